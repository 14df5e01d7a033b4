"""Two tensor-parallel ranks of SGLang's real network: our loader leaves what SGLang's own leaves, bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys

from rollout.plugin.cpu import cpu_environment
from tests.integration.oracle import make
from tests.support import ROOT, child_environment, free_port, write_tiny_sdar

RANK = """
import json, sys
import torch
rank, size, port, *paths = *map(int, sys.argv[1:4]), *sys.argv[4:]
from rollout.plugin.bare_model import build_model
from dllm.config import load_hf_config
from dllm.models.checkpoint import iterate_safetensors, load_model
from weight_sync import loader
from weight_sync.buckets import fill_buckets
from weight_sync.checksum import TensorSums, wire_checksum
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import BucketSpec, Commit, Manifest

def fill(model):
    for parameter in model.parameters():
        parameter.data.fill_(-7)

def say(model, header, data=torch.empty(0, dtype=torch.uint8)):
    loader.load(model, [(header.encode(), data)])
    statuses = [None] * size
    torch.distributed.all_gather_object(statuses, loader.STATE.status)
    good, message = loader.answer(statuses)
    assert good, message
    return message

def compare(path):
    model = build_model(path, rank=rank, size=size, port=port)
    fill(model)
    named = list(iterate_safetensors(path))
    model.load_weights(iter(named))
    stock = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fill(model)
    layout = CheckpointLayout.from_config(load_hf_config(path), torch.float32)
    say(model, Manifest("run", "1", layout.tensors(), layout.nbytes))
    for b in fill_buckets(layout.normalise(named), 50_000):
        checksum = wire_checksum(b.data, b.placements)
        answer = say(model, BucketSpec("run", "1", b.index, b.last, b.placements, checksum, nbytes=len(b.data)), b.data)
    sums = TensorSums()
    for name, tensor in load_model(path).state_dict().items():
        sums.add(name, tensor)
    assert answer.endswith(f"; checksum: {sums.value():016x}"), answer
    say(model, Commit("run", "1", f"{sums.value():016x}"))
    different = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, stock[name])]
    return {"buckets": b.index + 1, "parameters": len(stock), "different": different}

print(json.dumps([compare(path) for path in paths]))
"""


def test_two_ranks(tmp_path):
    """LLaDA2 with one key-value head for both ranks, and SDAR with experts."""
    make(tmp_path / "llada2", seed=3)
    write_tiny_sdar(tmp_path / "sdar", moe=True)
    paths = [str(tmp_path / name) for name in ("llada2", "sdar")]
    port, environment = str(free_port()), child_environment(OMP_NUM_THREADS="1", **cpu_environment())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "2", port, *paths],
            env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=180)
            assert rank.returncode == 0, errors[-3000:]
            results = json.loads(out.strip().splitlines()[-1])
            assert len(results) == 2
            for result in results:
                assert result["buckets"] > 3 and result["parameters"] > 20 and not result["different"]
    finally:
        for rank in ranks:
            rank.kill()
