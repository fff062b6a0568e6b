"""Rows of one sequence: the fuller ones of two ways to pack a histogram of lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxbucket.packing.best_fit import best_fit
from jaxbucket.packing.pattern import Pattern, positions
from jaxbucket.packing.subset_sum import fullest_rows

# A second way is tried if it may save this share of the rows.
_WORTH_MORE = 1e-4


def row_patterns(
    values: np.ndarray,
    counts: np.ndarray,
    seq_lens: Sequence[int],
    cap: int,
    padded_up_to: int,
) -> list[Pattern]:
    """Returns the rows of examples that are alone, and of all others by best fit.

    Args:
      values: `[V]` lengths, increasing, the last at most the last of `seq_lens`.
      counts: `[V]` how many examples of each there are.
      seq_lens: T of rows, increasing.
      cap: the most slots of a row.
      padded_up_to: an example is alone if its length is at most this.
    """
    first = int(np.searchsorted(values, padded_up_to, side="right"))
    places = np.searchsorted(seq_lens, values[:first]).tolist()
    pairs = zip(values.tolist(), counts.tolist(), places, strict=False)
    alone = [Pattern((n,), count, seq_lens[place]) for n, count, place in pairs]
    return alone + best_fit(values[first:], counts[first:], seq_lens, cap)


def fuller_patterns(
    patterns: list[Pattern],
    values: np.ndarray,
    counts: np.ndarray,
    seq_lens: Sequence[int],
    cap: int,
    padded_up_to: int,
) -> list[Pattern]:
    """Returns rows that `row_patterns` made, or those of `fullest_rows` if fuller."""
    first = int(np.searchsorted(values, padded_up_to, side="right"))
    values, counts = values[first:], counts[first:]
    fewest = fewest_positions(values, counts, seq_lens)
    other = functools.partial(fullest_rows, values, counts, seq_lens, cap)
    return patterns[:first] + fuller_of(patterns[first:], other, positions, fewest)


def fuller_of(
    patterns: list[Pattern],
    other: Callable[[], list[Pattern] | None],
    size: Callable[[list[Pattern]], int],
    fewest: int,
) -> list[Pattern]:
    """Returns rows, or those of another way where they are fewer.

    Args:
      patterns: the rows.
      other: the other way, which may give up.
      size: what there is less of in fuller rows.
      fewest: a bound of it; where little can be saved the other way is not tried.
    """
    if size(patterns) <= fewest * (1 + _WORTH_MORE):
        return patterns
    others = other()
    return others if others and size(others) < size(patterns) else patterns


def fewest_positions(
    values: np.ndarray, counts: np.ndarray, seq_lens: Sequence[int]
) -> int:
    """A bound for rows of any packer, of one T (Martello and Toth, 1990, their L2).

    Above half a row examples share none with each other, and beyond T - k none with
    those that are k long.
    """
    tokens = int(values @ counts)
    if len(seq_lens) > 1 or not len(values):
        return tokens
    (seq_len,) = seq_lens
    examples = np.concatenate([[0], np.cumsum(counts)])
    sums = np.concatenate([[0], np.cumsum(values * counts)])
    half = np.searchsorted(values, seq_len // 2, side="right")
    k = np.arange(half + 1)
    # Between these, examples leave room for some that are at least k long.
    beyond = np.searchsorted(values, seq_len - np.append(values[:half], 0), "right")
    beyond = np.maximum(beyond, half)
    alone = examples[-1] - examples[half]
    room = (examples[beyond] - examples[half]) * seq_len - (sums[beyond] - sums[half])
    rest = sums[half] - sums[k] - room
    return seq_len * int(alone + np.maximum(-(-rest // seq_len), 0).max())
