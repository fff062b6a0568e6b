"""Rows of several examples: which lengths fill a row, before any example is read.

Lengths are known, so what is packed is their histogram: a row is a *pattern* of
lengths, and thousands of rows have the same one. Which example takes a *slot* of a row
is drawn by the schedule, among all of the slot's length.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base import digest
from jaxbucket.checks import (
    MAX_LENGTH,
    check_integer,
    check_lengths,
    check_positive,
    split_line,
)
from jaxbucket.histogram import value_counts

# Of which there is a bit for each length of it.
_MOST_ROOM = 1 << 26


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """Rows of slots, each for one example of a certain length.

    Example:
      >>> packing = pack([3, 5, 2, 4, 6], max_seq_len=8)
      >>> [packing.slots(row).tolist() for row in range(packing.num_rows)]
      [[4], [5, 3], [6, 2]]
      >>> packing.row_lengths, f"{packing.fill:.1%}"
      (array([4, 8, 8]), '83.3%')

    Attributes:
      seq_lens: T that rows may have, increasing. A row has the first that holds it.
      slot_lengths: `[S]` int32, those of the first row, then those of the next; as
        many of each as there are examples of this length.
      row_splits: `[R + 1]` int64: row r has slots `row_splits[r]` up to, and without,
        `row_splits[r + 1]`.
      max_segments: the most slots a row may have, as features of one number for each
        example are `[B, max_segments]`.
    """

    seq_lens: tuple[int, ...]
    slot_lengths: np.ndarray
    row_splits: np.ndarray
    max_segments: int

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_splits) - 1

    @property
    def num_examples(self) -> int:
        """S, one for each slot."""
        return len(self.slot_lengths)

    def slots(self, row: int) -> np.ndarray:
        """Returns the lengths of a row's slots."""
        return self.slot_lengths[self.row_splits[row] : self.row_splits[row + 1]]

    @functools.cached_property
    def row_lengths(self) -> np.ndarray:
        """`[R]` int64: tokens of each row."""
        return np.add.reduceat(self.slot_lengths, self.row_splits[:-1], dtype=np.int64)

    @functools.cached_property
    def row_work(self) -> np.ndarray:
        """`[R]` int64: pairs of positions that attention within examples looks at."""
        squares = np.square(self.slot_lengths, dtype=np.int64)
        return np.add.reduceat(squares, self.row_splits[:-1])

    @functools.cached_property
    def row_segments(self) -> np.ndarray:
        """`[R]` int64: slots of each row."""
        return np.diff(self.row_splits)

    @property
    def fill(self) -> float:
        """Tokens by positions of all rows, each as long as its T."""
        seq_lens = np.array(self.seq_lens)
        rows = np.bincount(np.searchsorted(seq_lens, self.row_lengths))
        positions = rows @ seq_lens[: len(rows)]
        return float(self.row_lengths.sum() / positions)

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that name every row."""
        return digest(
            str((self.seq_lens, self.max_segments)).encode(),
            np.ascontiguousarray(self.slot_lengths, "<i4").data,
            np.ascontiguousarray(self.row_splits, "<i8").data,
        )

    def __repr__(self) -> str:
        shapes = ", ".join(map(str, self.seq_lens))
        return (
            f"Packing({self.num_examples} examples in {self.num_rows} rows of "
            f"{shapes}, fill {self.fill:.1%})"
        )


def pack(
    lengths: ArrayLike,
    max_seq_len: int | Sequence[int],
    *,
    max_segments_per_row: int | None = None,
    padded_up_to: int = 0,
) -> Packing:
    """Returns rows that examples of these lengths fill: best fit decreasing.

    The longest first, each goes into the row that has the least room for it. This is
    done for all examples of a length at once, so that it takes as long as there are
    lengths, and not examples (Krell et al., "Efficient Sequence Packing without
    Cross-contamination", 2021, arXiv:2107.02027, pack a histogram as well).

    With several T, a row is begun with the shortest that holds its longest example;
    shorter examples fill up the rows of any T.

    Example:
      >>> pack([3, 5, 2, 4, 6], max_seq_len=(4, 8))
      Packing(5 examples in 3 rows of 4, 8, fill 100.0%)

    Args:
      lengths: `[N]` integers, one per example.
      max_seq_len: T of a row, or several.
      max_segments_per_row: the most examples of a row; by default as many as fit.
      padded_up_to: examples that are at most so long are alone in their rows.

    Raises:
      ValueError: for lengths that `check_lengths` refuses or that are beyond the
        longest row, or for a T or a number of segments that is not positive.
    """
    lengths = check_lengths(lengths)
    seq_lens = check_seq_lens(max_seq_len)
    cap = check_cap(max_segments_per_row)
    values, counts = value_counts(lengths)
    check_longest(lengths, seq_lens[-1])
    up_to = check_integer("padded_up_to", padded_up_to)
    if up_to < 0:
        raise ValueError(f"`padded_up_to={up_to}` must not be negative.")
    patterns = row_patterns(values, counts, seq_lens, cap, up_to)
    return from_patterns(patterns, seq_lens, max_segments_per_row)


def from_patterns(
    patterns: Sequence[Pattern],
    seq_lens: tuple[int, ...],
    max_segments_per_row: int | None,
) -> Packing:
    """Returns the rows of patterns, one after the other."""
    slot_lengths = [np.tile(np.array(x.slots, np.int32), x.rows) for x in patterns]
    segments = np.array([len(pattern.slots) for pattern in patterns])
    sizes = np.repeat(segments, [pattern.rows for pattern in patterns])
    most = int(segments.max())
    if max_segments_per_row is not None:
        # So many could be in a row of other data as well.
        shortest = min(pattern.slots[-1] for pattern in patterns)
        most = min(max_segments_per_row, seq_lens[-1] // shortest)
    splits = np.concatenate([[0], np.cumsum(sizes)])
    return Packing(seq_lens, np.concatenate(slot_lengths), splits, most)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Rows that are alike.

    Attributes:
      slots: their lengths, the longest first.
      rows: how many there are.
      seq_len: T that they were begun with.
    """

    slots: tuple[int, ...]
    rows: int
    seq_len: int


def row_patterns(
    values: np.ndarray,
    counts: np.ndarray,
    seq_lens: Sequence[int],
    cap: int,
    padded_up_to: int,
) -> list[Pattern]:
    """Returns the rows of examples that are alone, and of the others `best_fit`.

    An example is alone if its length is at most `padded_up_to`.
    """
    first = int(np.searchsorted(values, padded_up_to, side="right"))
    places = np.searchsorted(seq_lens, values[:first]).tolist()
    pairs = zip(values.tolist(), counts.tolist(), places, strict=False)
    alone = [Pattern((n,), count, seq_lens[place]) for n, count, place in pairs]
    return alone + best_fit(values[first:], counts[first:], seq_lens, cap)


def best_fit(
    values: np.ndarray, counts: np.ndarray, seq_lens: Sequence[int], cap: int
) -> list[Pattern]:
    """Returns the rows of best fit decreasing, all examples of a length at once.

    Args:
      values: `[V]` lengths, increasing, the last at most the last of `seq_lens`.
      counts: `[V]` how many examples of each there are.
      seq_lens: T of rows, increasing.
      cap: the most slots of a row.
    """
    every: list[_Rows] = []
    rooms = _Rooms(cap)
    starts = iter(np.searchsorted(seq_lens, values[::-1]).tolist())
    pairs = zip(values[::-1].tolist(), counts[::-1].tolist(), starts, strict=True)
    for length, left, start in pairs:
        while left:
            rows = rooms.take_tightest(length)
            if rows is None:
                rows = _Rows(None, 0, 0, seq_lens[start], 0, left)
            # A row that took one is the tightest again until no more fit.
            times = min(rows.room // length, cap - rows.segments, left)
            number = min(rows.number, left // times)
            room, segments = rows.room - times * length, rows.segments + times
            every.append(_Rows(rows, length, times, room, segments, number))
            rows.number -= number
            if rows.number and rows.segments:
                rooms.put(rows)
            rooms.put(every[-1])
            left -= number * times
    return [
        Pattern(rows.slots(), rows.number, rows.seq_len())
        for rows in every
        if rows.number
    ]


@dataclasses.dataclass(slots=True, eq=False)
class _Rows:
    """Rows that are alike so far: those before them, and `times` more of a length."""

    before: _Rows | None
    length: int
    times: int
    room: int
    segments: int
    number: int

    def _history(self) -> Iterator[_Rows]:
        rows: _Rows | None = self
        while rows is not None and rows.segments:
            yield rows
            rows = rows.before

    def slots(self) -> tuple[int, ...]:
        parts = [(x.length,) * x.times for x in self._history()]
        return tuple(length for part in reversed(parts) for length in part)

    def seq_len(self) -> int:
        return self.room + sum(x.length * x.times for x in self._history())


class _Rooms:
    """Rows that may take more, by the room that is left in them."""

    def __init__(self, cap: int):
        self._cap = cap
        self._by_room: dict[int, list[_Rows]] = {}
        # Bit r is set where rows have room r: the next larger one is a shift away.
        self._bits = 0

    def take_tightest(self, length: int) -> _Rows | None:
        """Takes out rows with the least room for a length, the last come first."""
        bits = self._bits >> length
        if not bits:
            return None
        room = length + (bits & -bits).bit_length() - 1
        rows = self._by_room[room]
        found = rows.pop()
        if not rows:
            self._bits &= ~(1 << room)
        return found

    def put(self, rows: _Rows) -> None:
        if rows.room and rows.segments < self._cap:
            self._by_room.setdefault(rows.room, []).append(rows)
            self._bits |= 1 << rows.room


def check_longest(lengths: np.ndarray, max_seq_len: int) -> None:
    """Raises a ValueError if an example is longer than the longest row."""
    if lengths.max() > max_seq_len:
        example = int(np.argmax(lengths > max_seq_len))
        raise ValueError(
            f"`lengths[{example}]={lengths[example]}` is beyond the longest row, "
            f"`max_seq_len={max_seq_len}`. Give longer rows, or split the source: "
            f"`{split_line(max_seq_len)}` and `source.lengths`."
        )


def check_seq_lens(max_seq_len: int | Sequence[int]) -> tuple[int, ...]:
    """Returns T of rows as a tuple.

    Raises:
      ValueError: if there are none, or they are not positive and increasing.
    """
    given = max_seq_len if isinstance(max_seq_len, Sequence) else [max_seq_len]
    if isinstance(max_seq_len, np.ndarray):
        given = max_seq_len.tolist() if max_seq_len.ndim == 1 else []
    seq_lens = tuple(check_positive("max_seq_len", x) for x in given)
    if not seq_lens or any(np.diff(seq_lens) <= 0):
        raise ValueError(
            f"`max_seq_len={max_seq_len}` must be one T, or several that increase."
        )
    if seq_lens[-1] > _MOST_ROOM:
        raise ValueError(
            f"`max_seq_len={seq_lens[-1]}` is beyond {_MOST_ROOM}: give shorter rows."
        )
    return seq_lens


def check_cap(max_segments_per_row: int | None) -> int:
    """Returns the most examples of a row.

    Raises:
      ValueError: if it is not positive.
    """
    if max_segments_per_row is None:
        return MAX_LENGTH
    return check_positive("max_segments_per_row", max_segments_per_row)
