"""The buckets of all micro-batches of an epoch, found without their rows."""

from __future__ import annotations

import numpy as np

from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.batch_schedule import BatchSchedule
from jaxbucket.schedule.mixture import Mixture


def epoch_buckets(schedule: Schedule, epoch: int) -> np.ndarray:
    """Returns the index of the bucket of every micro-batch of an epoch.

    Example:
      >>> from jaxbucket import Bucket, BucketPlan
      >>> plan = BucketPlan((Bucket(2, 4), Bucket(1, 8)), max_tokens=8)
      >>> schedule = BatchSchedule(plan, [4, 8, 4, 8, 4, 4], order="ascending")
      >>> epoch_buckets(schedule, 0)
      array([0, 0, 1, 1])

    Args:
      schedule: a `BatchSchedule` or a `Mixture`.
      epoch: the epoch, counted from 0.

    Returns:
      `[steps * accumulate]` integers, empty micro-batches included.

    Raises:
      ValueError: if the schedule has several plans, or is of another type.
    """
    plan = schedule.plan
    if isinstance(schedule, Mixture):
        return _of_mixture(schedule, epoch)
    if not isinstance(schedule, BatchSchedule):
        raise ValueError(
            f"The schedule is a {type(schedule).__name__}, whose epochs may differ. "
            "Pass one of its `schedules`, or a loader of one of them."
        )
    batches = schedule._epochs.buckets(epoch)
    together = schedule.accumulate // schedule._batches_per_step
    buckets = np.repeat(batches, together)
    missing = len(schedule) * schedule.accumulate - len(buckets)
    filler = plan.buckets.index(schedule._filler.bucket)
    return np.pad(buckets, (0, missing), constant_values=filler)


def _of_mixture(mixture: Mixture, epoch: int) -> np.ndarray:
    """Returns the buckets of a mixture, whose components have epochs of their own."""
    per_epoch = len(mixture) * mixture._turns_per_step
    members, steps = mixture._turns.at_each(np.arange(per_epoch) + epoch * per_epoch)
    micro = mixture.schedules[0].accumulate
    buckets = np.empty((per_epoch, micro), np.int64)
    for index, schedule in enumerate(mixture.schedules):
        is_own = members == index
        # A component takes its steps one after the other.
        taken = steps[is_own]
        if not len(taken):
            continue
        epochs = range(taken[0] // len(schedule), taken[-1] // len(schedule) + 1)
        own = np.concatenate([epoch_buckets(schedule, x) for x in epochs])
        first = (taken[0] - epochs[0] * len(schedule)) * micro
        own = own[first : first + len(taken) * micro]
        buckets[is_own] = own.reshape(-1, micro)
    return buckets.ravel()
