"""Horvitz-Thompson sub-sampling of slices: a cheaper update with the same expectation.

A slice is kept with probability pi and the loss of its tokens is weighted by 1 / pi. That is unbiased for losses that
are sums over slices (token and step ratios, REINFORCE), with the denominator of the full batch; it is not for
functions of a whole response (GSPO, EBPO, ESPO).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dllm.likelihood.states import States, take


def slice_signals(states: States, logprob: np.ndarray) -> np.ndarray:
    """Sum of 1 - p over the targets of each slice: float64 [slices].

    A target's score is at most about 1 - p: tokens that were certain carry almost no gradient.

    Args:
        logprob: float [R], log-probs of the replay tokens when they were drawn.
    """
    missing = -np.expm1(np.minimum(logprob.astype(np.float64), 0.0))
    return np.asarray([missing[piece.token_index].sum() for piece in states.sample.slices])


def inclusion_probabilities(signal: np.ndarray, share: float, floor: float) -> np.ndarray:
    """Probabilities proportional to ``signal`` within [floor, 1] that add up to ``share`` of the slices.

    At least one slice is expected. Without a floor, a slice whose signal is 0 would be lost and the estimate biased.

    Args:
        signal: float [n], not negative.
        share: expected share of slices, in (0, 1].
        floor: smallest probability, in (0, share].

    Returns:
        float64 [n].
    """
    count = len(signal)
    expected = min(float(count), max(1.0, share * count))
    if expected == count or not signal.any():
        return np.full(count, expected / count)
    # A slice without signal must be able to rise above the floor when there is room left.
    signal = np.maximum(signal, 1e-9 * signal.max())
    low, high = 0.0, 1.0 / signal.min()
    for _ in range(100):
        middle = (low + high) / 2
        if np.clip(middle * signal, floor, 1.0).sum() < expected:
            low = middle
        else:
            high = middle
    return np.clip(high * signal, floor, 1.0)


def systematic_sample(probabilities: np.ndarray, generator: np.random.Generator) -> list[int]:
    """Indices drawn with the given inclusion probabilities, their number within one of the expected one.

    One uniform offset places equidistant points on the cumulative probabilities (Madow 1949); a nearly constant
    number of slices means a nearly constant cost.
    """
    bounds = generator.random() + np.concatenate([[0.0], np.cumsum(probabilities)])
    return np.flatnonzero(np.floor(bounds[1:]) > np.floor(bounds[:-1])).tolist()


def subsample(
    states: States, probabilities: Sequence[float] | np.ndarray, tokens: int, generator: np.random.Generator
) -> tuple[States, np.ndarray]:
    """Draw slices and the weights their tokens get in the loss.

    Args:
        probabilities: float [n], inclusion probability of each slice.
        tokens: R, replay tokens of the sample.

    Returns:
        The kept states and float32 [R]: 1 / pi where the token's slice was kept, 0 elsewhere.
    """
    probabilities = np.asarray(probabilities, dtype=np.float64)
    weights = np.zeros(tokens, np.float32)
    chosen = systematic_sample(probabilities, generator)
    for index in chosen:
        weights[states.sample.slices[index].token_index] = 1.0 / probabilities[index]
    return take(states, chosen), weights
