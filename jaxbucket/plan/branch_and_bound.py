"""A search for the cheapest epoch, remainders included: branch and bound.

Partial choices are extended bucket by bucket. Those go on whose lower bound is below
the best complete choice known, and of which no other is at least as good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxbucket.plan.lower_bound import INFINITE, Problem

# Pairs of a state and an end that are looked at together: bounds memory.
_CHUNK = 1 << 20
# A pair that is extended takes as long as so many that are ruled out.
_CLOSING = 16
# States that are compared for each one that goes on: most are not as good as another
# of the same end.
_SURPLUS = 64
# States that are held while others are looked at: bounds memory.
_MOST_STATES = 4 * _CHUNK
# Ends are cut into about so many blocks, most of which are ruled out as a whole.
_BLOCKS = 1024


@dataclasses.dataclass
class _States:
    """Partial choices of boundaries, `[S]` int64 each.

    Attributes:
      end: the last candidate chosen, -1 at the start.
      carry: rows that go up into the next bucket.
      cost: the cost so far.
      parent: the entry this one extends, in the states of one bucket fewer.
    """

    end: np.ndarray
    carry: np.ndarray
    cost: np.ndarray
    parent: np.ndarray

    def take(self, index: np.ndarray) -> _States:
        return _States(*(column[index] for column in vars(self).values()))

    @classmethod
    def concatenate(cls, parts: list[_States]) -> _States:
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))


class Search:
    """Branch and bound over partial choices, at most `width` for each level.

    It looks at no more than about `most_pairs`.

    Attributes:
      cut: whether states were given up: a wider search may find a better choice.
      pairs: pairs of a state and an end, or a block of ends, that were looked at.
    """

    def __init__(
        self,
        problem: Problem,
        bounds: list[np.ndarray],
        ahead: np.ndarray | None,
        width: int,
        most_pairs: int,
    ):
        self.problem = problem
        self.bounds = bounds
        self.ahead = ahead
        self.width = width
        self.most_pairs = most_pairs
        self.cut = False
        self.pairs = 0
        # `[n, block]`: the ends in blocks, G where there is none.
        block = -(-len(problem) // _BLOCKS)
        ends = np.arange(-(-len(problem) // block) * block).reshape(-1, block)
        self.blocks = np.minimum(ends, len(problem))
        # `[G]`: the least cost of a row that is carried beyond a candidate.
        self.next_rate = np.append(problem.rates[1:], INFINITE >> 31)

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
            if sum(len(part.end) for part in parts) > _MOST_STATES:
                parts = [self._best_of(_States.concatenate(parts), left, limit)]
            if self.pairs > self.most_pairs:
                self.cut = True
                break
        return _States.concatenate(parts)

    def _best_of(self, states: _States, left: int, limit: int) -> _States:
        """Those that `_prune` may keep, and the cheapest that is complete."""
        is_open = states.end < len(self.problem) - 1
        done = np.flatnonzero(~is_open)
        least = self._least(states, left)
        promising = is_open & (least <= self._cutoff(least[is_open], limit))
        cheapest = done[np.argsort(states.cost[done], kind="stable")[:1]]
        return states.take(np.append(np.flatnonzero(promising), cheapest))

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
        beyond = np.append(self.bounds[left][1:], INFINITE)
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
        """The pairs with their remainders padded, and with these promoted."""
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
        best = _undominated(states.end, states.carry, states.cost)
        least, states = least[best], states.take(best)
        taken = self._taken(states)
        best = _undominated(taken, states.end, states.cost)
        if best.size > self.width:
            self.cut = True
            best = best[_most_promising(least[best], taken[best], self.width)]
        return states.take(best)

    def _taken(self, states: _States) -> np.ndarray:
        """`[S]`: how many of the shortest examples have a row."""
        return self.problem.below[states.end + 1] - states.carry

    def _least(self, states: _States, left: int) -> np.ndarray:
        """The least cost of a choice that begins so."""
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
    cheapest_before = np.minimum.accumulate(np.append(INFINITE, level))[:-1]
    return order[level < cheapest_before]


def _most_promising(least: np.ndarray, taken: np.ndarray, width: int) -> np.ndarray:
    """Up to `width` states: half by bound, half the best of each number of examples.

    Bounds know little of remainders to come. Where these are most of the cost, the
    states with the fewest batches would seem the best, and none would go far.
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
