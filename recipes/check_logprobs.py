"""Replay rollouts in the trainer's model and compare with the engine's log-probs.

python -m recipes.check_logprobs --model-path DIR --rollouts FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from dllm.attention import attention_for
from dllm.config import ConfigError, resolve
from dllm.decoding import SamplingBatch
from dllm.likelihood.exact import (
    in_chunks,
    pack_traces,
    router_tie_targets,
    scatter_targets,
    select_logprobs,
    target_head,
)
from dllm.models.base import BlockDiffusionLM
from dllm.models.checkpoint import load_model
from dllm.trace import RolloutTrace, TraceError
from rollout.records import read_traces

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


NUMBERS = ("logprob", "select_logprob", "logprob_raw", "confidence")
"""What a line logs and the model can compute again: three per drawn token, ``select_logprob`` per step."""

LIMIT = 0.01


@dataclass
class Differences:
    """|engine - trainer| of every logged number of some rollouts.

    Attributes:
        values: float64 [N] for each of ``NUMBERS``.
        ties: bool [N], whether the ``logprob`` beside it depends on a router tie.
    """

    values: dict[str, np.ndarray]
    ties: np.ndarray


def _plain(hidden: Tensor, head: nn.Linear, token: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """Log-probs at temperature 1 without filters, and the largest probability over the whole vocabulary."""
    logits = head(hidden).float()
    confidence = logits.softmax(-1).amax(-1)
    logits[:, mask_id] = -torch.inf
    return logits.log_softmax(-1).gather(-1, token[:, None])[:, 0], confidence


@torch.no_grad()
def differences(
    model: BlockDiffusionLM, traces: Sequence[RolloutTrace], mask_id: int, device: str, batch: int = 16
) -> Differences:
    """Replay every state and compare.

    Raises:
        ConfigError: a trace logs ``select_logprob`` without the rule behind it.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in (*NUMBERS, "ties")}
    for number, trace in enumerate(traces, 1):
        if trace.select_logprobs is not None and trace.selection is None:
            raise ConfigError(
                f"sample {number} logs select_logprob without 'selection', the rule to recompute it by; its decoder "
                "must have one (see docs/decoders.md)"
            )
    model.record_router_gaps(True)
    for start in tqdm(range(0, len(traces), batch), desc="replay", unit="batch"):
        part = traces[start : start + batch]
        packed = pack_traces(part, mask_id, device)
        sampling = SamplingBatch.from_params([t.sampling for t in part], [0] * len(part), device)
        scored = target_head(packed, sampling, mask_id)

        def head(hidden: Tensor, lm_head: nn.Linear, packed: Any = packed, scored: Any = scored) -> tuple:
            picked = hidden[packed.target_row, packed.target_column]
            plain = in_chunks(_plain, picked, lm_head, packed.target_token, constants=(mask_id,))
            return scored(hidden, lm_head), *plain

        values, raw, confidence = model(packed.input_ids, packed.position, attention_for(packed), head)
        tied = router_tie_targets(packed, model.router_gap())
        numbers = (values.logprob, select_logprobs(packed, values), raw, confidence, tied.float())
        lengths = [len(t.replay_ids) for t in part]
        columns = (scatter_targets(packed, column, lengths) for column in numbers)
        for trace, *column in zip(part, *columns, strict=True):
            mine = dict(zip(found, (c.cpu().double().numpy() for c in column), strict=True))
            drawn = trace.reveal_step >= 0
            found["ties"].append(mine.pop("ties")[drawn] > 0)
            for name, expected in mine.items():
                if _is_logged(trace, name):
                    found[name].append(np.abs(expected - getattr(trace, name))[drawn])
    model.record_router_gaps(False)
    joined = {name: np.concatenate([np.zeros(0), *pieces]) for name, pieces in found.items()}
    return Differences(joined, joined.pop("ties").astype(bool))


def _is_logged(trace: RolloutTrace, name: str) -> bool:
    """Whether a trace has this number. A file without ``logprob_raw`` is read as if it repeated ``logprob``."""
    if name == "select_logprob":
        return trace.select_logprobs is not None
    return name != "logprob_raw" or not np.array_equal(trace.logprob, trace.logprob_raw)


def summarise(found: Differences) -> dict[str, Any]:
    """Mean, quantiles and maxima of log-prob differences; ties are tokens that depend on a router tie.

    ``worst`` has the largest difference of each of the logged numbers; a ``select_logprob`` is counted once per step.
    """
    diffs = found.values["logprob"]
    clean = diffs[~found.ties]
    return {
        "tokens": len(diffs),
        "mean": float(diffs.mean()),
        "p99": float(np.quantile(diffs, 0.99)),
        "p999": float(np.quantile(diffs, 0.999)),
        "max": float(diffs.max()),
        "max_without_ties": float(clean.max()) if len(clean) else 0.0,
        "router_tie_tokens": int(found.ties.sum()),
        "worst": {name: float(values.max()) for name, values in found.values.items() if len(values)},
    }


def agrees(worst: Mapping[str, float], tolerance: float, limit: float) -> bool:
    """Whether log-probs are within ``tolerance`` and every logged number is within ``limit``."""
    logprobs = [worst.get(name, 0.0) for name in ("logprob", "select_logprob")]
    return max(logprobs) <= tolerance and max(worst.values()) <= limit


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m recipes.check_logprobs", description=__doc__.splitlines()[0])
    p.add_argument("--model-path", required=True, help="checkpoint the rollouts were made with")
    p.add_argument("--rollouts", required=True, help="file written by rollout.generate or by a training run")
    p.add_argument("--tolerance", type=float, default=1e-3, help="largest difference of log-probs (exit 1 above it)")
    p.add_argument("--limit", type=float, default=LIMIT, help="largest difference of any logged number, ties included")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    p.add_argument("--dtype", default="auto", choices=tuple(DTYPES))
    p.add_argument("--batch", type=int, default=16, help="rollouts per forward pass")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        config = resolve(args.model_path)
        traces = read_traces(args.rollouts, None)
        if not traces:
            raise ConfigError(f"rollouts file {args.rollouts!r} has no lines; generate some first")
        if (size := traces[0].block_size) != config.block_size:
            raise ConfigError(
                f"rollouts were decoded with block size {size}, the checkpoint has {config.block_size}; pass the "
                "checkpoint they were made with"
            )
        model = load_model(args.model_path, DTYPES[args.dtype], args.device).eval()
        result = summarise(differences(model, traces, config.mask_id, args.device, args.batch))
    except (ConfigError, TraceError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0 if agrees(result["worst"], args.tolerance, args.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
