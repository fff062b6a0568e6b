"""Budgets of every kind, limits of rows, and given shapes."""

import re

import numpy as np
import pytest

from jaxbucket import Bucket, BucketPlan, StepTime, plan_buckets, report
from jaxbucket.histogram import cumulative

LENGTHS = np.random.default_rng(0).integers(1, 500, 1000)


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate", "split"])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_histogram_counts_every_example_and_token(seed, far, overlong, monkeypatch):
    # By a table of all lengths, and by sorting them.
    monkeypatch.setattr("jaxbucket.histogram._DENSE", 0 if far else 1 << 24)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, 300).astype(rng.choice([np.int32, np.int64]))
    multiple = int(rng.choice([1, 4]))
    last = 100 if overlong == "error" else int(rng.choice([8, 40, 100]))
    rows = []
    for length in lengths.tolist():
        if overlong == "split":
            rows += [min(last, length - at) for at in range(0, length, last)]
        elif length <= last or overlong == "truncate":
            rows.append(min(length, last))
    ends, examples, tokens = cumulative(lengths, last, multiple, overlong)
    assert np.all(ends % multiple == 0) and np.all(np.diff(ends) > 0)
    assert ends[-1] == last
    for end, count, total in zip(ends, examples, tokens, strict=True):
        assert count == sum(row <= end for row in rows)
        assert total == sum(row for row in rows if row <= end)


def test_a_budget_may_be_a_function_of_the_length():
    def budget(seq_len):
        return 8192 if seq_len <= 128 else 4096

    plan = plan_buckets(LENGTHS, max_tokens=budget, num_buckets=6, seq_len_multiple=64)
    for bucket in plan.buckets:
        assert bucket.batch_size == budget(bucket.seq_len) // bucket.seq_len
    assert plan.max_tokens == max(budget(b.seq_len) for b in plan.buckets)


def test_a_length_that_no_row_fits_is_no_boundary():
    # What is at most 300 long has no batch of its own.
    def budget(seq_len):
        return 8 * 512 if seq_len > 300 else 1

    plan = plan_buckets(LENGTHS, max_tokens=budget, num_buckets=4)
    assert plan.boundaries[0] > 300
    assert report(plan, LENGTHS).examples == 1000


def test_a_budget_may_be_one_for_each_boundary():
    plan = plan_buckets(LENGTHS, max_tokens=[1000, 4096], boundaries=[100, 512])
    assert plan.buckets == (Bucket(10, 100), Bucket(8, 512))
    assert plan.max_tokens == 4096


def test_batches_have_no_fewer_and_no_more_rows_than_is_said():
    options = {"num_buckets": 6, "batch_size_multiple": 4}
    free = plan_buckets(LENGTHS, max_tokens=8192, **options)
    held = plan_buckets(LENGTHS, max_tokens=8192, max_batch_size=30, **options)
    assert free.batch_sizes.max() > 30 and held.batch_sizes.max() == 28
    many = plan_buckets(
        LENGTHS, max_tokens=8192, min_batch_size=16, max_batch_size=30, **options
    )
    assert many.batch_sizes.min() >= 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": []}, "`max_tokens` has 0 budgets"),
        ({"max_tokens": [4096, 0]}, "`max_tokens=0` must be a positive integer"),
        ({"max_tokens": [4096] * 3}, "`max_tokens` has 3 budgets, one for each bucket"),
        ({"max_tokens": lambda t: -t}, "`max_tokens(500)=-500` must be a positive"),
        ({"max_tokens": lambda t: t / 2}, "`max_tokens(500)=250.0` is not an integer"),
        ({"min_batch_size": 0}, "`min_batch_size=0` must be a positive"),
        ({"max_batch_size": 2.5}, "`max_batch_size=2.5` is not an integer"),
        (
            {"min_batch_size": 9},
            "`max_tokens=4096` holds 8 rows of `seq_len=500`, fewer than "
            "`min_batch_size=9`. Raise `max_tokens` to 4500",
        ),
        (
            {"min_batch_size": 5, "batch_size_multiple": 8, "max_tokens": 2048},
            "`max_tokens=2048` holds 4 rows of `seq_len=500`, fewer than "
            "`batch_size_multiple=8`. Raise `max_tokens` to 4000",
        ),
        (
            {"batch_size_multiple": 4, "max_batch_size": 3},
            "`max_batch_size=3` is less than `batch_size_multiple=4`: no B fits. Raise",
        ),
        (
            {"batch_size_multiple": 4, "max_batch_size": 7, "min_batch_size": 5},
            "leave B no room above `min_batch_size=5`. Lower that to 4.",
        ),
        ({"cost_fn": 3}, "`cost_fn=3` is no function of (batch_size, seq_len)."),
        ({"cost_fn": lambda b, t: 0}, "`cost_fn("),
        ({"cost_fn": lambda b, t: None}, "=None` must be a positive, finite number"),
        ({"cost_fn": lambda b, t: np.inf}, "=inf` must be a positive, finite number"),
        (
            {"cost_fn": lambda b, t: {}["x"]},
            "raised KeyError: 'x'. Mend the function.",
        ),
        ({"cost_fn": lambda b: 1.0}, "raised TypeError: "),
        ({"max_tokens": lambda t: 1 // 0}, "`max_tokens(500)` raised ZeroDivisionErr"),
        ({"cost_fn": lambda b, t: 1e-310}, "a cost must be between 1e-100 and 1e100."),
        ({"cost_fn": lambda b, t: 1e300}, "a cost must be between 1e-100 and 1e100."),
        ({"num_buckets": "many"}, "`num_buckets='many'` is not an integer"),
    ],
)
def test_limits_that_are_none_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_buckets(np.append(LENGTHS, 500), **{"max_tokens": 4096, **options})


def test_a_multiple_beyond_the_longest_is_the_only_bucket():
    plan = plan_buckets([3, 5, 9], max_tokens=1024, seq_len_multiple=128)
    assert plan.buckets == (Bucket(8, 128),)


def test_fewer_lengths_than_buckets_pad_nothing():
    lengths = [3, 3, 3, 5, 5, 9]
    plan = plan_buckets(lengths, max_tokens=9, num_buckets=8)
    assert plan.boundaries.tolist() == [3, 5, 9]
    assert report(plan, lengths).padding == 0


# Given shapes


def test_given_shapes_are_taken_in_any_order():
    plan = BucketPlan.from_shapes([(16, 256), (32, 128), (8, 512)], overlong="drop")
    assert plan.buckets == (Bucket(32, 128), Bucket(16, 256), Bucket(8, 512))
    assert (plan.max_tokens, plan.overlong) == (4096, "drop")
    wide = BucketPlan.from_shapes([[4, 8]], max_tokens=100, seq_len_multiple=4)
    assert (wide.max_tokens, wide.seq_len_multiple) == (100, 4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "`buckets` is empty"),
        ([(1, 2, 3)], "`shapes` holds (1, 2, 3): give (B, T) for each."),
        ([(4, 8), (2, 8)], "strictly increasing order"),
        ([(0, 8)], "`batch_size=0` must be a positive integer"),
        ([(1, 8.5)], "`seq_len=8.5` is not an integer"),
        ([7], "`shapes` holds 7: give (B, T) for each."),
    ],
)
def test_given_shapes_that_are_none_are_refused(shapes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BucketPlan.from_shapes(shapes)


# Plans that know what a step costs


def test_a_plan_keeps_what_its_steps_cost():
    cost = StepTime(0.1, 1e-4, 1e-6)
    plan = plan_buckets(LENGTHS, max_tokens=4096, num_buckets=3, cost_fn=cost)
    assert plan.cost_unit == "s"
    assert plan.costs.tolist() == [cost(b.batch_size, b.seq_len) for b in plan.buckets]
    read = BucketPlan.from_json(plan.to_json())
    assert read == plan and read.fingerprint == plan.fingerprint
    epoch = report(plan, LENGTHS)
    assert epoch.epoch_cost == pytest.approx(
        sum(b.batches * c for b, c in zip(epoch.buckets, plan.costs, strict=True))
    )
    assert sum(b.cost_share for b in epoch.buckets) == pytest.approx(1)
    assert f"Predicted epoch: {epoch.epoch_cost:,.1f} s." in epoch.summary


def test_a_plan_without_costs_counts_tokens():
    plan = plan_buckets(LENGTHS, max_tokens=4096, num_buckets=3)
    assert plan.costs.tolist() == [b.num_tokens for b in plan.buckets]
    epoch = report(plan, LENGTHS)
    assert (epoch.epoch_cost, epoch.cost_unit) == (epoch.padded_tokens, "tokens")
    assert "Predicted" not in epoch.summary


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ((1.0,), "`step_costs=(1.0,)` must be 2 positive numbers"),
        (np.array(3.0), "must be 2 positive numbers, one for each bucket"),
        (3.0, "`step_costs=3.0` must be 2 positive numbers"),
        ((1.0, 0.0), "`step_costs[1]=0.0` must be a positive, finite number"),
        ((1.0, np.nan), "`step_costs[1]=nan` must be"),
        ((-1.0, 1.0), "`step_costs[0]=-1.0` must be"),
        (("1", 1.0), "`step_costs[0]='1'` must be"),
        ((True, 1.0), "`step_costs[0]=True` must be"),
        ((1e-200, 1.0), "`step_costs[0]=1e-200`: a cost must be between"),
    ],
)
def test_costs_that_are_none_are_refused(costs, message):
    buckets = (Bucket(4, 8), Bucket(2, 16))
    with pytest.raises(ValueError, match=re.escape(message)):
        BucketPlan(buckets, max_tokens=32, step_costs=costs)


def test_the_fingerprint_names_what_steps_cost():
    buckets = (Bucket(4, 8), Bucket(2, 16))
    plans = [
        BucketPlan(buckets, max_tokens=32, step_costs=costs, cost_unit=unit)
        for costs, unit in (
            *((None, "tokens"), ((1.0, 2.0), "s")),
            *(((1.0, 2.0), "FLOP"), ((1.0, 2.5), "s")),
        )
    ]
    assert len({plan.fingerprint for plan in plans}) == 4
    with pytest.raises(ValueError, match="`cost_unit='s'` is of no `step_costs`"):
        BucketPlan(buckets, max_tokens=32, cost_unit="s")
