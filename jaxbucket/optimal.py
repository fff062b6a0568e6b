"""The boundaries of the cheapest epoch, and whether they are proven to be.

Lower bounds are in `bounds`, and the search that they make short is in `search`.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxbucket.boundaries import RULES, Candidates
from jaxbucket.bounds import Problem, cost_ahead, lower_bounds, traced_ends
from jaxbucket.search import Search

# Pairs looked at in all, bounds included: bounds time, to about two seconds on one
# core, or a few, where the last search takes more than those before let expect.
_ENOUGH_PAIRS, _MOST_PAIRS = 150_000_000, 250_000_000
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
        most = _known_cost(candidates, max_buckets)
        self._kept = _affordable(candidates, _distinct(candidates), most)
        few = candidates.take(self._kept)
        # The last is kept in any case; whether it costs more, or never, is the same.
        few = dataclasses.replace(few, costs=np.minimum(few.costs, 2 * most))
        self._problem = Problem.of(few, max_buckets)
        self._bounds, self._ends = lower_bounds(self._problem, max_buckets)

    def choice(self, num_buckets: int, known: np.ndarray | None = None) -> np.ndarray:
        """Returns the best boundaries of at most so many buckets.

        Args:
          num_buckets: not above `max_buckets`.
          known: a choice to improve on, for example the best of fewer buckets.
        """
        problem = self._problem
        choices = [traced_ends(self._ends[:k]) for k in range(1, num_buckets + 1)]
        # What a rule chose may hold ends that no best choice has.
        if known is not None and np.isin(known, self._kept).all():
            choices.append(np.searchsorted(self._kept, known))
        best = min(choices, key=problem.epoch_cost)
        # The bounds were as much work as so many pairs.
        pairs = num_buckets * len(problem) * len(problem).bit_length()
        width = _FIRST_WIDTH
        # Where it takes longer than a first search, only if that is not enough.
        ahead = self._cost_ahead if self._is_little(*_LITTLE_AHEAD) else None
        while True:
            bounds = self._bounds[: num_buckets + 1]
            search = Search(problem, bounds, ahead, width, _MOST_PAIRS - pairs)
            best = search.better_than(best)
            pairs += search.pairs
            self.exact = self._candidates.complete and not search.cut
            if not search.cut:
                return self._kept[best]
            if pairs + 2 * search.pairs > _ENOUGH_PAIRS:
                return self._no_worse_than_rules(self._kept[best], num_buckets)
            width *= _WIDER
            ahead = self._cost_ahead

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
        problem = self._problem
        least = max(int(self._bounds[num_buckets][0]), int(problem.costs.min()))
        return least / problem.scale


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


def _known_cost(candidates: Candidates, max_buckets: int) -> float:
    """What an epoch costs that there is: by a rule of thumb, or in one shape."""
    by_rule = [rule(candidates, max_buckets) for rule in RULES.values()]
    known = min(map(candidates.epoch_cost, by_rule))
    # The last bucket has to be there, but where another holds all it may be empty.
    total = candidates.examples[-1]
    holds_all = candidates.examples == total
    holds_all[:-1] &= max_buckets > 1
    batches = -(-total // candidates.batch_sizes[holds_all])
    return min(known, (batches * candidates.costs[holds_all]).min().item())


def _affordable(candidates: Candidates, kept: np.ndarray, most: float) -> np.ndarray:
    """Those `[n]` of which one batch costs no more than a whole epoch, and the last.

    Beside a cost that says never, others would differ by less than an integer.
    """
    return kept[(candidates.costs[kept] <= most) | (kept == len(candidates) - 1)]
