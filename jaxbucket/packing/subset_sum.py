"""One row after the other, each as full as the lengths that are left can make it.

A row is begun with the longest example that is left, and the rest of it is a subset
sum: all sums that shorter ones have are the bits of one integer. Of subsets that fill
it alike, the one with the longest examples is taken, for short ones fill any gap later.

This is minimum bin slack with the longest always in (Gupta and Ho, "A new heuristic
algorithm for the one-dimensional bin-packing problem", 1999; Fleszar and Hindi, "New
heuristics for one-dimensional bin-packing", 2002), of a histogram.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence

import numpy as np

from jaxbucket.packing.pattern import Pattern

# Lengths that are looked at for all rows together, a second or two; those of rows that
# are longer than this count for more.
_MOST_LOOKED_AT = 3_000_000
_ROOM_OF_ONE = 8192
# After so much of them it ends where they are not going to be enough: where they have
# packed a fourth of this share of all tokens, and no more.
_EARLY = 1 / 8
# Sums of one row, 256 MB.
_MOST_BITS = 1 << 31


def fullest_rows(
    values: np.ndarray, counts: np.ndarray, seq_lens: Sequence[int], cap: int
) -> list[Pattern] | None:
    """Returns these rows, or None if it takes too long to find them, or too much.

    Args:
      values: `[V]` lengths, increasing, the last at most the last of `seq_lens`.
      counts: `[V]` how many examples of each there are.
      seq_lens: T of rows, increasing: a row has the first that holds its longest.
      cap: the most slots of a row.
    """
    lengths = values.tolist()
    left = dict(zip(lengths, counts.tolist(), strict=True))
    patterns = []
    looked_at = packed = 0
    tokens = int(values @ counts)
    while lengths:
        longest = lengths[-1]
        seq_len = seq_lens[bisect.bisect_left(seq_lens, longest)]
        room = seq_len - longest
        left[longest] -= 1
        shorter = lengths[: bisect.bisect_right(lengths, room)] if cap > 1 else []
        looked_at += len(shorter) * (1 + room // _ROOM_OF_ONE)
        if looked_at > _MOST_LOOKED_AT or len(shorter) * room > _MOST_BITS:
            return None
        if looked_at > _EARLY * _MOST_LOOKED_AT and packed < _EARLY / 4 * tokens:
            return None
        slots = (longest, *_subset(shorter, left, room)[: cap - 1])
        left[longest] += 1
        needed = collections.Counter(slots) if len(slots) > 1 else {longest: 1}
        rows = min([left[length] // times for length, times in needed.items()])
        for length, times in needed.items():
            left[length] -= rows * times
            if not left[length]:
                del lengths[bisect.bisect_left(lengths, length)]
        patterns.append(Pattern(slots, rows, seq_len))
        packed += rows * sum(slots)
    return patterns


def _subset(lengths: list[int], left: dict[int, int], room: int) -> list[int]:
    """The lengths, the longest first, that leave the least of a room."""
    if not lengths:
        return []
    within = (1 << (room + 1)) - 1
    # Bit s of entry i: the first i lengths have a subset with the sum s.
    sums = [1]
    for length in lengths:
        reached = sums[-1]
        times, together = left[length], 1
        if times > 1:
            times = min(times, room // length)
        while times > 0:
            # Any number of copies is a sum of 1, 2, 4, ... and a rest.
            if together > times:
                together = times
            reached |= (reached << (together * length)) & within
            times -= together
            together *= 2
        sums.append(reached)
    subset: list[int] = []
    rest = sums[-1].bit_length() - 1
    for index in range(len(lengths) - 1, -1, -1):
        if not rest:
            break
        length = lengths[index]
        times = min(left[length], rest // length)
        while not sums[index] >> (rest - times * length) & 1:
            times -= 1
        subset += [length] * times
        rest -= times * length
    return subset
