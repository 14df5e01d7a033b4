"""Two tensor-parallel ranks of SGLang's real network: our loader leaves what SGLang's own leaves, bit by bit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from tests.integration.oracle import TinyModel, make
from tests.support import ROOT, child_environment, write_tiny_sdar

RANK = """
import json, sys
import torch
path, rank, size, port = sys.argv[1], *map(int, sys.argv[2:5])
from rollout.plugin.bare_model import build_model
model = build_model(path, rank=rank, size=size, port=port)
from dllm.config import load_hf_config
from dllm.models.checkpoint import iterate_safetensors
from weight_sync import loader
from weight_sync.buckets import fill_buckets
from weight_sync.checksum import TensorSums, wire_checksum
from weight_sync.layout import CheckpointLayout
from weight_sync.messages import BucketSpec, Commit, Manifest

def fill():
    for parameter in model.parameters():
        parameter.data.fill_(-7)

fill()
named = list(iterate_safetensors(path))
model.load_weights(iter(named))
stock = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
fill()
layout = CheckpointLayout.from_config(load_hf_config(path), torch.float32)

def say(header, data=torch.empty(0, dtype=torch.uint8)):
    loader.load(model, [(header.encode(), data)])
    statuses = [None] * size
    torch.distributed.all_gather_object(statuses, loader.STATE.status)
    good, message = loader.answer(statuses)
    assert good, message
    return message

say(Manifest("run", "1", layout.tensors(), layout.nbytes))
sums = TensorSums()
for b in fill_buckets(layout.normalise(named), 50_000):
    checksum = wire_checksum(b.data, b.placements)
    spec = BucketSpec("run", "1", b.index, b.last, b.placements, checksum, nbytes=len(b.data))
    answer = say(spec, b.data)
from dllm.models.checkpoint import load_model
for name, tensor in load_model(path).state_dict().items():
    sums.add(name, tensor)
assert answer == f"checksum: {sums.value():016x}", answer
say(Commit("run", "1", f"{sums.value():016x}"))
different = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, stock[name])]
print(json.dumps({"buckets": b.index + 1, "parameters": len(stock), "different": different}))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict:
    llada2: TinyModel = make(tmp_path_factory.mktemp("two_ranks"), seed=3)
    sdar = tmp_path_factory.mktemp("two_ranks_sdar")
    write_tiny_sdar(sdar, moe=True)
    return {"llada2": llada2.path, "sdar": sdar}


@pytest.mark.parametrize("name", ["llada2", "sdar"])
def test_two_ranks(checkpoints, name):
    from rollout.plugin.cpu import cpu_environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = child_environment(OMP_NUM_THREADS="1", **cpu_environment())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(checkpoints[name]), str(rank), "2", str(port)],
            env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=180)
            assert rank.returncode == 0, errors[-3000:]
            result = json.loads(out.strip().splitlines()[-1])
            assert result["buckets"] > 3 and result["parameters"] > 20 and not result["different"]
    finally:
        for rank in ranks:
            rank.kill()
