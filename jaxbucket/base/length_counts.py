"""`LengthCounts`: how many examples have each length."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_lengths, check_positive

# Up to this length, lengths are counted in a table.
_MAX_TABLE = 1 << 24
# The number of examples that are processed at a time, which limits the memory.
_CHUNK = 1 << 20
_MAX_TOKENS = 2**62


class LengthCounts:
    """How many examples have each length, a histogram.

    Plans, reports and simulations depend on nothing else, so functions that take
    `lengths` of one sequence to plan for them also take this, for any number of
    examples.

    Example:
      >>> counts = LengthCounts({512: 3_000_000_000, 128: 7_000_000_000})
      >>> counts.lengths, counts.num_examples
      (array([128, 512]), 10000000000)

    Args:
      counts: a mapping from length to number of examples; or `[N]` integers, the
        lengths themselves, which are counted.
      name: the name of the argument, for messages.

    Attributes:
      lengths: `[V]` int64, the different lengths, increasing.
      counts: `[V]` int64, the number of examples of each.
      given: `[N]` integers, the lengths that were counted, so that messages can name
        one of them.

    Raises:
      ValueError: if a length or a count is not a positive integer, or none is left, or
        there are more than 2**62 tokens. A count of 0 leaves out its length.
    """

    def __init__(self, counts: Mapping[int, int] | ArrayLike, name: str = "lengths"):
        if isinstance(counts, Mapping):
            pairs = _of_mapping(counts, name)
            self.given = pairs[0]
        else:
            self.given = check_lengths(counts, name, keep=True)
            pairs = _counted(self.given)
        self.lengths, self.counts = _merged(*pairs)
        # Sums of tokens are 64-bit integers.
        if self.lengths.astype(float) @ self.counts.astype(float) >= _MAX_TOKENS:
            raise ValueError(
                f"`{name}` has {self.lengths.astype(float) @ self.counts:.3g} tokens. "
                f"Pass lengths with less than {_MAX_TOKENS:.3g} in all."
            )

    @classmethod
    def of(cls, lengths: Any) -> LengthCounts:
        """Returns `lengths` if they are counted already, or else their counts."""
        return lengths if isinstance(lengths, LengthCounts) else cls(lengths)

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return int(self.counts.sum())

    def times(self, number: int) -> LengthCounts:
        """Returns the counts of so many times the examples, such as of a sample.

        Example:
          >>> LengthCounts([3, 10, 3]).times(1000)
          LengthCounts(3000 examples of 2 lengths from 3 to 10)
        """
        number = check_positive("number", number)
        counts = zip(self.lengths.tolist(), self.counts.tolist(), strict=True)
        return LengthCounts({length: number * count for length, count in counts})

    def split(self, max_seq_len: int) -> LengthCounts:
        """Returns the counts of the chunks of examples that are split.

        Example:
          >>> LengthCounts([3, 10, 8]).split(4).counts
          array([1, 1, 4])
        """
        rest = (self.lengths - 1) % max_seq_len + 1
        full = int(((self.lengths - 1) // max_seq_len * self.counts).sum())
        lengths, counts = np.append(rest, max_seq_len), np.append(self.counts, full)
        merged = (x.tolist() for x in _merged(lengths, counts))
        return LengthCounts(dict(zip(*merged, strict=True)))

    def spread(self, number: int) -> np.ndarray:
        """Returns lengths at equal distances in sorted order, at most `number`."""
        total = self.num_examples
        places = np.linspace(0, total - 1, min(number, total)).astype(np.int64)
        ends = np.cumsum(self.counts)
        return self.lengths[np.searchsorted(ends, places, side="right")]

    def __repr__(self) -> str:
        return (
            f"LengthCounts({self.num_examples} examples of {len(self.lengths)} lengths "
            f"from {self.lengths[0]} to {self.lengths[-1]})"
        )


def _of_mapping(counts: Mapping[int, int], name: str) -> tuple[np.ndarray, np.ndarray]:
    lengths, numbers = np.array(list(counts)), np.array(list(counts.values()))
    is_counted = lengths.dtype.kind in "iu" and numbers.dtype.kind in "iu"
    is_counted &= numbers.shape == lengths.shape
    if not is_counted or numbers.min() < 0 or not 0 < numbers.max() < _MAX_TOKENS:
        raise ValueError(
            f"`{name}` is a mapping with the items {reprlib.repr(dict(counts))}. Pass "
            "integers, length -> number of examples; or, where examples have several "
            "sequences, the name of each -> lengths [N]."
        )
    return check_lengths(lengths[numbers > 0], name), numbers[numbers > 0]


def _counted(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns lengths and how often they occur; a large one may be there repeatedly."""
    last = int(lengths.max())
    if last > _MAX_TABLE:
        pairs = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for part in chunks(lengths):
            more = np.unique(part, return_counts=True)
            both = zip(pairs, more, strict=True)
            pairs = _merged(*map(np.concatenate, both))
        return pairs
    table = np.zeros(last + 1, np.int64)
    for part in chunks(lengths):
        found = np.bincount(part)
        table[: len(found)] += found
    values = np.flatnonzero(table)
    return values, table[values]


def _merged(lengths: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different lengths, `[V]` int64 increasing, and their total counts.

    Args:
      lengths: `[n]` integers.
      counts: `[n]` integers, the examples of each.
    """
    lengths, counts = lengths.astype(np.int64), counts.astype(np.int64)
    values, places = np.unique(lengths, return_inverse=True)
    totals = np.zeros(len(values), np.int64)
    np.add.at(totals, places, counts)
    return values[totals > 0], totals[totals > 0]


def chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yields consecutive parts of an array, of any number of examples."""
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
