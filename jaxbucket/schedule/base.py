"""The base class of all schedules: steps, epochs and fingerprints."""

from __future__ import annotations

import abc
import copy
import functools
import json
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from jaxbucket.base.batch import BatchIndices
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_integer
from jaxbucket.base.digest import digest
from jaxbucket.base.position import DataPosition, check_position
from jaxbucket.schedule.example_draws import BatchDraws


class Schedule(abc.ABC):
    """An endless sequence of batches, indexed by the step.

    `schedule[step]` is a `BatchIndices`, or a tuple of `accumulate` of them.

    Attributes:
      plans: the plans of its batches, one or several.
      lengths: `[N]` integers, one per example.
      accumulate: the number of micro-batches in a step.
      max_segments: the maximum number of examples in a packed row; None if every row
        holds one example.
      parts: sequence name -> `[N]` integers, the lengths of this sequence, which add
        up to `lengths`; None unless examples have several sequences.
      subset: `[N]` bool, the examples of an epoch; None for all.
      first_step: the step at which the first epoch starts; 0 unless the schedule was
        created by `continue_with`.
      continues: the fingerprint of the schedule that provides the earlier steps; None
        if there is no such schedule.
    """

    plans: tuple[BucketPlan, ...]
    lengths: np.ndarray
    accumulate: int = 1
    max_segments: int | None = None
    parts: dict[str, np.ndarray] | None = None
    subset: np.ndarray | None = None
    first_step: int = 0
    continues: str | None = None

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
    def sequences(self) -> tuple[str, ...]:
        """The sequences that have lengths of their own, which all plans share."""
        return self.plans[0].sequences

    @functools.cached_property
    def truncates(self) -> bool | list[str]:
        """Whether examples keep their first tokens; or which of their sequences do."""
        return _any_of([plan.truncates for plan in self.plans])

    @functools.cached_property
    def truncates_left(self) -> bool | list[str]:
        """Whether examples keep their last tokens; or which of their sequences do."""
        return _any_of([plan.truncates_left for plan in self.plans])

    def check_policies(self) -> None:
        """Checks that no two plans truncate different ends of the examples.

        Raises:
          ValueError: if one plan truncates their start and another one their end.
        """
        first, last = self.truncates, self.truncates_left
        both = first and last
        if isinstance(first, list) and isinstance(last, list):
            both = set(first) & set(last)
        if both:
            raise ValueError(
                "`schedules` have plans with `overlong='truncate'` and with "
                "'truncate_left'. Use one of them in all plans."
            )

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
        if self.subset is None:
            return self.plan.assign(self.columns) >= 0
        is_kept = self.subset.copy()
        is_kept[is_kept] = self.plan.assign(self.columns[is_kept]) >= 0
        return is_kept

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """The number of steps in one epoch."""

    @abc.abstractmethod
    def _micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        """Returns the micro-batches of a step, counted from `first_step`."""

    @abc.abstractmethod
    def _draws(self, step: int) -> tuple[BatchDraws, ...]:
        """Returns the `BatchDraws` of each micro-batch of the same step."""

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """Returns all options except the plan and the lengths, as plain Python."""

    def continue_with(self, position: DataPosition) -> Self:
        """Returns a copy of this schedule that takes over from another at a position.

        Use this to continue a run with more data, a different plan or a different
        seed. The first epoch of the copy starts at the step of the position. Earlier
        steps belong to the schedule that the position comes from.

        Call this once, when the new run starts, because every call with a newer
        position starts another epoch there. To resume the new run later, call `resume`
        on a loader of this schedule itself.

        Example:
          >>> from jaxbucket import BatchSchedule, batch_dataset, plan_buckets
          >>> source = [{"x": [1] * n} for n in (1, 2, 3, 4)]
          >>> plan = plan_buckets([4], max_tokens=8, sample=True)
          >>> before = BatchSchedule(plan, [1, 2], seed=0)
          >>> position = batch_dataset(source[:2], before).position(7)
          >>> grown = BatchSchedule(plan, [1, 2, 3, 4], seed=0).continue_with(position)
          >>> grown.first_step, len(grown)
          (7, 2)

        Args:
          position: the position of the dataset that used the previous schedule.

        Returns:
          A schedule of the same type whose `first_step` is the step of `position`.

        Raises:
          ValueError: if `position` is not a `DataPosition`.
        """
        check_position(position)
        return self.starting_at(position.step, position.schedule["fingerprint"])

    def starting_at(self, first_step: int, continues: str | None) -> Self:
        """Returns a copy of this schedule with new `first_step` and `continues`."""
        moved = copy.copy(self)
        moved.first_step = first_step
        moved.continues = continues
        return moved

    def __len__(self) -> int:
        """Returns the number of steps in one epoch.

        Larger steps are valid and belong to later epochs.
        """
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Returns an iterator over the batches of the first epoch."""
        return (self[self.first_step + step] for step in range(len(self)))

    def __getitem__(self, step: int) -> Any:
        """Returns the buckets and rows of any step of any epoch.

        Args:
          step: the step, counted over all epochs.

        Returns:
          A `BatchIndices` if `accumulate` is 1, and a tuple of them otherwise.

        Raises:
          IndexError: if `step` is negative or before `first_step`.
        """
        micro = self.micro_batches(step)
        return micro[0] if self.accumulate == 1 else micro

    def micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        """Returns the micro-batches of a step, as a tuple even if there is only one.

        Args:
          step: the step, counted over all epochs.

        Raises:
          IndexError: if `step` is negative or before `first_step`.
        """
        return self._micro_batches(self._check_step(step) - self.first_step)

    def draws(self, step: int) -> tuple[BatchDraws, ...]:
        """Returns the random numbers for the examples of each micro-batch of a step.

        Args:
          step: the step, counted over all epochs.

        Raises:
          IndexError: if `step` is negative or before `first_step`.
        """
        first = self.first_step
        draws = self._draws(self._check_step(step) - first)
        return tuple(x._replace(first_step=first + x.first_step) for x in draws)

    def epoch_at(self, step: int) -> int:
        """Returns the epoch of a step, counted from 0.

        Args:
          step: the step, counted over all epochs.

        Raises:
          IndexError: if `step` is negative or before `first_step`.
        """
        return self._epoch_of(self._check_step(step) - self.first_step)

    def epoch_start(self, epoch: int) -> int:
        """Returns the step at which an epoch starts.

        Args:
          epoch: the epoch, counted from 0.

        Raises:
          ValueError: if `epoch` is negative or not an integer.
        """
        if check_integer("epoch", epoch) < 0:
            raise ValueError(f"`epoch={epoch}` must not be negative.")
        return self.first_step + self._start_of(epoch)

    def _epoch_of(self, step: int) -> int:
        """Returns the epoch of a step, counted from `first_step`."""
        return step // self.steps_per_epoch

    def _start_of(self, epoch: int) -> int:
        """Returns the first step of an epoch, counted from `first_step`."""
        return epoch * self.steps_per_epoch

    def _check_step(self, step: int) -> int:
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"`step={step}` must not be negative.")
        if step < self.first_step:
            raise IndexError(
                f"`step={step}` is before the first step of this schedule, "
                f"{self.first_step}. Use the schedule that it continues."
            )
        return step

    @functools.cached_property
    def data_fingerprint(self) -> str:
        """32 hex digits that identify the lengths, for any integer dtype."""
        columns = [self.lengths] if self.parts is None else self.parts.values()
        return digest(*(np.ascontiguousarray(x, "<i4").data for x in columns))

    @property
    def fingerprint(self) -> str:
        """32 hex digits that identify all batches: plan, lengths and configuration."""
        plans = [plan.fingerprint for plan in self.plans]
        parts = [plans, self.data_fingerprint, self.config()]
        if self.continues is not None:
            parts += [self.first_step, self.continues]
        return digest(json.dumps(parts).encode())


def _any_of(policies: Sequence[bool | list[str]]) -> bool | list[str]:
    """Returns whether a policy applies in any plan; or the sequences it applies to."""
    if all(isinstance(policy, bool) for policy in policies):
        return any(policies)
    return list(dict.fromkeys(x for names in policies for x in names))  # pyright: ignore
