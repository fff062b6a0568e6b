"""Time, loss and padding of the steps of a run, by bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxbucket.base.bucket import Bucket


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step of a run, as plain numbers.

    Attributes:
      step: its number, starting at 0.
      bucket: the shape (B, T).
      seconds: its duration.
      loss: the mean over its real tokens.
      real_tokens: the number of positions that are not padding.
      learning_rate: the learning rate of the step, scaled by the size of the batch.
    """

    step: int
    bucket: Bucket
    seconds: float
    loss: float
    real_tokens: int
    learning_rate: float


@dataclasses.dataclass(frozen=True)
class BucketStats:
    """Statistics of the steps of one bucket in a run.

    Attributes:
      bucket: the shape (B, T).
      steps: the number of its steps.
      seconds: the total time of the steps.
      seconds_per_step: the median step time.
      loss: the mean over its real tokens; NaN if there are none.
      real_tokens: the number of positions that are not padding.
      padding: the share of positions that are padding.
    """

    bucket: Bucket
    steps: int
    seconds: float
    seconds_per_step: float
    loss: float
    real_tokens: int
    padding: float

    @property
    def seconds_per_token(self) -> float:
        """Median step time divided by B * T, padding included."""
        return self.seconds_per_step / self.bucket.num_tokens

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        fields = dataclasses.asdict(self)
        fields["bucket"] = self.bucket.to_list()
        fields["loss"] = None if np.isnan(self.loss) else self.loss
        return {**fields, "seconds_per_token": self.seconds_per_token}


def bucket_stats(records: Iterable[StepRecord]) -> list[BucketStats]:
    """Returns the statistics of each bucket in a run, the shortest bucket first.

    Example:
      >>> from jaxbucket import Bucket
      >>> short, long = Bucket(4, 8), Bucket(2, 16)
      >>> records = [
      ...     StepRecord(0, long, 0.3, 2.5, 24, 1e-3),
      ...     StepRecord(1, short, 0.1, 2.4, 32, 1e-3),
      ...     StepRecord(2, long, 0.2, 2.3, 24, 1e-3),
      ... ]
      >>> for x in bucket_stats(records):
      ...     print(x.bucket, x.steps, round(x.loss, 3), x.padding)
      [4, 8] 1 2.4 0.0
      [2, 16] 2 2.4 0.25

    To plan with the measured step times, use
    `StepTime.fit({x.bucket: x.seconds_per_step for x in bucket_stats(records)})`.

    Args:
      records: the steps of the run, in any order.
    """
    by_bucket: dict[Bucket, list[StepRecord]] = {}
    for record in records:
        by_bucket.setdefault(record.bucket, []).append(record)
    return [
        _stats_of(bucket, by_bucket[bucket])
        for bucket in sorted(by_bucket, key=lambda b: (b.seq_len, b.batch_size))
    ]


def _stats_of(bucket: Bucket, records: list[StepRecord]) -> BucketStats:
    real_tokens = sum(record.real_tokens for record in records)
    loss_sum = sum(record.loss * record.real_tokens for record in records)
    return BucketStats(
        bucket=bucket,
        steps=len(records),
        seconds=sum(record.seconds for record in records),
        seconds_per_step=float(np.median([record.seconds for record in records])),
        loss=loss_sum / real_tokens if real_tokens else np.nan,
        real_tokens=real_tokens,
        padding=1 - real_tokens / (bucket.num_tokens * len(records)),
    )
