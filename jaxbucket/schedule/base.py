"""What all schedules have: steps from the first one on, epochs and fingerprints."""

from __future__ import annotations

import abc
import copy
import functools
import operator
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from jaxbucket.base.batch import BatchIndices
from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.base.digest import digest
from jaxbucket.base.position import DataPosition, check_position
from jaxbucket.schedule.example_draws import BatchDraws

# In search of the first step of every bucket.
_MOST_LOOKED_AT = 4096


class Schedule(abc.ABC):
    """Step -> `BatchIndices`, or a tuple of `accumulate` of them; without end.

    Attributes:
      plan: the shapes.
      lengths: `[N]` integers.
      accumulate: micro-batches of a step.
      max_segments: the most examples of a packed row; None where a row has one example.
      capacities: what a row holds of each sequence, where examples have several.
      parts: name -> `[N]` integers, the lengths of each of these; they add up to
        `lengths`.
      first_step: the step that its first epoch begins with; 0, but for a schedule made
        by `continue_with`.
      continues: fingerprint of the schedule that has the steps before; None if none.
    """

    plan: BucketPlan
    lengths: np.ndarray
    accumulate: int = 1
    max_segments: int | None = None
    capacities: dict[str, int] | None = None
    parts: dict[str, np.ndarray] | None = None
    first_step: int = 0
    continues: str | None = None

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps until every example was in one row."""

    @abc.abstractmethod
    def _micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        """Those of a step, counted from `first_step` on."""

    @abc.abstractmethod
    def _draws(self, step: int) -> tuple[BatchDraws, ...]:
        """What is random in the examples of each of them."""

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """What it does beside the plan and the lengths, as plain Python."""

    @abc.abstractmethod
    def _fingerprint_parts(self) -> list[str]:
        """What its fingerprint is made of, beside the plan and the lengths."""

    def continue_with(self, position: DataPosition) -> Self:
        """Returns this schedule, taking over from another one at a position.

        The explicit way to go on with grown data, another plan or another seed: an
        epoch of this schedule begins with the position's step, and those before it
        stay the other's.

        Example:
          >>> from jaxbucket import BatchSchedule, batch_dataset, plan_buckets
          >>> source = [{"x": [1] * n} for n in (1, 2, 3, 4)]
          >>> plan = plan_buckets([4], max_tokens=8, boundaries=[4])
          >>> before = BatchSchedule(plan, [1, 2], seed=0)
          >>> position = batch_dataset(source[:2], before).position(7)
          >>> grown = BatchSchedule(plan, [1, 2, 3, 4], seed=0).continue_with(position)
          >>> grown.first_step, len(grown)
          (7, 2)

        Raises:
          ValueError: if `position` is no `DataPosition`.
        """
        check_position(position)
        return self.beginning_at(position.step, position.schedule["fingerprint"])

    def beginning_at(self, first_step: int, continues: str | None) -> Self:
        """Returns this schedule with another `first_step` and `continues`."""
        moved = copy.copy(self)
        moved.first_step = first_step
        moved.continues = continues
        return moved

    def __len__(self) -> int:
        """Steps of one epoch; larger steps are later epochs."""
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """The steps of the first epoch."""
        return (self[self.first_step + step] for step in range(len(self)))

    def __getitem__(self, step: int) -> Any:
        """Returns the bucket and the rows of any step, of any epoch.

        One `BatchIndices`, or a tuple of `accumulate` of them if that is not 1.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        micro = self.micro_batches(step)
        return micro[0] if self.accumulate == 1 else micro

    def micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        """Returns the same as a tuple, however many there are.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        return self._micro_batches(self._checked(step) - self.first_step)

    def draws(self, step: int) -> tuple[BatchDraws, ...]:
        """Returns the random numbers of the examples of each micro-batch of a step.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        first = self.first_step
        draws = self._draws(self._checked(step) - first)
        return tuple(one._replace(first_step=first) for one in draws)

    def bucket_order(self, start_step: int = 0) -> list[Bucket]:
        """Returns the buckets in the order in which steps first come to them.

        For `compile_steps(..., opening=)`. Those that thousands of steps do not come
        to are last, the longest first.

        Example:
          >>> from jaxbucket import BatchSchedule, plan_buckets
          >>> lengths = [2] * 9 + [9] * 2
          >>> plan = plan_buckets(lengths, max_tokens=18, num_buckets=2)
          >>> print(*BatchSchedule(plan, lengths, order="descending").bucket_order())
          [2, 9] [9, 2]

        Raises:
          IndexError: if `start_step` is negative, or before `first_step`.
        """
        # As the keys of a dict: each once, in the order in which they came.
        order: dict[Bucket, None] = {}
        for step in range(start_step, start_step + min(len(self), _MOST_LOOKED_AT)):
            order.update(dict.fromkeys(x.bucket for x in self.micro_batches(step)))
            if len(order) == len(self.plan):
                break
        return list(order | dict.fromkeys(reversed(self.plan.buckets)))

    def epoch_at(self, step: int) -> int:
        """Returns the epoch that a step is in, from 0 on: derived, never kept.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        return (self._checked(step) - self.first_step) // len(self)

    def _checked(self, step: int) -> int:
        step = operator.index(step)
        if step < 0:
            raise IndexError(f"`step={step}` must not be negative.")
        if step < self.first_step:
            raise IndexError(
                f"`step={step}` is one of the schedule that this one continues from "
                f"step {self.first_step} on."
            )
        return step

    @functools.cached_property
    def data_fingerprint(self) -> str:
        """32 hex digits that name the lengths, whatever their integer dtype."""
        columns = [self.lengths] if self.parts is None else self.parts.values()
        return digest(*(np.ascontiguousarray(x, "<i4").data for x in columns))

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name every batch: plan, lengths, and its configuration."""
        parts = [
            self.plan.fingerprint,
            self.data_fingerprint,
            *self._fingerprint_parts(),
        ]
        if self.continues is not None:
            parts += [str(self.first_step), self.continues]
        return digest("\n".join(parts).encode())
