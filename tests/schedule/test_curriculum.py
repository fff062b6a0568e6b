"""Curricula: as easy as possible with every example once, or with replacement."""

import math
import pickle

import numpy as np
import pytest
from schedule_cases import assert_same, compositions, is_open

from jaxbucket import (
    BatchSchedule,
    Curriculum,
    plan_buckets,
)
from jaxbucket.schedule import (
    ByValue,
    LinearPacing,
    RootPacing,
    StepPacing,
)


def build_schedule(order, **options) -> BatchSchedule:
    lengths = np.random.default_rng(0).integers(1, 200, 4000)
    plan = plan_buckets(lengths, max_tokens=3000, num_buckets=5)
    return BatchSchedule(plan, lengths, order=order, **options)


@pytest.mark.parametrize("replacement", [False, True])
def test_epochs_and_seeds_have_different_batches(replacement):
    difficulty = np.random.default_rng(1).normal(size=4000)
    order = Curriculum(difficulty, LinearPacing(0.3), replacement=replacement)
    schedule = build_schedule(order)
    other = build_schedule(order, seed=1)
    seen = [compositions(x, n) for x, n in ((schedule, 0), (schedule, 1), (other, 0))]
    for i, a in enumerate(seen):
        for b in seen[:i]:
            # The hardest examples open last and may all be in the last batch.
            assert len(a & b) <= 0.05 * len(a)


@pytest.mark.parametrize("replacement", [False, True])
def test_a_new_schedule_returns_the_same_batch_for_any_step(replacement):
    order = Curriculum(np.arange(4000) % 17, replacement=replacement)
    schedule = build_schedule(order)
    steps = np.random.default_rng(0).permutation(3 * len(schedule))[:60]
    ahead = {int(step): schedule[int(step)] for step in sorted(steps)}
    again = build_schedule(order)
    sent = pickle.loads(pickle.dumps(again))
    for step in steps.tolist():
        assert_same([again[step], sent[step]], [ahead[step]] * 2)


def test_draws_with_replacement_are_easy_and_uniform():
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 100, 300)
    plan = plan_buckets(lengths, max_tokens=800, num_buckets=4)
    difficulty = rng.permutation(300)
    order = Curriculum(difficulty, lambda epochs: 0.4, replacement=True)
    schedule = BatchSchedule(plan, lengths, order=order)
    counts = np.zeros(300, int)
    num_steps = 4000
    for step in range(num_steps):
        batch = schedule[step]
        # No row is empty, because an epoch does not need to have every example once.
        assert batch.rows.min() >= 0
        assert lengths[batch.rows].max() <= batch.bucket.seq_len
        np.add.at(counts, batch.rows, 1)
    assert np.all(counts[difficulty >= 120] == 0)
    easy = counts[difficulty < 120]
    mean = easy.mean()
    assert mean > 300
    assert np.all(abs(easy - mean) < 6 * np.sqrt(mean) + 0.02 * mean)


def test_a_report_of_draws_with_replacement_is_refused():
    plan = plan_buckets([1, 2], max_tokens=4)
    schedule = BatchSchedule(plan, [1, 2], order=Curriculum([1, 2], replacement=True))
    with pytest.raises(ValueError, match=r"Count .*: `schedule.micro_batches\(step\)`"):
        schedule.report()


def test_an_opening_draws_easy_examples():
    difficulty = np.random.default_rng(3).permutation(4000)
    order = Curriculum({"a": difficulty}, {"a": LinearPacing(0.6)})
    plain = build_schedule(order)
    schedule = build_schedule(order, largest_first=True)
    batches = list(schedule)
    assert batches[0].bucket == max(plain.plan.buckets, key=lambda b: b.num_tokens)
    rows = np.concatenate([batch.rows for batch in batches])
    np.testing.assert_array_equal(np.sort(rows[rows >= 0]), np.arange(4000))
    assert compositions(schedule, 1) == compositions(plain, 1)
    for step, batch in enumerate(batches[:5]):
        assert is_open(plain, step)[batch.rows].all()
    with pytest.raises(ValueError, match="`largest_first`"):
        build_schedule(Curriculum(difficulty, replacement=True), largest_first=True)


class Lookup:
    """A pacing function that uses a schedule, for example to count examples so far."""

    def __init__(self, schedule):
        self._schedule = schedule

    def __call__(self, epochs):
        return 1 / len(self._schedule[0].rows)


def test_a_pacing_may_use_another_schedule():
    inner = build_schedule(Curriculum(np.arange(4000)))
    schedule = build_schedule(Curriculum(np.arange(4000), Lookup(inner)))
    assert schedule[0].num_examples


def test_the_fingerprint_depends_on_difficulties_and_options():
    difficulty = np.arange(4000)
    values = {"a": difficulty, "b": difficulty[::-1]}
    linear, by_steps = LinearPacing(), LinearPacing(duration=5, unit="steps")
    orders = [
        Curriculum(difficulty),
        Curriculum(difficulty[::-1]),
        Curriculum(difficulty, LinearPacing(0.2)),
        Curriculum(difficulty, LinearPacing(0.1, duration=9)),
        Curriculum(difficulty, by_steps),
        Curriculum(difficulty, ByValue(linear, 0, 5)),
        Curriculum(difficulty, ByValue(linear, 0, 5, multiple=2)),
        Curriculum(difficulty, math.sin),
        Curriculum(difficulty, math.cos),
        Curriculum(difficulty, replacement=True),
        Curriculum(values, {"a": linear, "b": linear}),
        Curriculum(values, {"a": linear, "b": by_steps}),
    ]
    names = {build_schedule(order).fingerprint for order in orders}
    assert len(names) == len(orders)
    # The identity of the objects and the order of metrics make no difference.
    swapped = {"b": values["b"].copy(), "a": values["a"]}
    same = Curriculum(swapped, {"a": LinearPacing(), "b": by_steps})
    assert str(same) == str(orders[-1])


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("difficulty", lambda: Curriculum([[1.0]])),
        ("difficulty", lambda: Curriculum(["a"])),
        (r"difficulty\[1\]", lambda: Curriculum([1.0, np.nan])),
        (r"difficulty\['b'\]\[0\]", lambda: Curriculum({"a": [1], "b": [math.inf]})),
        ("difficulty", lambda: Curriculum({})),
        ("difficulty", lambda: build_schedule(Curriculum([1, 2, 3]))),
        ("pacing", lambda: Curriculum({"a": [1], "b": [2]}, {"a": LinearPacing()})),
        ("pacing", lambda: Curriculum([1], {"a": LinearPacing()})),
        ("pacing", lambda: Curriculum([1], 0.5)),
        ("pacing", lambda: Curriculum([3, 4], ByValue(LinearPacing(), 0, 2))),
        ("pacing", lambda: Curriculum([3, 4], ByValue(LinearPacing(), 0, 7, 8))),
        ("high", lambda: ByValue(LinearPacing(), 5, 3)),
        ("high", lambda: ByValue(LinearPacing(), 0, math.inf)),
        ("multiple", lambda: ByValue(LinearPacing(), 0, 1, 0)),
        ("start", lambda: LinearPacing(start=1.5)),
        ("start", lambda: RootPacing(start=-1)),
        ("degree", lambda: RootPacing(degree=0)),
        ("duration", lambda: LinearPacing(duration=0)),
        ("duration", lambda: RootPacing(duration=math.inf)),
        ("unit", lambda: LinearPacing(unit="batches")),
        ("unit", lambda: StepPacing((0, 1), (1,), unit="batches")),
        ("shares", lambda: StepPacing((0.5, 2), (1,))),
        ("boundaries", lambda: StepPacing((0.5,), (1,))),
        ("boundaries", lambda: StepPacing((0, 0.5, 1), (2, 1))),
        ("boundaries", lambda: StepPacing((0.5, 1), (math.nan,))),
    ],
)
def test_bad_arguments_are_refused(argument, make):
    with pytest.raises(ValueError, match=f"`{argument}"):
        make()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), None])
@pytest.mark.parametrize("replacement", [False, True])
def test_an_invalid_share_is_refused(share, replacement):
    order = Curriculum([1, 2], lambda epochs: share, replacement=replacement)
    schedule = BatchSchedule(plan_buckets([3, 4], max_tokens=8), [3, 4], order=order)
    with pytest.raises(ValueError, match=r"`pacing\(0.0\)="):
        schedule[0]
