"""One row after the other from a pool of examples, where these have several sequences.

Each time the example is taken that leaves the least room: the sum of squared shares of
the row, where a sequence counts as it fills rows in all (Panigrahy et al., "Heuristics
for Vector Bin Packing", 2011, their norm-based greedy). So what a row lacks is what it
gets, inputs or targets. All of it is integer arithmetic, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.base.permutation import permute
from jaxbucket.packing.pattern import Pattern
from jaxbucket.packing.vector_best_fit import shares_of

# Examples that are chosen from. More fill rows better, and take as much longer.
_POOL = 2048
# Beyond so many examples it takes more than some three seconds, and best fit is fuller.
_MOST_EXAMPLES = 100_000
_SEED = 0x5E9


def pooled_rows(
    kinds: np.ndarray,
    counts: np.ndarray,
    capacities: Sequence[int],
    cap: int,
    fewer_than: int = MAX_LENGTH,
) -> list[Pattern] | None:
    """Returns these rows, or None if it takes too long to find them, or for nothing.

    Args:
      kinds: `[V, Q]` lengths of the sequences of each kind, at most `capacities`.
      counts: `[V]` how many examples of each there are.
      capacities: `[Q]` what a row holds of each sequence.
      cap: the most slots of a row.
      fewer_than: it ends where there are going to be so many rows.
    """
    waiting = np.repeat(np.arange(len(counts)), counts)
    if len(waiting) > _MOST_EXAMPLES:
        return None
    waiting = waiting[permute(np.arange(len(waiting)), len(waiting), _SEED)]
    shares, whole = shares_of(kinds, capacities)
    weights = _weights(kinds, counts, capacities).tolist()
    # `[Q, V]` and `[Q, pool]`: what is looked at for every example is contiguous.
    table = np.ascontiguousarray(np.concatenate([kinds, shares], axis=1).T)
    pool, rest = waiting[:_POOL].copy(), iter(waiting[_POOL:].tolist())
    columns = table[:, pool]
    tokens = (counts @ kinds.astype(np.int64)).tolist()
    patterns = []
    while len(pool):
        room, left = list(capacities), whole.tolist()
        row: list[int] = []
        while len(row) < cap and len(pool):
            place = _best_place(columns, room, left, weights)
            if place is None:
                break
            row.append(int(pool[place]))
            taken = columns[:, place].tolist()
            room = [x - n for x, n in zip(room, taken, strict=False)]
            left = [x - n for x, n in zip(left, taken[len(room) :], strict=True)]
            kind = next(rest, None)
            if kind is None:
                pool = np.delete(pool, place)
                columns = np.delete(columns, place, axis=1)
            else:
                pool[place] = kind
                columns[:, place] = table[:, kind]
        patterns.append(Pattern(tuple(row), 1, sum(capacities)))
        # What is left takes at least as many rows as the sequence that needs most.
        tokens = [n - (c - x) for n, c, x in zip(tokens, capacities, room, strict=True)]
        left_over = max(-(-n // c) for n, c in zip(tokens, capacities, strict=True))
        if len(patterns) + left_over >= fewer_than:
            return None
    return patterns


def _best_place(
    columns: np.ndarray, room: list[int], left: list[int], weights: list[int]
) -> int | None:
    """Which of a pool leaves the least room, or None where none fits.

    Args:
      columns: `[2 * Q, pool]` lengths, and behind them shares of a row.
      room: `[Q]` that is left for lengths.
      left: `[Q]` that is left of the whole.
      weights: `[Q]` of each sequence.
    """
    size = len(room)
    fits = columns[0] <= room[0]
    for index in range(1, size):
        fits &= columns[index] <= room[index]
    lost = np.zeros(columns.shape[1], np.int64)
    for index, weight in enumerate(weights):
        over = left[index] - columns[size + index]
        over *= over
        over *= weight
        lost += over
    lost[~fits] = np.iinfo(np.int64).max
    place = int(lost.argmin())
    return place if fits[place] else None


def _weights(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int]
) -> np.ndarray:
    """`[Q]` integers up to 1,024: of how many rows each sequence fills the whole."""
    tokens = (counts @ kinds).tolist()
    rows = [-(-n // size) for n, size in zip(tokens, capacities, strict=True)]
    return np.array([-(-1024 * n // max(rows)) for n in rows])
