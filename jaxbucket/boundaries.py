"""Where one bucket ends and the next begins: choosers of boundaries.

A chooser takes `Candidates` and a number of buckets, and returns the increasing
positions of the chosen `seq_lens`, the last of which is always the last candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from jaxbucket.remainder import flow_remainders

_INFINITE = 2**61
# Pairs of (beginning, end) looked at together: bounds memory.
_CHUNK = 1 << 20
# Pairs looked at for one bucket: bounds time, about 0.1 s on one core.
_MAX_PAIRS = 1 << 23
# For each beginning that goes on, how many are compared with one another: most are not
# as good as another that ends alike.
_SURPLUS = 16


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Everything a chooser may know of the lengths.

    Attributes:
      seq_lens: `[G]` int64, increasing: lengths at which a bucket may end.
      examples: `[G]` int64, how many examples are at most that long.
      batch_sizes: `[G]` int64, the rows that the budget holds at that length.
    """

    seq_lens: np.ndarray
    examples: np.ndarray
    batch_sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.seq_lens)

    def counts(self, chosen: np.ndarray) -> np.ndarray:
        """`[K]`: examples of every bucket when the chosen candidates are its ends."""
        return np.diff(self.examples[chosen], prepend=0)

    def padded_tokens(self, chosen: np.ndarray) -> int:
        """B * T summed over the batches of one epoch, remainders included."""
        batch_sizes, seq_lens = self.batch_sizes[chosen], self.seq_lens[chosen]
        flow = flow_remainders(self.counts(chosen), batch_sizes, seq_lens)
        return int((flow.batches * batch_sizes * seq_lens).sum())

    def distinct(self) -> np.ndarray:
        """`[n]`: the candidates among which a best choice is always found.

        Of neighbours with the same examples and the same batch size the shortest is
        better than the others; one that no example reaches is of no use.
        """
        first = np.ones(len(self), bool)
        first[1:] = (np.diff(self.examples) != 0) | (np.diff(self.batch_sizes) != 0)
        first &= self.examples > 0
        first[-1] = True
        return np.flatnonzero(first)


Chooser: TypeAlias = Callable[[Candidates, int], np.ndarray]


def quantile(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Equal numbers of examples in every bucket."""
    total = int(candidates.examples[-1])
    shares = -(-np.arange(1, num_buckets + 1) * total // num_buckets)
    return _with_last(candidates, np.searchsorted(candidates.examples, shares))


def geometric(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Boundaries in constant ratio, from the shortest example to the longest."""
    shortest = candidates.seq_lens[np.argmax(candidates.examples > 0)]
    ends = np.geomspace(shortest, candidates.seq_lens[-1], num_buckets + 1)[1:]
    # geomspace rounds: without the slack an end on a candidate can miss it.
    chosen = np.searchsorted(candidates.seq_lens, ends * (1 - 1e-12))
    return _with_last(candidates, chosen)


def _with_last(candidates: Candidates, chosen: np.ndarray) -> np.ndarray:
    return np.unique(np.append(chosen, len(candidates) - 1))


def optimal(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """The boundaries that cost the fewest padded tokens, remainders included.

    Ignoring remainders, the cost of boundaries is a sum over buckets, and dynamic
    programming gives its minimum, a lower bound for every beginning of a choice. The
    search then extends beginnings bucket by bucket, remainders counted, and keeps
    those whose bound is below the best complete choice known.

    The result is exact as long as no more than 2**23 / G beginnings stay open. Beyond
    that, which takes many buckets and batches so large that an epoch has few of them,
    the most promising go on: then it may be some hundredths of a percent off, but
    never worse than the exact optimum without remainders.
    """
    kept = candidates.distinct()
    few = Candidates(*(x[kept] for x in dataclasses.astuple(candidates)))
    bounds = _lower_bounds(few, num_buckets)
    known = min(_steady_choices(few, bounds), key=few.padded_tokens)
    most = max(1, _MAX_PAIRS // len(few))
    # The narrow search is quick, and what it finds makes the wide one small.
    for width in (min(256, most), most):
        known = _Search(few, bounds, width).better_than(known)
    return kept[known]


def _lower_bounds(candidates: Candidates, num_buckets: int) -> list[np.ndarray]:
    """Fewest padded tokens of all examples beyond a boundary, remainders ignored.

    Returns:
      For k = 0 to `num_buckets` an `[G + 1]` int64 array: entry j is the cost of the
      examples that candidates j, j + 1, ... hold beyond candidate j - 1, when at most
      k buckets may end there. Entry G, nothing left, is 0.
    """
    size = len(candidates)
    nothing_left = np.full(size + 1, _INFINITE, np.int64)
    nothing_left[size] = 0
    bounds = [nothing_left]
    for _ in range(num_buckets):
        costs = np.zeros(size + 1, np.int64)
        costs[:size] = _best_ends(candidates, bounds[-1])[0]
        bounds.append(np.minimum(costs, bounds[-1]))
    return bounds


def _best_ends(
    candidates: Candidates, beyond: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For a bucket that begins after candidate j - 1: its best end and total cost.

    The cost of ending at i, examples in between times T plus `beyond[i + 1]`, obeys
    the Monge condition, so the best end never moves back as j grows, and solving the
    middle j first halves the range of all others (divide and conquer, one level at a
    time).
    """
    size = len(candidates)
    below = np.concatenate([[0], candidates.examples])
    costs, ends = np.zeros(size, np.int64), np.zeros(size + 1, np.int64)
    ends[size] = size - 1
    stride = 1 << (size - 1).bit_length()
    while stride:
        begins = np.arange(stride - 1, size, 2 * stride)
        before, after = begins - stride, np.minimum(begins + stride, size)
        low = np.maximum(begins, np.where(before < 0, 0, ends[before]))
        # A level above may not have reached beyond `size`: then any end is possible.
        high = np.where(after < size, ends[after], size - 1)
        starts = np.concatenate([[0], np.cumsum(high - low + 1)])
        owner = np.repeat(np.arange(len(begins)), high - low + 1)
        end = np.arange(starts[-1]) - starts[owner] + low[owner]
        total = (candidates.examples[end] - below[begins[owner]]) * candidates.seq_lens[
            end
        ] + beyond[end + 1]
        costs[begins] = np.minimum.reduceat(total, starts[:-1])
        is_best = np.flatnonzero(total == costs[begins][owner])
        first = np.unique(owner[is_best], return_index=True)[1]
        ends[begins] = end[is_best[first]]
        stride //= 2
    return costs, ends[:size]


def _steady_choices(
    candidates: Candidates, bounds: list[np.ndarray]
) -> Iterator[np.ndarray]:
    """The best choices of 1, 2, ... buckets when remainders are ignored."""
    best_ends = [_best_ends(candidates, beyond)[1] for beyond in bounds[:-1]]
    for num_buckets in range(1, len(bounds)):
        chosen, begin = [], 0
        for left in reversed(range(num_buckets)):
            if begin == len(candidates):
                break
            chosen.append(best_ends[left][begin])
            begin = chosen[-1] + 1
        yield np.array(chosen)


@dataclasses.dataclass
class _States:
    """Beginnings of a choice: all `[S]`, one entry for each.

    Attributes:
      end: the last candidate chosen, -1 at the start.
      carry: rows that go up into the next bucket.
      cost: padded tokens so far.
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


class _Search:
    """Branch and bound over beginnings of a choice, at most `width` for each level."""

    def __init__(self, candidates: Candidates, bounds: list[np.ndarray], width: int):
        self.candidates = candidates
        self.bounds = bounds
        self.width = width
        self.below = np.concatenate([[0], candidates.examples])
        self.tokens = candidates.batch_sizes * candidates.seq_lens
        # What a carried row costs at least: the next longer candidate's T.
        self.next_seq_len = np.append(candidates.seq_lens[1:], _INFINITE >> 31)

    def better_than(self, known: np.ndarray) -> np.ndarray:
        """Returns the best choice, or `known` where none is cheaper."""
        limit = self.candidates.padded_tokens(known)
        zero = np.zeros(1, np.int64)
        levels = [_States(zero - 1, zero, zero, zero)]
        for left in reversed(range(len(self.bounds) - 1)):
            states = self._extend(levels[-1], left, limit)
            done = np.flatnonzero(states.end == len(self.candidates) - 1)
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
        parts = [self._none()]
        size = len(self.candidates)
        rows = max(1, _CHUNK // size)
        ends = np.arange(size)
        for start in range(0, len(states.end), rows):
            parent = np.arange(start, min(start + rows, len(states.end)))
            held = (
                self.candidates.examples
                - self.below[states.end[parent] + 1][:, None]
                + states.carry[parent][:, None]
            )
            least = states.cost[parent][:, None] + held * self.candidates.seq_lens
            least += self.bounds[left][1:]
            open_pairs = (least < limit) & (ends > states.end[parent][:, None])
            row, end = np.nonzero(open_pairs)
            parts += self._close(states, parent[row], end, held[row, end])
        columns = map(dataclasses.astuple, parts)
        merged = [np.concatenate(x) for x in zip(*columns, strict=True)]
        return _States(*merged)

    def _close(
        self, states: _States, parent: np.ndarray, end: np.ndarray, held: np.ndarray
    ) -> list[_States]:
        full, rest = np.divmod(held, self.candidates.batch_sizes[end])
        cost = states.cost[parent] + full * self.tokens[end]
        padded = cost + (rest > 0) * self.tokens[end]
        up = np.flatnonzero((rest > 0) & (end < len(self.candidates) - 1))
        return [
            _States(end, np.zeros_like(rest), padded, parent),
            _States(end[up], rest[up], cost[up], parent[up]),
        ]

    def _prune(self, states: _States, left: int, limit: int) -> _States:
        """Drops what cannot win: bound at the limit, or another state at least as good.

        At the same end, fewer carried rows at no more cost are never worse.
        """
        least = states.cost + states.carry * self.next_seq_len[states.end]
        least += self.bounds[left][states.end + 1]
        promising = np.flatnonzero(least <= self._cutoff(least, limit))
        least, states = least[promising], states.take(promising)
        order = np.lexsort((states.cost, states.carry, states.end))
        # One running minimum serves all ends: each end's costs lie below the last's.
        level = (states.cost - states.end * (limit + 1))[order]
        cheapest_before = np.minimum.accumulate(np.append(_INFINITE * 2, level))[:-1]
        kept = order[level < cheapest_before]
        if kept.size > self.width:
            # Stable, as a plan must not depend on how a machine sorts equal bounds.
            kept = kept[np.argsort(least[kept], kind="stable")[: self.width]]
        return states.take(kept)

    def _cutoff(self, least: np.ndarray, limit: int) -> int:
        """The largest bound that is looked at: a value, so that ties stay together."""
        most = _SURPLUS * self.width
        if least.size <= most:
            return limit - 1
        return min(limit - 1, int(np.partition(least, most)[most]))

    def _none(self) -> _States:
        empty = np.zeros(0, np.int64)
        return _States(empty, empty, empty, empty)


def _trace(levels: list[_States], last: int) -> np.ndarray:
    chosen = []
    for states in reversed(levels[1:]):
        chosen.append(int(states.end[last]))
        last = int(states.parent[last])
    return np.array(chosen[::-1])
