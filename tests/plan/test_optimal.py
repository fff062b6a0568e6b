"""The optimal planner, compared with exhaustive search and with its lower bound."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from jaxbucket import plan_buckets, report
from jaxbucket.plan.branch_and_bound import Search
from jaxbucket.plan.candidates import Candidates
from jaxbucket.plan.costs import StepTime, TokenCost, TransformerCost
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.optimal import Optimum
from jaxbucket.plan.planner import RULES, plan_within

Cost = Callable[[int, int], float]


def exhaustive(cases: Iterable[Any]) -> list[Any]:
    """Marks cases as exhaustive."""
    return [pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def cheapest_epoch(
    counts: list[int], most: list[int], sizes: Callable[[int], range], cost: Cost
) -> float:
    """Returns the least cost over all B and all promote-or-pad decisions.

    A bucket has no more batches than its rows need with the largest B.

    Args:
      counts: the number of examples of each bucket.
      most: the largest B of each bucket.
      sizes: the largest B -> all B.
      cost: `(B, bucket)` -> the cost of a batch.
    """
    least = np.inf

    def extend(k: int, carry: int, total: float) -> None:
        nonlocal least
        if k == len(counts) or total >= least:
            least = min(least, total)
            return
        rows = counts[k] + carry
        if not rows:
            extend(k + 1, 0, total)
        for size in sizes(most[k]) if rows else ():
            full, rest = divmod(rows, size)
            padded = full + (rest > 0)
            if padded == -(-rows // most[k]):
                extend(k + 1, 0, total + padded * cost(size, k))
            is_last = k == len(counts) - 1
            if full and not is_last and full == -(-full * size // most[k]):
                extend(k + 1, rest, total + full * cost(size, k))

    extend(0, 0, 0.0)
    return least


def brute_force(
    lengths: np.ndarray,
    num_buckets: int,
    step: int,
    rows: Callable,
    cost: Cost,
    multiple: int = 1,
    fewest: int = 1,
) -> float:
    """Returns the least cost of an epoch over all valid boundaries and B."""
    first = -(-fewest // multiple) * multiple
    last = -(-int(lengths.max()) // step) * step
    grid = [end for end in range(step, last, step) if rows(end)]
    at_most = {end: int((lengths <= end).sum()) for end in [0, *grid, last]}
    least = np.inf
    for size in range(min(num_buckets, len(grid) + 1)):
        for chosen in itertools.combinations(grid, size):
            lens = [*chosen, last]
            counts = [
                at_most[b] - at_most[a] for a, b in itertools.pairwise([0, *lens])
            ]
            cheapest = cheapest_epoch(
                counts,
                [rows(end) for end in lens],
                lambda most: range(first, most + 1, multiple),
                lambda b, k, lens=lens: cost(b, lens[k]),
            )
            least = min(least, cheapest)
    return least


def odd_cost(batch_size: int, seq_len: int) -> float:
    """Returns a cost of a row that is pseudorandom, and so not monotone in T."""
    return 1 + batch_size * (1 + seq_len * 104729 % 97 / 7)


COSTS: dict[str, Cost | None] = {
    "none": None,
    "tokens": TokenCost(),
    "transformer": TransformerCost(width=4, depth=2, vocab_size=32),
    "measured": StepTime(per_step=0.02, per_token=1e-3, per_pair=2e-4),
    "odd": odd_cost,
}


# Blocks of 50 small problems with all kinds of ties and remainders.
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("block", [0, *exhaustive(range(1, 12))])
def test_no_choice_of_boundaries_is_cheaper(block, name):
    rng = np.random.default_rng(block)
    for _ in range(50):
        multiple, step = int(rng.choice([1, 1, 2])), int(rng.choice([1, 1, 2, 3]))
        longest, size = int(rng.integers(1, 10)), int(rng.integers(1, 20))
        lengths = rng.integers(1, longest + 1, size)
        if rng.random() < 0.3:
            lengths = rng.choice(np.unique(lengths)[:3], size)
        last = -(-int(lengths.max()) // step) * step
        max_tokens = int(last * multiple + rng.integers(0, 80))
        num_buckets = int(rng.integers(1, 5))
        plan = plan_buckets(
            lengths,
            max_tokens=max_tokens,
            num_buckets=num_buckets,
            batch_size_multiple=multiple,
            seq_len_multiple=step,
            cost_fn=COSTS[name],
        )
        assert len(plan) <= num_buckets
        best = brute_force(
            lengths,
            num_buckets,
            step,
            lambda end, m=multiple, total=max_tokens: total // end // m * m,
            COSTS[name] or TokenCost(),
            multiple,
        )
        assert report(plan, lengths).epoch_cost == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(8))
def test_no_choice_is_cheaper_with_varying_budgets_and_batch_limits(seed, name):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 13, int(rng.integers(1, 20)))
    budgets = rng.integers(1, 90, 13)
    fewest, most = int(rng.integers(1, 4)), int(rng.integers(4, 12))
    last = int(lengths.max())
    budgets[last] += last * fewest

    def rows(end: int) -> int:
        batch_size = min(int(budgets[end]) // end, most)
        return batch_size if batch_size >= fewest else 0

    limits = Limits(
        max_tokens=lambda seq_len: int(budgets[seq_len]),
        min_batch_size=fewest,
        max_batch_size=most,
        cost_fn=COSTS[name],
    )
    plan = plan_within(lengths, limits, num_buckets=3)
    for bucket in plan.buckets:
        assert fewest <= bucket.batch_size <= rows(bucket.seq_len)
    cost = COSTS[name] or TokenCost()
    best = brute_force(lengths, 3, 1, rows, cost, fewest=fewest)
    assert report(plan, lengths).epoch_cost == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_cheaper_with_micro_batches(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 13, int(rng.integers(1, 30)))
    together, num_buckets = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    max_tokens = int(lengths.max() + rng.integers(0, 20))
    cost = COSTS["measured"] or TokenCost()
    plan = plan_buckets(
        lengths,
        max_tokens=max_tokens,
        num_buckets=num_buckets,
        cost_fn=cost,
        accumulate=together,
    )
    best = brute_force(
        lengths,
        num_buckets,
        1,
        lambda end: max_tokens // end * together,
        lambda rows, end: together * cost(rows // together, end),
        together,
    )
    epoch = report(plan, lengths, accumulate=together)
    assert epoch.epoch_cost == pytest.approx(best, rel=1e-9)


def full_batches(
    lengths: np.ndarray, num_buckets: int, max_tokens: int, cost: Cost
) -> float:
    """Returns the least cost of full batches, by dynamic programming over lengths."""
    ends = range(1, int(lengths.max()) + 1)
    at_most = [0, *(int((lengths <= end).sum()) for end in ends)]
    rates = [0, *(cost(max_tokens // t, t) / (max_tokens // t) for t in ends)]
    best = [0.0] + [np.inf] * len(ends)
    for _ in range(num_buckets):
        best = [
            min(
                [best[j]]
                + [best[i] + (at_most[j] - at_most[i]) * rates[j] for i in range(j)]
            )
            for j in range(len(best))
        ]
    return best[-1]


@pytest.mark.parametrize("name", ["tokens", "transformer", "measured", "odd"])
@pytest.mark.parametrize("seed", range(2))
def test_the_full_batch_cost_is_the_least_cost_of_full_batches(seed, name):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3, 0.7, 400), 1, 60).astype(int)
    cost, num_buckets = COSTS[name] or TokenCost(), int(rng.integers(1, 6))
    limits = Limits(max_tokens=300, cost_fn=cost)
    optimum = Optimum(Candidates.of(lengths, limits), num_buckets)
    expected = full_batches(lengths, num_buckets, 300, cost)
    assert optimum.full_batch_cost() == pytest.approx(expected, rel=1e-9)
    plan = plan_buckets(lengths, max_tokens=300, num_buckets=num_buckets, cost_fn=cost)
    result = report(plan, lengths).epoch_cost
    # Remainders add at most one batch per bucket to the cost of full batches.
    assert expected * (1 - 1e-9) <= result <= expected + plan.costs.sum()


def check_rules(candidates: Candidates, num_buckets: int, cost: float) -> None:
    """Checks that no heuristic rule finds a cheaper epoch."""
    for name, rule in RULES.items():
        if name != "optimal":
            assert cost <= candidates.epoch_cost(rule(candidates, num_buckets))


# Epochs of few batches, in which remainders dominate the cost


@pytest.mark.parametrize("name", ["tokens", "transformer", "measured"])
@pytest.mark.parametrize("seed", [1, *exhaustive([0, 2, 3, 4, 5])])
def test_few_batches_are_planned_well(seed, name):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5, 1, 1500), 1, 3000).astype(int)
    max_tokens = int(lengths.sum() // rng.integers(3, 30) + 3000)
    limits = Limits(max_tokens=max_tokens, cost_fn=COSTS[name])
    candidates = Candidates.of(lengths, limits)
    before = np.inf
    for num_buckets in (2, 4, 8, 20, 32):
        optimum = Optimum(candidates, num_buckets)
        cost = candidates.epoch_cost(optimum.choice())
        # More buckets never cost more, although each number is solved separately.
        assert cost <= before * (1 + 1e-12)
        check_rules(candidates, num_buckets, cost)
        before = cost


def test_an_incomplete_search_is_no_worse_than_any_rule(monkeypatch):
    monkeypatch.setattr("jaxbucket.plan.optimal._SOFT_PAIRS", 0)
    monkeypatch.setattr("jaxbucket.plan.optimal._FIRST_WIDTH", 1)
    rng, num_incomplete = np.random.default_rng(0), 0
    for _ in range(20):
        lengths = np.clip(rng.lognormal(4, 1, 500), 1, 900).astype(int)
        limits = Limits(max_tokens=int(rng.integers(1000, 30_000)))
        candidates = Candidates.of(lengths, limits)
        optimum = Optimum(candidates, 12)
        check_rules(candidates, 12, candidates.epoch_cost(optimum.choice()))
        num_incomplete += not optimum.exact
    assert num_incomplete


@pytest.mark.exhaustive
@pytest.mark.parametrize("huge", [1e9, 1e60])
def test_a_huge_cost_excludes_shapes_without_changing_others(huge):
    lengths = np.random.default_rng(0).integers(1, 200, 2000)

    def cost(batch_size: int, seq_len: int) -> float:
        allowed = seq_len % 8 == 0 or seq_len == 199
        return float(batch_size * seq_len) if allowed else huge

    plan = plan_buckets(lengths, max_tokens=4096, num_buckets=5, cost_fn=cost)
    assert all(b.seq_len % 8 == 0 or b.seq_len == 199 for b in plan.buckets)
    limits = Limits(max_tokens=4096, cost_fn=cost)
    optimum = Optimum(Candidates.of(lengths, limits), 5)
    least = min(
        report(
            plan_buckets(lengths, max_tokens=4096, boundaries=[*ends, 199]), lengths
        ).padded_tokens
        for ends in itertools.combinations(range(8, 199, 8), 4)
        if ends[0] in (32, 40, 48) and ends[-1] in (152, 160, 168)
    )
    assert optimum.full_batch_cost() <= report(plan, lengths).epoch_cost <= least


def many_lengths(seed: int) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(5, 1.2, 3000), 1, 4000)


@pytest.mark.parametrize("seed", range(2))
def test_bounding_memory_does_not_change_the_choice(monkeypatch, seed):
    limits = Limits(max_tokens=8192 * (1 + 40 * seed), cost_fn=StepTime(0.1, 1e-4, 0))
    candidates = Candidates.of(many_lengths(seed).astype(int), limits)
    expected = Optimum(candidates, 6).choice()
    # Far fewer than are examined, so that each search has to discard some.
    monkeypatch.setattr("jaxbucket.plan.branch_and_bound._MAX_STATES", 100)
    monkeypatch.setattr("jaxbucket.plan.branch_and_bound._CHUNK", 1000)
    np.testing.assert_array_equal(Optimum(candidates, 6).choice(), expected)


@pytest.mark.parametrize("seed", range(2))
def test_skipped_pairs_do_not_change_the_choice(monkeypatch, seed):
    # With so few states, most pairs are skipped.
    monkeypatch.setattr("jaxbucket.plan.branch_and_bound._SURPLUS", 1)
    limits = Limits(max_tokens=32_768, batch_size_multiple=8)
    candidates = Candidates.of(many_lengths(seed).astype(int), limits)
    numbers = []

    def extensions(self, states, parent, end, original=Search._extensions):
        numbers[-1] += len(end)
        return original(self, states, parent, end)

    def chosen() -> tuple[list[int], bool]:
        numbers.append(0)
        optimum = Optimum(candidates, 8)
        return optimum.choice().tolist(), optimum.exact

    def no_bounds(self, *args, original=Search._open_pairs):
        for parent, end, bound in original(self, *args):
            yield parent, end, np.zeros_like(bound)

    monkeypatch.setattr(Search, "_extensions", extensions)
    expected = chosen()
    monkeypatch.setattr(Search, "_open_pairs", no_bounds)
    assert chosen() == expected
    assert numbers[0] < numbers[1]


def test_time_is_bounded_when_a_batch_holds_an_epoch(monkeypatch):
    monkeypatch.setattr("jaxbucket.plan.optimal._SOFT_PAIRS", 1_000_000)
    monkeypatch.setattr("jaxbucket.plan.optimal._MAX_PAIRS", 2_000_000)
    limits = Limits(max_tokens=2**40, cost_fn=StepTime(0.1, 1e-4, 1e-7))
    candidates = Candidates.of(many_lengths(0).astype(int), limits)
    searches = []

    def improve(self, *known, original=Search.improve):
        searches.append(self)
        return original(self, *known)

    monkeypatch.setattr(Search, "improve", improve)
    optimum = Optimum(candidates, 8)
    cost = candidates.epoch_cost(optimum.choice())
    assert not optimum.exact
    # A search may exceed the limit by one chunk.
    assert sum(search.pairs for search in searches) < 2_000_000 + 20 * 2**20
    check_rules(candidates, 8, cost)
