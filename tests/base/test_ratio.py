"""Tests of the largest ratio between the lengths of two sequences."""

import dataclasses
import itertools

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.base.ratio import within_ratio

NAMES = ("source", "target")


def pairs_of(seed, size=400):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(1, 40, size) for name in NAMES}


def limited(lengths, max_ratio, **options):
    return jb.plan_buckets(
        lengths, max_tokens=400, num_buckets=4, max_ratio=max_ratio, **options
    )


@pytest.mark.parametrize("seed", range(4))
def test_examples_beyond_the_ratio_are_left_out(seed):
    lengths = pairs_of(seed)
    s, t = (lengths[name] for name in NAMES)
    kept = np.maximum(s, t) <= 2.5 * np.minimum(s, t)
    plan = limited(lengths, 2.5)
    np.testing.assert_array_equal(plan.assign(lengths) >= 0, kept)
    assert jb.BucketPlan.from_json(plan.to_json()) == plan
    report = jb.report(plan, lengths)
    assert report.filtered_examples == np.count_nonzero(~kept)
    assert report.dropped_examples == 0 and report.examples == kept.sum()
    assert "exceed `max_ratio` and are left out" in report.summary
    schedule = jb.BatchSchedule(plan, lengths, seed=seed)
    rows = np.concatenate([batch.rows for batch in schedule])
    assert sorted(rows[rows >= 0]) == np.flatnonzero(kept).tolist()
    # A plan of the kept examples alone has the same shapes.
    alone = {name: lengths[name][kept] for name in NAMES}
    assert limited(alone, None).buckets == plan.buckets


def test_a_ratio_may_be_limited_in_one_direction():
    lengths = pairs_of(7)
    plan = limited(lengths, {"source/target": 1.5})
    kept = lengths["source"] <= 1.5 * lengths["target"]
    np.testing.assert_array_equal(plan.assign(lengths) >= 0, kept)
    assert hash(plan) == hash(jb.BucketPlan.from_json(plan.to_json()))
    three = np.array([list(x) for x in itertools.product((1, 2, 5), repeat=3)])
    expected = (three.max(axis=1) <= 2 * three.min(axis=1)).tolist()
    assert within_ratio(three, ("a", "b", "c"), 2).tolist() == expected


def test_overlong_examples_beyond_the_ratio_are_no_error():
    lengths = {"source": [4, 90], "target": [4, 3]}
    plan = limited(lengths, 2, max_seq_len=8)
    assert plan.assign(lengths).tolist() == [0, -1]
    with pytest.raises(ValueError, match="is beyond all buckets"):
        limited(lengths, 40, max_seq_len=8)


def test_packed_rows_leave_out_the_same_examples():
    lengths = pairs_of(5)
    packing = jb.packing.pack(lengths, dict.fromkeys(NAMES, 64), max_ratio=2)
    plan = jb.plan_buckets(
        packing.row_lengths, max_tokens=512, boundaries=packing.seq_lens
    )
    plan = dataclasses.replace(plan, max_ratio=2)
    schedule = jb.BatchSchedule(plan, lengths, packing=packing)
    rows = np.concatenate([batch.rows.ravel() for batch in schedule])
    kept = np.flatnonzero(plan.assign(lengths) >= 0)
    assert sorted(rows[rows >= 0]) == kept.tolist()
    assert schedule.report().filtered_examples == len(lengths["source"]) - len(kept)


@pytest.mark.parametrize(
    ("max_ratio", "message"),
    [
        (0.5, "`max_ratio=0.5` must be at least 1, because it applies to all pairs"),
        (float("nan"), "`max_ratio=nan` must be a positive, finite number"),
        ("3", "`max_ratio='3'` must be a positive, finite number"),
        ({}, "`max_ratio` is empty. Pass a number, or remove it."),
        ({"source": 2}, "`max_ratio` has the key 'source'. Pass two sequences with a"),
        ({"source/target": 0}, r"`max_ratio\['source/target'\]=0` must be a positive"),
    ],
)
def test_invalid_ratios_are_refused(max_ratio, message):
    with pytest.raises(ValueError, match=message):
        limited(pairs_of(0), max_ratio)
    with pytest.raises(ValueError, match=message):
        jb.BucketPlan.from_shapes([(1, dict.fromkeys(NAMES, 8))], max_ratio=max_ratio)


def test_a_ratio_requires_several_sequences_and_some_examples():
    calls = (
        lambda **x: jb.plan_buckets([3], max_tokens=8, **x),
        lambda **x: jb.plan_packing([3], max_tokens=8, **x),
        lambda **x: jb.packing.pack([3], 8, **x),
    )
    for call in calls:
        with pytest.raises(ValueError, match="requires examples with several seq"):
            call(max_ratio=2)
    with pytest.raises(ValueError, match="`max_ratio=2.0` leaves out every example"):
        limited({"source": [9], "target": [1]}, 2)
