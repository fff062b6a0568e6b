"""A branch-and-bound search for the cheapest epoch, remainders included.

Partial choices of boundaries are extended bucket by bucket. A partial choice is pruned
if its lower bound is not below the cost of the best known complete choice, or if
another partial choice is at least as good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxbucket.plan.lower_bound import INFINITE, Problem

# The number of pairs of a state and an end that are processed at a time, which limits
# the memory.
_CHUNK = 1 << 20
# Extending a pair takes as long as pruning this many pairs.
_EXTENSION_COST = 48
# The number of states that are compared for each state that is kept. Most of them are
# dominated by another state with the same end.
_SURPLUS = 64
# The number of states that are held at a time, which limits the memory.
_MAX_STATES = 4 * _CHUNK
# The ends are divided into about this many blocks, most of which are pruned as a whole.
_NUM_BLOCKS = 256


@dataclasses.dataclass
class _States:
    """Partial choices of boundaries, `[S]` int64 each.

    Attributes:
      end: the last chosen candidate, -1 at the start.
      carry: the number of rows promoted to the next bucket.
      cost: the cost so far.
      parent: the index of the state that this state extends, among the states with one
        bucket fewer.
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
    """A branch-and-bound search over partial choices of boundaries.

    Args:
      problem: the candidates.
      bounds: lower bounds of the cost of all longer buckets, from `lower_bounds`.
      width: the largest number of states that are kept for each number of buckets, and
        twice the largest number of B that are tried for each state and end.
      most_pairs: about how many pairs to examine at most.

    Attributes:
      incomplete: whether promising states were discarded, so that a wider search may
        find a better choice.
      pairs: the number of examined pairs of a state and an end or a block of ends,
        plus the work of extending all pairs whose bound is below the limit.
      cost: the cost of the best choice.
    """

    def __init__(
        self, problem: Problem, bounds: list[np.ndarray], width: int, most_pairs: int
    ):
        self.problem = problem
        self.bounds = bounds
        self.width = width
        self.most_pairs = most_pairs
        self.incomplete = False
        self.pairs = 0
        self.cost = INFINITE
        # `[n, block]`: the ends in blocks, padded with G, their rates, and the cost of
        # the rows after them.
        block = -(-len(problem) // _NUM_BLOCKS)
        ends = np.arange(-(-len(problem) // block) * block).reshape(-1, block)
        self.blocks = np.minimum(ends, len(problem))
        self.rates = np.append(problem.rates, 0)[self.blocks]
        self.after = np.append(problem.beyond[1:], 0)[self.blocks] * self.rates
        # `[G]`: the least cost of a row that is promoted from a bucket.
        self.next_rate = np.append(problem.rates[1:], INFINITE >> 31)

    def improve(self, known: np.ndarray, limit: int) -> np.ndarray:
        """Returns the best choice, or `known`, which costs `limit`, if none is cheaper.

        Choices are `[K]` increasing indices of candidates, including the last one.
        """
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
        self.cost = limit
        return known

    def _extend(self, states: _States, left: int, limit: int) -> _States:
        """Returns the states extended by one bucket, if their bound is below the limit.

        It is the cost of the best known complete choice. After this one, `left` buckets
        remain.
        """
        empty = np.zeros(0, np.int64)
        parts = [_States(empty, empty, empty, empty)]
        last, most = len(self.problem) - 1, limit - 1
        for parent, end, bound in self._open_pairs(states, left, limit):
            # An upper limit of the work, because not all of these pairs are extended.
            self.pairs += _EXTENSION_COST * len(end)
            # `_prune` only compares the states with the least bounds, and none has a
            # bound below that of its pair. Therefore the states of the pairs with the
            # least bounds rule out most other pairs before these are extended.
            few = _SURPLUS * self.width
            if len(end) > 4 * few:
                first = np.argpartition(bound, few)[: few + 1]
                extended, _ = self._extensions(states, parent[first], end[first])
                least = self._bound(extended, left)[extended.end < last]
                most = min(most, self._cutoff(least[least <= most], limit))
                needed = np.flatnonzero((bound <= most) | (end == last))
                parent, end = parent[needed], end[needed]
            extended, is_cut = self._extensions(states, parent, end)
            promising = self._bound(extended, left) < limit
            parts.append(extended.take(np.flatnonzero(promising)))
            # Those that were left out promote more rows, which costs no less.
            self.incomplete |= bool((promising & is_cut).any())
            if sum(len(part.end) for part in parts) > _MAX_STATES:
                parts = [self._best_of(_States.concatenate(parts), left, limit)]
            if self.pairs > self.most_pairs:
                self.incomplete = True
                break
        return _States.concatenate(parts)

    def _best_of(self, states: _States, left: int, limit: int) -> _States:
        """Returns the states that `_prune` may keep, and the cheapest complete one."""
        is_partial = states.end < len(self.problem) - 1
        done = np.flatnonzero(~is_partial)
        bound = self._bound(states, left)
        promising = is_partial & (bound <= self._cutoff(bound[is_partial], limit))
        cheapest = done[np.argsort(states.cost[done], kind="stable")[:1]]
        return states.take(np.append(np.flatnonzero(promising), cheapest))

    def _open_pairs(
        self, states: _States, left: int, limit: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields chunks of pairs: states, ends after them and lower bounds, `[n]` each.

        The rows of a bucket are at least a difference of two terms: the rows of the
        examples that are left, which do not depend on the end, and the rows of those
        after the end, which do not depend on the state. A block of ends is skipped if
        its bound reaches the limit. This bound uses the rate of the first end, the
        lowest in the block, and the least cost after any end of the block.
        """
        blocks, rates = self.blocks, self.rates
        beyond = np.append(self.bounds[left][1:], INFINITE)[blocks]
        of_block = beyond.min(axis=1) - self.after[:, 0]
        of_end = beyond - self.after
        rows = self.problem.rows_left(self._num_in_rows(states))
        most = limit - states.cost
        for parent in _chunks(len(rows), _CHUNK // len(blocks)):
            bound = rows[parent, None] * rates[:, 0] + of_block
            is_open = bound < most[parent, None]
            is_open &= blocks[:, -1] > states.end[parent, None]
            row, block = _nonzero(is_open)
            self.pairs += bound.size + len(row) * blocks.shape[1]
            for part in _chunks(len(row), _CHUNK // blocks.shape[1]):
                state, place = parent[row[part], None], block[part]
                bound, end = rows[state] * rates[place] + of_end[place], blocks[place]
                pair = _nonzero((bound < most[state]) & (end > states.end[state]))
                parents = state[pair[0], 0]
                yield parents, end[pair], bound[pair] + states.cost[parents]

    def _extensions(
        self, states: _States, parent: np.ndarray, end: np.ndarray
    ) -> tuple[_States, np.ndarray]:
        """Returns the states that pad the remainders, then those that promote them.

        The second result is whether states that promote more were left out after one.
        """
        problem, sizes = self.problem, self.problem.sizes
        rows = problem.examples[end] - self._num_in_rows(states)[parent]
        cost = states.cost[parent]
        paid = cost + sizes.padded_costs(end, rows)
        padded = _States(end, np.zeros_like(rows), paid, parent)
        short = np.flatnonzero(end < len(problem) - 1)
        filler, size, steps, is_cut = sizes.filled(
            end[short], rows[short], self.width // 2
        )
        up = short[filler]
        paid = cost[up] + steps * sizes.cost(end[up], size)
        filled = _States(end[up], rows[up] - size * steps, paid, parent[up])
        is_cut = np.concatenate([np.zeros(len(end), bool), is_cut])
        return _States.concatenate([padded, filled]), is_cut

    def _prune(self, states: _States, left: int, limit: int) -> _States:
        """Returns the states to extend further, at most `width`.

        A state is dominated by a state of no higher cost with the same end and fewer
        carried rows, or with the same examples in rows and a shorter end.
        """
        bound = self._bound(states, left)
        promising = np.flatnonzero(bound <= self._cutoff(bound, limit))
        bound, states = bound[promising], states.take(promising)
        best = _undominated(states.end, states.carry, states.cost)
        bound, states = bound[best], states.take(best)
        num_in_rows = self._num_in_rows(states)
        best = _undominated(num_in_rows, states.end, states.cost)
        if best.size > self.width:
            self.incomplete = True
            best = best[_most_promising(bound[best], num_in_rows[best], self.width)]
        return states.take(best)

    def _num_in_rows(self, states: _States) -> np.ndarray:
        """Returns how many of the shortest examples have a row, `[S]`."""
        return self.problem.below[states.end + 1] - states.carry

    def _bound(self, states: _States, left: int) -> np.ndarray:
        """Returns lower bounds of the complete choices that extend a state, `[S]`."""
        left_over = self.problem.rows_left(self._num_in_rows(states))
        carried = left_over - self.problem.beyond[states.end + 1]
        beyond = self.bounds[left][states.end + 1]
        return states.cost + carried * self.next_rate[states.end] + beyond

    def _cutoff(self, bound: np.ndarray, limit: int) -> int:
        """Returns the largest bound to keep; states with equal bounds stay together."""
        most = _SURPLUS * self.width
        if bound.size <= most:
            return limit - 1
        self.incomplete = True
        return min(limit - 1, int(np.partition(bound, most)[most]))


def _undominated(group: np.ndarray, value: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Returns the indices of undominated entries, `[m]`.

    An entry is dominated by another entry of the same group if neither the value nor
    the cost of that entry is higher.
    """
    order = np.lexsort((value, cost, -group))
    # A single running minimum works for all groups, because all levels of a group are
    # below those of the previous group.
    level = (value + group * (value.max(initial=0) + 1))[order]
    least_before = np.minimum.accumulate(np.append(INFINITE, level))[:-1]
    return order[level < least_before][::-1]


def _most_promising(bound: np.ndarray, group: np.ndarray, width: int) -> np.ndarray:
    """Returns the indices of `width` states: half by bound, half by rank in a group.

    The bounds underestimate the cost of future remainders. If remainders dominate the
    cost, the states with the fewest batches so far would have the lowest bounds, and
    would displace all states that have progressed further.
    """
    # Stable, because a plan must not depend on how a machine sorts equal bounds.
    by_bound = np.argsort(bound, kind="stable")
    by_group = by_bound[np.argsort(group[by_bound], kind="stable")]
    rank = np.empty(len(bound), np.int64)
    groups = group[by_group]
    rank[by_group] = np.arange(len(bound)) - np.searchsorted(groups, groups)
    by_rank = by_bound[np.argsort(rank[by_bound], kind="stable")]
    chosen = np.zeros(len(bound), bool)
    chosen[by_bound[: width // 2]] = True
    chosen[by_rank[~chosen[by_rank]][: width - width // 2]] = True
    return np.flatnonzero(chosen)


def _chunks(size: int, most: int) -> Iterator[np.ndarray]:
    """Yields `range(size)` in parts of at most `most` numbers."""
    for start in range(0, size, max(1, most)):
        yield np.arange(start, min(start + max(1, most), size))


def _nonzero(mask: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns `np.nonzero(mask)`, which is slow for more than one dimension."""
    return np.unravel_index(np.flatnonzero(mask), mask.shape)


def _trace(levels: list[_States], last: int) -> np.ndarray:
    """Returns the choice of a state of the last level, by following its parents."""
    chosen = []
    for states in reversed(levels[1:]):
        chosen.append(int(states.end[last]))
        last = int(states.parent[last])
    return np.array(chosen[::-1])
