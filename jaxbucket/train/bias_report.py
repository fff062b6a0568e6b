"""The report on gradients by bucket: bias, noise, and the effect of other orders."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbucket.base.buckets import Bucket
from jaxbucket.base.table import table_text
from jaxbucket.schedule.spread import spread_evenly

# Groups of batches that are left out in turn to estimate standard errors.
_FOLDS = 4
# Updates over which an optimizer with a momentum of 0.9 averages.
_NUM_UPDATES = 10


@dataclasses.dataclass(frozen=True)
class BucketGradient:
    """The gradients of the batches of one bucket.

    All squared norms are relative to the squared norm of the data's mean gradient.

    Attributes:
      bucket: the shape of the batches.
      share: the share of the bucket in the steps.
      weight: the mean weight of a batch, such as its number of real tokens.
      bias: the squared distance from the bucket's mean gradient to that of the data.
        It is an unbiased estimate, so it may be slightly negative.
      bias_error: the standard error of the bias.
      noise: the variance of the gradient of a batch, summed over all parameters.
      noise_scale: the weight of a batch at which its noise equals the squared norm of
        the mean gradient ("simple noise scale", McCandlish et al., 2018,
        arXiv:1812.06162).
      num_batches: the number of batches measured.
    """

    bucket: Bucket
    share: float
    weight: float
    bias: float
    bias_error: float
    noise: float
    noise_scale: float
    num_batches: int


@dataclasses.dataclass(frozen=True)
class WayToBatch:
    """The variance of updates if the same examples are batched in another way.

    Attributes:
      name: how updates are put together.
      one: the variance of the gradient of one update, relative to the squared norm of
        the data's mean gradient.
      several: the same for the mean of 10 consecutive updates, times 10.
      more_tokens: the share of tokens that is needed more than with packed rows, as far
        as it depends on this variance: with a variance of v, progress takes 1 + v times
        the updates that it would take without noise (McCandlish et al., 2018, section
        2.2).
    """

    name: str
    one: float
    several: float
    more_tokens: float


@dataclasses.dataclass(frozen=True)
class BucketBias:
    """How far the gradients of buckets are from the gradient of the data.

    Attributes:
      buckets: the measurements by bucket, the shortest first.
      within: the mean variance of the gradient of a batch within its bucket, relative
        to the squared norm of the data's mean gradient.
      between: the mean squared distance from the gradient of a bucket to that of the
        data, in the same unit. Batches with examples of all lengths do not have it.
      ways: the variance of updates for several ways to batch the examples.
    """

    buckets: tuple[BucketGradient, ...]
    within: float
    between: float
    ways: tuple[WayToBatch, ...]

    @classmethod
    def of(
        cls,
        counts: Mapping[Bucket, int],
        sketches: Mapping[Bucket, np.ndarray],
        weights: Mapping[Bucket, Sequence[float]],
        accumulate: int = 1,
    ) -> BucketBias:
        """Returns the report for measured gradients.

        Args:
          counts: bucket -> number of its batches in an epoch.
          sketches: bucket -> `[n, d]`, the sketch of each measured batch.
          weights: bucket -> the weight of each measured batch.
          accumulate: the number of micro-batches in an update, each of which is a batch
            here.

        Raises:
          ValueError: if the mean gradient cannot be told from zero.
        """
        samples = [sketches[bucket] for bucket in counts]
        steps = np.array(list(counts.values()))
        mean_weights = np.array([np.mean(weights[bucket]) for bucket in counts])
        squared_norm, noise, inner = _estimate(samples, steps * mean_weights)
        if squared_norm <= 0:
            raise ValueError(
                "The mean gradient is smaller than the noise of its estimate. Measure "
                "more batches with `batches_per_bucket`."
            )
        folds = [
            np.diag(_estimate(part, steps * mean_weights).inner)
            for part in _leave_out(samples)
        ]
        # The jackknife estimate of the standard error.
        errors = np.sqrt(len(folds) - 1) * np.std(folds, axis=0) if folds else np.nan
        noise, inner = noise / squared_norm, inner / squared_norm
        columns = (
            *(counts, steps / steps.sum(), mean_weights, np.diag(inner)),
            *(np.broadcast_to(errors / squared_norm, len(steps)), noise),
            *(noise * mean_weights, map(len, samples)),
        )
        buckets = tuple(
            BucketGradient(bucket, *map(float, numbers), num_batches=number)
            for bucket, *numbers, number in zip(*columns, strict=True)
        )
        within = float(steps @ noise / steps.sum())
        between = float(steps @ np.diag(inner) / steps.sum())
        ways = tuple(_ways(steps, inner, within / accumulate))
        return cls(buckets, within, between, ways)

    @property
    def between_share(self) -> float:
        """The share of the variance of updates that is between buckets.

        Where noise limits training, updates without this part need about this share of
        tokens less, so it is a sensible value for the `mixing` of `plan_packing`.
        """
        return max(self.between, 0.0) / (max(self.between, 0.0) + self.within)

    @property
    def summary(self) -> str:
        """The result in two sentences."""
        return (
            f"{self.between_share:.1%} of the variance of updates is between buckets, "
            "and the rest is between batches of the same bucket. Packed rows, or "
            "random batches without buckets, avoid the first part."
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python objects."""
        buckets = [
            dataclasses.asdict(x) | {"bucket": [x.bucket.batch_size, x.bucket.seq_len]}
            for x in self.buckets
        ]
        ways = [dataclasses.asdict(way) for way in self.ways]
        return {
            "buckets": buckets,
            "within": self.within,
            "between": self.between,
            "between_share": self.between_share,
            "ways": ways,
        }

    def to_json(self) -> str:
        """Returns all numbers as a JSON object."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        return f"{table_text(self._bucket_table())}\n\n{table_text(self._way_table())}"

    def __rich__(self) -> Any:
        """Returns `rich` tables for the terminal."""
        from rich.console import Group

        return Group(self._bucket_table(), self._way_table())

    def _bucket_table(self) -> Any:
        from rich import box
        from rich.table import Table

        caption = (
            "Bias: squared distance from the mean gradient of the data. Noise: "
            "variance of the gradient of a batch. Both are relative to the squared "
            "norm of the mean gradient. Noise scale: the weight of a batch with a "
            "noise of 1."
        )
        table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        for name in ("B", "T", "steps", "weight", "bias", "noise", "noise scale"):
            table.add_column(name, justify="right", no_wrap=True)
        for x in self.buckets:
            table.add_row(
                *(str(x.bucket.batch_size), str(x.bucket.seq_len)),
                *(f"{x.share:.1%}", f"{x.weight:,.0f}"),
                *(f"{x.bias:.3g} ± {x.bias_error:.2g}", f"{x.noise:.3g}"),
                f"{x.noise_scale:,.0f}",
            )
        return table

    def _way_table(self) -> Any:
        from rich import box
        from rich.table import Table

        caption = (
            f"Variance of the gradient of an update, and of the mean of {_NUM_UPDATES} "
            f"updates (times {_NUM_UPDATES}), relative to the squared norm of the mean "
            "gradient. More tokens: how many more than with packed rows are needed "
            f"because of it. {self.summary}"
        )
        table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        table.add_column("way to batch", no_wrap=True)
        for name in ("one update", f"{_NUM_UPDATES} updates", "more tokens"):
            table.add_column(name, justify="right", no_wrap=True)
        for way in self.ways:
            numbers = f"{way.one:.3g}", f"{way.several:.3g}", f"{way.more_tokens:.1%}"
            table.add_row(way.name, *numbers)
        return table


class _Estimate(NamedTuple):
    """Unbiased estimates from the gradients of several batches per bucket.

    Attributes:
      squared_norm: the squared norm of the mean gradient of the data.
      noise: `[K]`, the variance of the gradient of a batch of each bucket.
      inner: `[K, K]`, the inner products of the distances of the buckets' gradients
        from the mean gradient. The diagonal is the bias.
    """

    squared_norm: float
    noise: np.ndarray
    inner: np.ndarray


def _estimate(samples: Sequence[np.ndarray], weights: np.ndarray) -> _Estimate:
    """Estimates from `[n, d]` gradients per bucket and the `[K]` weights of buckets."""
    sizes = np.array([len(x) for x in samples])
    means = np.stack([x.mean(axis=0) for x in samples])
    squares = [np.square(x - m).sum() for x, m in zip(samples, means, strict=True)]
    noise = np.array(squares) / (sizes - 1)
    # A mean over n batches contains 1 / n of their noise.
    gram = means @ means.T - np.diag(noise / sizes)
    weights = weights / weights.sum()
    with_mean = gram @ weights
    squared_norm = float(weights @ with_mean)
    inner = gram - with_mean[:, None] - with_mean[None, :] + squared_norm
    return _Estimate(squared_norm, noise, inner)


def _leave_out(samples: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yields the samples without one of several groups of batches."""
    num_folds = min(_FOLDS, *map(len, samples))
    for fold in range(num_folds):
        parts = [np.delete(x, np.s_[fold::num_folds], axis=0) for x in samples]
        if all(len(part) > 1 for part in parts):
            yield parts


def _ways(counts: np.ndarray, inner: np.ndarray, within: float) -> Iterator[WayToBatch]:
    """Yields the variance of updates with equal numbers of tokens.

    Micro-batches have less tokens, and so more noise, which their mean makes up for.

    Args:
      counts: `[K]` integers, the number of batches of each bucket in an epoch.
      inner: `[K, K]`, relative to the squared norm of the mean gradient.
      within: the variance of the gradient of an update within buckets.
    """
    sequence, _ = spread_evenly(np.arange(counts.sum()), counts)
    mean_bias = counts @ np.diag(inner) / counts.sum()

    def shuffled(window: int) -> float:
        return mean_bias / window

    def spread(window: int) -> float:
        return _spread_bias(sequence, inner, window)

    for name, size, between in (
        ("one bucket, shuffled", 1, shuffled),
        ("one bucket, spread", 1, spread),
        ("2 micro-batches, shuffled", 2, shuffled),
        ("2 micro-batches, spread", 2, spread),
        ("4 micro-batches, spread", 4, spread),
        ("all lengths, as in packed rows", 1, lambda window: 0.0),
    ):
        one = within + between(size)
        several = within + _NUM_UPDATES * between(size * _NUM_UPDATES)
        yield WayToBatch(name, one, several, (several - within) / (1 + within))


def _spread_bias(sequence: np.ndarray, inner: np.ndarray, window: int) -> float:
    """Returns the mean squared bias of the mean gradient of a window of batches."""
    repeated = np.resize(sequence, len(sequence) + window)
    one_hot = repeated[:, None] == np.arange(len(inner))
    until = np.cumsum(np.vstack([np.zeros(len(inner)), one_hot]), axis=0)
    counts = (until[window:] - until[:-window])[: len(sequence)] / window
    return float(np.einsum("nk,kl,nl->n", counts, inner, counts).mean())
