"""Curricula of packed rows: easy examples share rows, and rows open as a whole."""

import numpy as np
import pytest
from schedule_cases import Cycles, check_open_rows_first, examples_in

from jaxbucket import BatchSchedule, Bucket, BucketPlan, Curriculum
from jaxbucket.packing import pack
from jaxbucket.schedule import ByValue, LinearPacing, StepPacing

SIZE = 400
LENGTHS = np.random.default_rng(0).integers(1, 60, SIZE)
PACKING = pack(LENGTHS, (32, 64))
PLAN = BucketPlan((Bucket(4, 32), Bucket(2, 64)), max_tokens=128)
METRICS = {
    "noise": np.random.default_rng(1).normal(size=SIZE),
    "level": np.random.default_rng(2).integers(0, 5, SIZE),
}
PACINGS = {
    "linear": LinearPacing(0.3, duration=120, unit="steps"),
    "steps": StepPacing((0.5, 1), boundaries=(40,), unit="steps"),
    "cycles": Cycles(LinearPacing(0.4, duration=0.3), every=0.4),
    "value": ByValue(LinearPacing(0.2, duration=60, unit="steps"), low=-2, high=2),
}


def build(*names: str, **options) -> BatchSchedule:
    metrics = dict(zip(METRICS, names, strict=False))
    order = Curriculum(
        {name: METRICS[name] for name in metrics},
        {name: PACINGS[pacing] for name, pacing in metrics.items()},
    )
    return BatchSchedule(PLAN, LENGTHS, packing=PACKING, order=order, **options)


@pytest.mark.parametrize(
    "names",
    [
        ("cycles", "linear"),
        pytest.param(("linear",), marks=pytest.mark.exhaustive),
        pytest.param(("value", "steps"), marks=pytest.mark.exhaustive),
    ],
    ids="-".join,
)
def test_open_rows_are_drawn_first_and_each_example_once(names):
    schedule = build(*names)
    slots = [sorted(PACKING.slots(row).tolist()) for row in range(PACKING.num_rows)]
    for epoch in range(3):
        rows = check_open_rows_first(schedule, epoch)
        # The rows are those of the packing.
        assert sorted(sorted(LENGTHS[list(row)].tolist()) for row in rows) == sorted(
            slots
        )


def neighbors(schedule: BatchSchedule, epoch: int) -> set[frozenset[int]]:
    steps = range(epoch * len(schedule), (epoch + 1) * len(schedule))
    rows = [frozenset(examples_in(row)) for s in steps for row in schedule[s].rows]
    return {row for row in rows if len(row) > 1}


def test_easy_examples_share_rows_that_are_new_in_every_epoch():
    lengths = np.random.default_rng(3).integers(1, 9, 4000)
    packing = pack(lengths, 32)
    plan = BucketPlan((Bucket(8, 32),), max_tokens=256)
    noise = np.random.default_rng(4).normal(size=4000)
    levels = np.arange(4000) % 2
    for values, least in ((noise, 0.3), (levels, 0.9)):
        order = Curriculum(values, LinearPacing(0.5))
        schedule = BatchSchedule(plan, lengths, packing=packing, order=order)
        seen = [neighbors(schedule, epoch) for epoch in range(2)]
        # Within a row, examples differ much less than in the whole source.
        spread = np.mean([np.var(values[list(row)]) for row in seen[0]])
        assert spread < 0.1 * np.var(values)
        assert len(seen[0] & seen[1]) <= 0.01 * len(seen[0])
        # Half of the examples open most of the rows that they would fill.
        easy = np.median(values)
        rows = [values[list(row)].max() <= easy for row in seen[0]]
        assert np.mean(rows) > least * np.mean(values <= easy)


def test_rows_of_several_sequences():
    rng = np.random.default_rng(5)
    lengths = {"a": rng.integers(1, 9, 200), "b": rng.integers(1, 5, 200)}
    packing = pack(lengths, {"a": 16, "b": 8})
    plan = BucketPlan.from_shapes([(4, {"a": 16, "b": 8})])
    values = rng.normal(size=200)
    order = Curriculum(values, LinearPacing(0.2))
    schedule = BatchSchedule(plan, lengths, packing=packing, order=order)
    rows = np.concatenate([batch.rows for batch in schedule])
    np.testing.assert_array_equal(np.sort(rows[rows >= 0]), np.arange(200))
    for row in rows:
        own = list(examples_in(row))
        assert lengths["a"][own].sum() <= 16 and lengths["b"][own].sum() <= 8
    hardest = [values[list(examples_in(row))].max() for row in rows if examples_in(row)]
    assert np.mean(hardest[: len(hardest) // 4]) < np.mean(hardest)
    assert (
        schedule.fingerprint
        != BatchSchedule(plan, lengths, packing=packing).fingerprint
    )
