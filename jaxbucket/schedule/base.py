"""The base class of all schedules: steps, epochs and fingerprints."""

from __future__ import annotations

import abc
import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxbucket.base.batch import BatchIndices
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_integer
from jaxbucket.base.digest import digest, digest_all
from jaxbucket.base.length_counts import chunks
from jaxbucket.schedule.example_draws import BatchDraws


class Schedule(abc.ABC):
    """An endless sequence of batches, indexed by the step.

    `schedule[step]` is a `BatchIndices`, or a tuple of `accumulate` of them. Steps
    count over all epochs from 0; a negative one raises an `IndexError` in any method.

    Attributes:
      plans: the plans of its batches, one or several.
      lengths: `[N]` integers, one per example.
      accumulate: the number of micro-batches in a step.
      max_segments: the maximum number of examples in a packed row; None if every row
        holds one example.
      parts: sequence name -> `[N]` integers, the lengths of this sequence, which add
        up to `lengths`; None unless examples have several sequences.
      subset: `[N]` bool, the examples of an epoch; None for all.
      names: the names of components with sources of their own; usually empty.
    """

    plans: tuple[BucketPlan, ...]
    lengths: np.ndarray
    accumulate: int = 1
    max_segments: int | None = None
    parts: dict[str, np.ndarray] | None = None
    subset: np.ndarray | None = None
    names: tuple[str, ...] = ()

    @property
    def plan(self) -> BucketPlan:
        """The plan, if there is only one.

        Raises:
          ValueError: if there are several, as in a `JoinedSchedule`.
        """
        if len(self.plans) != 1:
            raise ValueError(
                f"The schedule has {len(self.plans)} plans, but a single one is needed "
                "here. Pass a `BatchSchedule` of one of `schedule.plans`."
            )
        return self.plans[0]

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of all plans, each of them once."""
        return tuple(dict.fromkeys(x for plan in self.plans for x in plan.buckets))

    @property
    def columns(self) -> np.ndarray:
        """The lengths, `[N]`, or `[N, Q]` with a column for each of Q sequences."""
        if self.parts is None:
            return self.lengths
        return np.stack(list(self.parts.values()), axis=1)

    @property
    def is_kept(self) -> np.ndarray:
        """`[N]` bool, the examples of the subset that the plan does not leave out.

        Raises:
          ValueError: if there are several plans.
        """
        return assign_subset(self.plan, self.columns, self.subset) >= 0

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """The number of steps in one epoch."""

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """Returns all options except the plan and the lengths, as plain Python."""

    def __len__(self) -> int:
        """Returns the number of steps in one epoch.

        Larger steps are valid and belong to later epochs.
        """
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Returns an iterator over the batches of the first epoch."""
        return (self[step] for step in range(len(self)))

    def __getitem__(self, step: int) -> Any:
        """Returns the buckets and rows of any step of any epoch.

        Args:
          step: the step, counted over all epochs.

        Returns:
          A `BatchIndices` if `accumulate` is 1, and a tuple of them otherwise.
        """
        micro = self.micro_batches(step)
        return micro[0] if self.accumulate == 1 else micro

    def micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        """Returns the micro-batches of a step, as a tuple even if there is only one."""
        return tuple(indices for indices, _ in self.drawn_batches(step))

    @abc.abstractmethod
    def drawn_batches(self, step: int) -> Iterator[tuple[BatchIndices, BatchDraws]]:
        """Yields each micro-batch of a step, and the random numbers of its examples."""

    def epoch_at(self, step: int) -> int:
        """Returns the epoch of a step, counted from 0."""
        return check_step(step) // self.steps_per_epoch

    def epoch_start(self, epoch: int) -> int:
        """Returns the step at which an epoch starts.

        Args:
          epoch: the epoch, counted from 0.

        Raises:
          ValueError: if `epoch` is negative or not an integer.
        """
        return check_integer("epoch", epoch, least=0) * self.steps_per_epoch

    @functools.cached_property
    def data_fingerprint(self) -> str:
        """32 hex digits that identify the lengths, for any integer dtype."""
        columns = [self.lengths] if self.parts is None else self.parts.values()
        parts = (part for column in columns for part in chunks(column))
        return digest_all(np.ascontiguousarray(part, "<i4").data for part in parts)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that identify all batches: plan, lengths and configuration."""
        plans = [plan.fingerprint for plan in self.plans]
        parts = [plans, self.data_fingerprint, self.config()]
        return digest(json.dumps(parts).encode())

    def before(self, step: int) -> Schedule:
        """Returns a schedule of the steps before a step, without later changes."""
        return self


def assign_subset(
    plan: BucketPlan, lengths: np.ndarray, subset: np.ndarray | None
) -> np.ndarray:
    """Returns the bucket of each example, `[N]` int16; -1 outside of the subset."""
    if subset is None:
        return plan.assign(lengths)
    index = np.full(len(lengths), -1, np.int16)
    if subset.any():
        index[subset] = plan.assign(lengths[subset])
    return index


def check_step(step: int) -> int:
    """Returns a step as an int, or raises an IndexError if it is negative."""
    step = operator.index(step)
    if step < 0:
        raise IndexError(f"`step={step}` must not be negative.")
    return step
