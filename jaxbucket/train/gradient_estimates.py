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
      weights: `[n]`, the weight of each batch, such as its number of real tokens.
      examples: `[n]`, the number of examples of each batch.
    """

    gradients: np.ndarray
    weights: np.ndarray
    examples: np.ndarray


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
        """Returns the estimates from at least two batches of each bucket.

        Raises:
          ValueError: if the mean gradient cannot be told from zero.
        """
        totals = [x.weights / x.weights.sum() for x in samples]
        means = np.stack(
            [w @ x.gradients for w, x in zip(totals, samples, strict=True)]
        )
        squares = [
            w @ np.square(x.gradients - mean).sum(axis=1)
            for w, x, mean in zip(totals, samples, means, strict=True)
        ]
        # A mean with these weights contains this share of the noise of a batch.
        kept = np.array([w @ w for w in totals])
        noise = np.array(squares) / (1 - kept)
        gram = means @ means.T - np.diag(noise * kept)
        weights = np.array([x.weights.mean() for x in samples])
        shares = steps * weights / (steps @ weights)
        with_mean = gram @ shares
        squared_norm = float(shares @ with_mean)
        if squared_norm <= 0:
            raise ValueError(
                "The mean gradient is smaller than the noise of its estimate. Measure "
                "more batches with `batches_per_bucket`."
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

    A bucket with two batches stays as it is, because one batch shows no noise.
    """
    large = [len(x.weights) for x in samples if len(x.weights) > 2]
    num_folds = min(_FOLDS, *large) if large else 0
    for fold in range(num_folds):
        group = np.s_[fold::num_folds]
        yield [
            GradientSamples(*(np.delete(y, group, axis=0) for y in x))
            if len(x.weights) > 2
            else x
            for x in samples
        ]


def jackknife_error(values: np.ndarray) -> np.ndarray:
    """Returns standard errors from the estimates `[n, ...]` without each group.

    This is the jackknife estimate (Tukey, 1958). It is NaN without groups.
    """
    if not len(values):
        return np.full(values.shape[1:], np.nan)
    return np.sqrt(len(values) - 1) * values.std(axis=0)
