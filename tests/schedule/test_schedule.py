"""Batch schedules: epochs, orders, openings, micro-batches and fingerprints."""

import numpy as np
import pytest
from schedule_cases import (
    assert_same,
    assert_same_steps,
    batches_of,
    compositions,
    real_rows,
)

from jaxbucket import (
    BatchSchedule,
    Bucket,
    BucketPlan,
    Curriculum,
    plan_buckets,
)
from jaxbucket.packing import pack
from jaxbucket.schedule import BatchIndices
from jaxbucket.schedule.orders import Fixed, Order

EPOCHS = (0, 1, 10**6)


ORDERS = ["shuffled", "spread", "source", "ascending", "descending"]


def kept_examples(plan: BucketPlan, lengths: np.ndarray) -> np.ndarray:
    """Returns the examples that an epoch must contain."""
    if plan.overlong == "drop":
        return np.flatnonzero(lengths <= plan.max_seq_len)
    return np.arange(len(lengths))


def check_epoch(
    plan: BucketPlan, lengths: np.ndarray, batches: list[BatchIndices]
) -> None:
    """Checks the shapes of all batches, and that each example is in exactly one row."""
    for batch in batches:
        bucket = batch.bucket
        assert bucket in plan.buckets
        assert bucket.batch_size * bucket.seq_len <= plan.max_tokens
        assert bucket.batch_size % plan.batch_size_multiple == 0
        assert bucket.seq_len % plan.seq_len_multiple == 0
        assert (batch.rows.dtype, batch.rows.shape) == (np.int64, (bucket.batch_size,))
        longest = np.minimum(lengths[real_rows(batch)], plan.max_seq_len).max(initial=0)
        # Not all rows are empty, and every example fits its row.
        assert 0 < longest <= bucket.seq_len
    rows = np.concatenate([real_rows(batch) for batch in batches])
    np.testing.assert_array_equal(np.sort(rows), kept_examples(plan, lengths))


@pytest.mark.parametrize("remainder", ["cheapest", "promote", "pad"])
@pytest.mark.parametrize("order", ORDERS)
def test_each_example_is_in_one_row_per_epoch(problem, order, remainder):
    schedule = BatchSchedule(*problem, seed=3, order=order, remainder=remainder)
    for number in EPOCHS:
        check_epoch(*problem, batches_of(schedule, number))


@pytest.mark.parametrize("order", ORDERS)
def test_dropped_remainders_leave_full_batches_only(problem, order):
    plan, lengths = problem
    try:
        schedule = BatchSchedule(plan, lengths, order=order, remainder="drop")
    except ValueError as error:
        assert "`remainder='drop'` leave out every example" in str(error)
        counts = np.bincount(plan.assign(lengths) + 1, minlength=len(plan) + 1)[1:]
        assert np.all(counts < plan.batch_sizes)
        return
    for number in EPOCHS:
        batches = batches_of(schedule, number)
        rows = np.concatenate([batch.rows for batch in batches])
        assert rows.min() >= 0 and len(np.unique(rows)) == len(rows)
        assert (
            len(rows) == len(kept_examples(plan, lengths)) - schedule.flow.dropped.sum()
        )


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_batches_are_sorted_by_length(problem, order):
    plan, lengths = problem
    schedule = BatchSchedule(plan, lengths, order=order, remainder="pad")
    batches = batches_of(schedule, 3)
    sign = 1 if order == "ascending" else -1
    longest = [lengths[real_rows(batch)].max() for batch in batches]
    assert np.all(np.diff(longest) * sign >= 0)
    for bucket in plan.buckets:
        in_bucket = [lengths[real_rows(b)] for b in batches if b.bucket == bucket]
        if in_bucket:
            assert np.all(np.diff(np.concatenate(in_bucket)) * sign >= 0)


# Openings


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group", [{}, {"accumulate": 3, "group": "mixed"}])
def test_an_opening_only_reorders_the_first_epoch(order, group):
    options = {"seed": 4, "order": order, **group}
    plain = BatchSchedule(*random_problem(), **options)
    schedule = BatchSchedule(*random_problem(), largest_first=True, **options)
    assert compositions(schedule, 0) == compositions(plain, 0)
    assert_same_steps(schedule, plain, range(len(plain), 2 * len(plain)))
    assert schedule.fingerprint != plain.fingerprint


def test_largest_first_starts_with_the_largest_bucket():
    plan = BucketPlan((Bucket(4, 8), Bucket(3, 10), Bucket(2, 16)), max_tokens=32)
    for lengths, first in [
        ([8] * 9 + [10] * 4 + [16] * 5, Bucket(2, 16)),
        # Only buckets with a batch count.
        ([8] * 9 + [10] * 4, Bucket(4, 8)),
    ]:
        schedule = BatchSchedule(plan, lengths, largest_first=True, seed=7)
        assert schedule[0].bucket == first
        check_epoch(plan, np.array(lengths), batches_of(schedule, 0))


# Micro-batches


@pytest.mark.parametrize(
    ("accumulate", "remainder"),
    [(2, "cheapest"), (5, "promote"), (5, "pad"), (2, "drop")],
)
@pytest.mark.parametrize("order", ORDERS)
def test_micro_batches_of_a_step_have_the_same_bucket(order, accumulate, remainder):
    plan, lengths = random_problem()
    options = {"order": order, "remainder": remainder, "seed": 2}
    schedule = BatchSchedule(plan, lengths, accumulate=accumulate, **options)
    # The micro-batches are slices of batches that are `accumulate` times as high.
    high = BucketPlan(
        tuple(Bucket(accumulate * b.batch_size, b.seq_len) for b in plan.buckets),
        max_tokens=accumulate * plan.max_tokens,
    )
    whole = BatchSchedule(high, lengths, **options)
    assert len(schedule) == len(whole)
    for step in (*range(len(whole)), 10**6):
        micro = schedule[step]
        assert len(micro) == accumulate
        assert {batch.bucket.seq_len for batch in micro} == {whole[step].bucket.seq_len}
        assert all(batch.bucket in plan.buckets for batch in micro)
        rows = np.concatenate([batch.rows for batch in micro])
        np.testing.assert_array_equal(rows, whole[step].rows)


@pytest.mark.parametrize("accumulate", [2, 5])
@pytest.mark.parametrize("order", [x for x in ORDERS if x != "spread"])
def test_mixed_micro_batches_are_consecutive_batches(problem, order, accumulate):
    options = {"order": order, "seed": 2, "largest_first": True}
    single = BatchSchedule(*problem, **options)
    schedule = BatchSchedule(*problem, accumulate=accumulate, group="mixed", **options)
    assert len(schedule) == -(-len(single) // accumulate)
    for number in EPOCHS:
        micro = batches_of(schedule, number)
        assert len(micro) == accumulate * len(schedule)
        assert_same(micro[: len(single)], batches_of(single, number))
        plan = problem.plan
        costs = dict(zip(plan.buckets, plan.costs.tolist(), strict=True))
        for filler in micro[len(single) :]:
            assert not filler.num_examples
            assert costs[filler.bucket] == min(costs.values())


@pytest.mark.parametrize("group", [(1, "same"), (3, "same"), (3, "mixed")])
@pytest.mark.parametrize("remainder", ["cheapest", "drop"])
@pytest.mark.parametrize("order", ["spread", "source", "ascending", "descending"])
def test_the_report_matches_the_batches_of_an_epoch(order, remainder, group):
    rng = np.random.default_rng(group[0])
    lengths = rng.integers(1, 60, 400)
    limits = {"max_seq_len": 50, "overlong": "truncate"}
    plan = plan_buckets(lengths, max_tokens=700, num_buckets=4, **limits)
    options = {"order": order, "remainder": remainder}
    accumulate, name = group
    schedule = BatchSchedule(
        plan, lengths, accumulate=accumulate, group=name, **options
    )
    report, micro = schedule.report(), batches_of(schedule, 0)
    assert report.steps_per_epoch == len(schedule)
    assert report.examples == sum(batch.num_examples for batch in micro)
    padded_tokens = sum(x.bucket.num_tokens for x in micro)
    real_tokens = sum(
        int(np.minimum(lengths[real_rows(x)], x.bucket.seq_len).sum()) for x in micro
    )
    assert report.padded_tokens == padded_tokens
    # The epochs of "spread" drop different examples.
    if (order, remainder) != ("spread", "drop"):
        assert report.real_tokens == real_tokens
        assert report.padding == pytest.approx(1 - real_tokens / padded_tokens)
    parts = report.padding_in_rows + report.padding_in_empty_rows
    assert parts == pytest.approx(report.padding)
    for entry in report.buckets:
        bucket = Bucket(entry.batch_size, entry.seq_len)
        batches = [batch for batch in micro if batch.bucket == bucket]
        assert entry.batches == len(batches)
        rows = len(batches) * bucket.batch_size
        assert entry.empty_rows == rows - sum(b.num_examples for b in batches)


def random_problem() -> tuple[BucketPlan, np.ndarray]:
    lengths = np.random.default_rng(0).integers(1, 200, 4000)
    return plan_buckets(lengths, max_tokens=3000, num_buckets=5), lengths


def test_dropped_examples_are_redrawn_and_counted():
    plan, lengths = random_problem()
    schedule = BatchSchedule(plan, lengths, remainder="drop")
    number = int(schedule.flow.dropped.sum())
    assert number == schedule.report().left_over_examples > 0
    left_out = []
    for index in (0, 1):
        rows = np.concatenate([real_rows(x) for x in batches_of(schedule, index)])
        assert len(np.unique(rows)) == len(rows) == len(lengths) - number
        left_out.append({*range(len(lengths))} - {*rows.tolist()})
    assert left_out[0] != left_out[1]


def test_examples_that_move_up_are_redrawn():
    # Of 7 short examples in batches of 4, three move up, different ones in each epoch.
    plan = BucketPlan((Bucket(4, 8), Bucket(2, 10)), max_tokens=32)
    schedule = BatchSchedule(plan, [8] * 7 + [10] * 5)
    assert schedule.flow.carried.tolist() == [0, 3]
    seen = set()
    for number in range(30):
        long = [b for b in batches_of(schedule, number) if b.bucket == Bucket(2, 10)]
        seen |= {int(row) for b in long for row in b.rows if 0 <= row < 7}
    assert seen == set(range(7))


def test_source_order_fills_each_bucket_in_source_order(problem):
    plan, lengths = problem
    batches = list(BatchSchedule(plan, lengths, order="source"))
    for bucket in plan.buckets:
        rows = [real_rows(batch) for batch in batches if batch.bucket == bucket]
        if rows:
            examples = np.concatenate(rows)
            is_own = plan.assign(lengths)[examples] == plan.buckets.index(bucket)
            assert np.all(np.diff(examples[is_own]) > 0)
    ends = [real_rows(batch).max() for batch in batches]
    assert ends == sorted(ends)


def test_the_fingerprint_depends_on_plan_lengths_and_options():
    plan, lengths = random_problem()
    other = lengths.copy()
    other[[0, 1]] = other[[1, 0]] + [0, 1]
    wider = BucketPlan(plan.buckets, plan.max_tokens + 1)
    schedules = [
        BatchSchedule(plan, lengths),
        BatchSchedule(plan, lengths, seed=1),
        *(
            BatchSchedule(plan, lengths, order=order)
            for order in ORDERS
            if order != "spread"
        ),
        *(BatchSchedule(plan, lengths, remainder=x) for x in ("promote", "drop")),
        BatchSchedule(plan, lengths, largest_first=True),
        BatchSchedule(plan, lengths, accumulate=2),
        BatchSchedule(plan, lengths, accumulate=2, group="mixed"),
        BatchSchedule(plan, np.minimum(other, 199)),
        BatchSchedule(wider, lengths),
    ]
    assert len({s.fingerprint for s in schedules}) == len(schedules)
    assert schedules[0].fingerprint == BatchSchedule(plan, lengths).fingerprint
    assert len({s.data_fingerprint for s in schedules}) == 2


class Backwards(Order):
    """Source order with the last batch first."""

    is_redrawn = False

    def __str__(self):
        return "backwards"

    def epoch_order(self, rows, lengths, seed, opening):
        return BackwardsEpochs(
            rows, Fixed("source").epoch_order(rows, lengths, 0, None)
        )


class BackwardsEpochs:
    def __init__(self, rows, source):
        self._last = rows.num_batches - 1
        self._source = source

    def batch(self, epoch, position):
        return self._source.batch(epoch, self._last - position)


@pytest.mark.parametrize("remainder", ["cheapest", "drop"])
def test_a_schedule_accepts_a_custom_order(remainder):
    plan, lengths = random_problem()
    schedule, source = (
        BatchSchedule(plan, lengths, order=order, remainder=remainder)
        for order in (Backwards(), "source")
    )
    assert_same(batches_of(schedule, 3), batches_of(source, 3)[::-1])
    # Everything that depends on the kind of order: reports, names and packed rows.
    assert schedule.report() == source.report()
    assert schedule.config() == {**source.config(), "order": "backwards"}
    assert schedule.fingerprint != source.fingerprint
    packing = pack(lengths, plan.max_seq_len)
    packed = BatchSchedule(plan, lengths, order=Backwards(), packing=packing)
    assert_same(batches_of(packed, 1), batches_of(packed, 0))


@pytest.mark.parametrize("order", ["shuffled", "source"])
def test_an_example_can_move_up_through_thousands_of_buckets(order):
    size = 3000
    buckets = tuple(Bucket(2, t) for t in range(1, size + 1))
    plan = BucketPlan(buckets, max_tokens=2 * size)
    # Two more examples of length 1 make every bucket carry one example up to the next.
    lengths = np.append(np.arange(1, size + 1), [1, 1])
    schedule = BatchSchedule(plan, lengths, order=order)
    rows = np.concatenate([batch.rows for batch in schedule])
    assert sorted(rows[rows >= 0]) == list(range(size + 2))


def test_epochs_and_seeds_share_no_batches():
    schedule, other = (BatchSchedule(*random_problem(), seed=seed) for seed in (0, 1))
    seen = [compositions(schedule, number) for number in EPOCHS]
    seen.append(compositions(other, 0))
    assert sum(map(len, seen)) == len(set().union(*seen))


DROPPING = BucketPlan((Bucket(1, 8),), max_tokens=8, overlong="drop")
REPLACEMENT = Curriculum([1, 2], replacement=True)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("order", {"order": "random"}),
        ("order", {"order": np.arange(2)}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 1.5}),
        ("accumulate", {"accumulate": 0}),
        ("accumulate", {"accumulate": 2**61}),
        ("group", {"group": "both"}),
        ("largest_first", {"largest_first": True, "order": REPLACEMENT}),
        ("remainder", {"remainder": "keep"}),
        ("overlong", {"lengths": [9, 10], "plan": DROPPING}),
        (r"lengths\[1\]", {"lengths": [8, 9]}),
        ("packing", {"packing": 3}),
    ],
)
def test_bad_arguments_are_refused(argument, options):
    job = {"plan": BucketPlan((Bucket(1, 8),), max_tokens=8), "lengths": [7, 8]}
    with pytest.raises(ValueError, match=f"`{argument}"):
        BatchSchedule(**job | options)


@pytest.mark.parametrize("step", [-1, 1.5, "3", slice(0, 2)])
def test_a_step_is_an_integer_from_0(step):
    with pytest.raises(IndexError if step == -1 else TypeError):
        BatchSchedule(*random_problem())[step]
