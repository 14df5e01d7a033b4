"""Replay rollouts in the trainer's model and compare with the engine's log-probs.

python -m recipes.check_logprobs --model-path DIR --rollouts FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dllm.attention import attention_for
from dllm.config import ConfigError, resolve
from dllm.decoding import SamplingBatch
from dllm.likelihood.exact import (
    pack_traces,
    router_tie_targets,
    scatter_targets,
    target_head,
)
from dllm.models.checkpoint import load_model
from dllm.models.llada2 import LLaDA2MoeModelLM
from dllm.trace import RolloutTrace, TraceError
from rollout.records import read_traces

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.no_grad()
def differences(
    model: LLaDA2MoeModelLM, traces: Sequence[RolloutTrace], mask_id: int, device: str, batch: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    """|engine - trainer| log-prob of every drawn token, and whether it depends on a router tie.

    Returns:
        float64 [N] and bool [N] over all drawn tokens of all traces.
    """
    diffs, ties = [], []
    model.record_router_gaps(True)
    for start in tqdm(range(0, len(traces), batch), desc="replay", unit="batch"):
        part = traces[start : start + batch]
        packed = pack_traces(part, mask_id, device)
        sampling = SamplingBatch.from_params([t.sampling for t in part], [0] * len(part), device)
        values = model(packed.input_ids, packed.position, attention_for(packed), target_head(packed, sampling, mask_id))
        tied = router_tie_targets(packed, model.router_gap())
        lengths = [len(t.replay_ids) for t in part]
        for trace, logprob, tie in zip(
            part,
            scatter_targets(packed, values.logprob, lengths),
            scatter_targets(packed, tied.float(), lengths),
            strict=True,
        ):
            drawn = trace.reveal_step >= 0
            diffs.append(np.abs(logprob.cpu().double().numpy() - trace.logprob)[drawn])
            ties.append(tie.cpu().bool().numpy()[drawn])
    model.record_router_gaps(False)
    return np.concatenate(diffs), np.concatenate(ties)


def summarise(diffs: np.ndarray, ties: np.ndarray) -> dict[str, Any]:
    """Mean, quantiles and maxima of log-prob differences; ties are tokens that depend on a router tie."""
    clean = diffs[~ties]
    return {
        "tokens": len(diffs),
        "mean": float(diffs.mean()),
        "p99": float(np.quantile(diffs, 0.99)),
        "p999": float(np.quantile(diffs, 0.999)),
        "max": float(diffs.max()),
        "max_without_ties": float(clean.max()) if len(clean) else 0.0,
        "router_tie_tokens": int(ties.sum()),
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m recipes.check_logprobs", description=__doc__.splitlines()[0])
    p.add_argument("--model-path", required=True, help="checkpoint the rollouts were made with")
    p.add_argument("--rollouts", required=True, help="file written by rollout.generate or by a training run")
    p.add_argument("--tolerance", type=float, default=1e-3, help="largest difference allowed (exit 1 above it)")
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
    except (ConfigError, TraceError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    diffs, ties = differences(model, traces, config.mask_id, args.device, args.batch)
    result = summarise(diffs, ties)
    print(json.dumps(result))
    return 1 if result["max"] > args.tolerance else 0


if __name__ == "__main__":
    sys.exit(main())
