"""The boundaries of the cheapest epoch, and whether they are proven to be.

`lower_bound` has lower bounds, and `branch_and_bound` the search that these keep short.
Where there are too many buckets and lengths for that, `dense` has boundaries to begin
with, and the search looks at lengths near these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from jaxbucket.plan.boundary_rules import RULES, Candidates
from jaxbucket.plan.branch_and_bound import Search
from jaxbucket.plan.dense import beside, evenly_dense, improved
from jaxbucket.plan.lower_bound import (
    INFINITE,
    Problem,
    cost_ahead,
    lower_bounds,
    traced_ends,
)
from jaxbucket.plan.remainder import least_cost

# Pairs of a beginning and an end that searches look at, bounds included: about two
# seconds on one core, or a few where the last search takes longer than expected.
_ENOUGH_PAIRS, _MOST_PAIRS = 150_000_000, 250_000_000
# The same of all numbers of buckets: then searches stay narrow, and then none begins.
_ENOUGH_PAIRS_IN_ALL, _MOST_PAIRS_IN_ALL = 660_000_000, 900_000_000
# Beyond so many pairs bounds are computed for some of the candidates: half a second.
_MOST_BOUND_PAIRS = 80_000_000
# With fewer candidates for each bucket, a search looks at nearly all of them.
_WIDE, _NARROW = 16, 4
# Pairs that improve the boundaries of very many buckets: about a second.
_DENSE_PAIRS = 20_000_000
# Up to here every number of buckets is tried, however few may be of use.
_FEW_BUCKETS = 64
# States of remainders in which choices are compared: about half a second.
_MOST_STATES = 2_000_000
# Examples, and examples times candidates, for which the cost ahead is computed at once,
# and where a first search was not enough. About 0.1 s, and 1 s.
_LITTLE_AHEAD, _MAX_AHEAD = (10_000, 10_000_000), (100_000, 100_000_000)
# A narrow search is quick, and its result makes a wide one small.
_FIRST_WIDTH, _WIDER = 16, 4


def optimal(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """The boundaries of the cheapest epoch, remainders included.

    The result is proven to be the best if the search ends before it has looked at some
    150 million pairs of boundaries (`Optimum.exact`). Otherwise, with many buckets and
    thousands of lengths, only the most promising choices are completed: the result may
    be some hundredths of a percent off, and is no worse than any rule of thumb.
    """
    return Optimum(candidates, num_buckets).choice(num_buckets)


class Optimum:
    """The best choices of 1 to `max_buckets` of the candidates.

    Args:
      candidates: where buckets may end.
      max_buckets: of how many at most.

    Attributes:
      exact: whether the last choice is proven to be the best.
    """

    def __init__(self, candidates: Candidates, max_buckets: int):
        self.exact = False
        self._candidates = candidates
        self._pairs = 0
        known_cost = _known_cost(candidates, max_buckets)
        # `[G]`: the positions of the problem's candidates among all.
        self._positions = _affordable_batches(candidates, known_cost)
        useful = candidates.take(self._positions)
        if max_buckets > _FEW_BUCKETS:
            max_buckets = min(max_buckets, _most_batches(useful, known_cost))
        # The last is needed even if its batch costs more than an epoch; how much more
        # makes no difference, and twice as much fits into 64 bits.
        ceiling = min(2 * known_cost, useful.costs.max().item())
        useful = dataclasses.replace(useful, costs=useful.costs.clip(max=ceiling))
        self._problem = self._full_problem = Problem.of(useful, max_buckets)
        self._dense_choice: np.ndarray | None = None
        if max_buckets * _pairs(len(useful)) > _MOST_BOUND_PAIRS:
            dense = self._dense(max_buckets)
            grid, max_buckets = self._grid(dense)
            self._dense_choice = np.searchsorted(grid, dense)
            self._positions = self._positions[grid]
            self._problem = self._full_problem.take(grid)
        self._bounds, self._ends = lower_bounds(self._problem, max_buckets)

    def _grid(self, dense: np.ndarray) -> tuple[np.ndarray, int]:
        """Candidates near a good choice, and how many buckets a search can afford."""
        size = _affordable(len(self._full_problem), len(dense))
        grid = beside(dense, size, len(self._full_problem))
        return grid, min(len(dense), size // _NARROW)

    def choice(self, num_buckets: int, known: np.ndarray | None = None) -> np.ndarray:
        """Returns the best boundaries of at most so many buckets.

        Args:
          num_buckets: not above `max_buckets`.
          known: the best of one bucket fewer, if that is known.
        """
        size = min(num_buckets, len(self._ends))
        # A rule may have chosen ends that no best choice has.
        if known is not None:
            is_open = np.isin(known, self._positions).all()
            known = np.searchsorted(self._positions, known) if is_open else None
        best = self._best_of_full_batches(size, known)
        dense = self._dense_choice
        if dense is not None and len(dense) <= num_buckets:
            best = min(best, dense, key=self._problem.epoch_cost)
        best = self._positions[self._search(best, size)]
        if self.exact:
            return best
        by_rule = [rule(self._candidates, num_buckets) for rule in RULES.values()]
        return min([best, *by_rule], key=self._candidates.epoch_cost)

    def _search(self, best: np.ndarray, num_buckets: int) -> np.ndarray:
        """Returns a better choice, if wider and wider searches find one."""
        problem = self._problem
        # The bounds were as much work as so many pairs.
        pairs = num_buckets * _pairs(len(problem))
        width = _FIRST_WIDTH
        # If it takes longer than a first search, only where that was not enough.
        ahead = self._cost_ahead if self._is_little(*_LITTLE_AHEAD) else None
        is_whole = self._candidates.complete and problem is self._full_problem
        self.exact = False
        while self._pairs < _MOST_PAIRS_IN_ALL:
            search = Search(
                problem,
                self._bounds[: num_buckets + 1],
                ahead,
                width,
                _MOST_PAIRS - pairs,
            )
            best = search.better_than(best)
            pairs += search.pairs
            self._pairs += search.pairs
            self.exact = is_whole and not search.cut
            is_enough = pairs + 2 * search.pairs > _ENOUGH_PAIRS
            if not search.cut or is_enough or self._pairs > _ENOUGH_PAIRS_IN_ALL:
                break
            width *= _WIDER
            ahead = self._cost_ahead
        return best

    def _best_of_full_batches(
        self, num_buckets: int, known: np.ndarray | None
    ) -> np.ndarray:
        """Of the best choices of 1, 2, ... full-batch buckets the cheapest epoch.

        If one of fewer buckets is known, of that and the one of so many. Of very many
        numbers some are skipped, once others have taken their time.
        """
        problem, work = self._problem, 0
        least, best = INFINITE, 0
        if known is not None:
            least = problem.epoch_cost(known)
        ahead = np.zeros(len(problem) + 1, np.int64)
        if num_buckets > _FEW_BUCKETS and self._cost_ahead is not None:
            ahead = self._cost_ahead[problem.below]
        ahead = ahead.tolist()
        for k in _spread(num_buckets) if known is None else [num_buckets]:
            chosen = traced_ends(self._ends[:k])
            beyond = [
                max(int(self._bounds[k - 1 - i][end + 1]), ahead[end + 1])
                for i, end in enumerate(chosen.tolist())
            ]
            cost, looked_at = least_cost(*problem.shapes(chosen), beyond, least)
            if cost is not None and (cost, k) < (least, best or num_buckets + 1):
                least, best = cost, k
            work += looked_at + k
            if work > _MOST_STATES:
                break
        return traced_ends(self._ends[:best]) if best or known is None else known

    def _dense(self, num_buckets: int) -> np.ndarray:
        """A good choice of very many buckets, or of fewer where these cost less."""
        problem = self._full_problem
        sizes = [num_buckets * share // 8 for share in (8, 6, 4, 3, 2, 1)]
        choices = [evenly_dense(problem, max(1, size)) for size in sizes]
        best = min(choices, key=problem.epoch_cost)
        size = _affordable(len(problem), len(best))
        if size < _WIDE * len(best):
            return improved(problem, best, _DENSE_PAIRS)
        # With many candidates for each bucket all buckets are solved at once.
        grid = evenly_dense(problem, size)
        return grid[traced_ends(lower_bounds(problem.take(grid), len(best))[1])]

    @functools.cached_property
    def _cost_ahead(self) -> np.ndarray | None:
        return cost_ahead(self._problem) if self._is_little(*_MAX_AHEAD) else None

    def _is_little(self, examples: int, pairs: int) -> bool:
        total = int(self._problem.below[-1])
        return total <= examples and total * len(self._problem) <= pairs

    def steady_cost(self, num_buckets: int) -> float:
        """The least that an epoch could cost if every batch were full.

        In the unit of the candidates' costs; no choice of so many buckets costs less.
        One batch there is at least.
        """
        bounds = self._full_batches
        bound = bounds[min(num_buckets, len(bounds) - 1)]
        problem = self._full_problem
        return max(bound, int(problem.costs.min())) / problem.scale

    @functools.cached_property
    def _full_batches(self) -> list[int]:
        """What full batches of at most 0, 1, 2, ... buckets cost at least."""
        if self._problem is self._full_problem:
            return [int(bound[0]) for bound in self._bounds]
        grid = evenly_dense(self._full_problem, len(self._problem))
        bounds, _ = lower_bounds(self._full_problem.relaxed(grid), len(self._ends))
        # Of more buckets nothing is known but that each row costs something.
        least = int(np.diff(self._full_problem.below) @ self._full_problem.rates)
        return [*(int(bound[0]) for bound in bounds), least]


def _affordable_batches(candidates: Candidates, known_cost: float) -> np.ndarray:
    """`[n]`: the candidates among which a best choice is always found, and the last.

    Of neighbors with the same examples and the same batch size the cheapest is better
    than the others. One that no example reaches is of no use, nor is one of which a
    batch costs more than a known epoch: beside a cost that says never, others would
    differ by less than an integer.
    """
    last = len(candidates) - 1
    is_first = np.ones(len(candidates), bool)
    is_first[1:] = np.diff(candidates.examples) != 0
    is_first[1:] |= np.diff(candidates.batch_sizes) != 0
    order = np.lexsort((np.arange(last + 1), candidates.costs, np.cumsum(is_first)))
    cheapest = order[np.flatnonzero(is_first)]
    is_useful = candidates.examples[cheapest] > 0
    is_useful &= candidates.costs[cheapest] <= known_cost
    return np.append(cheapest[is_useful & (cheapest < last)], last)


def _pairs(size: int) -> int:
    """Pairs of a beginning and an end that the bounds of a bucket look at, about."""
    return size * size.bit_length()


def _affordable(size: int, num_buckets: int) -> int:
    """How many of the candidates can be looked at, for so many buckets or fewer."""
    while min(num_buckets, size // _NARROW) * _pairs(size) > _MOST_BOUND_PAIRS:
        size = size * 15 // 16
    return size


def _spread(size: int) -> Iterator[int]:
    """`size` and all numbers below, those that are far apart first."""
    yield size
    stride = 1 << (size - 1).bit_length()
    while stride:
        yield from range(stride, size, 2 * stride)
        stride //= 2


def _most_batches(candidates: Candidates, known_cost: float) -> int:
    """The most buckets of an epoch that costs no more, because each has a batch.

    And one that is empty, where the last has to be there.
    """
    cheapest = np.cumsum(np.sort(candidates.costs.astype(np.float64)))
    # Not fewer by a rounding error.
    most = np.searchsorted(cheapest, known_cost * (1 + 1e-9), side="right")
    return 1 + max(1, int(most))


def _known_cost(candidates: Candidates, max_buckets: int) -> float:
    """The cost of an epoch by a rule of thumb, or in one shape."""
    by_rule = [rule(candidates, max_buckets) for rule in RULES.values()]
    known = min(map(candidates.epoch_cost, by_rule))
    # The last bucket has to be there, but where another holds all it may be empty.
    total = candidates.examples[-1]
    holds_all = candidates.examples == total
    holds_all[:-1] &= max_buckets > 1
    batches = -(-total // candidates.batch_sizes[holds_all])
    costs = candidates.costs[holds_all]
    if int(batches.max()) * costs.max().item() >= 2**63:
        # More than 64 bits hold, so in Python's own numbers.
        batches = batches.astype(object)
    return min(known, (batches * costs).min())
