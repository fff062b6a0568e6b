"""Remainders in a chain of buckets, and between shapes of several lengths."""

import itertools

import numpy as np
import pytest

from jaxbucket.plan.flow.dominance import dominates, shape_order
from jaxbucket.plan.flow.remainder import epoch_cost, flow_remainders


def random_buckets(seed: int, most: int = 6, chain: bool = False):
    """Returns random counts, batch sizes and costs, and which bucket can take which.

    In a chain, a bucket can only take the remainder of the previous one.
    """
    rng = np.random.default_rng(seed)
    size, sides = int(rng.integers(1, most + 1)), 1 if chain else rng.integers(1, 4)
    seq_lens = np.unique(rng.integers(1, 80 if chain else 8, (size, sides)), axis=0)
    seq_lens = seq_lens[shape_order(seq_lens)]
    totals = seq_lens.sum(axis=1)
    batch_sizes = np.maximum(1, int(totals[-1] * rng.integers(1, 9)) // totals)
    counts = rng.integers(0, rng.choice([4, 30, 1000]), len(totals))
    costs = batch_sizes * totals
    if seed % 2:
        costs = costs * rng.uniform(0.5, 2, len(totals))
    above = np.eye(len(totals), k=1, dtype=bool) if chain else dominates(seq_lens)
    return counts, batch_sizes, costs, above


def cost_of(targets, counts, batch_sizes, costs) -> float:
    carried, cost = [0] * len(counts), 0
    for k, target in enumerate(targets):
        full, rest = divmod(int(counts[k]) + carried[k], int(batch_sizes[k]))
        cost += (full + (rest > 0 and target < 0)) * costs[k]
        if target >= 0:
            carried[target] += rest
    return cost


def least_cost(counts, batch_sizes, costs, above) -> float:
    options = [[-1, *np.flatnonzero(row).tolist()] for row in above]
    choices = itertools.product(*options)
    return min(cost_of(choice, counts, batch_sizes, costs) for choice in choices)


def check_flow(flow, batch_sizes) -> None:
    """Checks that no example is lost or duplicated, and that each has a row."""
    left = flow.counts + flow.carried - flow.rows - flow.dropped
    assert flow.rows.sum() + flow.dropped.sum() == flow.counts.sum()
    carried = np.zeros_like(left)
    for k in np.flatnonzero(left):
        assert 0 < left[k] < batch_sizes[k]
        carried[flow.targets[k]] += left[k]
    np.testing.assert_array_equal(flow.targets >= 0, left > 0)
    np.testing.assert_array_equal(flow.carried, carried)
    np.testing.assert_array_equal(flow.batches, -(-flow.rows // batch_sizes))


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_no_choice_of_targets_is_cheaper(seed, chain):
    counts, batch_sizes, costs, above = random_buckets(seed, chain=chain)
    given = None if chain else above
    flow = flow_remainders(counts, batch_sizes, costs, above=given)
    check_flow(flow, batch_sizes)
    least = least_cost(counts, batch_sizes, costs, above)
    assert epoch_cost(flow.batches, costs) == pytest.approx(least, rel=1e-11)


@pytest.mark.parametrize("work", [1, 1000])
@pytest.mark.parametrize("seed", range(8))
def test_an_incomplete_search_is_never_worse_than_simple_policies(
    seed, work, monkeypatch
):
    monkeypatch.setattr("jaxbucket.plan.flow.between._WORK", work)
    arguments = random_buckets(seed, most=24)
    counts, batch_sizes, costs, above = arguments
    flow = flow_remainders(counts, batch_sizes, costs, above=above)
    check_flow(flow, batch_sizes)
    cost = epoch_cost(flow.batches, costs)
    for policy in ("pad", "promote"):
        other = flow_remainders(*arguments[:3], policy, above)
        assert cost <= epoch_cost(other.batches, costs)
    chain = np.triu(np.ones_like(above), 1).astype(bool)
    flow = flow_remainders(counts, batch_sizes, costs, above=chain)
    other = flow_remainders(counts, batch_sizes, costs)
    assert epoch_cost(flow.batches, costs) <= epoch_cost(other.batches, costs)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("policy", ["promote", "pad", "drop"])
@pytest.mark.parametrize("seed", range(10))
def test_every_remainder_follows_the_policy(seed, policy, chain):
    counts, batch_sizes, costs, above = random_buckets(seed, chain=chain)
    given = None if chain else above
    flow = flow_remainders(counts, batch_sizes, costs, policy, given)
    check_flow(flow, batch_sizes)
    rests = (counts + flow.carried) % batch_sizes
    rates = costs / batch_sizes
    for k in range(len(counts)):
        holding = [(rates[j], j) for j in np.flatnonzero(above[k])]
        goes_up = policy == "promote" and bool(holding) and rests[k] > 0
        assert flow.targets[k] == (min(holding)[1] if goes_up else -1)
        assert flow.dropped[k] == (rests[k] if policy == "drop" else 0)


def test_empty_buckets_have_no_batches():
    assert flow_remainders([0, 0], [4, 2], [32, 32]).num_batches == 0


@pytest.mark.parametrize("above", [None, np.eye(2, k=1, dtype=bool)])
def test_costs_beyond_64_bits_are_supported(above):
    flow = flow_remainders([5, 7], [4, 2], costs=[2**61, 2**62], above=above)
    assert flow.targets.tolist() == [1, -1]
    assert epoch_cost(flow.batches, np.array([2**61, 2**62])) == 2**61 + 4 * 2**62
