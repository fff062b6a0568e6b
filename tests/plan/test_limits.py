"""Budgets of every kind, limits on the batch size, and given shapes."""

import re
from typing import Any

import numpy as np
import pytest

from jaxbucket import (
    BatchSchedule,
    Bucket,
    BucketPlan,
    Limits,
    plan_buckets,
    report,
)
from jaxbucket.plan import StepTime, compare_plans, plan_curve
from jaxbucket.plan.candidates import Candidates
from jaxbucket.plan.planner import plan_within
from jaxbucket.plan.reports.epoch import Report

LENGTHS = np.random.default_rng(0).integers(1, 500, 1000)


def plan_of(lengths, num_buckets=8, boundaries="optimal", **limits):
    return plan_within(
        lengths,
        Limits(**limits),
        num_buckets=num_buckets,
        boundaries=boundaries,
    )


@pytest.mark.parametrize(
    "overlong", ["error", "drop", "truncate", "truncate_left", "split"]
)
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_histogram_counts_every_example_and_token(seed, far, overlong, monkeypatch):
    # Lengths are counted in a table, or by sorting if they are too long for a table.
    monkeypatch.setattr("jaxbucket.plan.candidates._MAX_TABLE", 0 if far else 1 << 24)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, 300).astype(rng.choice([np.int32, np.int64]))
    multiple = int(rng.choice([1, 4]))
    last = 100 if overlong == "error" else int(rng.choice([8, 40, 100]))
    rows = []
    for length in lengths.tolist():
        if overlong == "split":
            rows += [min(last, length - at) for at in range(0, length, last)]
        elif length <= last or overlong.startswith("truncate"):
            rows.append(min(length, last))
    limits = Limits(
        max_tokens=2**20, seq_len_multiple=multiple, max_seq_len=last, overlong=overlong
    )
    found = Candidates.of(lengths, limits)
    ends, examples, tokens = found.seq_lens, found.examples, found.tokens
    assert np.all(ends % multiple == 0) and np.all(np.diff(ends) > 0)
    assert ends[-1] == last
    for end, count, total in zip(ends, examples, tokens, strict=True):
        assert count == sum(row <= end for row in rows)
        assert total == sum(row for row in rows if row <= end)


def test_each_boundary_may_have_its_own_budget():
    plan = plan_buckets(LENGTHS, max_tokens=[1000, 4096], boundaries=[100, 512])
    assert plan.buckets == (Bucket(10, 100), Bucket(8, 512))
    assert plan.max_tokens == 4096


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("max_tokens", {"max_tokens": []}),
        ("max_tokens", {"max_tokens": [4096, 0]}),
        ("max_tokens", {"max_tokens": [4096] * 3}),
        ("max_tokens", {"max_tokens": lambda t: -t}),
        ("max_tokens", {"max_tokens": lambda t: t / 2}),
        ("min_batch_size", {"min_batch_size": 0}),
        ("max_batch_size", {"max_batch_size": 2.5}),
        ("max_tokens", {"min_batch_size": 9}),
        ("max_tokens", {"batch_size_multiple": 8, "max_tokens": 2048}),
        ("max_batch_size", {"batch_size_multiple": 4, "max_batch_size": 3}),
        (
            "max_batch_size",
            {"batch_size_multiple": 4, "max_batch_size": 7, "min_batch_size": 5},
        ),
        ("cost_fn", {"cost_fn": lambda b, t: 0}),
        ("cost_fn", {"cost_fn": lambda b, t: 1e300}),
        ("num_buckets", {"num_buckets": "many"}),
    ],
)
def test_invalid_limits_are_refused(name, options):
    with pytest.raises(ValueError, match=f"`{name}"):
        plan_of(np.append(LENGTHS, 500), **{"max_tokens": 4096, **options})


def test_a_largest_batch_size_below_the_smallest_is_refused_at_once():
    for options in ({"min_batch_size": 5}, {"batch_size_multiple": 4}):
        with pytest.raises(ValueError, match="`max_batch_size"):
            Limits(max_tokens=99, max_batch_size=3, **options)


# Given shapes


def test_given_shapes_may_have_any_order():
    plan = BucketPlan.from_shapes([(16, 256), (32, 128), (8, 512)], overlong="drop")
    assert plan.buckets == (Bucket(32, 128), Bucket(16, 256), Bucket(8, 512))
    assert (plan.max_tokens, plan.overlong) == (4096, "drop")
    wide = BucketPlan.from_shapes([[4, 8]], max_tokens=100, seq_len_multiple=4)
    assert (wide.max_tokens, wide.seq_len_multiple) == (100, 4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "`buckets"),
        ([(4, 8), (2, 8)], "`buckets"),
        ([(0, 8)], "`batch_size=0`"),
        ([(1, 8.5)], "`seq_len=8.5`"),
    ],
)
def test_invalid_shapes_are_refused(shapes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BucketPlan.from_shapes(shapes)


# Plans with step costs


def test_a_plan_stores_its_step_costs():
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
    "costs",
    [
        *((1.0,), np.array(3.0), 3.0, (1.0, 0.0), (1.0, np.nan), (-1.0, 1.0)),
        *(("1", 1.0), (True, 1.0), (1e-200, 1.0)),
    ],
)
def test_invalid_step_costs_are_refused(costs):
    buckets = (Bucket(4, 8), Bucket(2, 16))
    with pytest.raises(ValueError, match="`step_costs"):
        BucketPlan(buckets, max_tokens=32, step_costs=costs)


# Numbers at the limits of integer dtypes

EDGES = [0, 1, 2, 2**16, 2**26 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**53 - 1, 2**53 + 1]
EDGES += [2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**64 - 1, 2**64, -1]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64]


class Edges:
    """Draws Python and numpy integers, many of which are near a limit of a dtype."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def one(self, ordinary: float = 0.6) -> Any:
        value = EDGES[self.rng.integers(len(EDGES))]
        if self.rng.random() < ordinary:
            value = int(self.rng.integers(1, 100))
        dtype = INTEGERS[self.rng.integers(len(INTEGERS))]
        info = np.iinfo(dtype)
        if self.rng.random() < 0.4 and info.min <= value <= info.max:
            return dtype(value)
        return value

    def some(self, *names: str) -> dict[str, Any]:
        return {name: self.one() for name in names if self.rng.random() < 0.5}

    def lengths(self) -> Any:
        size = int(self.rng.integers(1, 20))
        if self.rng.random() < 0.15:
            return [self.one() for _ in range(size)]
        values = [[1, 5, 60], [1, 5, 2**26, 2**30, 2**31 - 1]][self.rng.integers(2)]
        return self.rng.choice(values, size)

    def limits(self) -> dict[str, Any]:
        names = "batch_size_multiple", "seq_len_multiple", "max_seq_len"
        names += "min_batch_size", "max_batch_size", "accumulate"
        return {"max_tokens": self.one(0.3), **self.some(*names)}


def check_epoch(plan: BucketPlan, epoch: Report, accumulate: int = 1) -> None:
    """Checks that the numbers of a report do not overflow."""
    padded = sum(b.batches * b.batch_size * b.seq_len for b in epoch.buckets)
    assert padded == epoch.padded_tokens
    assert epoch.epoch_cost == pytest.approx(padded, rel=1e-12)
    assert sum(b.batches for b in epoch.buckets) == epoch.steps_per_epoch * accumulate
    for b in epoch.buckets:
        assert min(b.examples, b.carried, b.batches, b.empty_rows, b.left_over) >= 0


def try_plan(edges: Edges) -> None:
    lengths, options = edges.lengths(), edges.limits()
    plan = plan_of(lengths, **options, **edges.some("num_buckets"))
    for bucket in plan.buckets:
        rows = int(options["max_tokens"]) // bucket.seq_len
        rows = min(rows, int(options.get("max_batch_size", rows)))
        multiple = int(options.get("batch_size_multiple", 1))
        assert 0 < bucket.batch_size <= rows // multiple * multiple
        assert bucket.batch_size % multiple == 0
        assert bucket.seq_len % int(options.get("seq_len_multiple", 1)) == 0
    check_epoch(plan, report(plan, lengths))
    assert plan.kept_lengths(lengths).sum(dtype=np.int64) == sum(map(int, lengths))
    try_schedule(edges, plan, lengths)


def try_shapes(edges: Edges) -> None:
    shapes = [(edges.one(0.5), edges.one(0.5)) for _ in range(2)]
    plan = BucketPlan.from_shapes(shapes, **edges.some("max_tokens"))
    assert BucketPlan.from_json(plan.to_json()) == plan
    try_schedule(edges, plan, edges.lengths())


def try_schedule(edges: Edges, plan: BucketPlan, lengths: Any) -> None:
    accumulate, group = edges.one(), ["same", "mixed"][edges.rng.integers(2)]
    schedule = BatchSchedule(
        plan,
        lengths,
        accumulate=accumulate,
        group=group,
        largest_first=edges.rng.random() < 0.2,
        **edges.some("seed"),
    )
    assert len(schedule) > 0
    check_epoch(plan, schedule.report(), int(accumulate))


def try_curve(edges: Edges) -> None:
    limits = Limits(**edges.limits(), cost_fn=lambda rows, length: float(rows) * length)
    options = edges.some("max_buckets", "num_epochs")
    curve = plan_curve(edges.lengths(), limits, compile_seconds=1.0, **options)
    assert all(0 <= point.padding <= 1 for point in curve.points)


def try_comparison(edges: Edges) -> None:
    limits = Limits(**edges.limits())
    comparison = compare_plans(edges.lengths(), limits, **edges.some("num_buckets"))
    for compared in comparison.plans:
        check_epoch(compared.plan, compared.report, int(limits.accumulate))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("attempt", [try_plan, try_shapes, try_curve, try_comparison])
def test_extreme_integers_are_handled_or_refused_by_name(attempt):
    edges, accepted = Edges(0), 0
    for _ in range(120):
        try:
            attempt(edges)
            accepted += 1
        except ValueError as error:
            # The message names an argument, and is not an internal error.
            assert "`" in str(error) or "Bucket [" in str(error), error
            assert not re.search("raised (Zero|Overflow)", str(error)), error
    assert accepted


def test_the_tokens_of_a_step_fit_in_64_bits():
    limits = {"max_tokens": 2**61, "accumulate": 2**16}
    plan = plan_buckets([1, 2, 3, 4], sample=True, **limits)
    assert max(bucket.num_tokens for bucket in plan.buckets) < 2**40
    schedule = BatchSchedule(plan, [1, 2, 3, 4], accumulate=2**16)
    check_epoch(plan, schedule.report(), 2**16)
    with pytest.raises(ValueError, match=r"`batch_size=\d+` rows of `seq_len=2`"):
        Bucket(2**40, 2)


def test_epochs_whose_tokens_exceed_64_bits_are_counted():
    plan = plan_buckets([1], max_tokens=2**39, seq_len_multiple=2**39)
    epoch = report(plan, np.ones(2**25, int))
    assert epoch.padded_tokens == epoch.epoch_cost == 2**64
    assert epoch.buckets[0].token_share == 1


@pytest.mark.parametrize("dtype", ["m8[s]", "M8[D]"])
def test_lengths_with_a_time_dtype_are_refused(dtype):
    with pytest.raises(ValueError, match="`lengths`"):
        plan_buckets(np.array([3, 4], dtype), max_tokens=8)
