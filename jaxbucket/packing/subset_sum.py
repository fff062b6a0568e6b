"""Fills one row after the other as full as possible, by subset sums.

Every row starts with the longest remaining example. The rest of the row is a subset sum
problem: all sums of shorter examples are the bits of one integer. Among subsets that
fill the row equally, the one with the longest examples is chosen, because short
examples fill later gaps more easily.

This is minimum bin slack with the longest item fixed (Gupta and Ho, "A new heuristic
algorithm for the one-dimensional bin-packing problem", 1999; Fleszar and Hindi, "New
heuristics for one-dimensional bin-packing", 2002), applied to a histogram.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Sequence

import numpy as np

from jaxbucket.packing.pattern import Pattern, positions

# The work limit over all rows, in lengths tried: a second or two. A length counts once
# more for every `_ROOM_UNIT` tokens of room, because long integers are slower.
_MAX_LENGTHS_TRIED = 3_000_000
_ROOM_UNIT = 8192
# After this share of the work the packer gives up if it has packed less than a quarter
# of the same share of all tokens, because then it would not finish.
_EARLY_SHARE = 1 / 8
# The limit on the bits of all sums of one row, 256 MB.
_MAX_BITS = 1 << 31


def fullest_rows(
    values: np.ndarray, counts: np.ndarray, seq_lens: Sequence[int], cap: int
) -> list[Pattern] | None:
    """Returns the rows, or None if finding them takes too much time or memory.

    Args:
      values: `[V]` distinct lengths, increasing, at most the last of `seq_lens`.
      counts: `[V]` integers, the number of examples of each length.
      seq_lens: the possible T of a row, increasing. A row gets the shortest T that its
        longest example fits.
      cap: the maximum number of slots in a row.
    """
    lengths = values.tolist()
    left = dict(zip(lengths, counts.tolist(), strict=True))
    patterns = []
    tried = packed = 0
    tokens = int(values @ counts)
    while lengths:
        longest = lengths[-1]
        seq_len = seq_lens[bisect.bisect_left(seq_lens, longest)]
        room = seq_len - longest
        left[longest] -= 1
        shorter = lengths[: bisect.bisect_right(lengths, room)] if cap > 1 else []
        tried += len(shorter) * (1 + room // _ROOM_UNIT)
        if tried > _MAX_LENGTHS_TRIED or len(shorter) * room > _MAX_BITS:
            return None
        is_early = tried > _EARLY_SHARE * _MAX_LENGTHS_TRIED
        if is_early and packed < _EARLY_SHARE / 4 * tokens:
            return None
        slots = (longest, *_fullest_subset(shorter, left, room)[: cap - 1])
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


def _fullest_subset(lengths: list[int], left: dict[int, int], room: int) -> list[int]:
    """Returns the lengths, the longest first, that fill a room as far as possible.

    There are `left[length]` examples of each of the increasing `lengths`.
    """
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
            # Every number of copies up to `times` is a sum of some of 1, 2, 4, ... and
            # a final remainder.
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


# The second packer runs only if it may save more than this share of the rows.
_MIN_SAVING = 1e-4


def choose_fuller(
    patterns: list[Pattern], other: Callable[[], list[Pattern] | None], fewest: int
) -> list[Pattern]:
    """Returns the given rows, or those of another packer if they have fewer positions.

    Args:
      patterns: the given rows.
      other: the other packer, which returns None if it gives up.
      fewest: a lower bound on the positions. The other packer is not run if the given
        rows are already close to this bound.
    """
    if positions(patterns) <= fewest * (1 + _MIN_SAVING):
        return patterns
    others = other()
    return others if others and positions(others) < positions(patterns) else patterns


def fewest_positions(
    values: np.ndarray, counts: np.ndarray, seq_lens: Sequence[int]
) -> int:
    """Returns a lower bound on the positions that any packer needs.

    For a single T it is the bound L2 of Martello and Toth, 1990. Two examples longer
    than half a row cannot share a row, and neither can an example longer than T - k
    and one of length k or more.
    """
    tokens = int(values @ counts)
    if len(seq_lens) > 1 or not len(values):
        return tokens
    (seq_len,) = seq_lens
    examples = np.concatenate([[0], np.cumsum(counts)])
    sums = np.concatenate([[0], np.cumsum(values * counts)])
    half = np.searchsorted(values, seq_len // 2, side="right")
    k = np.arange(half + 1)
    # Lengths between half a row and T - k leave room for examples of length k or more.
    beyond = np.searchsorted(values, seq_len - np.append(values[:half], 0), "right")
    beyond = np.maximum(beyond, half)
    alone = examples[-1] - examples[half]
    room = (examples[beyond] - examples[half]) * seq_len - (sums[beyond] - sums[half])
    rest = sums[half] - sums[k] - room
    return seq_len * int(alone + np.maximum(-(-rest // seq_len), 0).max())
