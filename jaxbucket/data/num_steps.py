"""The first and last steps of a run."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from jaxbucket.base.checks import check_integer, check_positive
from jaxbucket.schedule.base import Schedule


class RunEnd(NamedTuple):
    """The end of a run: a step, or a number of epochs of its schedule."""

    num_steps: int = 0
    num_epochs: int | None = None

    def step(self, schedule: Schedule) -> int:
        """Returns the first step after the run."""
        if self.num_epochs is None:
            return self.num_steps
        return schedule.epoch_start(self.num_epochs)


def run_end(num_steps: float | None, num_epochs: int | None) -> RunEnd | None:
    """Returns the end of a run, or None if neither argument is given.

    Raises:
      ValueError: if both are given, or the one given is not a valid number.
    """
    if num_steps is not None and num_epochs is not None:
        raise ValueError(
            f"`num_steps={num_steps}` and `num_epochs={num_epochs}` both set the "
            "end of the run. Pass only one of them."
        )
    if num_epochs is not None:
        return RunEnd(num_epochs=check_positive("num_epochs", num_epochs))
    if num_steps is None:
        return None
    # A Python sequence cannot have more elements.
    endless = num_steps == math.inf
    return RunEnd(sys.maxsize if endless else check_integer("num_steps", num_steps))


def epoch_end(schedule: Schedule, step: int) -> RunEnd:
    """Returns the end of the epoch that contains `step`."""
    return RunEnd(num_epochs=schedule.epoch_at(max(step, 0)) + 1)


def check_steps(schedule: Schedule, start_step: int, end: RunEnd) -> int:
    """Returns the step at which a run ends.

    Raises:
      ValueError: if `start_step` is negative or after the end of the run.
    """
    num_steps = end.step(schedule)
    if not 0 <= start_step <= num_steps:
        raise ValueError(
            f"`start_step={start_step}` must be between 0 and the end of the run, "
            f"`num_steps={num_steps}`."
        )
    return num_steps
