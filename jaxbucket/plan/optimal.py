"""The boundaries that minimize the cost of an epoch, with a proof where possible.

With too many buckets and lengths for a full search, it is restricted to lengths near
evenly dense boundaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxbucket.plan.boundary_rules import RULES
from jaxbucket.plan.branch_and_bound import Search
from jaxbucket.plan.candidates import Candidates
from jaxbucket.plan.flow.batch_sizes import Fit
from jaxbucket.plan.lower_bound import Problem, lower_bounds, traced_ends

# The unit of work is a pair: one start and one end of a bucket that are examined
# together. No wider search starts after the soft limit, and a search stops at the hard
# limit. This takes about two seconds on one core, bounds included.
_SOFT_PAIRS, _MAX_PAIRS = 150_000_000, 250_000_000
# After this many, no wider search starts if the last one found no choice that costs
# less than this share of the previous one.
_UNPROVEN_PAIRS, _HARDLY_LESS = 8_000_000, 1 - 2e-5
# If the bounds need more pairs, only some candidates are used. About half a second.
_MAX_BOUND_PAIRS = 80_000_000
# Candidates per bucket: below `_WIDE`, dense boundaries are not optimized together, and
# below `_NARROW`, the search uses fewer buckets.
_WIDE, _NARROW = 16, 4
# Costs of steps above that of a known epoch by this factor are not told apart.
_MAX_RATIO = 1 << 20
# Lengths are counted in so many bins for their density, because counts of single
# lengths are noisy.
_NUM_BINS = 1024
# Up to this limit, `max_buckets` is not reduced to the number of useful buckets.
_FEW_BUCKETS = 64
# Buckets of compared choices in all: about half a second.
_MAX_COMPARED = 200_000
# The width of the first search and the factor for each further search. A narrow search
# is fast, and its result prunes the wider ones.
_FIRST_WIDTH, _WIDTH_FACTOR = 16, 4


def optimal(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Chooses the boundaries that minimize the cost of an epoch, remainders included.

    The result is proven to be optimal if the search completes within about 150 million
    pairs of boundaries (see `Optimum.exact`). With many buckets and thousands of
    lengths, the search follows only the most promising choices. Then the cost may be a
    few hundredths of a percent above the optimum, but never above any heuristic rule.

    Args:
      candidates: the lengths at which buckets may end.
      num_buckets: the largest number of buckets.

    Returns:
      `[K]` integers, increasing indices of candidates that end with the last.
    """
    return Optimum(candidates, num_buckets).choice()


class Optimum:
    """Finds the best choice of boundaries.

    Args:
      candidates: the lengths at which buckets may end.
      max_buckets: the largest number of buckets.

    Attributes:
      exact: whether the result of `choice` is proven to be optimal.
    """

    def __init__(self, candidates: Candidates, max_buckets: int):
        self.exact = False
        self._candidates = candidates
        self._num_buckets = max_buckets
        known_cost = _known_cost(candidates, max_buckets)
        # `[G]`: the index of each of the problem's candidates in `candidates`.
        self._indices = _useful_candidates(candidates, known_cost)
        useful = candidates.take(self._indices)
        if max_buckets > _FEW_BUCKETS:
            max_buckets = min(max_buckets, _most_batches(useful, known_cost))
        # The last candidate is required even if a batch of it costs far more than a
        # known epoch. Its exact cost does not matter then, but the bits of others do.
        ceiling = min(_MAX_RATIO * known_cost, useful.costs.max().item())
        sizes = useful.sizes
        sizes = dataclasses.replace(sizes, costs=sizes.costs.clip(max=ceiling))
        useful = dataclasses.replace(useful, sizes=sizes)
        self._problem = self._full_problem = Problem.scaled(useful, max_buckets)
        self._dense_choice: np.ndarray | None = None
        if max_buckets * _pairs(len(useful)) > _MAX_BOUND_PAIRS:
            dense = self._dense(max_buckets)
            # Only candidates near a good choice, and as many buckets as is feasible.
            size = _feasible_size(len(self._full_problem), len(dense))
            grid = _near(dense, size, len(self._full_problem))
            max_buckets = min(len(dense), size // _NARROW)
            self._dense_choice = np.searchsorted(grid, dense)
            self._indices = self._indices[grid]
            self._problem = self._full_problem.take(grid)
        self._bounds, self._ends = lower_bounds(self._problem, max_buckets)

    def choice(self) -> np.ndarray:
        """Returns the best boundaries: `[K]` increasing indices of candidates."""
        size = len(self._ends)
        best = self._best_by_full_batches(size)
        if self._dense_choice is not None:
            best = min(best, self._dense_choice, key=self._problem.epoch_cost)
        # Few examples may fill fewer buckets, and then a search for these is faster.
        for number in sorted({len(best), size}):
            best = self._search(best, number)
        best = self._indices[best]
        fit = self._candidates.fit(best)
        if not self.exact:
            best, fit = self._cheapest_rule(best, fit)
        # A bucket may promote all its rows.
        is_used = fit.steps > 0
        is_used[-1] = True
        return best[is_used]

    def _cheapest_rule(self, best: np.ndarray, fit: Fit) -> tuple[np.ndarray, Fit]:
        """Returns a choice and its steps, or those of a cheaper heuristic rule."""
        candidates, rates = self._candidates, self._candidates.sizes.rates()
        for rule in RULES.values():
            chosen = rule(candidates, self._num_buckets)
            # Mostly, even full batches cost more.
            if candidates.counts(chosen) @ rates[chosen] < fit.cost:
                other = candidates.fit(chosen)
                if other.cost < fit.cost:
                    best, fit = chosen, other
        return best, fit

    def _search(self, best: np.ndarray, num_buckets: int) -> np.ndarray:
        """Returns a better choice if one of several, ever wider searches finds one."""
        problem = self._problem
        # The work that the bounds took.
        pairs = num_buckets * _pairs(len(problem))
        width, cost = _FIRST_WIDTH, int(problem.epoch_cost(best))
        is_whole = self._candidates.complete and problem is self._full_problem
        self.exact = False
        while True:
            search = Search(
                problem, self._bounds[: num_buckets + 1], width, _MAX_PAIRS - pairs
            )
            best = search.improve(best, cost)
            pairs += search.pairs
            self.exact = is_whole and not search.incomplete
            is_enough = pairs + 2 * search.pairs > _SOFT_PAIRS
            is_repeated = width > _FIRST_WIDTH and pairs > _UNPROVEN_PAIRS
            is_enough |= is_repeated and search.cost > _HARDLY_LESS * cost
            cost = search.cost
            if not search.incomplete or is_enough:
                return best
            width *= _WIDTH_FACTOR

    def _best_by_full_batches(self, num_buckets: int) -> np.ndarray:
        """Returns the choice with the cheapest epoch among the best for full batches.

        This compares the choices of 1, 2, ... buckets, and skips some numbers if the
        comparison takes too long.
        """
        choices, compared = [], 0
        for k in _spread(num_buckets):
            choices.append(traced_ends(self._ends[:k]))
            compared += k
            if compared > _MAX_COMPARED:
                break
        return min(choices, key=lambda x: (self._problem.padded_cost(x), len(x)))

    def _dense(self, num_buckets: int) -> np.ndarray:
        """Returns a good choice of very many buckets, or of fewer if it is cheaper."""
        problem = self._full_problem
        sizes = [num_buckets * share // 8 for share in (8, 6, 4, 3, 2, 1)]
        choices = [_evenly_dense(problem, max(1, size)) for size in sizes]
        best = min(choices, key=problem.epoch_cost)
        size = _feasible_size(len(problem), len(best))
        if size < _WIDE * len(best):
            return best
        # With many candidates per bucket, all boundaries are optimized together.
        grid = _evenly_dense(problem, size)
        return grid[traced_ends(lower_bounds(problem.take(grid), len(best))[1])]

    def full_batch_cost(self) -> float:
        """Returns the least cost of an epoch if every batch were full.

        This is a lower bound of the cost of every choice, in the unit of the
        candidates' costs. It is at least the cost of one batch.
        """
        problem = self._full_problem
        if self._problem is problem:
            bound = int(self._bounds[-1][0])
        else:
            # With as many buckets as candidates, each row would cost the least.
            bound = int(np.diff(problem.below) @ problem.rates)
        return max(bound, int(problem.sizes.costs.min())) / problem.scale


def _useful_candidates(candidates: Candidates, known_cost: float) -> np.ndarray:
    """Returns indices of candidates that contain an optimal choice, `[n]`.

    The last candidate is always included. Among neighbors with the same examples and
    the same batch size, only the cheapest is useful. A candidate shorter than all
    examples is not useful, and neither is one whose batch costs more than a known
    epoch. The latter must be removed, because users may exclude a shape by a huge cost,
    next to which all other costs would be scaled to equal integers.
    """
    last = len(candidates) - 1
    is_first = np.ones(len(candidates), bool)
    is_first[1:] = np.diff(candidates.examples) != 0
    is_first[1:] |= np.diff(candidates.batch_sizes) != 0
    order = np.lexsort((np.arange(last + 1), candidates.costs, np.cumsum(is_first)))
    cheapest = order[np.flatnonzero(is_first)]
    is_useful = candidates.examples[cheapest] > 0
    is_useful &= candidates.sizes.costs[cheapest, 0] <= known_cost
    return np.append(cheapest[is_useful & (cheapest < last)], last)


def _evenly_dense(problem: Problem, num_buckets: int) -> np.ndarray:
    """Returns at most `num_buckets` boundaries: increasing indices, `[K]`.

    Their density is best for full batches on average. At a length with n examples,
    where the cost of a row increases by r per position, the best bucket width is
    inversely proportional to the square root of n * r (Panter and Dite, "Quantization
    distortion in pulse-count modulation with nonuniform spacing of levels", 1951).
    """
    last = len(problem) - 1
    num_bins = min(last, _NUM_BINS)
    ends = np.unique(np.arange(num_bins + 1) * last // max(num_bins, 1))
    examples, rates = np.diff(problem.examples[ends]), np.diff(problem.rates[ends])
    density = np.sqrt(examples.astype(np.float64) * rates)
    # A small constant keeps the density positive where a boundary saves nothing.
    density += density.sum() / (1 << 20) + 1
    total = np.append(0, np.cumsum(density))
    shares = total[-1] * np.arange(1, num_buckets) / num_buckets
    return np.unique(np.append(np.interp(shares, total, ends).astype(np.int64), last))


def _near(chosen: np.ndarray, size: int, num_candidates: int) -> np.ndarray:
    """Returns the chosen indices, `[K]`, and their neighbors: about `size` indices."""
    reach = size // (2 * len(chosen))
    neighbors = chosen[:, None] + np.arange(-reach, reach + 1)
    return np.unique(np.clip(neighbors, 0, num_candidates - 1))


def _pairs(size: int) -> int:
    """Returns about how many pairs the bounds examine per bucket."""
    return size * size.bit_length()


def _feasible_size(size: int, num_buckets: int) -> int:
    """Returns how many of `size` candidates the bounds can be computed for in time."""
    while min(num_buckets, size // _NARROW) * _pairs(size) > _MAX_BOUND_PAIRS:
        size = size * 15 // 16
    return size


def _spread(size: int) -> Iterator[int]:
    """Yields `size`, and then all smaller positive numbers, from coarse to fine."""
    yield size
    stride = 1 << (size - 1).bit_length()
    while stride:
        yield from range(stride, size, 2 * stride)
        stride //= 2


def _most_batches(candidates: Candidates, known_cost: float) -> int:
    """Returns the largest number of buckets of an epoch within the known cost.

    Each bucket has at least one batch, except the last bucket, which is always required
    and may be empty.
    """
    cheapest = np.cumsum(np.sort(candidates.sizes.costs[:, 0].astype(np.float64)))
    # The factor makes up for rounding errors.
    most = np.searchsorted(cheapest, known_cost * (1 + 1e-9), side="right")
    return 1 + max(1, int(most))


def _known_cost(candidates: Candidates, max_buckets: int) -> float:
    """Returns the cost of an epoch by the best heuristic rule, or in one shape.

    No rows are promoted.
    """
    by_rule = [rule(candidates, max_buckets) for rule in RULES.values()]
    # The last bucket may be empty if a shorter one holds all examples.
    holds_all = np.flatnonzero(candidates.examples == candidates.examples[-1])
    alone = holds_all if max_buckets > 1 else holds_all[-1:]
    examples = np.full(len(alone), candidates.examples[-1])
    known = candidates.sizes.padded_costs(alone, examples).min().item()
    return min(known, *map(candidates.padded_cost, by_rule))
