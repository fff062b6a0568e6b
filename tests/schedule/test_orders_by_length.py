"""Orders that sort by length, and draw new batches in every epoch."""

import pickle
import re

import numpy as np
import pytest

from jaxbucket import BatchSchedule, plan_buckets
from jaxbucket.base.permutation import fold, mix, permute
from jaxbucket.packing import pack
from jaxbucket.schedule import GroupedByLength, NoisySorted

EPOCHS = (0, 10**6)
ORDERS = [NoisySorted(0.3), NoisySorted(0.1, descending=True), GroupedByLength(3)]
SEEDS = [
    *range(4),
    *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 30)),
]


def random_problem(seed):
    """Returns a random plan and lengths, of which some may be too long."""
    rng = np.random.default_rng(seed)
    size, longest = int(rng.choice([1, 7, 30, 90])), int(rng.choice([1, 9, 60]))
    lengths = rng.integers(1, longest, size, endpoint=True)
    plan = plan_buckets(
        lengths,
        max_tokens=longest * int(rng.integers(1, 5)),
        num_buckets=int(rng.integers(1, 5)),
        max_seq_len=-(-longest * 3 // 4) if seed % 2 else None,
        overlong="drop",
    )
    return plan, lengths


def batches_of(schedule, epoch):
    """Returns `[(bucket, examples)]` for the batches of an epoch."""
    first = epoch * len(schedule)
    steps = range(first, first + len(schedule))
    batches = [x for step in steps for x in schedule.micro_batches(step)]
    return [(x.bucket, x.rows[x.rows >= 0].tolist()) for x in batches]


def shuffled_examples(plan, lengths, seed, epoch):
    """Returns the examples of each bucket, shuffled as for all redrawn orders."""
    assigned = plan.assign(lengths)
    for k in range(len(plan)):
        examples = np.flatnonzero(assigned == k)
        places = np.arange(len(examples))
        yield examples[permute(places, len(examples), fold(seed, epoch, k))]


def noisy_batches(plan, lengths, seed, epoch, order):
    """The reference implementation of `NoisySorted`, with Python numbers."""
    sign = -1 if order.descending else 1

    def key(example):
        uniform = (mix(example ^ fold(seed, epoch, 0x2015E)) >> 11) / 2**53
        noise = order.noise * (2 * uniform - 1)
        assert -order.noise <= noise < order.noise or not order.noise
        return int(lengths[example]) * (1 + noise)

    batches = []
    for bucket, drawn in zip(
        plan.buckets, shuffled_examples(plan, lengths, seed, epoch), strict=True
    ):
        ranked = sorted(drawn.tolist(), key=lambda x: sign * key(x))
        size = bucket.batch_size
        parts = [ranked[i : i + size] for i in range(0, len(ranked), size)]
        batches += [(bucket, part) for part in parts]
    return sorted(batches, key=lambda batch: sign * max(map(key, batch[1])))


@pytest.mark.parametrize("seed", SEEDS)
def test_noisy_batches_are_those_of_the_reference(seed):
    plan, lengths = random_problem(seed)
    for order in (NoisySorted(0.3), NoisySorted(0), NoisySorted(1, descending=True)):
        schedule = BatchSchedule(plan, lengths, seed=3, order=order, remainder="pad")
        for epoch in EPOCHS:
            want = noisy_batches(plan, lengths, 3, epoch, order)
            assert batches_of(schedule, epoch) == want


def grouped_batches(plan, lengths, seed, epoch, order):
    """The reference implementation of the batches of `GroupedByLength`."""
    batches = []
    for bucket, drawn in zip(
        plan.buckets, shuffled_examples(plan, lengths, seed, epoch), strict=True
    ):
        size = bucket.batch_size
        count = -(-len(drawn) // size)
        span = min(order.window, max(1, count // 4)) * size
        for start in range(0, len(drawn), span):
            window = sorted(drawn[start : start + span].tolist(), key=lengths.item)
            parts = [window[i : i + size] for i in range(0, len(window), size)]
            batches += [(bucket, part) for part in parts]
    return batches


@pytest.mark.parametrize("seed", SEEDS)
def test_grouped_batches_are_those_of_the_reference(seed):
    plan, lengths = random_problem(seed)
    options = {"seed": 3, "remainder": "pad"}
    spread = BatchSchedule(plan, lengths, order="spread", **options)
    for order in (GroupedByLength(2), GroupedByLength()):
        schedule = BatchSchedule(plan, lengths, order=order, **options)
        for epoch in EPOCHS:
            got = batches_of(schedule, epoch)
            want = grouped_batches(plan, lengths, 3, epoch, order)
            assert sorted(map(str, got)) == sorted(map(str, want))
            # Only the examples differ from those of "spread".
            sizes = [(bucket, len(rows)) for bucket, rows in got]
            assert sizes == [(x, len(rows)) for x, rows in batches_of(spread, epoch)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_each_example_is_in_one_row_per_epoch(seed, order):
    plan, lengths = random_problem(seed)
    for remainder in ("cheapest", "promote"):
        schedule = BatchSchedule(plan, lengths, order=order, remainder=remainder)
        for epoch in EPOCHS:
            batches = batches_of(schedule, epoch)
            for bucket, rows in batches:
                assert bucket in plan.buckets
                assert 0 < lengths[rows].max() <= bucket.seq_len
            seen = sorted(row for _, rows in batches for row in rows)
            assert seen == np.flatnonzero(lengths <= plan.max_seq_len).tolist()


LENGTHS = np.random.default_rng(0).integers(1, 200, 1000)
PLAN = plan_buckets(LENGTHS, max_tokens=2400, num_buckets=3)


def make_schedule(order, **options):
    return BatchSchedule(PLAN, LENGTHS, order=order, **options)


def compositions(schedule, epoch):
    return {frozenset(rows) for _, rows in batches_of(schedule, epoch)}


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_epochs_and_seeds_have_different_batches(order):
    schedule, other = (make_schedule(order, seed=seed) for seed in range(2))
    common = [
        compositions(schedule, 0) & compositions(schedule, 1),
        compositions(schedule, 0) & compositions(other, 0),
    ]
    # The few shortest or longest examples may all be in one batch.
    assert max(map(len, common)) <= 1
    assert schedule.fingerprint != other.fingerprint


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_any_step_of_a_copy_is_the_same(order):
    schedule = make_schedule(order, accumulate=2)
    copy = pickle.loads(pickle.dumps(schedule))
    steps = np.random.default_rng(0).integers(0, 4 * len(schedule), 15).tolist()
    for step in steps:
        for got, want in zip(copy[step], schedule[step], strict=True):
            assert got.bucket == want.bucket
            np.testing.assert_array_equal(got.rows, want.rows)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_opening_only_reorders_the_first_epoch(order):
    plain, bucket = make_schedule(order), PLAN.buckets[2]
    opened = make_schedule(order, opening=[(bucket, 4)])
    assert [x for x, _ in batches_of(opened, 0)[:4]] == [bucket] * 4
    assert compositions(opened, 0) == compositions(plain, 0)
    assert batches_of(opened, 1) == batches_of(plain, 1)


def mean_range(schedule):
    """Returns the mean difference of the longest and shortest example of a batch."""
    batches = batches_of(schedule, 0)
    return np.mean([np.ptp(LENGTHS[rows]) for _, rows in batches])


def test_more_windows_and_less_noise_give_more_similar_lengths():
    ranges = [mean_range(make_schedule(GroupedByLength(n))) for n in (1, 3, 9)]
    assert ranges[0] == pytest.approx(mean_range(make_schedule("spread")), rel=0.1)
    assert ranges[2] < ranges[1] / 1.3 and ranges[1] < ranges[0] / 2
    noisy = [mean_range(make_schedule(NoisySorted(x))) for x in (0, 0.1, 0.3)]
    assert noisy[0] < noisy[1] / 2 < noisy[2] / 3


def test_without_noise_examples_of_the_same_length_are_shuffled():
    schedule = make_schedule(NoisySorted(0), remainder="pad")
    fixed = make_schedule("ascending", remainder="pad")
    want = [LENGTHS[rows].tolist() for _, rows in batches_of(fixed, 0)]
    epochs = [batches_of(schedule, epoch) for epoch in range(2)]
    for batches in epochs:
        assert [LENGTHS[rows].tolist() for _, rows in batches] == want
    assert epochs[0] != epochs[1]


def test_noisy_batches_come_from_short_to_long():
    for descending in (False, True):
        schedule = make_schedule(NoisySorted(0.1, descending=descending))
        longest = [LENGTHS[rows].max() for _, rows in batches_of(schedule, 1)]
        falling = np.diff(longest if descending else longest[::-1]) <= 0
        assert 0.5 < falling.mean() < 1
        assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) > 0.95


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_packed_rows_of_similar_lengths_share_a_batch(order):
    lengths = np.random.default_rng(0).integers(1, 60, 400)
    packing = pack(lengths, (64, 256), max_segments_per_row=3)
    plan = plan_buckets(
        packing.row_lengths, max_tokens=1024, boundaries=packing.seq_lens
    )
    ranges = []
    for x in (order, "shuffled"):
        schedule = BatchSchedule(plan, lengths, packing=packing, order=x)
        batches = [schedule[step].rows for step in range(len(schedule))]
        tokens = [np.where(rows >= 0, lengths[rows], 0).sum(axis=1) for rows in batches]
        ranges.append(np.mean([np.ptp(x[x > 0]) for x in tokens]))
        rows = np.concatenate([rows[rows >= 0] for rows in batches])
        assert sorted(rows) == list(range(len(lengths)))
    assert ranges[0] < 0.7 * ranges[1]


def test_orders_with_different_batches_have_different_names():
    orders = [
        *("spread", "ascending", "descending"),
        *(NoisySorted(x, descending=y) for x in (0, 0.1, 0.25) for y in (False, True)),
        *(GroupedByLength(x) for x in (1, 50)),
    ]
    schedules = [make_schedule(order) for order in orders]
    assert len({x.fingerprint for x in schedules}) == len(orders)
    # Equal numbers of any type are equal orders.
    assert str(NoisySorted(np.float64(0.25))) == str(NoisySorted(0.25))
    assert repr(NoisySorted()) == "NoisySorted(noise=0.1, descending=False)"
    assert repr(GroupedByLength()) == "GroupedByLength(window=50)"
    assert schedules[-1].config()["order"] == "grouped by length in windows of 50"


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: NoisySorted(-0.1), "`noise=-0.1` must be a share, from 0 to 1."),
        (lambda: NoisySorted(10), "`noise=10` must be a share, from 0 to 1."),
        (lambda: NoisySorted(np.nan), "`noise=nan` must be a share"),
        (lambda: NoisySorted(descending=1), "`descending=1` is not a bool. Pass True"),
        (lambda: GroupedByLength(0), "`window=0` must be a positive integer"),
        (lambda: GroupedByLength(2.5), "`window=2.5` is not an integer"),
    ],
)
def test_invalid_options_are_refused(create, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        create()
