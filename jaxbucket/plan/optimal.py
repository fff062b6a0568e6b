"""The boundaries of the cheapest epoch, and whether they are proven to be.

Lower bounds are in `bounds`, and the search that they make short is in `search`. Where
there are too many buckets and lengths for these, `dense` has others to begin with, and
what is searched is beside them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from jaxbucket.plan.bounds import (
    INFINITE,
    Problem,
    cost_ahead,
    lower_bounds,
    traced_ends,
)
from jaxbucket.plan.branch_and_bound import Search
from jaxbucket.plan.dense import beside, evenly_dense, improved
from jaxbucket.plan.remainder import least_cost
from jaxbucket.plan.rules import RULES, Candidates

# Pairs looked at in all, bounds included: bounds time, to about two seconds on one
# core, or a few, where the last search takes more than those before let expect.
_ENOUGH_PAIRS, _MOST_PAIRS = 150_000_000, 250_000_000
# Of all numbers of buckets together: then searches stay narrow, and then there is none.
_ENOUGH_PAIRS_IN_ALL, _MOST_PAIRS_IN_ALL = 660_000_000, 900_000_000
# Bounds of more pairs are not looked for, but of some of the candidates: half a second.
_MOST_BOUND_PAIRS = 80_000_000
# For each bucket so many candidates, or what is searched is nearly all there is.
_WIDE, _NARROW = 16, 4
# By so many are the boundaries of very many buckets improved: about a second.
_DENSE_PAIRS = 20_000_000
# Up to here every number of buckets is looked at, however few may be of use.
_FEW_BUCKETS = 64
# States of remainders, where choices are compared: about half a second.
_MOST_STATES = 2_000_000
# Examples, and these times candidates, for which what remainders cost ahead is looked
# at: at once, and where a first search was not enough. About 0.1 s, and 1 s.
_LITTLE_AHEAD, _MAX_AHEAD = (10_000, 10_000_000), (100_000, 100_000_000)
# A narrow search is quick, and what it finds makes a wide one small.
_FIRST_WIDTH, _WIDER = 16, 4


def optimal(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """The boundaries of the cheapest epoch, remainders included.

    The result is proven to be the best if the search ends before it has looked at some
    150 million pairs of boundaries (`Optimum.exact`). Where it does not, which takes
    many buckets and thousands of lengths, only the most promising beginnings have gone
    on: then it may be some hundredths of a percent off, and no worse than any rule of
    thumb.
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
        self._max_buckets = max_buckets
        self._pairs = 0
        most = _known_cost(candidates, max_buckets)
        self._kept = _worth_a_batch(candidates, _distinct(candidates), most)
        few = candidates.take(self._kept)
        if max_buckets > _FEW_BUCKETS:
            max_buckets = min(max_buckets, _used(few, most))
        # The last is kept in any case; whether it costs more, or never, is the same.
        few = dataclasses.replace(few, costs=few.costs.clip(max=_twice(few, most)))
        self._problem = self._whole = Problem.of(few, max_buckets)
        self._good: np.ndarray | None = None
        if max_buckets * _pairs(len(few)) > _MOST_BOUND_PAIRS:
            good = self._dense(max_buckets)
            grid, max_buckets = self._grid(good)
            self._good = np.searchsorted(grid, good)
            self._kept, self._problem = self._kept[grid], self._whole.take(grid)
        self._bounds, self._ends = lower_bounds(self._problem, max_buckets)

    def _grid(self, good: np.ndarray) -> tuple[np.ndarray, int]:
        """Candidates beside a good choice, and how many buckets can be looked at."""
        size = _affordable(len(self._whole), len(good))
        grid = beside(good, size, len(self._whole))
        return grid, min(len(good), size // _NARROW)

    def choice(self, num_buckets: int, known: np.ndarray | None = None) -> np.ndarray:
        """Returns the best boundaries of at most so many buckets.

        Args:
          num_buckets: not above `max_buckets`.
          known: the best of one bucket fewer, if that is known.
        """
        problem, most = self._problem, min(num_buckets, len(self._ends))
        # What a rule chose may hold ends that no best choice has.
        if known is not None and np.isin(known, self._kept).all():
            known = np.searchsorted(self._kept, known)
        else:
            known = None
        best = self._best_of_full_batches(most, known)
        if self._good is not None and len(self._good) <= num_buckets:
            best = min(best, self._good, key=problem.epoch_cost)
        # The bounds were as much work as so many pairs.
        pairs = most * _pairs(len(problem))
        width = _FIRST_WIDTH
        # Where it takes longer than a first search, only if that is not enough.
        ahead = self._cost_ahead if self._is_little(*_LITTLE_AHEAD) else None
        while self._pairs < _MOST_PAIRS_IN_ALL:
            search = Search(
                problem, self._bounds[: most + 1], ahead, width, _MOST_PAIRS - pairs
            )
            best = search.better_than(best)
            pairs += search.pairs
            self._pairs += search.pairs
            self.exact = self._candidates.complete and not search.cut
            self.exact &= problem is self._whole
            if self.exact:
                return self._kept[best]
            is_enough = pairs + 2 * search.pairs > _ENOUGH_PAIRS
            if not search.cut or is_enough or self._pairs > _ENOUGH_PAIRS_IN_ALL:
                break
            width *= _WIDER
            ahead = self._cost_ahead
        else:
            self.exact = False
        return self._no_worse_than_rules(self._kept[best], num_buckets)

    def _best_of_full_batches(
        self, num_buckets: int, known: np.ndarray | None
    ) -> np.ndarray:
        """Of the best choices of 1, 2, ... buckets by full batches the cheapest epoch.

        Where one of fewer buckets is known, of that and the one of so many. Of very
        many some are left out, once others have taken their time.
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
        whole = self._whole
        sizes = [num_buckets * share // 8 for share in (8, 6, 4, 3, 2, 1)]
        choices = [evenly_dense(whole, max(1, size)) for size in sizes]
        good = min(choices, key=whole.epoch_cost)
        size = _affordable(len(whole), len(good))
        if size < _WIDE * len(good):
            return improved(whole, good, _DENSE_PAIRS)
        # Where many candidates can be looked at for each bucket, it is for all at once.
        grid = evenly_dense(whole, size)
        return grid[traced_ends(lower_bounds(whole.take(grid), len(good))[1])]

    @functools.cached_property
    def _cost_ahead(self) -> np.ndarray | None:
        return cost_ahead(self._problem) if self._is_little(*_MAX_AHEAD) else None

    def _is_little(self, examples: int, pairs: int) -> bool:
        total = int(self._problem.below[-1])
        return total <= examples and total * len(self._problem) <= pairs

    def _no_worse_than_rules(self, chosen: np.ndarray, num_buckets: int) -> np.ndarray:
        others = [rule(self._candidates, num_buckets) for rule in RULES.values()]
        return min([chosen, *others], key=self._candidates.epoch_cost)

    def steady_cost(self, num_buckets: int) -> float:
        """The least that an epoch could cost if every batch were full.

        In the unit of the candidates' costs; no choice of so many buckets costs less.
        One batch there is at least.
        """
        bounds = self._full_batches
        bound = bounds[min(num_buckets, len(bounds) - 1)]
        return max(bound, int(self._whole.costs.min())) / self._whole.scale

    @functools.cached_property
    def _full_batches(self) -> list[int]:
        """What full batches of at most 0, 1, 2, ... buckets cost at least."""
        if self._problem is self._whole:
            return [int(bound[0]) for bound in self._bounds]
        grid = evenly_dense(self._whole, len(self._problem))
        bounds, _ = lower_bounds(self._whole.relaxed(grid), len(self._ends))
        # Of more buckets nothing is known but that each row costs something.
        least = int(np.diff(self._whole.below) @ self._whole.rates)
        return [*(int(bound[0]) for bound in bounds), least]


def _distinct(candidates: Candidates) -> np.ndarray:
    """`[n]`: the candidates among which a best choice is always found.

    Of neighbours with the same examples and the same batch size one is better than the
    others, the cheapest; one that no example reaches is of no use.
    """
    new = np.ones(len(candidates), bool)
    new[1:] = np.diff(candidates.examples) != 0
    new[1:] |= np.diff(candidates.batch_sizes) != 0
    order = np.lexsort((np.arange(len(new)), candidates.costs, np.cumsum(new)))
    cheapest = order[np.flatnonzero(new)]
    last = len(candidates) - 1
    reached = cheapest[candidates.examples[cheapest] > 0]
    return np.append(reached[reached < last], last)


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


def _used(candidates: Candidates, most: float) -> int:
    """How many buckets an epoch has at most that costs no more: each has a batch.

    And one that is empty, where the last has to be there.
    """
    cheapest = np.cumsum(np.sort(candidates.costs.astype(np.float64)))
    # Not fewer by a rounding error.
    most *= 1 + 1e-9
    return 1 + max(1, int(np.searchsorted(cheapest, most, side="right")))


def _twice(candidates: Candidates, cost: float) -> float:
    """Twice a cost, or the highest of a batch, which 64 bits hold."""
    return min(2 * cost, candidates.costs.max().item())


def _known_cost(candidates: Candidates, max_buckets: int) -> float:
    """What an epoch costs that there is: by a rule of thumb, or in one shape."""
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


def _worth_a_batch(candidates: Candidates, kept: np.ndarray, most: float) -> np.ndarray:
    """Those `[n]` of which one batch costs no more than a whole epoch, and the last.

    Beside a cost that says never, others would differ by less than an integer.
    """
    return kept[(candidates.costs[kept] <= most) | (kept == len(candidates) - 1)]
