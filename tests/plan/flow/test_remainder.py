import itertools

import numpy as np
import pytest

from jaxbucket.plan.flow import remainder
from jaxbucket.plan.flow.remainder import epoch_cost, flow_remainders


def cost_of(decisions, counts, batch_sizes, seq_lens) -> int:
    """Returns the padded tokens for given promote-or-pad decisions."""
    carry = cost = 0
    for count, size, length, promote in zip(
        counts, batch_sizes, seq_lens, [*decisions, False], strict=True
    ):
        full, rest = divmod(count + carry, size)
        cost += (full + (rest > 0 and not promote)) * size * length
        carry = rest if promote else 0
    return cost


def cheapest(counts, batch_sizes, seq_lens) -> int:
    choices = itertools.product([False, True], repeat=len(counts) - 1)
    return min(cost_of(choice, counts, batch_sizes, seq_lens) for choice in choices)


@pytest.mark.parametrize("seed", range(40))
def test_no_sequence_of_decisions_is_cheaper(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 8))
    counts = rng.integers(0, rng.choice([4, 30, 1000]), size)
    seq_lens = np.cumsum(rng.integers(1, 20, size))
    batch_sizes = np.maximum(1, int(seq_lens[-1] * rng.integers(1, 9)) // seq_lens)
    flow = flow_remainders(counts, batch_sizes, batch_sizes * seq_lens)
    tokens = (flow.batches * batch_sizes * seq_lens).sum()
    assert tokens == cheapest(counts.tolist(), batch_sizes.tolist(), seq_lens.tolist())
    # No example is lost or duplicated, and each has a row.
    assert flow.rows.sum() == counts.sum()
    left_over = flow.counts + flow.carried - flow.rows
    np.testing.assert_array_equal(flow.carried, [0, *left_over[:-1]])
    np.testing.assert_array_equal(flow.batches, -(-flow.rows // batch_sizes))
    assert left_over[-1] == 0
    assert flow.num_batches == flow.batches.sum()


@pytest.mark.parametrize("policy", ["promote", "pad", "drop"])
@pytest.mark.parametrize("seed", range(8))
def test_every_remainder_follows_the_policy(seed, policy):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 8))
    counts = rng.integers(0, rng.choice([4, 30, 1000]), size)
    seq_lens = np.cumsum(rng.integers(1, 20, size))
    batch_sizes = rng.integers(1, 9, size)
    flow = flow_remainders(counts, batch_sizes, seq_lens, policy)
    carry = 0
    for k in range(size):
        full, rest = divmod(int(counts[k]) + carry, int(batch_sizes[k]))
        assert flow.carried[k] == carry
        goes_up = policy == "promote" and k < size - 1
        is_dropped = policy == "drop"
        assert flow.batches[k] == full + (rest > 0 and not goes_up and not is_dropped)
        assert flow.dropped[k] == (rest if is_dropped else 0)
        assert flow.rows[k] == counts[k] + carry - rest * (goes_up or is_dropped)
        carry = rest if goes_up else 0


def test_empty_buckets_have_no_batches():
    assert flow_remainders([0, 0], [4, 2], [32, 32]).num_batches == 0


def test_the_cheapest_policy_depends_on_the_batch_costs():
    # With these costs, an empty row is cheaper than another long batch.
    flow = flow_remainders([5, 1], batch_sizes=[4, 2], costs=[1.5, 4.0])
    assert flow.carried.tolist() == [0, 1]
    flow = flow_remainders([5, 2], batch_sizes=[4, 2], costs=[1.5, 4.0])
    assert flow.carried.tolist() == [0, 0]
    assert flow_remainders([5, 2], [4, 2], costs=[1.5, 0.1]).carried.tolist() == [0, 1]


def test_many_buckets_are_processed_with_vectorized_carries(monkeypatch):
    calls = []

    def counted(*numbers):
        calls.append(numbers)
        return divmod(*numbers)

    monkeypatch.setattr(remainder, "divmod", counted, raising=False)
    size = 400
    ends = np.arange(1, size + 1)
    counts = np.random.default_rng(0).integers(0, 80, size)
    flow = flow_remainders(counts, 64 * size // ends, 64 * size // ends * ends)
    assert flow.rows.sum() == counts.sum()
    # Once per bucket; once per number of carried rows would be about 20,000 calls.
    assert len(calls) <= size


def test_costs_beyond_64_bits_are_supported():
    flow = flow_remainders([5, 7], [4, 2], costs=[2**61, 2**62])
    assert flow.carried.tolist() == [0, 1]
    assert epoch_cost(flow.batches, np.array([2**61, 2**62])) == 2**61 + 4 * 2**62
