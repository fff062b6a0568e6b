"""Unbiased estimates of gradients and their noise from a few batches per bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# Groups of batches that are left out in turn to estimate standard errors.
_FOLDS = 8
# With one batch left out, two are left, which still show noise.
MIN_BATCHES = 3


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
      weights: `[K]`, the mean weight of a batch, batches of weight 0 included.
      examples: `[K]`, the mean number of examples in a batch.
      noise: `[K]`, the variance of the gradient of a batch of this weight.
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
        weights = np.array([x.weights.mean() for x in samples])
        noise = scales / weights
        gram = means @ means.T - np.diag(scales / [x.weights.sum() for x in samples])
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

    @property
    def offset(self) -> float:
        """The squared distance of the mean of all updates to the mean gradient."""
        share = self.steps / self.steps.sum()
        return float(share @ self.inner @ share)


def leave_out(samples: Sequence[GradientSamples]) -> Iterator[list[GradientSamples]]:
    """Yields the samples without one of several groups of batches.

    Every bucket must have at least `MIN_BATCHES` gradients.
    """
    num_folds = min(_FOLDS, *(x.size for x in samples))
    for fold in range(num_folds):
        yield [_without(x, fold, num_folds) for x in samples]


def _without(x: GradientSamples, fold: int, num_folds: int) -> GradientSamples:
    """Leaves out every `num_folds`-th batch with a gradient."""
    group = np.flatnonzero(x.weights)[fold::num_folds]
    return GradientSamples(*(np.delete(column, group, axis=0) for column in x))


def jackknife_error(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Returns standard errors from the estimates `[n, ...]` without each group.

    This is the jackknife estimate (Tukey, 1958).
    """
    return np.sqrt(len(values) - 1) * np.std(values, axis=0)
