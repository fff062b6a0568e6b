"""The variance of updates if the examples of an epoch are batched in other ways."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np
from gradient_estimates import GradientEstimates

from jaxbucket.schedule.spread import SpreadUpdates

# Updates over which an optimizer with a momentum of 0.9 averages.
NUM_UPDATES = 10
# Numbers of micro-batches in an update of a spread order.
SIZES = (1, 2, 4)
# The size of the largest temporary array, `[N, K]` or windows of `[N, 40]` batches.
_MAX_SIZE = 1 << 20


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
        (McCandlish et al., 2018, arXiv:1812.06162, section 2.2). All updates are
        assumed to have the same learning rate.
      more_tokens_error: the standard error of `more_tokens`.
    """

    name: str
    one: float
    several: float
    more_tokens: float
    more_tokens_error: float = math.nan


def spread_windows(steps: np.ndarray, size: int) -> np.ndarray:
    """Returns 10 consecutive updates `[N, 10, size]` of an endless spread sequence.

    They start at every update of an epoch. If it has too many, they start at random,
    one in each of N parts of it: at equal distances, they could always start at the
    same bucket.

    Args:
      steps: `[K]` integers, the number of batches of each bucket in an epoch.
      size: the number of batches in an update.
    """
    # All batches of `size` epochs are in whole updates.
    updates = SpreadUpdates(steps * size, size)
    total = updates.num_updates
    most = _MAX_SIZE // max(NUM_UPDATES * size, len(steps))
    number = min(total, max(1, most))
    starts = np.arange(number) * total // number
    if number < total:
        starts += np.random.default_rng(0).integers(0, total // number, number)
    numbers = (starts[:, None] + np.arange(NUM_UPDATES)) % total
    positions = numbers[..., None] * size + np.arange(size)
    buckets = [updates.at(position)[0] for position in positions.ravel().tolist()]
    return np.reshape(buckets, positions.shape)


def ways_to_batch(
    estimates: GradientEstimates, windows: Mapping[int, np.ndarray]
) -> Iterator[WayToBatch]:
    """Yields several ways to batch, with equal numbers of tokens in an update.

    Micro-batches have less tokens each, and so more noise, which their mean makes up
    for. The last way is the one without buckets.

    Args:
      estimates: the gradients of buckets.
      windows: size -> the result of `spread_windows` for these buckets, for each of
        `SIZES`.
    """
    single, pair = _one_batch(estimates), _two_batches(estimates)
    mixed = _mixed(estimates)
    for name, one, several in (
        ("one bucket, shuffled", single, single),
        ("one bucket, spread", *_spread(estimates, windows[1])),
        ("2 micro-batches, shuffled", pair, pair),
        ("2 micro-batches, spread", *_spread(estimates, windows[2])),
        ("4 micro-batches, spread", *_spread(estimates, windows[4])),
    ):
        yield WayToBatch(name, one, several, (1 + several) / (1 + mixed) - 1)
    yield WayToBatch("random examples of all lengths", mixed, mixed, 0.0)


def _one_batch(x: GradientEstimates) -> float:
    """Returns the variance of an update from a batch of a random bucket."""
    share = x.steps / x.steps.sum()
    return float(share @ (x.noise + x.bias) - share @ x.inner @ share)


def _two_batches(x: GradientEstimates) -> float:
    """Returns the variance of an update from two batches of random buckets."""
    share = x.steps / x.steps.sum()
    # The share of the first batch in the update, for any two buckets.
    part = x.weights[:, None] / (x.weights[:, None] + x.weights)
    mean = 2 * share * (part @ share)
    squares = 2 * share @ (part**2 @ share * (2 * x.noise + x.bias))
    products = 2 * share @ (part * part.T * x.inner) @ share
    return float(squares + products - mean @ x.inner @ mean)


def _spread(x: GradientEstimates, updates: np.ndarray) -> tuple[float, float]:
    """Returns the variances of updates `[N, 10, size]` of a spread order.

    Returns:
      The variance of one update, and that of the mean of 10 updates, times 10.
    """
    weights = x.weights[updates]
    weights /= weights.sum(axis=2, keepdims=True)
    # A micro-batch with a part of the tokens has as many times the noise.
    noise = updates.shape[2] * np.sum(
        weights[:, 0] ** 2 * x.noise[updates[:, 0]], axis=1
    )
    one = _variance(updates[:, :1], weights[:, :1], x.inner)
    several = _variance(updates, weights / NUM_UPDATES, x.inner)
    return float(noise.mean() + one), float(noise.mean() + NUM_UPDATES * several)


def _variance(buckets: np.ndarray, weights: np.ndarray, inner: np.ndarray) -> float:
    """Returns the variance of `[N]` weighted sums of the buckets' gradients."""
    sums = np.zeros((len(buckets), len(inner)))
    rows = np.arange(len(buckets))
    columns = (a.reshape(len(buckets), -1).T for a in (buckets, weights))
    for bucket, weight in zip(*columns, strict=True):
        sums[rows, bucket] += weight
    sums -= sums.mean(axis=0)
    return float(np.einsum("nk,nk->n", sums @ inner, sums).mean())


def _mixed(estimates: GradientEstimates) -> float:
    """Returns the variance of an update from random examples of all lengths.

    The lengths of its examples vary, too, but each of them has its own. So the bias of
    a bucket counts like noise of a single example.
    """
    x = estimates
    share = x.steps / x.steps.sum()
    relative = np.square(x.weights / (share @ x.weights))
    return float(share @ (relative * (x.noise + x.bias / x.examples)))
