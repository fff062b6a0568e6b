"""Several schedules one after another: planned changes during a run."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxbucket.base.checks import by_step, check_integer
from jaxbucket.schedule.base import Schedule, check_step
from jaxbucket.schedule.combined import CombinedSchedule


class JoinedSchedule(CombinedSchedule):
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
        self.schedules = by_step("schedules", schedules)
        super().__init__(self.schedules)
        self._first_steps = list(self.schedules)
        first = self._components[0]
        for step, schedule in self.schedules.items():
            if schedule.data_fingerprint != first.data_fingerprint:
                raise ValueError(
                    f"`schedules[{step}]` has other lengths than `schedules[0]`. Pass "
                    "all lengths to each. To add examples later, use `subset` before."
                )
        self.lengths, self.parts = first.lengths, first.parts
        # The epoch with which each schedule starts.
        self._epochs = [0]
        for (start, end), schedule in zip(
            itertools.pairwise(self._first_steps), self._components, strict=False
        ):
            self._epochs.append(
                self._epochs[-1] + schedule.epoch_at(end - start - 1) + 1
            )

    def __repr__(self) -> str:
        return f"JoinedSchedule({self.schedules})"

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in the first epoch; others may have more or fewer."""
        return self.epoch_start(1)

    def epoch_at(self, step: int) -> int:
        ((index, number),) = self._parts_of(check_step(step))
        return self._epochs[index] + self._components[index].epoch_at(number)

    def epoch_start(self, epoch: int) -> int:
        check_integer("epoch", epoch, least=0)
        index = bisect.bisect_right(self._epochs, epoch) - 1
        start = self._components[index].epoch_start(epoch - self._epochs[index])
        return self._first_steps[index] + start

    def _parts_of(self, step: int) -> Iterator[tuple[int, int]]:
        index = bisect.bisect_right(self._first_steps, step) - 1
        yield index, step - self._first_steps[index]

    def before(self, step: int) -> Schedule:
        begun = {s: x for s, x in self.schedules.items() if s < max(step, 1)}
        last = max(begun)
        begun[last] = begun[last].before(step - last)
        return JoinedSchedule(begun) if len(begun) > 1 else begun[last]

    def config(self) -> dict[str, Any]:
        configs = zip(self._first_steps, self._component_configs(), strict=True)
        return {"schedules": {str(step): x for step, x in configs}}
