"""Takes the fuller rows of two packers, and knows when neither can be fuller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxbucket.packing.pattern import Pattern, positions
from jaxbucket.packing.subset_sum import fullest_rows

# The second packer runs only if it may save more than this share of the rows.
_MIN_SAVING = 1e-4


def fuller_patterns(
    patterns: list[Pattern],
    values: np.ndarray,
    counts: np.ndarray,
    seq_lens: Sequence[int],
    cap: int,
) -> list[Pattern]:
    """Returns the rows of best fit, or of `fullest_rows` if these are fuller.

    Args:
      patterns: the rows of best fit.
      values: `[V]` distinct lengths, increasing, at most the last of `seq_lens`.
      counts: `[V]` integers, the number of examples of each length.
      seq_lens: the possible T of a row, increasing.
      cap: the maximum number of slots in a row.
    """
    fewest = fewest_positions(values, counts, seq_lens)
    other = functools.partial(fullest_rows, values, counts, seq_lens, cap)
    return choose_fuller(patterns, other, positions, fewest)


def choose_fuller(
    patterns: list[Pattern],
    other: Callable[[], list[Pattern] | None],
    size: Callable[[list[Pattern]], int],
    fewest: int,
) -> list[Pattern]:
    """Returns the given rows, or the rows of another packer if they are fewer.

    Args:
      patterns: the given rows.
      other: the other packer, which returns None if it gives up.
      size: the quantity to minimize, such as the number of rows.
      fewest: a lower bound of `size`. The other packer is not run if the given rows are
        already close to this bound.
    """
    if size(patterns) <= fewest * (1 + _MIN_SAVING):
        return patterns
    others = other()
    return others if others and size(others) < size(patterns) else patterns


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
