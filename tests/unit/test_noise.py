"""Counter-based noise: uniform, independent of the batch, and never shared by two samples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dllm import noise

MASK_64 = (1 << 64) - 1


def draws(seeds: range, positions: range, steps: range) -> np.ndarray:
    grid = torch.tensor(list(itertools.product(seeds, positions, steps)))
    return noise.uniform(grid[:, 0], grid[:, 1], grid[:, 2]).numpy()


def test_mixer_is_splitmix64():
    """First outputs of SplitMix64 with seed 0, as published with the reference implementation."""
    golden = 0x9E3779B97F4A7C15
    state = torch.tensor([noise._signed(golden * i & MASK_64) for i in (1, 2, 3)])
    assert [value & MASK_64 for value in noise._mix(state).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize(
    "axes",
    [(range(20000), range(1), range(1)), (range(1), range(20000), range(1)), (range(20), range(50), range(20))],
    ids=["seeds", "positions", "all"],
)
def test_uniform(axes):
    values = np.sort(draws(*axes))
    assert values[0] >= 0 and values[-1] < 1
    count = len(values)
    distance = np.abs(values - (np.arange(count) + 0.5) / count).max()
    assert distance < 1.95 / np.sqrt(count), "Kolmogorov-Smirnov, 0.1 % level"


@pytest.mark.parametrize("axis", range(3), ids=["seed", "position", "step"])
def test_neighbours_are_uncorrelated(axis):
    ranges = [range(7, 8), range(33, 34), range(2, 3)]
    ranges[axis] = range(20000)
    values = draws(*ranges)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(len(values))


def test_a_draw_depends_on_its_own_counters_only():
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(0, 2**62, (50,), generator=generator)
    position, step = torch.randint(0, 4096, (2, 50), generator=generator)
    whole = noise.uniform(seed, position, step)
    alone = torch.cat([noise.uniform(seed[i : i + 1], position[i : i + 1], step[i : i + 1]) for i in range(50)])
    assert torch.equal(whole, alone)
    order = torch.randperm(50, generator=generator)
    assert torch.equal(noise.uniform(seed[order], position[order], step[order]), whole[order])


def test_every_counter_matters():
    base = [torch.tensor([n]) for n in (3, 4, 5)]
    value = noise.uniform(*base)
    for axis in range(3):
        changed = [b + (i == axis) for i, b in enumerate(base)]
        assert not torch.equal(noise.uniform(*changed), value)


def test_seeds_of_a_run_are_distinct():
    steps, prompts, samples = (0, 1, 2, (1 << 20) - 1), (0, 1, 5, (1 << 23) - 1), (0, 1, 7, (1 << 20) - 1)
    for base in (0, 1, 123456789):
        seeds = {noise.sample_seed(base, *counters) for counters in itertools.product(steps, prompts, samples)}
        assert len(seeds) == 64
        assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_seeds_differ_between_runs():
    assert len({noise.sample_seed(base, 1, 2, 3) for base in range(1000)}) == 1000


@pytest.mark.parametrize("counters", [(1 << 20, 0, 0), (0, 1 << 23, 0), (0, 0, 1 << 20), (-1, 0, 0)])
def test_a_counter_that_does_not_fit_is_refused(counters):
    with pytest.raises(ValueError, match=r"does not fit into a seed; it must be in \[0, "):
        noise.sample_seed(0, *counters)
