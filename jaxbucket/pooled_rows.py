"""One row after the other from a pool of examples, where these have several sequences.

Each time the example is taken that leaves the least room: the sum of squared shares of
the row, where a sequence counts as it fills rows in all (Panigrahy et al., "Heuristics
for Vector Bin Packing", 2011, their norm-based greedy). So what a row lacks is what it
gets, inputs or targets. All of it is integer arithmetic, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.fit_sequences import KindPattern, shares_of
from jaxbucket.permutation import permute

# Examples that are chosen from. More fill rows better, and take as much longer.
_POOL = 2048
# Beyond so many examples it takes more than some ten seconds.
_MOST_EXAMPLES = 100_000
_SEED = 0x5E9


def pooled_rows(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int], cap: int
) -> list[KindPattern] | None:
    """Returns these rows, or None if it takes too long to find them.

    Args:
      kinds: `[V, Q]` lengths of the sequences of each kind, at most `capacities`.
      counts: `[V]` how many examples of each there are.
      capacities: `[Q]` what a row holds of each sequence.
      cap: the most slots of a row.
    """
    waiting = np.repeat(np.arange(len(counts)), counts)
    if len(waiting) > _MOST_EXAMPLES:
        return None
    waiting = waiting[permute(np.arange(len(waiting)), len(waiting), _SEED)]
    shares, whole = shares_of(kinds, capacities)
    weights = _weights(kinds, counts, capacities)
    pool, rest = waiting[:_POOL].copy(), iter(waiting[_POOL:].tolist())
    patterns = []
    while len(pool):
        lengths, room = kinds[pool], np.array(capacities)
        parts, left = shares[pool], np.array(whole)
        row: list[int] = []
        while len(row) < cap and len(pool):
            fits = np.all(lengths <= room, axis=1)
            lost = np.square(left - parts) @ weights
            place = int(np.where(fits, lost, np.iinfo(np.int64).max).argmin())
            if not fits[place]:
                break
            row.append(int(pool[place]))
            room, left = room - lengths[place], left - parts[place]
            kind = next(rest, None)
            if kind is None:
                pool, lengths, parts = (
                    np.delete(x, place, axis=0) for x in (pool, lengths, parts)
                )
            else:
                pool[place] = kind
                lengths[place], parts[place] = kinds[kind], shares[kind]
        patterns.append(KindPattern(tuple(row), 1))
    return patterns


def _weights(
    kinds: np.ndarray, counts: np.ndarray, capacities: Sequence[int]
) -> np.ndarray:
    """`[Q]` integers up to 1,024: of how many rows each sequence fills the whole."""
    tokens = (counts @ kinds).tolist()
    rows = [-(-n // size) for n, size in zip(tokens, capacities, strict=True)]
    return np.array([-(-1024 * n // max(rows)) for n in rows])
