"""Heuristic rules for boundaries."""

import numpy as np
import pytest

from jaxbucket import BucketPlan, plan_buckets, report
from jaxbucket.plan.boundary_rules import (
    powers_of_two,
    quantile,
)
from jaxbucket.plan.candidates import Candidates
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.planner import RULES


def candidates(lengths: np.ndarray, max_tokens: int = 4096) -> Candidates:
    return Candidates.of(lengths, Limits(max_tokens=max_tokens))


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
