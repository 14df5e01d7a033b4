"""What tests of several directories share: small models, traces, checkpoint directories, running processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dllm.decoding import SamplingBatch, SamplingParams
from dllm.models import MODELS, BlockDiffusionLM
from dllm.models.base import init_weights
from dllm.models.checkpoint import save_checkpoint
from dllm.models.llada2 import LLaDA2Config, LLaDA2MoeModelLM
from dllm.trace import RolloutTrace

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"

SMALL_VOCAB, SMALL_MASK, SMALL_EOS = 40, 39, 1


def small_config(**changes: Any) -> LLaDA2Config:
    """Sizes of a network that runs in milliseconds, with every part of the real one."""
    sizes = dict(
        vocab_size=SMALL_VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=4,
        topk_group=2,
    )
    return LLaDA2Config(**(sizes | changes))


def small_model(seed: int = 0, head_std: float | None = None, **changes: Any) -> LLaDA2MoeModelLM:
    """A random network of ``small_config`` with an expert bias that is not zero."""
    model = LLaDA2MoeModelLM(small_config(**changes))
    init_weights(model, seed, head_std)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, buffer in model.named_buffers():
        assert name.endswith("expert_bias")
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.05)
    return model.eval()


def random_prompt(
    length: int, seed: int = 0, vocab: int = SMALL_VOCAB, avoid: Sequence[int] = (SMALL_MASK,)
) -> list[int]:
    """``length`` token ids without those of ``avoid``."""
    allowed = [i for i in range(vocab) if i not in avoid]
    return np.random.default_rng(seed).choice(allowed, length).tolist()


def sampling_batch(params: SamplingParams | Sequence[SamplingParams], rows: int = 1, seed: int = 0) -> SamplingBatch:
    """Parameters of ``rows`` equal requests, or of the given ones."""
    listed = [params] * rows if isinstance(params, SamplingParams) else list(params)
    return SamplingBatch.from_params(listed, [seed + i for i in range(len(listed))])


def hand_made_trace(
    prompt: Sequence[int], response: Sequence[int], reveal_step: Sequence[int], block_size: int, **changes: Any
) -> RolloutTrace:
    """A trace with a schedule written by hand; log-probs and confidences are placeholders."""
    steps = np.asarray(reveal_step, dtype=np.int16)
    count, first = len(response), len(prompt) // block_size
    blocks = (len(prompt) + count) // block_size - first
    per_block = []
    for index in range(blocks):
        start = max(0, (first + index) * block_size - len(prompt))
        end = (first + index + 1) * block_size - len(prompt)
        per_block.append(int(steps[start:end].max()) + 1)
    values: dict[str, Any] = dict(
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        replay_ids=np.asarray(response, dtype=np.int32),
        visible=count,
        reveal_step=steps,
        logprob=np.full(count, -1.0, np.float32),
        logprob_raw=np.full(count, -1.0, np.float32),
        confidence=np.full(count, 0.5, np.float32),
        steps_per_block=per_block,
        weight_versions=["0"] * blocks,
        block_size=block_size,
    )
    return RolloutTrace(**(values | changes))


def rollout_line(
    uid: str = "a",
    output: Sequence[int] = (1, 2, 3),
    tail: Sequence[int] = (4,),
    engine: Sequence[float] = (-1.0, -2.0, -3.0, -4.0),
    trainer: Sequence[float] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A line of a training run's rollout file: three visible tokens and one behind them, unless changed."""
    shown, values = len(output), list(engine)
    made: dict[str, Any] = {
        "uid": uid,
        "output_ids": list(output),
        "reveal_step": [0, 1, 0],
        "logprob": values[:shown],
        "confidence": [0.2, 0.4, 0.6],
        "tail": {"ids": list(tail), "reveal_step": [2], "logprob": values[shown:], "confidence": [0.8]},
        "steps_per_block": [3],
        "trainer_logprob": list(trainer or engine),
        "router_tie": [False] * 4,
        "finish_reason": "stop",
        "weight_version": "2",
    }
    return made | changes


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_tiny_model(path: Path, seed: int = 0, head_std: float | None = None, **shape: Any) -> LLaDA2MoeModelLM:
    """A complete checkpoint directory of a random tiny LLaDA2 with tokenizer; returns its model."""
    from recipes.tiny import TinyShape, make_model_dir
    from recipes.tokenizer import build_tokenizer

    text = ["State the final answer to the following arithmetic problem: 26 + 53 ="]
    return make_model_dir(path, build_tokenizer(text), TinyShape(**shape), seed=seed, head_std=head_std)


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def child_environment(**extra: str) -> dict[str, str]:
    """Environment of a process under test: this one's, with threads that do not spin while they wait."""
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **extra}


def run_module(
    module: str, *arguments: object, timeout: float = 600, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python -m module arguments`` to its end, output captured."""
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=cwd,
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def processes_with(marker: str) -> list[str]:
    """Command lines of the living processes that inherited ``marker`` in their environment."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            if marker.encode() not in (directory / "environ").read_bytes():
                continue
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if command:
            found.append(f"{directory.name} {command[:120]}")
    return found


def wait_for(condition: Any, seconds: float, what: str, interval: float = 0.25) -> Any:
    """The first true value of ``condition()``; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(interval)
    raise AssertionError(f"{what} did not happen within {seconds:.0f} s")


@contextmanager
def verl_on_cpu() -> Iterator[None]:
    """Import verl within this block, as its workers do on a CPU host: a process chooses its platform once."""
    variables, path = dict(os.environ), list(sys.path)
    os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="rollout.verl")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:] = path


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch threads for the time of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sdar_hf_config(moe: bool, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny SDAR with every key that the published ones have and stock SGLang reads."""
    kind = "SDARMoe" if moe else "SDAR"
    config = json.loads((DATA / ("sdar_30b_a3b_config.json" if moe else "sdar_8b_config.json")).read_text())
    sizes: dict[str, Any] = dict(
        architectures=[f"{kind}ForCausalLM"],
        block_size=4,
        dtype="float32",
        torch_dtype="float32",
        head_dim=32,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=2048,
        num_attention_heads=4,
        num_hidden_layers=3,
        num_key_value_heads=2,
    )
    if moe:
        sizes |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    return {key: value for key, value in (config | sizes | changes).items() if key != "auto_map"}


def small_sdar(moe: bool, seed: int = 0, **changes: Any) -> BlockDiffusionLM:
    """A random SDAR of ``sdar_hf_config``."""
    config = sdar_hf_config(moe, vocab_size=SMALL_VOCAB, **changes)
    model = MODELS[config["architectures"][0]].from_hf(config)
    init_weights(model, seed)
    return model.eval()


def write_tiny_sdar(path: Path, moe: bool, seed: int = 0) -> BlockDiffusionLM:
    """A complete checkpoint directory of a random tiny SDAR with tokenizer; returns its model."""
    from recipes.tokenizer import build_tokenizer, save_tokenizer

    tokenizer = build_tokenizer(["State the final answer to the following arithmetic problem: 26 + 53 ="])
    ids = {"vocab_size": len(tokenizer), "mask_token_id": tokenizer.mask_token_id}
    ids |= {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    config = sdar_hf_config(moe, **ids)
    model = MODELS[config["architectures"][0]].from_hf(config)
    init_weights(model, seed)
    save_checkpoint(path, model.state_dict(), config)
    save_tokenizer(tokenizer, path)
    return model.eval()
