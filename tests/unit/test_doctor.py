"""What a machine can run, and which versions fit."""

from __future__ import annotations

import json
import tomllib

import pytest

from rollout import doctor, versions
from rollout.doctor import Gpu, Machine, least_gpus, verdicts
from rollout.versions import Version
from tests.support import ROOT

MINI, FLASH = "inclusionAI/LLaDA2.0-mini", "inclusionAI/LLaDA2.0-flash"


def host(*gigabytes: int) -> Machine:
    gpus = [Gpu("a GPU", int(size * 1e9), "1") for size in gigabytes]
    return Machine("3.11.0", "Linux", 2, int(24e9), "cuda" if gpus else "cpu", gpus)


def test_versions_are_those_of_the_project():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = dict(item.split("==") for item in wanted)
    assert {n: v for n, v in versions.REQUIRED.items() if n in pins} == {
        n: pins[n] for n in versions.REQUIRED if n in pins
    }
    assert {"torch", "sglang", "transformers", "verl"} <= pins.keys()


def test_versions_of_the_kernels_are_those_sglang_asks_for():
    from importlib.metadata import requires

    asked = [
        item.replace("_", "-").split("[")[0].split("==")[0] + "==" + item.split("==")[1]
        for item in requires("sglang")
        if "==" in item
    ]
    for name in versions.GPU_ONLY:
        assert f"{name}=={versions.REQUIRED[name]}" in asked


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        (Version("torch", "2.11.0", "2.11.0+cu130"), "ok"),
        (Version("torch", "2.11.0", "2.10.0"), "needs 2.11.0"),
        (Version("torch", "2.11.0", None), "missing"),
        (Version("torch", "2.11.0", None, needed=False), "not needed here"),
    ],
)
def test_verdict_on_a_version(version, verdict):
    assert version.verdict == verdict and version.fits == (verdict == "ok")


def test_models_by_gpus():
    assert least_gpus(MINI, int(80e9), 1) == 1
    assert least_gpus(MINI, int(24e9), 1) is None
    assert [least_gpus(FLASH, int(size * 1e9), 8) for size in (80, 141, 20)] == [4, 2, None]


def test_verdicts():
    assert verdicts(host())[MINI] == "needs a GPU"
    one, four = verdicts(host(80)), verdicts(host(80, 80, 80, 80))
    assert one[MINI].startswith("tp_size=1 ") and one[FLASH] == "does not fit 1 x 80 GB"
    assert four[FLASH].startswith("tp_size=4 ")


def test_command(capsys):
    assert doctor.main(["--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["ok"] and {v["name"]: v["installed"] for v in made["versions"]}["sglang"] == "0.5.17"
    assert made["models"].keys() > {MINI, FLASH}
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "an engine would run on" in text and "transformers" in text and MINI in text
