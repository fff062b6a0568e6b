"""What several tests of schedules share."""

import dataclasses

import numpy as np

from jaxbucket.base.batch import BatchIndices
from jaxbucket.schedule import LinearPacing
from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.pacing import Pacing, pacing_unit


def draws_of(schedule: Schedule, step: int) -> list[BatchDraws]:
    """Returns the random numbers of the micro-batches of a step."""
    return [draws for _, draws in schedule.drawn_batches(step)]


@dataclasses.dataclass(frozen=True)
class Cycles:
    """A pacing function that restarts another one, so that its share falls."""

    pacing: Pacing = LinearPacing(start=0.1, duration=0.25)
    every: float = 0.3

    @property
    def unit(self) -> str:
        return pacing_unit(self.pacing)

    def __call__(self, progress: float) -> float:
        return self.pacing(progress % self.every)


def batches_of(schedule: Schedule, epoch: int) -> list[BatchIndices]:
    """Returns the micro-batches of all steps of an epoch."""
    steps = range(schedule.epoch_start(epoch), schedule.epoch_start(epoch + 1))
    return [x for step in steps for x in schedule.micro_batches(step)]


def assert_same_steps(one: Schedule, other: Schedule, steps) -> None:
    """Asserts that two schedules have the same batches at some steps."""
    for step in steps:
        pairs = zip(one.micro_batches(step), other.micro_batches(step), strict=True)
        for a, b in pairs:
            assert a.bucket == b.bucket
            np.testing.assert_array_equal(a.rows, b.rows)
