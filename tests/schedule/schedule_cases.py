"""What several tests of schedules share."""

import dataclasses
import math

import numpy as np
import pytest

from jaxbucket.base.batch import BatchIndices
from jaxbucket.schedule import ByValue, LinearPacing
from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.pacing import Pacing, pacing_unit


def seeds(quick: int, count: int) -> list:
    """Returns `count` seeds; all but the first `quick` are for exhaustive runs."""
    rest = (pytest.param(i, marks=pytest.mark.exhaustive) for i in range(quick, count))
    return [*range(quick), *rest]


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


def is_open(schedule: Schedule, step: int) -> np.ndarray:
    """Returns whether a curriculum opens each example, `[N]` bool, by the definition.

    The difficulties and the pacing functions have names.
    """
    epoch, position = divmod(step, len(schedule))
    progress = {
        "epochs": epoch + position / len(schedule),
        "steps": step,
        "tokens": step * schedule.lengths.sum() / len(schedule),
    }
    result = np.ones(len(schedule.lengths), bool)
    for name, values in schedule.order.difficulty.items():
        pacing = schedule.order.pacing[name]
        done = progress[pacing_unit(pacing)]
        if isinstance(pacing, ByValue):
            share = pacing.pacing(done)
            limit = pacing.low + (pacing.high - pacing.low) * share + 1e-9
            if pacing.multiple:
                limit = math.floor(limit / pacing.multiple) * pacing.multiple
        else:
            count = math.ceil(round(pacing(done), 9) * len(values) - 1e-6)
            limit = np.sort(values)[max(count, 1) - 1]
        result &= values <= limit
    return result


def batches_of(schedule: Schedule, epoch: int) -> list[BatchIndices]:
    """Returns the micro-batches of all steps of an epoch."""
    steps = range(schedule.epoch_start(epoch), schedule.epoch_start(epoch + 1))
    return [x for step in steps for x in schedule.micro_batches(step)]


def real_rows(batch: BatchIndices) -> np.ndarray:
    return batch.rows[batch.rows >= 0]


def compositions(schedule: Schedule, epoch: int) -> set[frozenset[int]]:
    """Returns the examples of each batch of an epoch."""
    return {frozenset(real_rows(x).tolist()) for x in batches_of(schedule, epoch)}


def assert_same_steps(one: Schedule, other: Schedule, steps) -> None:
    """Asserts that two schedules have the same batches at some steps."""
    for step in steps:
        assert_same(one.micro_batches(step), other.micro_batches(step))


def assert_same(batches, expected) -> None:
    """Asserts that two sequences of batches are the same."""
    for a, b in zip(batches, expected, strict=True):
        assert a.bucket == b.bucket
        np.testing.assert_array_equal(a.rows, b.rows)


def examples_in(row: np.ndarray) -> tuple[int, ...]:
    """Returns the examples of a packed row, or that of a row of one example."""
    return tuple(row[row >= 0].tolist())


def check_open_rows_first(schedule: Schedule, epoch: int) -> list[tuple[int, ...]]:
    """Checks that open rows are drawn first, and returns all rows of an epoch.

    A row is open if all of its examples are.
    """
    batches = []
    left = {bucket: set() for bucket in schedule.plan.buckets}
    for batch in batches_of(schedule, epoch):
        drawn = {
            examples_in(row) for row in batch.rows.reshape(len(batch.rows), -1)
        } - {()}
        batches.append((batch.bucket, drawn))
        left[batch.bucket] |= drawn
    rows = [row for part in left.values() for row in part]
    assert sorted(i for row in rows for i in row) == list(range(len(schedule.lengths)))
    for step, (own, drawn) in enumerate(batches, schedule.epoch_start(epoch)):
        now = is_open(schedule, step)
        opened = {k: {r for r in x if now[list(r)].all()} for k, x in left.items()}
        need = {k: min(k.batch_size, len(x)) for k, x in left.items() if x}
        assert len(drawn) == need[own] and drawn <= left[own]
        can_fill = {k for k in need if len(opened[k]) >= need[k]}
        if can_fill:
            assert own in can_fill and drawn <= opened[own]
        else:
            # All of its open rows come, completed by others.
            assert opened[own] <= drawn
            if len(schedule.order.difficulty) == 1 and schedule.packing is None:
                # No bucket can fill a batch, so the easiest batch comes next.
                (values,) = schedule.order.difficulty.values()
                hardest = [
                    np.sort(values[np.ravel([*left[k]])])[n - 1]
                    for k, n in need.items()
                ]
                assert values[np.ravel([*drawn])].max() == min(hardest)
        left[own] -= drawn
    return rows
