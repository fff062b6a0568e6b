"""Schedules over a part of the source."""

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.schedule import (
    ByValue,
    GroupedByLength,
    LinearPacing,
    RootPacing,
)

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 50, 500)
RARITY = RNG.random(500)
# The plan does not hold lengths above 40, but these are not in the subset.
LONG = int(np.flatnonzero(LENGTHS > 40)[3])
SUBSET = (LENGTHS <= 40) & (RARITY < 0.8)
PLAN = jb.plan_buckets(
    LENGTHS[SUBSET], max_tokens=240, num_buckets=3, batch_size_multiple=6
)


def curriculum(kept, **options):
    metrics = {"length": LENGTHS[kept], "rarity": RARITY[kept]}
    pacing = {
        "length": ByValue(
            LinearPacing(start=0, duration=40, unit="steps"), low=10, high=40
        ),
        "rarity": RootPacing(start=0.2, duration=50, unit="steps"),
    }
    return jb.Curriculum(metrics, pacing, **options)


ORDERS = {
    **{x: lambda _, x=x: x for x in ("shuffled", "spread", "source")},
    **{x: lambda _, x=x: x for x in ("ascending", "descending")},
    "grouped": lambda _: GroupedByLength(40),
    "one metric": lambda kept: jb.Curriculum(
        RARITY[kept], RootPacing(start=0.2, duration=50, unit="steps")
    ),
    "two metrics": curriculum,
    "replacement": lambda kept: curriculum(kept, replacement=True),
}
SHORT = jb.plan_buckets(
    LENGTHS[SUBSET], max_tokens=240, num_buckets=3, max_seq_len=30, overlong="drop"
)
OPTIONS = {
    "plain": {},
    "short": {"plan": SHORT},
    "dropped": {"remainder": "drop"},
    "accumulated": {"accumulate": 2, "group": "mixed", "balance": True},
}


def assert_selected(schedule, alone, kept) -> None:
    """Asserts that a schedule has the batches of one of only the examples it keeps."""
    assert len(schedule) == len(alone)
    # Row -1 is empty.
    indices = np.append(np.flatnonzero(kept), -1)
    for step in range(2 * len(alone)):
        pairs = schedule.micro_batches(step), alone.micro_batches(step)
        for batch, expected in zip(*pairs, strict=True):
            assert batch.bucket == expected.bucket
            np.testing.assert_array_equal(batch.rows, indices[expected.rows])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_subset_has_the_batches_of_the_selected_examples(order, options):
    kept = SUBSET & (LENGTHS <= 30) if options == "short" else SUBSET
    make, options = ORDERS[order], {"plan": PLAN, "seed": 3, **OPTIONS[options]}
    order = make(np.ones(500, bool))
    schedule = jb.BatchSchedule(lengths=LENGTHS, order=order, subset=SUBSET, **options)
    alone = jb.BatchSchedule(lengths=LENGTHS[kept], order=make(kept), **options)
    assert_selected(schedule, alone, kept)


def test_indices_are_the_same_subset_as_a_mask():
    indices = np.flatnonzero(SUBSET)
    schedules = [
        jb.BatchSchedule(PLAN, LENGTHS, subset=x)
        for x in (SUBSET, indices, indices[::-1].tolist())
    ]
    assert len({x.fingerprint for x in schedules}) == 1
    fewer = jb.BatchSchedule(PLAN, LENGTHS, subset=indices[1:])
    assert fewer.fingerprint != schedules[0].fingerprint
    short = jb.plan_buckets([50], max_tokens=400, batch_size_multiple=6)
    assert (
        jb.BatchSchedule(short, LENGTHS, subset=np.ones(500, bool)).fingerprint
        != jb.BatchSchedule(short, LENGTHS).fingerprint
    )


def test_the_report_counts_the_other_examples():
    schedule = jb.BatchSchedule(PLAN, LENGTHS, subset=SUBSET)
    report, plain = schedule.report(), jb.report(PLAN, LENGTHS[SUBSET])
    assert report.unselected_examples == np.count_nonzero(~SUBSET)
    assert report.examples == plain.examples == np.count_nonzero(SUBSET)
    assert report.real_tokens == plain.real_tokens == LENGTHS[SUBSET].sum()
    number = f"{report.unselected_examples:,} examples are not in the subset."
    assert number in report.summary and "subset" not in plain.summary
    np.testing.assert_array_equal(schedule.is_kept, SUBSET)


def test_policies_apply_to_the_subset():
    lengths = {"a": LENGTHS, "b": np.maximum(1, LENGTHS[::-1] // 2)}
    chosen = {name: x[SUBSET] for name, x in lengths.items()}
    plan = jb.plan_buckets(
        chosen,
        max_tokens=500,
        num_buckets=3,
        max_seq_len={"a": 30, "b": 30},
        overlong={"a": "drop", "b": "truncate"},
    )
    schedule = jb.BatchSchedule(plan, lengths, subset=SUBSET)
    plain = jb.BatchSchedule(plan, chosen)
    rows = [x.rows[x.rows >= 0] for x in schedule]
    expected = SUBSET & (lengths["a"] <= 30)
    assert sorted(np.concatenate(rows)) == np.flatnonzero(expected).tolist()
    report, other = schedule.report(), plain.report()
    assert 0 < report.dropped_examples == other.dropped_examples
    np.testing.assert_array_equal(schedule.is_kept, expected)


@pytest.mark.parametrize(
    "subset",
    [
        [],
        np.zeros(500, bool),
        np.ones(3, bool),
        [500],
        [-1],
        [1.0],
        [4, 4],
        np.ones(500, int),
    ],
)
def test_invalid_subsets_are_refused(subset):
    with pytest.raises(ValueError, match="`subset`"):
        jb.BatchSchedule(PLAN, LENGTHS, subset=subset)


def test_a_length_of_the_subset_that_the_plan_does_not_hold_is_named():
    with pytest.raises(ValueError, match=rf"`lengths\[{LONG}\]={LENGTHS[LONG]}`"):
        jb.BatchSchedule(PLAN, LENGTHS, subset=np.arange(LONG, 500))


PACKED_ORDERS = ("spread", "source", "grouped", "one metric", "two metrics")


@pytest.mark.parametrize("overlong", ["error", "drop"])
@pytest.mark.parametrize("order", PACKED_ORDERS)
def test_packed_rows_of_a_subset_are_those_of_the_selected_examples(order, overlong):
    kept = SUBSET & (LENGTHS <= 30) if overlong == "drop" else SUBSET
    packing = jb.packing.pack(LENGTHS[kept], (30, 60) if kept is SUBSET else 30)
    plan = jb.plan_buckets(
        packing.row_lengths,
        max_tokens=240,
        boundaries=packing.seq_lens,
        overlong=overlong,
    )
    make = ORDERS[order]
    schedule = jb.BatchSchedule(
        plan, LENGTHS, order=make(np.ones(500, bool)), subset=SUBSET, packing=packing
    )
    alone = jb.BatchSchedule(plan, LENGTHS[kept], order=make(kept), packing=packing)
    assert_selected(schedule, alone, kept)
    report, other = schedule.report(), alone.report()
    assert report.packed_examples == other.packed_examples == np.count_nonzero(kept)
    assert report.real_tokens == other.real_tokens == LENGTHS[kept].sum()
    assert report.unselected_examples == np.count_nonzero(~SUBSET)
    assert report.dropped_examples == np.count_nonzero(SUBSET & ~kept)


def test_a_packing_is_that_of_the_subset():
    packing = jb.packing.pack(LENGTHS, 64)
    plan = jb.plan_buckets(packing.row_lengths, max_tokens=640)
    with pytest.raises(ValueError, match="`packing`"):
        jb.BatchSchedule(plan, LENGTHS, packing=packing, subset=SUBSET)
