"""The boundaries of the cheapest epoch, by dynamic programming and a search.

Ignoring remainders, the cost of boundaries is a sum over buckets, and dynamic
programming gives its minimum: a lower bound for every beginning of a choice. The search
then extends beginnings bucket by bucket, remainders counted, and keeps those whose
bound is below the best complete choice known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from jaxbucket import boundaries
from jaxbucket.boundaries import Candidates

# Costs are counted in integers, so that a plan does not depend on how a machine rounds.
# What an epoch costs has this many bits; sums of a few of them stay below 2**63.
_TOTAL_BITS = 59
_INFINITE = 2**61
# Pairs of (beginning, end) looked at together: bounds memory.
_CHUNK = 1 << 20
# Pairs looked at in all, bounds included, unless the first search needs more: bounds
# time, to about two seconds on one core. One that is kept takes as long as some others.
_MAX_PAIRS = 150_000_000
_CLOSING = 16
# Examples, and these times candidates, for which what remainders cost ahead is looked
# at: at once, and where a first search was not enough. About 0.1 s, and 1 s.
_LITTLE_AHEAD, _MAX_AHEAD = (10_000, 10_000_000), (100_000, 100_000_000)
# A narrow search is quick, and what it finds makes a wide one small.
_FIRST_WIDTH, _WIDER = 16, 4
# For each beginning that goes on, how many are compared with one another: most are not
# as good as another that ends alike.
_SURPLUS = 64
# Into about so many blocks are the ends cut, of which most are ruled out as a whole.
_BLOCKS = 1024


_RULES = (
    *(boundaries.quantile, boundaries.equal_tokens, boundaries.equal_width),
    *(boundaries.quarters, boundaries.geometric, boundaries.powers_of_two),
)


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
        self._problem = _Problem.of(few, max_buckets)
        self._bounds, self._ends = _lower_bounds(self._problem, max_buckets)

    def choice(self, num_buckets: int, known: np.ndarray | None = None) -> np.ndarray:
        """Returns the best boundaries of at most so many buckets.

        Args:
          num_buckets: not above `max_buckets`.
          known: a choice to improve on, for example the best of fewer buckets.
        """
        problem = self._problem
        choices = [_traced_ends(self._ends[:k]) for k in range(1, num_buckets + 1)]
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
            search = _Search(problem, bounds, ahead, width)
            best = search.better_than(best)
            pairs += search.pairs
            self.exact = self._candidates.complete and not search.cut
            if not search.cut:
                return self._kept[best]
            if pairs + 2 * search.pairs > _MAX_PAIRS:
                return self._no_worse_than_rules(self._kept[best], num_buckets)
            width *= _WIDER
            ahead = self._cost_ahead

    @functools.cached_property
    def _cost_ahead(self) -> np.ndarray | None:
        return _cost_ahead(self._problem) if self._is_little(*_MAX_AHEAD) else None

    def _is_little(self, examples: int, pairs: int) -> bool:
        total = int(self._problem.below[-1])
        return total <= examples and total * len(self._problem) <= pairs

    def _no_worse_than_rules(self, chosen: np.ndarray, num_buckets: int) -> np.ndarray:
        others = [rule(self._candidates, num_buckets) for rule in _RULES]
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
    by_rule = [rule(candidates, max_buckets) for rule in _RULES]
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


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The candidates, costs in integers.

    Attributes:
      below: `[G + 1]` int64, examples shorter than every candidate may hold, from 0.
      batch_sizes: `[G]` int64.
      costs: `[G]` int64, of a batch.
      rates: `[G]` int64, the least that a row costs in this bucket or a longer one;
        never falls.
      scale: how many of these units make one of the candidates'.
    """

    below: np.ndarray
    batch_sizes: np.ndarray
    costs: np.ndarray
    rates: np.ndarray
    scale: float

    @classmethod
    def of(cls, candidates: Candidates, max_buckets: int) -> _Problem:
        costs = candidates.costs.astype(np.float64)
        worst = (costs / candidates.batch_sizes).max() * candidates.examples[-1]
        worst += costs.max() * max_buckets
        # A power of two, so that integers stay what they are.
        scale = 2.0 ** (_TOTAL_BITS - math.frexp(worst)[1])
        units = np.maximum(1, np.rint(costs * scale)).astype(np.int64)
        rates = units // candidates.batch_sizes
        return cls(
            below=np.concatenate([[0], candidates.examples]),
            batch_sizes=candidates.batch_sizes,
            costs=units,
            rates=np.minimum.accumulate(rates[::-1])[::-1],
            scale=scale,
        )

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def examples(self) -> np.ndarray:
        """`[G]`: how many examples a candidate and all shorter ones hold."""
        return self.below[1:]

    def epoch_cost(self, chosen: np.ndarray) -> int:
        """As `Candidates.epoch_cost`, in units."""
        examples, sizes = self.examples, self.batch_sizes
        whole = Candidates(examples, examples, examples, sizes, self.costs)
        return int(whole.epoch_cost(chosen))


def _lower_bounds(
    problem: _Problem, num_buckets: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The least that all examples beyond a boundary cost, remainders ignored.

    Returns:
      For k = 0 to `num_buckets` a `[G + 1]` int64 array: entry j is the cost of the
      examples that candidates j, j + 1, ... hold beyond candidate j - 1, when at most
      k buckets may end there; entry G, nothing left, is 0. And for k = 1 to
      `num_buckets` a `[G]` array: where the first of these buckets ends.
    """
    nothing_left = np.full(len(problem) + 1, _INFINITE, np.int64)
    nothing_left[-1] = 0
    bounds, ends = [nothing_left], []
    for _ in range(num_buckets):
        costs, best = _best_ends(problem, bounds[-1])
        bounds.append(np.append(costs, 0))
        ends.append(best)
    return bounds, ends


def _cost_ahead(problem: _Problem) -> np.ndarray:
    """`[N + 1]`: the least cost of all examples but the n shortest, remainders counted.

    Of any number of buckets, so that it is a bound for every number. A batch takes the
    shortest examples that are left, as many as are no longer than its bucket; which of
    them go up into a longer one makes no difference.
    """
    examples, sizes, costs = problem.examples, problem.batch_sizes, problem.costs
    total = int(problem.below[-1])
    ahead = np.zeros(total + 1, np.int64)
    first = np.searchsorted(examples, np.arange(total), side="right")
    for taken in reversed(range(total)):
        ends = slice(int(first[taken]), None)
        after = np.minimum(examples[ends], taken + sizes[ends])
        ahead[taken] = (costs[ends] + ahead[after]).min()
    return ahead


def _best_ends(problem: _Problem, beyond: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For a bucket that begins after candidate j - 1: its least cost and best end.

    The cost of ending at i, examples in between times rate plus `beyond[i + 1]`, obeys
    the Monge condition, for rates never fall. So the best end never moves back as j
    grows, and solving the middle j first halves the range of all others (divide and
    conquer, one level at a time).
    """
    size, rates = len(problem), problem.rates
    at_end = problem.examples * rates + beyond[1:]
    costs, ends = np.zeros(size, np.int64), np.zeros(size, np.int64)
    stride = 1 << (size - 1).bit_length()
    while stride:
        begins = np.arange(stride - 1, size, 2 * stride)
        before, after = begins - stride, begins + stride
        low = np.maximum(begins, np.where(before < 0, 0, ends[before]))
        # A level above may not have reached beyond `size`: then any end is possible.
        high = np.where(after < size, ends[np.minimum(after, size - 1)], size - 1)
        lengths = high - low + 1
        starts = np.cumsum(lengths) - lengths
        end = np.arange(lengths.sum()) + np.repeat(low - starts, lengths)
        total = at_end[end]
        total -= np.repeat(problem.below[begins], lengths) * rates[end]
        costs[begins] = np.minimum.reduceat(total, starts)
        is_best = np.flatnonzero(total == np.repeat(costs[begins], lengths))
        ends[begins] = end[is_best[np.searchsorted(is_best, starts)]]
        stride //= 2
    return costs, ends


def _traced_ends(ends: list[np.ndarray]) -> np.ndarray:
    """The best choice when remainders are ignored."""
    chosen, begin = [], 0
    for best in reversed(ends):
        if begin < len(best):
            chosen.append(int(best[begin]))
            begin = chosen[-1] + 1
    return np.array(chosen)


@dataclasses.dataclass
class _States:
    """Beginnings of a choice: all `[S]`, one entry for each.

    Attributes:
      end: the last candidate chosen, -1 at the start.
      carry: rows that go up into the next bucket.
      cost: what it costs so far.
      parent: the entry this one extends, in the states of one bucket fewer.
    """

    end: np.ndarray
    carry: np.ndarray
    cost: np.ndarray
    parent: np.ndarray

    def take(self, index: np.ndarray) -> _States:
        return _States(
            *(getattr(self, f.name)[index] for f in dataclasses.fields(self))
        )

    @classmethod
    def joined(cls, parts: list[_States]) -> _States:
        columns = (f.name for f in dataclasses.fields(cls))
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in columns))


class _Search:
    """Branch and bound over beginnings of a choice, at most `width` for each level.

    Attributes:
      cut: whether more were open, so that a wider search may find a better choice.
      pairs: how many of a beginning and an end, or a block of ends, were looked at.
    """

    def __init__(
        self,
        problem: _Problem,
        bounds: list[np.ndarray],
        ahead: np.ndarray | None,
        width: int,
    ):
        self.problem = problem
        self.bounds = bounds
        self.ahead = ahead
        self.width = width
        self.cut = False
        self.pairs = 0
        # `[n, block]`: the ends in blocks, G where there is none.
        block = -(-len(problem) // _BLOCKS)
        ends = np.arange(-(-len(problem) // block) * block).reshape(-1, block)
        self.blocks = np.minimum(ends, len(problem))
        # What a carried row costs at least, beyond every candidate.
        self.next_rate = np.append(problem.rates[1:], _INFINITE >> 31)

    def better_than(self, known: np.ndarray) -> np.ndarray:
        """Returns the best choice, or `known` where none is cheaper."""
        limit = self.problem.epoch_cost(known)
        zero = np.zeros(1, np.int64)
        levels = [_States(zero - 1, zero, zero, zero)]
        for left in reversed(range(len(self.bounds) - 1)):
            states = self._extend(levels[-1], left, limit)
            done = np.flatnonzero(states.end == len(self.problem) - 1)
            if done.size:
                cheapest = done[np.argmin(states.cost[done])]
                if states.cost[cheapest] < limit:
                    limit = int(states.cost[cheapest])
                    known = _trace([*levels, states], cheapest)
                states = states.take(np.flatnonzero(states.end < states.end[done[0]]))
            levels.append(self._prune(states, left, limit))
        return known

    def _extend(self, states: _States, left: int, limit: int) -> _States:
        """Every state with one more bucket, padded and promoted, below the limit."""
        empty = np.zeros(0, np.int64)
        parts = [_States(empty, empty, empty, empty)]
        for parent, end in self._open_pairs(states, left, limit):
            for closed in self._closed(states, parent, end):
                promising = self._least(closed, left) < limit
                parts.append(closed.take(np.flatnonzero(promising)))
            self.pairs += _CLOSING * len(end)
        return _States.joined(parts)

    def _open_pairs(
        self, states: _States, left: int, limit: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields pairs of a state and an end beyond it, `[n]` and `[n]`.

        Of the rows that a state holds at an end, those up to the end are the same for
        all states, and those before its beginning for all ends. A block of ends is left
        out where none of them can be below the limit: were all as cheap as its first,
        with as little beyond as any.
        """
        blocks, lasts = self.blocks, self.blocks[:, -1]
        rates = np.append(self.problem.rates, 0)
        fixed = np.append(self.problem.examples * rates[:-1], 0)
        beyond = np.append(self.bounds[left][1:], _INFINITE)
        of_block = fixed[blocks[:, 0]] + beyond[blocks].min(axis=1)
        of_end = fixed + beyond
        rows = states.carry - self.problem.below[states.end + 1]
        for parent in _chunks(len(rows), _CHUNK // len(blocks)):
            least = rows[parent, None] * rates[blocks[:, 0]] + of_block
            least += states.cost[parent, None]
            row, block = np.nonzero(
                (least < limit) & (lasts > states.end[parent, None])
            )
            self.pairs += least.size + len(row) * blocks.shape[1]
            for part in _chunks(len(row), _CHUNK // blocks.shape[1]):
                owner, end = parent[row[part], None], blocks[block[part]]
                least = rows[owner] * rates[end] + of_end[end] + states.cost[owner]
                pair = np.nonzero((least < limit) & (end > states.end[owner]))
                yield owner[pair[0], 0], end[pair]

    def _closed(
        self, states: _States, parent: np.ndarray, end: np.ndarray
    ) -> list[_States]:
        """The pairs, what is left over padded, and where there is some, promoted."""
        problem = self.problem
        begin = problem.below[states.end[parent] + 1]
        held = problem.examples[end] - begin + states.carry[parent]
        full, rest = np.divmod(held, problem.batch_sizes[end])
        cost = states.cost[parent] + full * problem.costs[end]
        padded = cost + (rest > 0) * problem.costs[end]
        up = np.flatnonzero((rest > 0) & (end < len(problem) - 1))
        return [
            _States(end, np.zeros_like(rest), padded, parent),
            _States(end[up], rest[up], cost[up], parent[up]),
        ]

    def _prune(self, states: _States, left: int, limit: int) -> _States:
        """Drops what cannot win: bound at the limit, or another state at least as good.

        At the same end, fewer carried rows at no more cost are never worse; nor, with
        the same examples taken, is a shorter end.
        """
        least = self._least(states, left)
        promising = np.flatnonzero(least <= self._cutoff(least, limit))
        least, states = least[promising], states.take(promising)
        kept = _undominated(states.end, states.carry, states.cost)
        least, states = least[kept], states.take(kept)
        taken = self._taken(states)
        kept = _undominated(taken, states.end, states.cost)
        if kept.size > self.width:
            self.cut = True
            kept = kept[_most_promising(least[kept], taken[kept], self.width)]
        return states.take(kept)

    def _taken(self, states: _States) -> np.ndarray:
        """`[S]`: how many of the shortest examples have a row."""
        return self.problem.below[states.end + 1] - states.carry

    def _least(self, states: _States, left: int) -> np.ndarray:
        """What a choice costs at least that begins so."""
        carried = states.carry * self.next_rate[states.end]
        least = carried + self.bounds[left][states.end + 1]
        if self.ahead is not None:
            least = np.maximum(least, self.ahead[self._taken(states)])
        return states.cost + least

    def _cutoff(self, least: np.ndarray, limit: int) -> int:
        """The largest bound that is looked at: a value, so that ties stay together."""
        most = _SURPLUS * self.width
        if least.size <= most:
            return limit - 1
        self.cut = True
        return min(limit - 1, int(np.partition(least, most)[most]))


def _undominated(group: np.ndarray, value: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Those `[m]` of a group of which no other has neither a higher value nor cost."""
    order = np.lexsort((cost, value, group))
    # One running minimum serves all groups: each one's ranks lie below the last's.
    rank = np.unique(cost, return_inverse=True)[1]
    level = (rank - group * (len(rank) + 1))[order]
    cheapest_before = np.minimum.accumulate(np.append(_INFINITE, level))[:-1]
    return order[level < cheapest_before]


def _most_promising(least: np.ndarray, taken: np.ndarray, width: int) -> np.ndarray:
    """So many: half by their bounds, half the best of all that took as many examples.

    Bounds know little of remainders to come. Where these are most of the cost, the
    beginnings with the fewest batches would seem the best, and none would go far.
    """
    # Stable, as a plan must not depend on how a machine sorts equal bounds.
    by_bound = np.argsort(least, kind="stable")
    by_taken = by_bound[np.argsort(taken[by_bound], kind="stable")]
    rank = np.empty(len(least), np.int64)
    sorted_taken = taken[by_taken]
    rank[by_taken] = np.arange(len(least)) - np.searchsorted(sorted_taken, sorted_taken)
    by_rank = by_bound[np.argsort(rank[by_bound], kind="stable")]
    chosen = np.zeros(len(least), bool)
    chosen[by_bound[: width // 2]] = True
    chosen[by_rank[~chosen[by_rank]][: width - width // 2]] = True
    return np.flatnonzero(chosen)


def _chunks(size: int, most: int) -> Iterator[np.ndarray]:
    """`range(size)` in parts of at most so many."""
    for start in range(0, size, max(1, most)):
        yield np.arange(start, min(start + max(1, most), size))


def _trace(levels: list[_States], last: int) -> np.ndarray:
    chosen = []
    for states in reversed(levels[1:]):
        chosen.append(int(states.end[last]))
        last = int(states.parent[last])
    return np.array(chosen[::-1])
