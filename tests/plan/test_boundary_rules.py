"""Heuristic rules for boundaries."""

import numpy as np
import pytest

from jaxbucket import BucketPlan, plan_buckets, report
from jaxbucket.plan.boundary_rules import (
    Candidates,
    equal_tokens,
    powers_of_two,
    quantile,
)
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.planner import RULES


def candidates(lengths: np.ndarray, max_tokens: int = 4096) -> Candidates:
    return Limits(max_tokens=max_tokens).candidates(lengths)


def test_candidates_count_examples_tokens_and_the_rows_that_they_fill():
    lengths = np.random.default_rng(0).integers(1, 50, 90)
    given = candidates(lengths, max_tokens=1000)
    for k, end in enumerate(range(1, lengths.max() + 1)):
        held = lengths[lengths <= end]
        assert given.seq_lens[k] == end
        assert (given.examples[k], given.tokens[k]) == (len(held), held.sum())
        assert given.batch_sizes[k] == max(1, min(1000 // end, len(held)))
        assert given.costs[k] == given.batch_sizes[k] * end


def test_quantile_buckets_have_equally_many_examples():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 1201))
    chosen = quantile(candidates(lengths), 6)
    assert (chosen + 1).tolist() == [200, 400, 600, 800, 1000, 1200]


@pytest.mark.parametrize("chooser", RULES.values(), ids=RULES)
def test_every_chooser_includes_the_last_candidate(chooser):
    for size in (1, 2, 50):
        lengths = np.random.default_rng(size).integers(1, 100, size)
        for num_buckets in (1, 3, 200):
            chosen = chooser(candidates(lengths), num_buckets)
            assert chosen[-1] == lengths.max() - 1
            assert np.all(np.diff(chosen) > 0)
            assert len(chosen) <= num_buckets


def test_equal_tokens_buckets_have_equally_many_tokens():
    # 600 tokens in examples of length 1, and 600 tokens in one example.
    lengths = np.array([1] * 600 + [600])
    assert (equal_tokens(candidates(lengths), 2) + 1).tolist() == [1, 600]
    lengths = np.random.default_rng(0).integers(1, 1000, 20_000)
    chosen = equal_tokens(candidates(lengths), 4)
    shares = np.diff(candidates(lengths).tokens[chosen], prepend=0) / lengths.sum()
    np.testing.assert_allclose(shares, 0.25, atol=1e-3)


@pytest.mark.parametrize(
    ("longest", "num_buckets", "expected"),
    [
        (1000, 4, [128, 256, 512, 1000]),
        (1024, 4, [128, 256, 512, 1024]),
        (5, 8, [1, 2, 4, 5]),
        (1, 3, [1]),
        (700, 1, [700]),
    ],
)
def test_powers_of_two_end_with_the_longest_length(longest, num_buckets, expected):
    chosen = powers_of_two(candidates(np.arange(1, longest + 1)), num_buckets)
    assert (chosen + 1).tolist() == expected


@pytest.mark.parametrize("rule", RULES)
def test_max_seq_len_adds_no_bucket(rule):
    lengths = np.random.default_rng(0).integers(1, 500, 1000)
    for num_buckets in (1, 2, 4):
        plan = plan_buckets(
            lengths,
            max_tokens=8192,
            max_seq_len=512,
            num_buckets=num_buckets,
            boundaries=rule,
        )
        assert len(plan) <= num_buckets
        assert plan.max_seq_len == 512


def test_the_epoch_cost_equals_that_of_the_report():
    lengths = np.random.default_rng(1).integers(1, 200, 500)
    given = candidates(lengths)
    chosen = np.array([40, 90, lengths.max() - 1])
    ends = given.seq_lens[chosen]
    plan: BucketPlan = plan_buckets(lengths, max_tokens=4096, boundaries=ends.tolist())
    assert given.epoch_cost(chosen) == report(plan, lengths).padded_tokens
    assert given.counts(chosen).tolist() == [
        b.examples for b in report(plan, lengths).buckets
    ]
