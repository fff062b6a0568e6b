"""The variance of updates if the examples of an epoch are batched in other ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxbucket.schedule.spread import spread_evenly
from jaxbucket.train.gradient_estimates import GradientEstimates

# Updates over which an optimizer with a momentum of 0.9 averages.
NUM_UPDATES = 10


@dataclasses.dataclass(frozen=True)
class WayToBatch:
    """The variance of updates if the same examples are batched in another way.

    Variances are those around the mean of all updates, relative to the squared norm of
    the data's mean gradient.

    Attributes:
      name: how updates are put together.
      one: the variance of one update.
      several: the variance of the mean of 10 consecutive updates, times 10.
      more_tokens: the share of tokens that is needed more than with examples of all
        lengths in every update, as far as it depends on `several`: with a variance of
        v, progress takes 1 + v times the updates that it would take without noise
        (McCandlish et al., 2018, arXiv:1812.06162, section 2.2).
      more_tokens_error: the standard error of `more_tokens`; NaN if no bucket has three
        batches.
    """

    name: str
    one: float
    several: float
    more_tokens: float
    more_tokens_error: float = np.nan


def ways_to_batch(estimates: GradientEstimates) -> Iterator[WayToBatch]:
    """Yields several ways to batch, with equal numbers of tokens in an update.

    Micro-batches have less tokens each, and so more noise, which their mean makes up
    for. The last way is the one without buckets.
    """
    steps = estimates.steps
    sequence, _ = spread_evenly(np.arange(steps.sum()), steps)
    mixed = _mixed(estimates)
    for name, windows, shares, is_spread in (
        ("one bucket, shuffled", *_drawn(steps, 1), False),
        ("one bucket, spread", *_consecutive(sequence, 1), True),
        ("2 micro-batches, shuffled", *_drawn(steps, 2), False),
        ("2 micro-batches, spread", *_consecutive(sequence, 2), True),
        ("4 micro-batches, spread", *_consecutive(sequence, 4), True),
    ):
        within, updates = _updates(estimates, windows)
        updates -= shares @ updates
        noise = float(shares @ within)
        one = several = noise + _variance(updates, shares, estimates.inner)
        if is_spread:
            size = windows.shape[1]
            later = [np.roll(updates, -n * size, axis=0) for n in range(NUM_UPDATES)]
            variance = _variance(np.mean(later, axis=0), shares, estimates.inner)
            several = noise + NUM_UPDATES * variance
        yield WayToBatch(name, one, several, (1 + several) / (1 + mixed) - 1)
    yield WayToBatch("random examples of all lengths", mixed, mixed, 0.0)


def _drawn(steps: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns all combinations `[K ** size, size]` of buckets, and their shares."""
    grids = np.meshgrid(*[np.arange(len(steps))] * size, indexing="ij")
    windows = np.stack([x.ravel() for x in grids], axis=1)
    return windows, np.prod(steps[windows] / steps.sum(), axis=1)


def _consecutive(sequence: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the windows `[N, size]` of an endlessly repeated sequence of buckets."""
    windows = np.stack([np.roll(sequence, -n) for n in range(size)], axis=1)
    return windows, np.full(len(sequence), 1 / len(sequence))


def _updates(
    estimates: GradientEstimates, windows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the noise of updates from several batches, and what they consist of.

    Args:
      estimates: the gradients of buckets.
      windows: `[N, size]` integers, the buckets of the micro-batches of each update.

    Returns:
      `[N]`, the noise of each update, and `[N, K]`, the share of each bucket in it.
    """
    weights = estimates.weights[windows]
    weights /= weights.sum(axis=1, keepdims=True)
    # A micro-batch with a part of the tokens has as many times the noise.
    noise = windows.shape[1] * estimates.noise[windows]
    is_bucket = windows[:, :, None] == np.arange(len(estimates.steps))
    return np.sum(weights**2 * noise, axis=1), np.einsum(
        "ns,nsk->nk", weights, is_bucket
    )


def _variance(updates: np.ndarray, shares: np.ndarray, inner: np.ndarray) -> float:
    """Returns the mean squared norm of `[N, K]` combinations of gradients."""
    return float(shares @ np.einsum("nk,nk->n", updates @ inner, updates))


def _mixed(estimates: GradientEstimates) -> float:
    """Returns the variance of an update from random examples of all lengths.

    The lengths of its examples vary, too, but each of them has its own. So the bias of
    a bucket counts like noise of a single example.
    """
    x = estimates
    share = x.steps / x.steps.sum()
    relative = np.square(x.weights / (share @ x.weights))
    return float(share @ (relative * (x.noise + x.bias / x.examples)))
