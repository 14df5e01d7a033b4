"""The command line of the bench between devices; what it measures needs an engine."""

import pytest
import torch

from recipes.bench_weight_remote import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu", "--tp-size", "0"], "--tp-size=0"),
        (["--device", "cpu", "--bucket-mb", "-1"], "--bucket-mb=-1"),
        (["--device", "cpu", "--backend", "nccl"], "--backend=nccl needs GPUs"),
        (["--device", "cuda", "--tp-size", "64"], f"this host has {torch.cuda.device_count()}"),
        (["--device", "cpu", "--config", "nowhere.json"], "--config 'nowhere.json' does not exist"),
    ],
)
def test_what_cannot_be_is_refused(capsys, arguments, said):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
