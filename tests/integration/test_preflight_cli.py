"""The preflight's command line, which reads the server's flags with SGLang's own parser."""

from __future__ import annotations

import json

from recipes.compose import CHECKPOINT_DIR
from rollout.server import device_of
from tests.support import run_module

FLAGS = ("--model-path", CHECKPOINT_DIR / "tiny_llada2", "--dllm-algorithm", "SelectThenSample")


def test_settings_are_printed(tmp_path):
    """Flags may stand in a file, as for the server."""
    file = tmp_path / "flags.yaml"
    file.write_text("device: cpu\nmax-running-requests: 8\n")
    done = run_module("rollout.preflight", *FLAGS, "--config", file, "--no-dllm-fdfo")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert "max_running_requests: 8 (as asked)" in lines and "dllm_fdfo: False (as asked)" in lines
    assert "attention_backend: None -> torch_native (the CPU engine's)" in lines and lines[-1] == "preflight: ok"


def test_everything_is_refused_at_once_and_readable_for_machines():
    more = ("--device", "cuda", "--gpu-memory-gb", 1, "--pp-size", 2, "--page-size", 48, "--training", "--json")
    done = run_module("rollout.preflight", *FLAGS, *more, "--max-running-requests", 1)
    assert done.returncode == 2
    made = json.loads(done.stdout)
    assert made["requested"]["pp_size"] == 2 and not made["ok"]
    assert [line.split("=")[0].split(":")[0] for line in made["refused"]] == [
        "pp_size",
        "page_size",
        "max_running_requests",
        "not enough GPU memory",
    ]
    assert done.stderr.count("refused: ") == 4


def test_a_server_without_our_routes_is_refused():
    """Where the device stands in a file, it decides about the environment as on the command line."""
    done = run_module("rollout.server", *FLAGS, "--device", "cpu", "--smg-grpc-mode")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: smg_grpc_mode=True starts a server without HTTP routes or in Ray; leave it out"
    )


def test_the_device_of_a_server(tmp_path):
    file = tmp_path / "flags.yaml"
    for text, device in (("device: cpu\n", "cpu"), ("port: 1\n", None), ("[", None), ("- 1\n", None)):
        file.write_text(text)
        assert device_of(["--config", str(file)]) == device
    assert device_of([f"--config={file}", "--device=cuda"]) == "cuda"
    assert device_of(["--config", "nowhere.yaml"]) is None
