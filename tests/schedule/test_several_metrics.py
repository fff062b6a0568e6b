"""Curricula by several metrics and by value, against oracles in plain numpy."""

import math
from fractions import Fraction

import numpy as np
import pytest
from schedule_cases import Cycles, check_open_rows_first, is_open

from jaxbucket import BatchSchedule, Bucket, BucketPlan, Curriculum, plan_buckets
from jaxbucket.schedule import (
    ByValue,
    LinearPacing,
    RootPacing,
    StepPacing,
)
from jaxbucket.schedule.metric import Metric

# Each opens examples by one metric; in a case, every metric has its own.
PACINGS = {
    "linear": LinearPacing(0.2, duration=1.5),
    "root": RootPacing(0.1, duration=60, unit="steps"),
    "steps": StepPacing((0.1, 0.5, 1), boundaries=(10, 35), unit="steps"),
    "tokens": LinearPacing(0.3, duration=9000, unit="tokens"),
    "cycles": Cycles(LinearPacing(0.2, duration=11, unit="steps"), every=17),
    "wave": lambda epochs: 0.5 + 0.5 * math.sin(9 * epochs),
    "value": ByValue(
        LinearPacing(0, duration=50, unit="steps"), low=2, high=90, multiple=8
    ),
    "low value": ByValue(LinearPacing(0, duration=2), low=-5, high=40),
}
CASES = [
    ("linear", "root", "tokens"),
    ("cycles", "linear"),
    ("value", "wave", "cycles"),
    ("low value", "steps"),
    ("cycles", "cycles"),
    ("low value",),
    ("value",),
]
QUICK = [("value", "wave", "cycles"), ("low value",)]
# The others are exhaustive tests.
MARKED_CASES = [
    pytest.param(case, marks=() if case in QUICK else pytest.mark.exhaustive)
    for case in CASES
]


def problem(seed=0, size=200):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, size)
    plan = plan_buckets(lengths, max_tokens=600, num_buckets=3, batch_size_multiple=2)
    metrics = {
        "length": lengths,
        "noise": rng.normal(size=size) * 50,
        "level": rng.integers(0, 4, size).astype(np.uint8),
    }
    return plan, lengths, metrics


def build(case, replacement=False, **options) -> BatchSchedule:
    plan, lengths, metrics = problem()
    names = list(metrics)[: len(case)]
    order = Curriculum(
        {name: metrics[name] for name in names},
        {name: PACINGS[p] for name, p in zip(names, case, strict=True)},
        replacement=replacement,
    )
    return BatchSchedule(plan, lengths, order=order, **options)


@pytest.mark.parametrize("case", MARKED_CASES, ids="-".join)
def test_open_examples_are_drawn_first_and_each_example_once(case):
    schedule = build(case)
    for epoch in range(3):
        check_open_rows_first(schedule, epoch)


def test_a_batch_is_completed_by_the_examples_that_open_next():
    rng = np.random.default_rng(5)
    values = {name: rng.permutation(60) for name in "ab"}
    plan = BucketPlan((Bucket(4, 8),), max_tokens=32)
    # The metrics take turns, so that their ranks alone do not tell which opens next.
    pacing = {
        "a": StepPacing((0.1, 0.5, 0.7, 1), boundaries=(25, 60, 70), unit="steps"),
        "b": StepPacing((0.1, 0.3, 1), boundaries=(30, 50), unit="steps"),
    }
    schedule = BatchSchedule(plan, [8] * 60, order=Curriculum(values, pacing))
    opens = np.full(60, 1000)
    for step in reversed(range(100)):
        opens[is_open(schedule, step)] = step
    for epoch in range(2):
        batches = [schedule[15 * epoch + x].rows for x in range(15)]
        left = set(range(60))
        for position, rows in enumerate(batches):
            now = 15 * epoch + position
            when = np.clip(opens, now, 15 * (epoch + 1))
            assert when[rows].max() <= sorted(when[list(left)])[:4][-1]
            left -= set(rows.tolist())


@pytest.mark.parametrize("case", MARKED_CASES[:5], ids="-".join)
def test_draws_with_replacement_come_from_all_open_examples(case):
    schedule = build(case, replacement=True)
    rng = np.random.default_rng(0)
    for step in rng.permutation(3 * len(schedule))[:40].tolist():
        open_now = is_open(schedule, step)
        batch = schedule[step]
        assert batch.rows.min() >= 0
        if open_now.any():
            assert open_now[batch.rows].all()
        epoch, position = divmod(step, len(schedule))
        counts, examples = schedule._epochs.open_examples(epoch, position)
        if open_now.any():
            found = [own[:n] for n, own in zip(counts, examples, strict=True)]
            np.testing.assert_array_equal(
                np.sort(np.concatenate(found)), np.flatnonzero(open_now)
            )
        else:
            assert sum(counts)


def test_equal_metrics_equal_one_metric():
    plan, lengths, metrics = problem()
    for pacing in (PACINGS["cycles"], PACINGS["root"]):
        one = BatchSchedule(plan, lengths, order=Curriculum(metrics["level"], pacing))
        pair = Curriculum(dict.fromkeys("ab", metrics["level"]), pacing)
        both = BatchSchedule(plan, lengths, order=pair)
        for step in range(2 * len(one)):
            np.testing.assert_array_equal(one[step].rows, both[step].rows)


def num_open(pacing, values, progress) -> int:
    metric = Metric("difficulty", values, pacing)
    return metric.num_open(np.sort(values), progress)


def deepspeed_value(kind: str, step: int, config: dict) -> int:
    """The difficulty at a step by DeepSpeed's `CurriculumScheduler`."""
    if kind == "fixed_discrete":
        for value, last in zip(config["difficulty"], config["max_step"], strict=False):
            if step <= last:
                return value
        return config["difficulty"][-1]
    low, high, total = config["min"], config["max"], config["total"]
    if kind == "fixed_linear":
        value = math.floor(Fraction(step * (high - low), total) + low)
    else:
        # The floor of an irrational number, by an exact integer root.
        value = math.isqrt(step * (high - low) ** 2 // total) + low
    value -= value % config["multiple"]
    return min(value, high - high % config["multiple"])


STEPS = [0, 1, 2, 333, 334, 624, 625, 9_999, 10_001, 10**7 - 1, 10**7, 10**7 + 1]


@pytest.mark.parametrize("total", [3_000, 10**7])
@pytest.mark.parametrize(
    "kind", ["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
)
def test_open_sets_by_value_are_those_of_deepspeed(total, kind):
    values = np.random.default_rng(1).integers(1, 2100, 500)
    config = {"min": 8, "max": 2048, "total": total, "multiple": 8}
    config |= {"difficulty": [100, 300, 700], "max_step": [total // 3, total]}
    options = {"duration": total - 1, "unit": "steps"}
    root = RootPacing((1 / total) ** 0.5, **options)
    shares = StepPacing((1 / 7, 3 / 7, 1), boundaries=(total // 3, total), unit="steps")
    pacing = {
        "fixed_linear": ByValue(
            LinearPacing(1 / total, **options), 8, 2048, multiple=8
        ),
        "fixed_root": ByValue(root, 8, 2048, multiple=8),
        "fixed_discrete": ByValue(shares, 0, 700),
        "custom": ByValue(Every100(), 0, 2048),
    }[kind]
    for step in {*STEPS, total // 2, total // 3, total - 1, total}:
        # DeepSpeed's first batch has step 1.
        value = min((step + 1) // 100, 2048)
        if kind != "custom":
            value = deepspeed_value(kind, step + 1, config)
        assert num_open(pacing, values, step) == np.count_nonzero(values <= value)


class Every100:
    """A value that grows by one every 100 steps, as a share of 2048."""

    unit = "steps"

    def __call__(self, step):
        return min((step + 1) // 100, 2048) / 2048


class Percentile(LinearPacing):
    """DeepSpeed's percentile at a step: from 10 to 100, by whole percents."""

    def __call__(self, step):
        assert isinstance(step, int)
        return min(100, 10 + 90 * (step + 1) // self.duration) / 100


def test_open_sets_by_percentile_are_those_of_deepspeed():
    values = np.random.default_rng(1).permutation(700)
    pacing = Percentile(duration=1234, unit="steps")
    for step in (*range(0, 1300, 7), 10**7):
        percentile = min(100, math.floor(Fraction(90 * (step + 1), 1234) + 10))
        # Each percentile has 7 examples.
        assert num_open(pacing, values, step) == 7 * percentile


def test_large_integers_are_compared_with_values_exactly():
    values = 2**60 + np.array([0, 1, 2, 3])
    pacing = ByValue(StepPacing((0, 1), (1,), unit="steps"), 5, 2**60 + 2)
    assert [num_open(pacing, values, step) for step in (0, 1)] == [0, 3]


def test_values_beyond_the_last_one_come_last():
    plan = BucketPlan((Bucket(2, 8),), max_tokens=16)
    values, pacing = np.arange(10), ByValue(LinearPacing(1), 0, 5)
    schedule = BatchSchedule(plan, [8] * 10, order=Curriculum(values, pacing))
    rows = np.concatenate([batch.rows for batch in schedule])
    assert sorted(rows[:6]) == list(range(6)) and rows[6:].tolist() != [6, 7, 8]
    np.testing.assert_array_equal(np.sort(rows), values)
    order = Curriculum(values, pacing, replacement=True)
    repeated = BatchSchedule(plan, [8] * 10, order=order)
    assert max(repeated[step].rows.max() for step in range(60)) == 5
