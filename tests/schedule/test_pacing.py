"""Pacing functions by epochs, steps and tokens, and their fingerprints."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from schedule_cases import Cycles

from jaxbucket import BatchSchedule, Curriculum, plan_buckets
from jaxbucket.schedule import (
    ByValue,
    LinearPacing,
    RootPacing,
    StepPacing,
)
from jaxbucket.schedule.metric import Metric


class Counted:
    """A pacing function that opens one example more in every step."""

    def __init__(self, size: int, unit: str):
        self.size = size
        self.unit = unit

    def __call__(self, progress):
        assert self.unit != "steps" or isinstance(progress, int)
        return min(self.size, progress + 1) / self.size


def schedule_of(pacing, **options) -> BatchSchedule:
    lengths = np.random.default_rng(0).integers(1, 100, 600)
    plan = plan_buckets(lengths, max_tokens=800, num_buckets=3)
    order = Curriculum(np.arange(600), pacing, replacement=True)
    return BatchSchedule(plan, lengths, order=order, **options)


@pytest.mark.parametrize("group", ["same", "mixed"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: Cycles(x, 400)])
def test_steps_are_steps_of_the_schedule(group, accumulate, wrap):
    pacing = wrap(Counted(600, "steps"))
    schedule = schedule_of(pacing, accumulate=accumulate, group=group)
    assert len(schedule) < 300
    for step in (0, 1, 7, len(schedule) - 1, len(schedule), 399, 400, 10**7):
        num_open = min(step % 400 if isinstance(pacing, Cycles) else step, 599)
        rows = np.concatenate([x.rows for x in schedule.micro_batches(step)])
        assert rows.max() <= num_open


@pytest.mark.parametrize("multiple", [0.1, 0.2, 0.3, 0.7, 1e-3, 3, 8])
def test_values_are_the_decimal_multiples(multiple):
    decimal = Fraction(str(multiple))
    for count in (*range(1, 60), 1000):
        high = float(count * decimal)
        value = ByValue(
            LinearPacing(start=0, duration=count, unit="steps"), 0, high, multiple
        )
        for step in {0, 1, count // 2, count - 1, count}:
            assert value(step) == float(step * decimal)


def test_a_float32_difficulty_is_open_at_its_value():
    values = np.array([i / 10 for i in range(1, 10)], np.float32)
    for count in range(1, 10):
        pacing = ByValue(LinearPacing(start=1), 0, count / 10)
        assert Metric("difficulty", values, pacing).num_open(values, 0) == count


@pytest.mark.parametrize("size", [7, 600, 1000, 4099])
def test_a_share_by_steps_opens_exactly_as_many_examples(size):
    values = np.arange(1, size + 1)
    linear = LinearPacing(start=0, duration=size, unit="steps")
    for pacing in (Counted(size, "steps"), linear):
        metric = Metric("difficulty", values, pacing)
        for step in range(1, size + 2):
            done = step + 1 if isinstance(pacing, Counted) else step
            assert metric.num_open(values, step) == min(done, size)


@pytest.mark.parametrize("step", [10**7 - 1, 10**7, 10**7 + 1])
def test_steps_are_exact_after_many_steps(step):
    # A float number of epochs would be off by some steps.
    schedule = schedule_of(StepPacing((0, 1), boundaries=(10**7,), unit="steps"))
    assert (schedule[step].rows.max() > 0) == (step >= 10**7)
    linear = LinearPacing(start=0, duration=2 * 10**7, unit="steps")
    share = Fraction(linear(step))
    assert abs(share - Fraction(step, 2 * 10**7)) < 1e-15


@pytest.mark.parametrize("accumulate", [1, 4])
def test_tokens_are_real_tokens_of_the_mean_step(accumulate):
    options = {"accumulate": accumulate, "group": "mixed"}
    tokens = schedule_of(LinearPacing()).lengths.sum()
    # All examples open after one and a half epochs.
    schedule = schedule_of(
        StepPacing((0, 1), boundaries=(1.5 * tokens,), unit="tokens"), **options
    )
    first = math.ceil(1.5 * len(schedule))
    for step in range(first - 3, first + 3):
        micro = schedule.micro_batches(step)
        largest = max(x.rows.max() for x in micro)
        assert (largest > 0) == (step >= first)


def test_pacings_are_compared_printed_and_sent():
    assert LinearPacing() == LinearPacing(duration=1.0) == LinearPacing(0.1, 1.0)
    assert LinearPacing(duration=10, unit="steps") != LinearPacing(duration=10)
    assert "unit='steps'" in repr(RootPacing(unit="steps"))
    pacing = StepPacing((0, 1), boundaries=[3], unit="steps")
    assert pickle.loads(pickle.dumps(pacing)) == pacing
