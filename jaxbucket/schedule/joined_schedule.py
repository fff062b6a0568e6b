"""Several schedules one after another: planned changes during a run."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxbucket.base.batch import BatchIndices
from jaxbucket.base.checks import check_integer
from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.mixture import pad_segments


class JoinedSchedule(Schedule):
    """A schedule that changes to another one at given steps.

    The plan, the token budget, the order, the number of micro-batches or the weights of
    a mixture may change. All shapes are known before the first step, so `compile_steps`
    compiles them once. Each schedule starts with its own step 0, as in
    `optax.join_schedules`.

    A change starts a new epoch. The rest of the epoch before it is left out, so choose
    a step at which an epoch ends, `schedule.epoch_start(n)`, if every example should be
    in every epoch. Schedules with the same seed, plan and order have the same batches
    in their first epochs; pass different seeds.

    A position describes the schedules that have begun. So a run resumes with another
    change at a later step: positions of `first` up to step 1,000 are those of
    `JoinedSchedule({0: first, 1000: second})`, too.

    Each of `schedules` has a report of its own epochs: `joined.schedules[0].report()`.

    Example:
      The first epoch by length, as in Deep Speech 2 (Amodei et al. 2015, "SortaGrad"):

      >>> from jaxbucket import BatchSchedule, Bucket, BucketPlan
      >>> plan = BucketPlan((Bucket(2, 4), Bucket(1, 8)), max_tokens=8)
      >>> lengths = [4, 8, 3, 7, 2, 1]
      >>> by_length = BatchSchedule(plan, lengths, order="ascending")
      >>> spread = BatchSchedule(plan, lengths, seed=1)
      >>> schedule = JoinedSchedule({0: by_length, len(by_length): spread})
      >>> [schedule[step].bucket.seq_len for step in range(4)]
      [4, 4, 8, 8]
      >>> schedule.epoch_at(3), schedule.epoch_at(4)
      (0, 1)

    Attributes:
      schedules: step -> the schedule from this step on. The first step is 0. All
        schedules have the same lengths; all have packed rows or none.
      plans: the different plans of the schedules.
      accumulate: the largest number of micro-batches in a step. If it is not 1,
        `schedule[step]` is a tuple at every step, which may have a single element.

    Raises:
      ValueError: if the steps do not start at 0 or are not ascending; if a schedule is
        a mixture with names; if schedules differ in their lengths, their sequences or
        in whether rows are packed; or if some truncate the start and others the end.
    """

    def __init__(self, schedules: Mapping[int, Schedule]):
        if not isinstance(schedules, Mapping):
            raise ValueError(
                f"`schedules` is a {type(schedules).__name__}. Pass a mapping from "
                "steps to schedules: `{0: first, 1000: second}`."
            )
        self.schedules = dict(schedules)
        self._steps = [check_integer("step", step) for step in self.schedules]
        self._phases = list(self.schedules.values())
        self._check()
        first = self._phases[0]
        plans = [plan for phase in self._phases for plan in phase.plans]
        self.plans = tuple({plan.fingerprint: plan for plan in plans}.values())
        self.check_policies()
        self.lengths, self.parts = first.lengths, first.parts
        self.accumulate = max(phase.accumulate for phase in self._phases)
        if first.max_segments is not None:
            self.max_segments = max(x.max_segments or 0 for x in self._phases)
        lengths_of_phases = np.diff(self._steps).tolist()
        epochs = [
            phase.epoch_at(length - 1) + 1
            for length, phase in zip(lengths_of_phases, self._phases, strict=False)
        ]
        # The epoch with which each schedule starts.
        self._epochs = [0, *itertools.accumulate(epochs)]

    def _check(self) -> None:
        steps = self._steps
        if not steps or steps != sorted({0, *steps}):
            raise ValueError(
                f"`schedules` has the steps {steps}. Start with step 0, in ascending "
                "order: `{0: first, 1000: second}`."
            )
        for step, phase in self.schedules.items():
            if not isinstance(phase, Schedule) or phase.names:
                raise ValueError(
                    f"`schedules[{step}]` is a {type(phase).__name__}. Pass a "
                    "`BatchSchedule` or another schedule without names. The weights of "
                    f"a mixture change by `weights={{0: ..., {step or 1000}: ...}}`."
                )
            if self._kind(phase) != self._kind(self._phases[0]):
                raise ValueError(
                    f"`schedules[{step}]` has other lengths or sequences than "
                    "`schedules[0]`, or only one of them has packed rows. Pass "
                    "schedules of the same source. To add examples at a later step, "
                    "leave them out before with `subset`."
                )

    @staticmethod
    def _kind(phase: Schedule) -> tuple[Any, ...]:
        """Returns what all schedules must have in common."""
        return phase.data_fingerprint, phase.sequences, phase.max_segments is None

    def __repr__(self) -> str:
        return f"JoinedSchedule({self.schedules})"

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in the first epoch; others may have more or fewer."""
        return self._start_of(1)

    def _epoch_of(self, step: int) -> int:
        index = self._phase_at(step)
        phase = self._phases[index]
        return self._epochs[index] + phase.epoch_at(step - self._steps[index])

    def _start_of(self, epoch: int) -> int:
        index = bisect.bisect_right(self._epochs, epoch) - 1
        phase, start = self._phases[index], self._steps[index]
        return start + phase.epoch_start(epoch - self._epochs[index])

    def _phase_at(self, step: int) -> int:
        """Returns the index of the schedule that provides a step."""
        return bisect.bisect_right(self._steps, step) - 1

    def _micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        index = self._phase_at(step)
        batches = self._phases[index]._micro_batches(step - self._steps[index])
        if self.max_segments is None:
            return batches
        rows = (pad_segments(x.rows, self.max_segments) for x in batches)
        return tuple(map(BatchIndices, (x.bucket for x in batches), rows))

    def _draws(self, step: int) -> tuple[BatchDraws, ...]:
        index = self._phase_at(step)
        start = self._steps[index]
        # Schedules with equal seeds draw different numbers.
        return tuple(
            draws._replace(first_step=start + draws.first_step)
            for draws in self._phases[index]._draws(step - start)
        )

    def before(self, step: int) -> Schedule:
        begun = {s: x for s, x in self.schedules.items() if s < max(step, 1)}
        last = max(begun)
        begun[last] = begun[last].before(step - last)
        return JoinedSchedule(begun) if len(begun) > 1 else begun[last]

    def config(self) -> dict[str, Any]:
        schedules = self.schedules.items()
        phases = {str(s): x.config() | {"of": x.fingerprint} for s, x in schedules}
        return {"schedules": phases}
