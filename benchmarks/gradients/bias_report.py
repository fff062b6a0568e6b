"""The report on gradients by bucket: bias, noise, and the effect of other orders."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gradient_estimates import (
    MIN_BATCHES,
    GradientEstimates,
    GradientSamples,
    jackknife_error,
    leave_out,
)
from ways_to_batch import (
    NUM_UPDATES,
    SIZES,
    WayToBatch,
    spread_windows,
    ways_to_batch,
)

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.table import table_text

# A mean of updates that is closer to the mean gradient is not worth mentioning.
_MIN_OFFSET = 0.01
# Smaller shares of tokens are shown as none.
_MIN_SHOWN = 0.0005


@dataclasses.dataclass(frozen=True)
class BucketGradient:
    """The gradients of the batches of one bucket.

    All squared norms are relative to the squared norm of the data's mean gradient.

    Attributes:
      bucket: the shape of the batches.
      share: the share of the bucket in the steps of an epoch.
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
class BucketBias:
    """How far the gradients of buckets are from the gradient of the data.

    All of this assumes that every update has the same learning rate.

    Attributes:
      buckets: the measurements by bucket, the shortest first.
      offset: the squared distance from the mean of all updates, with one bucket in
        each, to the mean gradient of the data. It is large if batches of different
        buckets have different weights, because every update counts equally. It is an
        unbiased estimate, so it may be slightly negative.
      offset_error: the standard error of the offset.
      ways: the variance of updates for several ways to batch the examples.
      left_out: buckets of which fewer than three batches with weight were measured.
      left_out_share: the share of these buckets in the steps.
      accumulate: the number of micro-batches in an update, each of which is a batch in
        `buckets`.
    """

    buckets: tuple[BucketGradient, ...]
    offset: float
    offset_error: float
    ways: tuple[WayToBatch, ...]
    left_out: tuple[Bucket, ...] = ()
    left_out_share: float = 0.0
    accumulate: int = 1

    @classmethod
    def of(
        cls,
        counts: Mapping[Bucket, int],
        measured: Mapping[Bucket, GradientSamples],
        accumulate: int = 1,
    ) -> BucketBias:
        """Returns the report for measured gradients.

        Args:
          counts: bucket -> number of its batches in an epoch, the shortest first.
          measured: bucket -> its measured batches. Buckets in which fewer than three
            have weight are left out.
          accumulate: the number of micro-batches in an update, each of which is a batch
            here.

        Raises:
          ValueError: if a gradient is not finite, if no bucket has three batches, or if
            the mean gradient cannot be told from zero.
        """
        _check(measured)
        kept = {k: measured[k] for k in counts if measured[k].size >= MIN_BATCHES}
        if not kept:
            raise ValueError(
                "No bucket has three batches with weight, so the noise of gradients "
                "cannot be estimated. Plan with fewer buckets or a smaller "
                "`max_tokens`, or check the weights of the loss."
            )
        steps, samples = np.array([counts[bucket] for bucket in kept]), [*kept.values()]
        estimates = GradientEstimates.of(steps, samples)
        folds = [GradientEstimates.of(steps, part) for part in leave_out(samples)]
        left_out = tuple(bucket for bucket in counts if bucket not in kept)
        total = sum(counts.values())
        return cls(
            tuple(_buckets(kept, steps / total, estimates, folds)),
            estimates.offset,
            float(jackknife_error([fold.offset for fold in folds])),
            tuple(_ways(estimates, folds, accumulate)),
            left_out,
            sum(counts[bucket] for bucket in left_out) / total,
            accumulate,
        )

    @property
    def summary(self) -> str:
        """What the order changes, in sentences, with errors."""
        if len(self.buckets) < 2:
            return (
                "With a single bucket, the order of the batches does not change the "
                "variance of updates."
            )
        shuffled, spread = map(_more, self.ways[:2])
        others = f"Without {self.left_out_share:.1%} of the steps, compared"
        text = (
            f"{others if self.left_out else 'Compared'} with random examples of all "
            f"lengths, training on one bucket at a time needs about {shuffled} "
            "because of this variance if the order is shuffled, and "
            f"{spread} if buckets are spread evenly."
        )
        if self.offset > max(_MIN_OFFSET, 2 * self.offset_error):
            text += (
                " With one bucket in each update, the mean of updates differs from the "
                f"mean gradient by {math.sqrt(self.offset):.0%} of its norm, because "
                "every update counts equally, whatever its weight. Learning rates that "
                'are proportional to the weight avoid this (`rule="linear"`).'
            )
        return text

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python objects."""
        return {
            "buckets": [
                dataclasses.asdict(x) | {"bucket": _shape(x.bucket)}
                for x in self.buckets
            ],
            "offset": self.offset,
            "offset_error": self.offset_error,
            "ways": [dataclasses.asdict(way) for way in self.ways],
            "left_out": [_shape(bucket) for bucket in self.left_out],
            "left_out_share": self.left_out_share,
            "accumulate": self.accumulate,
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
        if self.accumulate > 1:
            caption += (
                f" An update has {self.accumulate} micro-batches; these are the "
                "numbers of one micro-batch."
            )
        if self.left_out:
            caption += (
                " Left out, because fewer than three batches have weight: "
                f"{', '.join(map(str, self.left_out))}, {self.left_out_share:.1%} of "
                "the steps."
            )
        table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        for name in ("B", "T", "steps", "weight", "bias", "noise", "noise scale"):
            table.add_column(name, justify="right", no_wrap=True)
        for x in self.buckets:
            table.add_row(
                *(str(x.bucket.batch_size), str(x.bucket.seq_len)),
                *(f"{x.share:.1%}", _short(x.weight)),
                *(_with_error(x.bias, x.bias_error, "z.3g", ".2g"), f"{x.noise:.3g}"),
                _short(x.noise_scale),
            )
        return table

    def _way_table(self) -> Any:
        from rich import box
        from rich.table import Table

        caption = (
            f"Variance of an update, and of the mean of {NUM_UPDATES} updates (times "
            f"{NUM_UPDATES}), relative to the squared norm of the mean gradient. More "
            "tokens: an estimate of how many more are needed than with random examples "
            "of all lengths, if all updates have the same learning rate. "
            f"{self.summary}"
        )
        table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        table.add_column("way to batch", no_wrap=True)
        for name in ("one update", f"{NUM_UPDATES} updates", "more tokens"):
            table.add_column(name, justify="right", no_wrap=True)
        for way in self.ways[:-1]:
            more = _with_error(way.more_tokens, way.more_tokens_error, "z.1%", ".1%")
            table.add_row(way.name, f"{way.one:.3g}", f"{way.several:.3g}", more)
        mixed = self.ways[-1]
        table.add_row(mixed.name, f"{mixed.one:.3g}", f"{mixed.several:.3g}", "")
        return table


def _check(measured: Mapping[Bucket, GradientSamples]) -> None:
    """Raises a ValueError if gradients or weights are not valid."""
    for bucket, x in measured.items():
        if not np.isfinite(x.gradients).all():
            raise ValueError(
                f"The gradient of a batch of shape {bucket} is not finite. Pass a "
                "state and a loss whose gradients are finite."
            )
        if not (np.isfinite(x.weights) & (x.weights >= 0)).all():
            raise ValueError(
                f"The weight of a batch of shape {bucket} is negative or not finite. "
                "Return the sum of weights that are at least 0 from the loss."
            )


def _buckets(
    measured: Mapping[Bucket, GradientSamples],
    shares: np.ndarray,
    estimates: GradientEstimates,
    folds: list[GradientEstimates],
) -> Iterator[BucketGradient]:
    errors = jackknife_error([fold.bias for fold in folds])
    for k, (bucket, x) in enumerate(measured.items()):
        weight, noise = float(estimates.weights[k]), float(estimates.noise[k])
        yield BucketGradient(
            *(bucket, float(shares[k]), weight),
            *(float(estimates.bias[k]), float(errors[k])),
            *(noise, noise * weight, x.size),
        )


def _ways(
    estimates: GradientEstimates, folds: list[GradientEstimates], accumulate: int
) -> Iterator[WayToBatch]:
    """Yields the ways to batch, for updates of several measured batches."""
    windows = {size: spread_windows(estimates.steps, size) for size in SIZES}
    ways, *others = (
        list(
            ways_to_batch(
                dataclasses.replace(
                    x, noise=x.noise / accumulate, examples=x.examples * accumulate
                ),
                windows,
            )
        )
        for x in (estimates, *folds)
    )
    errors = jackknife_error([[way.more_tokens for way in x] for x in others])
    for way, error in zip(ways, errors.tolist(), strict=True):
        yield dataclasses.replace(way, more_tokens_error=error)


def _shape(bucket: Bucket) -> list[int]:
    return bucket.to_list()


def _more(way: WayToBatch) -> str:
    """Returns how many more tokens a way needs, and whether that exceeds two errors."""
    more, error = abs(way.more_tokens), way.more_tokens_error
    if max(more, error) < _MIN_SHOWN:
        return "as many tokens"
    direction = "more" if way.more_tokens >= 0 else "fewer"
    shown = f"{more:.1%} ± {error:.1%} {direction} tokens"
    return shown if more > 2 * error else f"{shown} (not significant)"


def _short(number: float) -> str:
    if abs(number) < 100:
        return f"{number:.3g}"
    return f"{number:,.0f}" if abs(number) < 1e7 else f"{number:.2e}"


def _with_error(value: float, error: float, *formats: str) -> str:
    return f"{value:{formats[0]}} ± {error:{formats[1]}}"
