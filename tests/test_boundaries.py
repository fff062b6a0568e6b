"""The planner against every choice there is, and choosers against one another."""

import itertools

import numpy as np
import pytest

from jaxbucket import BucketPlan, plan_buckets, report
from jaxbucket.boundaries import Candidates, geometric, optimal, quantile


def cheapest_epoch(counts: list[int], sizes: list[int], lens: list[int]) -> int:
    """Padded tokens over every sequence of promote-or-pad decisions."""
    best = {0: 0}
    for bucket, (count, size, length) in enumerate(
        zip(counts, sizes, lens, strict=True)
    ):
        after: dict[int, int] = {}
        for carry, cost in best.items():
            full, rest = divmod(count + carry, size)
            options = [(0, cost + (full + (rest > 0)) * size * length)]
            if bucket < len(counts) - 1:
                options.append((rest, cost + full * size * length))
            for out, total in options:
                after[out] = min(total, after.get(out, total))
        best = after
    return min(best.values())


def brute_force(
    lengths: np.ndarray, max_tokens: int, num_buckets: int, multiples: tuple[int, int]
) -> int:
    """The fewest padded tokens of an epoch, over all boundary sets."""
    rows, step = multiples
    grid = list(range(step, -(-int(lengths.max()) // step) * step + 1, step))
    at_most = {end: int((lengths <= end).sum()) for end in [0, *grid]}
    costs = []
    for size in range(num_buckets):
        for chosen in itertools.combinations(grid[:-1], size):
            lens = [*chosen, grid[-1]]
            counts = [
                at_most[b] - at_most[a] for a, b in itertools.pairwise([0, *lens])
            ]
            sizes = [max_tokens // end // rows * rows for end in lens]
            costs.append(cheapest_epoch(counts, sizes, lens))
    return min(costs)


@pytest.mark.parametrize("block", range(20))
def test_no_choice_of_boundaries_is_cheaper(block):
    # 20 blocks of 50 small problems, every kind of tie and tail among them.
    rng = np.random.default_rng(block)
    for _ in range(50):
        multiples = int(rng.choice([1, 1, 2])), int(rng.choice([1, 1, 2, 3]))
        longest, size = int(rng.integers(1, 13)), int(rng.integers(1, 40))
        lengths = rng.integers(1, longest + 1, size)
        if rng.random() < 0.3:
            lengths = rng.choice(np.unique(lengths)[:3], size)
        last = -(-int(lengths.max()) // multiples[1]) * multiples[1]
        max_tokens = int(last * multiples[0] + rng.integers(0, 80))
        num_buckets = int(rng.integers(1, 5))
        plan = plan_buckets(
            lengths,
            max_tokens=max_tokens,
            num_buckets=num_buckets,
            batch_size_multiple=multiples[0],
            seq_len_multiple=multiples[1],
        )
        assert len(plan) <= num_buckets
        best = brute_force(lengths, max_tokens, num_buckets, multiples)
        assert report(plan, lengths).padded_tokens == best


def padded(lengths: np.ndarray, boundaries: str, num_buckets: int) -> int:
    plan = plan_buckets(
        lengths,
        max_tokens=16 * (int(lengths.max()) + 8),
        num_buckets=num_buckets,
        batch_size_multiple=4,
        seq_len_multiple=8,
        boundaries=boundaries,
    )
    return report(plan, lengths).padded_tokens


@pytest.mark.parametrize("num_buckets", [1, 4, 8, 16])
def test_optimal_is_never_worse_on_real_lengths(real_lengths, num_buckets):
    best = padded(real_lengths, "optimal", num_buckets)
    for other in ("quantile", "geometric"):
        assert best <= padded(real_lengths, other, num_buckets)
    assert best <= padded(real_lengths, "optimal", max(1, num_buckets // 2))


@pytest.mark.parametrize("seed", range(30))
def test_optimal_is_never_worse_on_random_lengths(seed):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4, 1, int(rng.integers(1, 3000))), 1, 2000)
    for num_buckets in (2, 5, 9):
        best = padded(lengths.astype(int), "optimal", num_buckets)
        for other in ("quantile", "geometric"):
            assert best <= padded(lengths.astype(int), other, num_buckets)


def candidates(lengths: np.ndarray, max_tokens: int = 4096) -> Candidates:
    ends = np.arange(1, lengths.max() + 1)
    examples = np.searchsorted(np.sort(lengths), ends, side="right")
    return Candidates(ends, examples, max_tokens // ends)


def test_quantile_buckets_have_equally_many_examples():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 1201))
    chosen = quantile(candidates(lengths), 6)
    assert (chosen + 1).tolist() == [200, 400, 600, 800, 1000, 1200]


def test_geometric_boundaries_grow_by_a_constant_ratio():
    chosen = geometric(candidates(np.arange(1, 257)), 8)
    assert (chosen + 1).tolist() == [2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("chooser", [optimal, quantile, geometric])
def test_choosers_end_with_the_last_candidate(chooser):
    for size in (1, 2, 50):
        lengths = np.random.default_rng(size).integers(1, 100, size)
        for num_buckets in (1, 3, 200):
            chosen = chooser(candidates(lengths), num_buckets)
            assert chosen[-1] == lengths.max() - 1
            assert np.all(np.diff(chosen) > 0)
            assert len(chosen) <= num_buckets


def test_padded_tokens_are_those_of_the_report():
    lengths = np.random.default_rng(1).integers(1, 200, 500)
    given = candidates(lengths)
    chosen = np.array([40, 90, lengths.max() - 1])
    ends = given.seq_lens[chosen]
    plan: BucketPlan = plan_buckets(lengths, max_tokens=4096, boundaries=ends.tolist())
    assert given.padded_tokens(chosen) == report(plan, lengths).padded_tokens
    assert given.counts(chosen).tolist() == [
        b.examples for b in report(plan, lengths).buckets
    ]
