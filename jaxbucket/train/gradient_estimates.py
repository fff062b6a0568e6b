"""Unbiased estimates of gradients and their noise from a few batches per bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Groups of batches that are left out in turn to estimate standard errors.
_FOLDS = 4


class GradientSamples(NamedTuple):
    """The measured batches of one bucket.

    Attributes:
      gradients: `[n, D]`, the mean gradient of each batch, or a sketch of it.
      weights: `[n]`, the weight of each batch, such as its number of real tokens. A
        batch of weight 0 has no gradient.
      examples: `[n]`, the number of examples of each batch.
    """

    gradients: np.ndarray
    weights: np.ndarray
    examples: np.ndarray

    @property
    def size(self) -> int:
        """The number of batches with a gradient."""
        return int(np.count_nonzero(self.weights))


@dataclasses.dataclass(frozen=True)
class GradientEstimates:
    """The gradients of the buckets of an epoch, relative to that of the data.

    All squared norms are relative to the squared norm of the mean gradient of the data,
    in which every bucket has its share of the total weight.

    Attributes:
      steps: `[K]` integers, the number of batches of each bucket in an epoch.
      weights: `[K]`, the mean weight of a batch.
      examples: `[K]`, the mean number of examples in a batch.
      noise: `[K]`, the variance of the gradient of a batch.
      inner: `[K, K]`, the inner products of the distances of the buckets' gradients
        from the mean gradient. The diagonal is the squared bias.
    """

    steps: np.ndarray
    weights: np.ndarray
    examples: np.ndarray
    noise: np.ndarray
    inner: np.ndarray

    @classmethod
    def of(
        cls, steps: np.ndarray, samples: Sequence[GradientSamples]
    ) -> GradientEstimates:
        """Returns the estimates from at least two gradients of each bucket.

        The noise of a batch is assumed to be in inverse proportion to its weight.

        Raises:
          ValueError: if the mean gradient cannot be told from zero.
        """
        means = np.stack([x.weights @ x.gradients / x.weights.sum() for x in samples])
        # The variance of a gradient, multiplied by its weight.
        scales = np.array(
            [
                x.weights @ np.square(x.gradients - mean).sum(axis=1) / (x.size - 1)
                for x, mean in zip(samples, means, strict=True)
            ]
        )
        noise = scales / [x.weights.sum() / x.size for x in samples]
        gram = means @ means.T - np.diag(scales / [x.weights.sum() for x in samples])
        weights = np.array([x.weights.mean() for x in samples])
        shares = steps * weights / (steps @ weights)
        with_mean = gram @ shares
        squared_norm = float(shares @ with_mean)
        if squared_norm <= 0:
            raise ValueError(
                "The mean gradient is zero, or smaller than the noise of its estimate. "
                "Measure more batches with `batches_per_bucket`, or another state."
            )
        inner = gram - with_mean[:, None] - with_mean[None, :] + squared_norm
        examples = np.array([x.examples.mean() for x in samples])
        return cls(
            *(steps, weights, examples, noise / squared_norm, inner / squared_norm)
        )

    @property
    def bias(self) -> np.ndarray:
        """`[K]`, the squared distance of a bucket's gradient to the mean gradient."""
        return np.diag(self.inner)


def leave_out(samples: Sequence[GradientSamples]) -> Iterator[list[GradientSamples]]:
    """Yields the samples without one of several groups of batches.

    A bucket with two gradients stays as it is, because one gradient shows no noise.
    """
    large = [x.size for x in samples if x.size > 2]
    num_folds = min(_FOLDS, *large) if large else 0
    for fold in range(num_folds):
        yield [_without(x, fold, num_folds) if x.size > 2 else x for x in samples]


def _without(x: GradientSamples, fold: int, num_folds: int) -> GradientSamples:
    """Leaves out every `num_folds`-th batch with a gradient."""
    group = np.flatnonzero(x.weights)[fold::num_folds]
    return GradientSamples(*(np.delete(column, group, axis=0) for column in x))


def jackknife_error(values: np.ndarray) -> np.ndarray:
    """Returns standard errors from the estimates `[n, ...]` without each group.

    This is the jackknife estimate (Tukey, 1958). It is NaN without groups.
    """
    if not len(values):
        return np.full(values.shape[1:], np.nan)
    return np.sqrt(len(values) - 1) * values.std(axis=0)
