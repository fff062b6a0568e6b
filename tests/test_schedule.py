import hashlib

import numpy as np
import pytest

from jaxbucket import (
    BatchIndices,
    BatchSchedule,
    Bucket,
    BucketPlan,
    DataPosition,
    plan_buckets,
)
from jaxbucket.base import RowShard

EPOCHS = (0, 1, 10**6)


def epoch(schedule: BatchSchedule, number: int) -> list[BatchIndices]:
    first = number * len(schedule)
    return [schedule[first + position] for position in range(len(schedule))]


def real(batch: BatchIndices) -> np.ndarray:
    return batch.rows[batch.rows >= 0]


ORDERS = ["shuffled", "source", "ascending", "descending"]


def kept(plan: BucketPlan, lengths: np.ndarray) -> np.ndarray:
    """The examples that an epoch must hold."""
    if plan.overlong == "drop":
        return np.flatnonzero(lengths <= plan.max_seq_len)
    return np.arange(len(lengths))


def compositions(batches: list[BatchIndices]) -> set[frozenset[int]]:
    return {frozenset(real(batch).tolist()) for batch in batches}


def check_epoch(
    plan: BucketPlan, lengths: np.ndarray, batches: list[BatchIndices]
) -> None:
    """Invariants 1, 2 and 3 on all batches of one epoch."""
    for batch in batches:
        bucket = batch.bucket
        assert bucket in plan.buckets
        assert bucket.batch_size * bucket.seq_len <= plan.max_tokens
        assert bucket.batch_size % plan.batch_size_multiple == 0
        assert bucket.seq_len % plan.seq_len_multiple == 0
        assert (batch.rows.dtype, batch.rows.shape) == (np.int64, (bucket.batch_size,))
        longest = np.minimum(lengths[real(batch)], plan.max_seq_len).max(initial=0)
        # Not all rows are empty, and every example fits its row.
        assert 0 < longest <= bucket.seq_len
    rows = np.concatenate([real(batch) for batch in batches])
    np.testing.assert_array_equal(np.sort(rows), kept(plan, lengths))


@pytest.mark.parametrize("remainder", ["cheapest", "promote", "pad"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_example_is_in_one_row_of_every_epoch(problem, order, remainder):
    schedule = BatchSchedule(*problem, seed=3, order=order, remainder=remainder)
    for number in EPOCHS:
        check_epoch(*problem, epoch(schedule, number))


@pytest.mark.parametrize("order", ORDERS)
def test_dropped_remainders_leave_full_batches_only(problem, order):
    plan, lengths = problem
    try:
        schedule = BatchSchedule(plan, lengths, order=order, remainder="drop")
    except ValueError as error:
        assert "`remainder='drop'` leaves out every example" in str(error)
        counts = np.bincount(plan.assign(lengths) + 1, minlength=len(plan) + 1)[1:]
        assert np.all(counts < plan.batch_sizes)
        return
    for number in EPOCHS:
        batches = epoch(schedule, number)
        rows = np.concatenate([batch.rows for batch in batches])
        assert rows.min() >= 0 and len(np.unique(rows)) == len(rows)
        assert len(rows) == len(kept(plan, lengths)) - schedule.flow.dropped.sum()


def test_dropped_remainders_are_others_in_other_epochs():
    plan = BucketPlan((Bucket(4, 8),), max_tokens=32)
    schedule = BatchSchedule(plan, [8] * 7, remainder="drop")
    seen = {int(row) for step in range(30) for row in schedule[step].rows}
    assert len(schedule) == 1 and seen == set(range(7))


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_batches_come_by_length(problem, order):
    plan, lengths = problem
    schedule = BatchSchedule(plan, lengths, order=order, remainder="pad")
    batches = epoch(schedule, 3)
    sign = 1 if order == "ascending" else -1
    longest = [lengths[real(batch)].max() for batch in batches]
    assert np.all(np.diff(longest) * sign >= 0)
    for bucket in plan.buckets:
        own = [lengths[real(batch)] for batch in batches if batch.bucket == bucket]
        if own:
            assert np.all(np.diff(np.concatenate(own)) * sign >= 0)


# Openings


def opened(problem, order, seed):
    """An opening that the plan has, drawn at random; empty now and then."""
    plan, lengths = problem
    flow = BatchSchedule(plan, lengths).flow
    rng = np.random.default_rng(seed)
    pairs, left = [], flow.batches.copy()
    for _ in range(rng.integers(0, 5)):
        k = int(rng.integers(len(plan)))
        if left[k]:
            steps = int(rng.integers(1, left[k], endpoint=True))
            left[k] -= steps
            pairs.append((plan.buckets[k], steps))
    return pairs, BatchSchedule(plan, lengths, seed=4, order=order, opening=pairs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_an_opening_is_a_beginning_of_the_same_epoch(problem, order, seed):
    pairs, schedule = opened(problem, order, seed)
    plain = BatchSchedule(*problem, seed=4, order=order)
    planned = [bucket for bucket, steps in pairs for _ in range(steps)]
    batches = epoch(schedule, 0)
    assert [batch.bucket for batch in batches[: len(planned)]] == planned
    check_epoch(*problem, batches)
    # The very batches of that epoch, and of others in their own order.
    assert compositions(batches) == compositions(epoch(plain, 0))
    for a, b in zip(epoch(schedule, 1), epoch(plain, 1), strict=True):
        np.testing.assert_array_equal(a.rows, b.rows)
    assert schedule.opening_pairs == [[b.batch_size, b.seq_len, n] for b, n in pairs]
    assert (schedule.fingerprint == plain.fingerprint) == (not pairs)


def test_what_follows_an_opening_is_shuffled():
    plan, lengths = many()
    opening = [(plan.buckets[3], 5), (plan.buckets[0], 2), (plan.buckets[3], 1)]
    schedule = BatchSchedule(plan, lengths, opening=opening)
    rest = [plan.buckets.index(b.bucket) for b in epoch(schedule, 0)[8:]]
    assert abs(np.corrcoef(rest[:-1], rest[1:])[0, 1]) < 5 / np.sqrt(len(rest))


def test_the_largest_comes_first():
    plan = BucketPlan((Bucket(4, 8), Bucket(3, 10), Bucket(2, 16)), max_tokens=32)
    for lengths, first in [
        ([8] * 9 + [10] * 4 + [16] * 5, Bucket(2, 16)),
        # Of those that have a batch.
        ([8] * 9 + [10] * 4, Bucket(4, 8)),
    ]:
        schedule = BatchSchedule(plan, lengths, opening="largest_first", seed=7)
        assert schedule[0].bucket == first
        check_epoch(plan, np.array(lengths), epoch(schedule, 0))


@pytest.mark.parametrize(
    ("opening", "message"),
    [
        ("smallest", "`opening='smallest'`: choose 'largest_first', or give pairs"),
        ([(Bucket(4, 9), 1)], r"`opening` names \[4, 9\], which is no bucket of the"),
        ([(Bucket(4, 8), 3)], r"takes 3 steps of bucket \[4, 8\], which has 2 in an"),
        ([(Bucket(4, 8), 1)] * 3, r"takes 3 steps of bucket \[4, 8\], which has 2"),
        ([Bucket(4, 8)], "`opening` holds Bucket.*: make it a pair of a bucket and a"),
        ([(Bucket(4, 8), 0)], "`steps=0` must be a positive integer"),
    ],
)
def test_an_opening_that_the_epoch_has_not_is_refused(opening, message):
    plan = BucketPlan((Bucket(4, 8),), max_tokens=32)
    with pytest.raises(ValueError, match=message):
        BatchSchedule(plan, [8] * 8, opening=opening)


@pytest.mark.parametrize("order", ["shuffled", "source"])
def test_every_real_example_is_in_one_row_of_every_epoch(real_lengths, order):
    plan = plan_buckets(
        real_lengths,
        max_tokens=16 * int(real_lengths.max()),
        num_buckets=8,
        batch_size_multiple=2,
    )
    schedule = BatchSchedule(plan, real_lengths, seed=1, order=order)
    for number in EPOCHS:
        check_epoch(plan, real_lengths, epoch(schedule, number))


def test_empty_rows_stand_last_and_in_the_last_batch_of_a_bucket(problem):
    schedule = BatchSchedule(*problem)
    for bucket in problem.plan.buckets:
        own = [batch for batch in epoch(schedule, 2) if batch.bucket == bucket]
        empty = [bucket.batch_size - batch.num_examples for batch in own]
        assert np.count_nonzero(empty) <= 1
        for batch in own:
            assert np.all(batch.rows[: batch.num_examples] >= 0)


def test_any_step_is_the_same_on_a_schedule_made_anew(problem):
    first = BatchSchedule(*problem, seed=9)
    ahead = list(range(2 * len(first)))
    batches = [first[step] for step in ahead]
    for step in np.random.default_rng(0).permutation(ahead)[:50]:
        # Resumed: nothing was run before it.
        again = BatchSchedule(*problem, seed=9)[int(step)]
        assert again.bucket == batches[step].bucket
        np.testing.assert_array_equal(again.rows, batches[step].rows)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_shards_divide_a_batch_whatever_parts_they_hold(shards):
    lengths = np.random.default_rng(shards).integers(1, 100, 500)
    plan = plan_buckets(lengths, max_tokens=3200, batch_size_multiple=8)
    parts = np.random.default_rng(1).permutation(8).reshape(shards, -1)
    for batch in BatchSchedule(plan, lengths):
        size = batch.bucket.batch_size
        rows = [RowShard(sorted(own), 8).rows(size) for own in parts]
        np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(size))


def many() -> tuple[BucketPlan, np.ndarray]:
    lengths = np.random.default_rng(0).integers(1, 200, 4000)
    return plan_buckets(lengths, max_tokens=3000, num_buckets=5), lengths


def test_another_epoch_has_other_batches():
    schedule = BatchSchedule(*many())
    seen = [compositions(epoch(schedule, number)) for number in (0, 1, 2, 10**6)]
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert not a & b


def test_real_epochs_have_other_batches(real_lengths):
    plan = plan_buckets(
        real_lengths, max_tokens=32 * int(real_lengths.max()), num_buckets=4
    )
    schedule = BatchSchedule(plan, real_lengths)
    common = compositions(epoch(schedule, 0)) & compositions(epoch(schedule, 1))
    # Only a bucket with a single batch can repeat it.
    assert len(common) <= np.count_nonzero(schedule.flow.batches == 1)


def test_another_seed_has_other_batches():
    a, b = (compositions(epoch(BatchSchedule(*many(), seed=s), 0)) for s in (0, 1))
    assert not a & b


def test_another_epoch_has_another_order_of_buckets():
    schedule = BatchSchedule(*many())
    orders = [[b.bucket for b in epoch(schedule, number)] for number in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_examples_carried_up_are_drawn_anew():
    # 7 short examples for rows of 4: three go up, other ones in other epochs.
    plan = BucketPlan((Bucket(4, 8), Bucket(2, 10)), max_tokens=32)
    schedule = BatchSchedule(plan, [8] * 7 + [10] * 5)
    assert schedule.flow.carried.tolist() == [0, 3]
    seen = set()
    for number in range(30):
        long = [b for b in epoch(schedule, number) if b.bucket == Bucket(2, 10)]
        seen |= {int(row) for b in long for row in b.rows if 0 <= row < 7}
    assert seen == set(range(7))


def test_batches_of_one_bucket_do_not_follow_one_another():
    schedule = BatchSchedule(*many())
    lengths = np.array([b.bucket.seq_len for n in range(5) for b in epoch(schedule, n)])
    lag1 = np.corrcoef(lengths[:-1], lengths[1:])[0, 1]
    assert abs(lag1) < 5 / np.sqrt(len(lengths))


def test_source_order_is_the_same_in_every_epoch(problem):
    schedule = BatchSchedule(*problem, order="source", seed=1)
    for a, b in zip(epoch(schedule, 0), epoch(schedule, 7), strict=True):
        assert a.bucket == b.bucket
        np.testing.assert_array_equal(a.rows, b.rows)


def test_source_order_fills_buckets_as_examples_come(problem):
    plan, lengths = problem
    batches = list(BatchSchedule(plan, lengths, order="source"))
    for bucket in plan.buckets:
        rows = [real(batch) for batch in batches if batch.bucket == bucket]
        if rows:
            own = np.concatenate(rows)
            own = own[plan.assign(lengths)[own] == plan.buckets.index(bucket)]
            assert np.all(np.diff(own) > 0)
    ends = [real(batch).max() for batch in batches]
    assert ends == sorted(ends)


def test_rows_do_not_depend_on_the_dtype_of_lengths():
    plan, lengths = many()
    schedules = [BatchSchedule(plan, lengths.astype(t)) for t in ("u1", "i4", "i8")]
    assert len({s.fingerprint for s in schedules}) == 1
    for step in (0, 100):
        rows = [s[step].rows.tolist() for s in schedules]
        assert rows[0] == rows[1] == rows[2]


def test_the_fingerprint_names_plan_lengths_seed_and_order():
    plan, lengths = many()
    other = lengths.copy()
    other[[0, 1]] = other[[1, 0]] + [0, 1]
    wider = BucketPlan(plan.buckets, plan.max_tokens + 1)
    schedules = [
        BatchSchedule(plan, lengths),
        BatchSchedule(plan, lengths, seed=1),
        *(BatchSchedule(plan, lengths, order=order) for order in ORDERS[1:]),
        *(BatchSchedule(plan, lengths, remainder=x) for x in ("promote", "drop")),
        BatchSchedule(plan, lengths, opening="largest_first"),
        BatchSchedule(plan, np.minimum(other, 199)),
        BatchSchedule(wider, lengths),
    ]
    assert len({s.fingerprint for s in schedules}) == len(schedules)
    assert schedules[0].fingerprint == BatchSchedule(plan, lengths).fingerprint
    assert len({s.data_fingerprint for s in schedules}) == 2


def test_steps_per_epoch_is_the_length():
    schedule = BatchSchedule(*many())
    assert len(schedule) == schedule.steps_per_epoch == len(list(schedule))
    assert f"{len(schedule)} steps per epoch" in repr(schedule)


def test_lengths_are_not_copied():
    plan, lengths = many()
    assert BatchSchedule(plan, lengths).lengths is lengths


def golden_schedule(order: str) -> BatchSchedule:
    lengths = np.arange(1, 3001) * 7919 % 300 + 1
    plan = BucketPlan(
        (Bucket(40, 50), Bucket(20, 100), Bucket(12, 160), Bucket(6, 301)),
        max_tokens=2000,
    )
    return BatchSchedule(plan, lengths, seed=2024, order=order)


GOLDEN_ROWS = {"shuffled": "cb1704d3605e4333", "source": "ca511f0527d1b772"}
GOLDEN_FINGERPRINTS = {
    "plan": "1b4f1252dabb0a42c80503e112c6004e",
    "data": "5bd7bba591c4c60eba26af50ac315699",
    "shuffled": "79319d49388a6d52dbcc3e3737e90a18",
    "source": "1aff75bf63c258268b40def9946afff0",
}


@pytest.mark.parametrize("order", ["shuffled", "source"])
def test_schedules_never_change(order):
    # A run is resumed with these: a new digest means that old runs cannot be.
    schedule = golden_schedule(order)
    state = hashlib.blake2b(digest_size=8)
    for number in (0, 1, 77):
        for batch in epoch(schedule, number):
            state.update(f"{batch.bucket} {batch.rows.tolist()}\n".encode())
    assert state.hexdigest() == GOLDEN_ROWS[order]


def test_fingerprints_never_change():
    shuffled, source = golden_schedule("shuffled"), golden_schedule("source")
    assert shuffled.plan.fingerprint == GOLDEN_FINGERPRINTS["plan"]
    assert shuffled.data_fingerprint == GOLDEN_FINGERPRINTS["data"]
    assert shuffled.fingerprint == GOLDEN_FINGERPRINTS["shuffled"]
    assert source.fingerprint == GOLDEN_FINGERPRINTS["source"]


def test_a_negative_step_is_refused():
    schedule = BatchSchedule(*many())
    with pytest.raises(IndexError, match="`step=-1` must not be negative"):
        schedule[-1]


@pytest.mark.parametrize("step", [1.5, "3", slice(0, 2)])
def test_a_step_that_is_no_integer_is_refused(step):
    with pytest.raises(TypeError):
        BatchSchedule(*many())[step]


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="`order='random'`: choose 'shuffled', "):
        BatchSchedule(*many(), order="random")


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=f"`seed={seed}` must be between 0 and"):
        BatchSchedule(*many(), seed=seed)


@pytest.mark.parametrize("seed", [1.5, "3", None])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(ValueError, match=f"`seed={seed!r}` is not an integer"):
        BatchSchedule(*many(), seed=seed)


def test_lengths_that_are_all_dropped_are_refused():
    plan = BucketPlan((Bucket(1, 8),), max_tokens=8, overlong="drop")
    with pytest.raises(ValueError, match="leaves out every example.*larger `max_seq"):
        BatchSchedule(plan, [9, 10])


def test_a_length_beyond_the_last_bucket_is_refused():
    plan = BucketPlan((Bucket(1, 8),), max_tokens=8)
    with pytest.raises(ValueError, match=r"`lengths\[1\]=9` is beyond the last bucket"):
        BatchSchedule(plan, [8, 9])


@pytest.mark.parametrize("order", ["shuffled", "source"])
def test_an_example_may_be_carried_through_thousands_of_buckets(order):
    size = 3000
    buckets = tuple(Bucket(2, t) for t in range(1, size + 1))
    plan = BucketPlan(buckets, max_tokens=2 * size)
    # Two examples of length 1 after the first: each bucket hands one on to the next.
    lengths = np.append(np.arange(1, size + 1), [1, 1])
    schedule = BatchSchedule(plan, lengths, order=order)
    rows = np.concatenate([batch.rows for batch in schedule])
    assert sorted(rows[rows >= 0]) == list(range(size + 2))


# Going on from another schedule


@pytest.mark.parametrize("order", ["shuffled", "source"])
def test_an_epoch_begins_where_a_schedule_takes_over(problem, order):
    schedule = BatchSchedule(problem.plan, problem.lengths, seed=5, order=order)
    position = DataPosition(17, {}, {}, {"fingerprint": "other"})
    moved = schedule.continue_with(position)
    assert (moved.first_step, schedule.first_step) == (17, 0)
    for step in range(len(schedule) + 3):
        assert moved[17 + step].bucket == schedule[step].bucket
        np.testing.assert_array_equal(moved[17 + step].rows, schedule[step].rows)
    for got, want in zip(moved, schedule, strict=True):
        np.testing.assert_array_equal(got.rows, want.rows)


def test_steps_before_a_schedule_takes_over_are_refused():
    plan = BucketPlan((Bucket(2, 8),), max_tokens=16)
    position = DataPosition(7, {}, {}, {"fingerprint": "other"})
    moved = BatchSchedule(plan, [3, 8, 5]).continue_with(position)
    with pytest.raises(IndexError, match="`step=6` is one of the schedule that this"):
        moved[6]
    with pytest.raises(IndexError, match="`step=-1` must not be negative"):
        moved[-1]


def test_the_fingerprint_names_what_a_schedule_continues():
    plan = BucketPlan((Bucket(2, 8),), max_tokens=16)
    schedule = BatchSchedule(plan, [3, 8, 5])
    moved = {
        schedule.continue_with(
            DataPosition(step, {}, {}, {"fingerprint": before})
        ).fingerprint
        for step in (0, 7)
        for before in ("a", "b")
    }
    assert len(moved | {schedule.fingerprint}) == 5
