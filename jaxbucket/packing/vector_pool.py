"""Fills one row after the other from a pool of examples with several sequences.

At each step, the example that leaves the least room is added to the row. The room is
the sum of squared shares that are left, weighted by how many rows each sequence fills
overall (norm-based greedy; Panigrahy et al., "Heuristics for Vector Bin Packing",
2011). So a row with much room for targets gets an example with long targets. All
arithmetic uses integers, so that results are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.base.permutation import permute
from jaxbucket.packing.pattern import Pattern
from jaxbucket.packing.vector_best_fit import row_shares

# The examples to choose from. A larger pool fills rows better and takes longer.
_POOL_SIZE = 2048
# More examples would take over three seconds, and best fit would fill rows better.
_MAX_EXAMPLES = 100_000
_SEED = 0x5E9


def pooled_rows(
    kinds: np.ndarray,
    counts: np.ndarray,
    capacities: Sequence[int],
    cap: int,
    fewer_than: int = MAX_LENGTH,
) -> list[Pattern] | None:
    """Returns the rows, or None if there are too many examples or too many rows.

    Args:
      kinds: `[V, Q]` lengths of the sequences of each kind, at most `capacities`.
      counts: `[V]` integers, the number of examples of each kind.
      capacities: `[Q]` integers, the tokens of each sequence that a row can hold.
      cap: the maximum number of slots in a row.
      fewer_than: the packer gives up as soon as it needs at least this many rows.
    """
    pending = np.repeat(np.arange(len(counts)), counts)
    if len(pending) > _MAX_EXAMPLES:
        return None
    pending = pending[permute(np.arange(len(pending)), len(pending), _SEED)]
    shares, whole = row_shares(kinds, capacities)
    weights = _weights(kinds, counts, capacities).tolist()
    # `[2 * Q, V]` and `[2 * Q, pool]`: each length and share is a contiguous row.
    table = np.ascontiguousarray(np.concatenate([kinds, shares], axis=1).T)
    pool, rest = pending[:_POOL_SIZE].copy(), iter(pending[_POOL_SIZE:].tolist())
    columns = table[:, pool]
    tokens = (counts @ kinds.astype(np.int64)).tolist()
    patterns = []
    while len(pool):
        room, left = list(capacities), whole.tolist()
        row: list[int] = []
        while len(row) < cap and len(pool):
            index = _best_index(columns, room, left, weights)
            if index is None:
                break
            row.append(int(pool[index]))
            taken = columns[:, index].tolist()
            room = [x - n for x, n in zip(room, taken, strict=False)]
            left = [x - n for x, n in zip(left, taken[len(room) :], strict=True)]
            kind = next(rest, None)
            if kind is None:
                pool = np.delete(pool, index)
                columns = np.delete(columns, index, axis=1)
            else:
                pool[index] = kind
                columns[:, index] = table[:, kind]
        patterns.append(Pattern(tuple(row), 1, sum(capacities)))
        # The sequence that needs the most rows is a bound for the remaining examples.
        tokens = [n - (c - x) for n, c, x in zip(tokens, capacities, room, strict=True)]
        left_over = max(-(-n // c) for n, c in zip(tokens, capacities, strict=True))
        if len(patterns) + left_over >= fewer_than:
            return None
    return patterns


def _best_index(
    columns: np.ndarray, room: list[int], left: list[int], weights: list[int]
) -> int | None:
    """Returns the index in the pool that leaves the least room, or None if none fits.

    Args:
      columns: `[2 * Q, pool]` integers, the lengths followed by the shares of a row.
      room: `[Q]` integers, the tokens that are left in the row.
      left: `[Q]` integers, the shares that are left in the row.
      weights: `[Q]` integers, the weight of each sequence.
    """
    size = len(room)
    fits = columns[0] <= room[0]
    for index in range(1, size):
        fits &= columns[index] <= room[index]
    remaining = np.zeros(columns.shape[1], np.int64)
    for index, weight in enumerate(weights):
        share = left[index] - columns[size + index]
        share *= share
        share *= weight
        remaining += share
    remaining[~fits] = np.iinfo(np.int64).max
    index = int(remaining.argmin())
    return index if fits[index] else None


def _weights(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int]
) -> np.ndarray:
    """Returns `[Q]` weights up to 1,024, proportional to the rows a sequence fills."""
    tokens = (counts @ kinds).tolist()
    rows = [-(-n // size) for n, size in zip(tokens, capacities, strict=True)]
    return np.array([-(-1024 * n // max(rows)) for n in rows])
