"""A search for where remainders go between shapes of several lengths.

With several lengths, a remainder can go to any bucket that dominates its own, so the
buckets are a graph. It is passed on as a whole, and may be part of what its new bucket
passes on.
"""

from __future__ import annotations

import dataclasses

import numpy as np

# The number of partial choices that are kept after each bucket, times K**2.
_WORK = 1 << 17
# The fractional part of the golden ratio in 64 bits, which spreads hashes evenly.
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
# A choice counts as cheaper only beyond rounding errors.
_SLACK = 1 - 1e-12


def search_targets(
    counts: np.ndarray,
    batch_sizes: np.ndarray,
    costs: np.ndarray,
    above: np.ndarray,
    limit: float,
) -> np.ndarray | None:
    """Returns the bucket to which each remainder goes in the cheapest epoch, `[K]`.

    Partial choices are extended bucket by bucket, and only those are discarded that
    cannot be completed to a cheaper epoch. If thousands of them remain, the least
    promising are discarded as well.

    The arguments are those of `flow_remainders`.

    Returns:
      `[K]` int64, -1 for a remainder that is padded; None if no choice that costs less
      than `limit` was found.
    """
    costs = costs.astype(np.float64)
    width = max(1, _WORK // len(counts) ** 2)
    zeros = np.zeros((1, len(counts)), np.int64)
    states = _States(zeros, zeros - 1, np.zeros(1))
    for k in range(len(counts)):
        targets = np.flatnonzero(above[k]).tolist()
        rows = states.carried[:, k] + counts[k]
        states = _extend(states, k, *np.divmod(rows, batch_sizes[k]), costs[k], targets)
        later = slice(k + 1, None)
        rows = states.carried[:, later] + counts[later]
        least = _least_cost(rows, batch_sizes[later], costs[later], above[later, later])
        bound = states.cost + least
        kept = np.flatnonzero(bound < limit * _SLACK)
        kept = kept[_cheapest_of_each(rows[kept], states.cost[kept])]
        if len(kept) > width:
            kept = kept[np.argsort(bound[kept], kind="stable")[:width]]
        states = states.take(kept)
    if not len(states.cost):
        return None
    return states.targets[np.argmin(states.cost)]


@dataclasses.dataclass
class _States:
    """Partial choices of targets for the first buckets, `[S]` or `[S, K]` each.

    Attributes:
      carried: `[S, K]` int64, the rows passed on to each bucket.
      targets: `[S, K]` int64, the targets chosen so far.
      cost: `[S]` float64, the cost of the batches so far.
    """

    carried: np.ndarray
    targets: np.ndarray
    cost: np.ndarray

    def take(self, index: np.ndarray) -> _States:
        return _States(self.carried[index], self.targets[index], self.cost[index])


def _least_cost(
    rows: np.ndarray, batch_sizes: np.ndarray, costs: np.ndarray, above: np.ndarray
) -> np.ndarray:
    """Returns a lower bound of the cost of `[S, n]` rows in n buckets, `[S]`.

    Full batches are never passed on, because more rows only make more of them. A row of
    a remainder costs at least what a row costs in the bucket or in one that dominates
    it; or else, a remainder costs a batch where no bucket can take it.
    """
    rates = costs / batch_sizes
    passed = np.where(above, rates, np.inf).min(axis=1, initial=np.inf)
    is_last = ~above.any(axis=1)
    full, rest = np.divmod(rows, batch_sizes)
    by_row = rest @ np.minimum(rates, passed)
    by_batch = (rest[:, is_last] > 0) @ costs[is_last]
    return full @ costs + np.maximum(by_row, by_batch)


def _extend(
    states: _States,
    k: int,
    full: np.ndarray,
    rest: np.ndarray,
    cost: float,
    targets: list[int],
) -> _States:
    """Returns the states with every choice for the remainder of bucket k, `rest`."""
    spent = states.cost + full * cost
    parts = [_States(states.carried, states.targets, spent + (rest > 0) * cost)]
    passed = np.flatnonzero(rest)
    for target in targets if passed.size else ():
        part = states.take(passed)
        part.carried[:, target] += rest[passed]
        part.targets[:, k] = target
        parts.append(dataclasses.replace(part, cost=spent[passed]))
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return _States(*map(np.concatenate, columns))


def _cheapest_of_each(rows: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Returns the cheapest of the states with equal rows in all later buckets."""
    # Equal rows have equal hashes, so they are neighbors in this order.
    odd = 2 * np.arange(rows.shape[1]).astype(np.uint64) + np.uint64(1)
    order = np.lexsort([cost, rows.astype(np.uint64) @ (odd * _HASH_FACTOR)])
    is_new = np.ones(len(order), bool)
    is_new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    return np.sort(order[is_new])
