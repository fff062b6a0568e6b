"""Histograms of lengths: counted from any array, and taken wherever lengths are."""

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.base import length_counts
from jaxbucket.base.length_counts import LengthCounts


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i2", "i4", "i8"])
@pytest.mark.parametrize("most", [200, 2**31 - 1])
def test_counts_are_those_of_unique(dtype, most, monkeypatch):
    monkeypatch.setattr(length_counts, "_CHUNK", 97)
    most = min(most, np.iinfo(dtype).max)
    rng = np.random.default_rng(0)
    lengths = np.concatenate(
        [rng.integers(1, 50, 900), rng.integers(1, most, 100, endpoint=True)]
    ).astype(dtype)
    values, counts = np.unique(lengths, return_counts=True)
    for found in (
        LengthCounts(lengths),
        LengthCounts(dict(zip(values.tolist(), counts.tolist(), strict=True))),
    ):
        np.testing.assert_array_equal(found.lengths, values)
        np.testing.assert_array_equal(found.counts, counts)
        assert found.num_examples == 1000
        assert found.lengths.dtype == found.counts.dtype == np.int64


@pytest.mark.parametrize("number", [1, 7, 999, 1000, 5000])
def test_spread_lengths_are_those_at_equal_distances_in_sorted_order(number):
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    places = np.linspace(0, 999, min(number, 1000)).astype(int)
    found = LengthCounts(lengths).spread(number)
    np.testing.assert_array_equal(found, np.sort(lengths)[places])


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {8: 0},
        {8: 2**62},
        {8: 2**61, 9: 2**61},
        {8: -1},
        {8: 1.5},
        {0: 1},
        {-3: 1},
        {2**31: 1},
        {1.5: 1},
        {"128": 5},
        {1: [1, 2]},
        {1: 2**63},
        {"source": [1, 2], "target": [3, 4]},
        [],
        [0, 1],
        [1.5],
        [[1, 2]],
    ],
)
def test_what_are_no_counts_is_refused(counts):
    with pytest.raises(ValueError, match="`lengths"):
        LengthCounts(counts)


def test_so_many_times_the_examples():
    counts = LengthCounts([3, 1, 3])
    many = counts.times(10**9)
    np.testing.assert_array_equal(many.counts, 10**9 * counts.counts)
    np.testing.assert_array_equal(many.lengths, counts.lengths)
    # Numbers that wrap around in 64 bits are refused, too.
    wrapping = LengthCounts({1: 2**31 + 2})
    with pytest.raises(ValueError):
        wrapping.times(2**33)
    for number in (0, -1, 1.5, 2**60, 2**62 - 1):
        with pytest.raises(ValueError):
            counts.times(number)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_buckets": 1},
        {"boundaries": "quantile"},
        {"boundaries": [64, 500]},
        {"overlong": "drop", "max_seq_len": 300},
        {"overlong": "truncate", "max_seq_len": 300},
        {"overlong": "split", "max_seq_len": 120},
        {"batch_size_multiple": 4, "seq_len_multiple": 16, "accumulate": 2},
        {"sample": True},
        {"cost_fn": jb.plan.TransformerCost(64, 2)},
    ],
    ids=str,
)
def test_plans_and_reports_of_counts_are_those_of_lengths(options):
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    counts = LengthCounts(lengths)
    plan = jb.plan_buckets(lengths, max_tokens=4096, **options)
    assert plan == jb.plan_buckets(counts, max_tokens=4096, **options)
    for remainder in ("cheapest", "promote", "pad", "drop", "repeat"):
        expected = jb.report(plan, lengths, remainder=remainder)
        assert jb.report(plan, counts, remainder=remainder) == expected


def test_comparisons_and_curves_of_counts_are_those_of_lengths():
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    limits = jb.Limits(max_tokens=4096, cost_fn=jb.plan.TokenCost(1000.0))
    for function, options in (
        (jb.plan.compare_plans, {"num_buckets": 4}),
        (jb.plan.plan_curve, {"compile_seconds": 1.0, "max_buckets": 6}),
    ):
        found, expected = (
            function(x, limits, **options).to_json()
            for x in (LengthCounts(lengths), lengths)
        )
        assert found == expected


def test_numbers_beyond_32_bits_are_exact():
    counts = LengthCounts({100: 10**12, 300: 3 * 10**11})
    plan = jb.plan_buckets(counts, max_tokens=3000, num_buckets=2)
    report = jb.report(plan, counts)
    assert report.examples == 13 * 10**11
    assert report.real_tokens == 190 * 10**12
    assert 0 <= report.padded_tokens - report.real_tokens < 3000


@pytest.mark.parametrize("function", [jb.plan_packing, jb.packing.pack])
def test_packing_names_the_lengths_that_it_needs(function):
    options = {"max_tokens": 64} if function is jb.plan_packing else {"max_seq_len": 8}
    with pytest.raises(ValueError, match="`lengths`"):
        function(LengthCounts({8: 3}), **options)
