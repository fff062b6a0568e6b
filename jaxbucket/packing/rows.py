"""Rows of several examples: which lengths fill a row, before any example is read.

Lengths are known, so what is packed is their histogram: a row is a *pattern* of
lengths, and thousands of rows have the same one. Which example takes a *slot* of a row
is drawn by the schedule, among all of the slot's length.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_integer,
    check_lengths,
    check_positive,
    split_line,
)
from jaxbucket.base.digest import digest
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.packing.best_fit import best_fit
from jaxbucket.packing.kinds import grouped_kinds, kinds_of
from jaxbucket.packing.pattern import Pattern, positions
from jaxbucket.packing.sequences import MAX_ROW, check_capacities, check_parts
from jaxbucket.packing.subset_sum import fullest_rows
from jaxbucket.packing.vector_best_fit import fit_sequences
from jaxbucket.packing.vector_pool import pooled_rows
from jaxbucket.plan.histogram import value_counts

# Of a pattern with so many rows the slots are made together.
_FEW_ROWS = 16
# Of more examples that differ neighbours are taken as equal: about three seconds.
_MOST_KINDS = 300_000
# A second way is tried if it may save this share of the rows.
_WORTH_MORE = 1e-4


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
      capacities: what a row holds of each sequence, where examples have several; these
        are T together.
      slot_parts: `[S, Q]` int32: the lengths of these sequences, in that order.
    """

    seq_lens: tuple[int, ...]
    slot_lengths: np.ndarray
    row_splits: np.ndarray
    max_segments: int
    capacities: dict[str, int] | None = None
    slot_parts: np.ndarray | None = None

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
        parts = self.slot_parts
        if parts is None:
            parts = self.slot_lengths[:, None]
        squares = np.square(parts, dtype=np.int64).sum(axis=1)
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
        parts = [
            str((self.seq_lens, self.max_segments)).encode(),
            np.ascontiguousarray(self.slot_lengths, "<i4").data,
            np.ascontiguousarray(self.row_splits, "<i8").data,
        ]
        if self.slot_parts is not None:
            parts.append(str(self.capacities).encode())
            parts.append(np.ascontiguousarray(self.slot_parts, "<i4").data)
        return digest(*parts)

    def __repr__(self) -> str:
        shapes = ", ".join(map(str, self.seq_lens))
        return (
            f"Packing({self.num_examples} examples in {self.num_rows} rows of "
            f"{shapes}, fill {self.fill:.1%})"
        )


@bar_if_slow("Packing")
def pack(
    lengths: ArrayLike | Mapping[str, ArrayLike],
    max_seq_len: int | Sequence[int] | Mapping[str, int],
    *,
    max_segments_per_row: int | None = None,
    padded_up_to: int = 0,
) -> Packing:
    """Returns rows that examples of these lengths fill, the fuller ones of two ways.

    Best fit decreasing: the longest first, each into the row that has the least room
    for it. Where there may be fewer, by more than 1 in 10,000, one row after the other
    is made as full as it can be, too, if that takes no more than seconds. Both pack the
    histogram of lengths: they take as long as there are lengths, and not examples.

    With several T, a row is begun with the shortest that holds its longest example;
    shorter examples fill up the rows of any T.

    Examples with several sequences, such as inputs and targets, are packed in all of
    them at once, into rows of one shape: a row has a capacity for each sequence, and
    the n-th segments of all are of one example. These take as long as there are pairs,
    and up to 100,000 examples are packed in a second way, again, from a pool.

    Example:
      >>> pack([3, 5, 2, 4, 6], max_seq_len=(4, 8))
      Packing(5 examples in 3 rows of 4, 8, fill 100.0%)
      >>> lengths = {"inputs": [3, 5, 2], "targets": [1, 4, 3]}
      >>> packing = pack(lengths, {"inputs": 8, "targets": 4})
      >>> packing.seq_lens, packing.num_rows
      ((12,), 2)

    Args:
      lengths: `[N]` integers, one per example; or name -> `[N]` for each sequence.
      max_seq_len: T of a row, or several; or name -> what a row holds of the sequence.
      max_segments_per_row: the most examples of a row; by default as many as fit.
      padded_up_to: examples that are at most so long are alone in their rows.

    Raises:
      ValueError: for lengths that `check_lengths` refuses or that are beyond the
        longest row, or for a T or a number of segments that is not positive; if
        sequences and capacities are not of the same names and examples.
    """
    cap = check_cap(max_segments_per_row)
    up_to = min(check_integer("padded_up_to", padded_up_to), MAX_LENGTH)
    if up_to < 0:
        raise ValueError(f"`padded_up_to={up_to}` must not be negative.")
    if isinstance(lengths, Mapping) or isinstance(max_seq_len, Mapping):
        _check_both(lengths, max_seq_len, up_to)
        return _pack_sequences(
            cast(Mapping, lengths), cast(Mapping, max_seq_len), max_segments_per_row
        )
    lengths = check_lengths(lengths)
    seq_lens = check_seq_lens(max_seq_len)
    values, counts = value_counts(lengths)
    check_longest(lengths, seq_lens[-1])
    patterns = row_patterns(values, counts, seq_lens, cap, up_to)
    patterns = fuller_patterns(patterns, values, counts, seq_lens, cap, up_to)
    return from_patterns(patterns, seq_lens, max_segments_per_row)


def _check_both(lengths: Any, max_seq_len: Any, padded_up_to: int) -> None:
    for name, value in (("lengths", lengths), ("max_seq_len", max_seq_len)):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"`{name}={value!r}` is no mapping, and the other one is: "
                "of several sequences, give lengths and capacities by name."
            )
    if padded_up_to:
        raise ValueError(
            f"`padded_up_to={padded_up_to}`: rows of several sequences have one shape. "
            "Leave it out."
        )


def _pack_sequences(
    lengths: Mapping[str, ArrayLike],
    max_seq_len: Mapping[str, int],
    max_segments_per_row: int | None,
) -> Packing:
    """Rows with a room for each sequence."""
    parts = check_parts(lengths)
    capacities = check_capacities(max_seq_len, parts)
    rooms = list(capacities.values())
    cap = check_cap(max_segments_per_row)
    kinds, counts = kinds_of(np.stack(list(parts.values()), axis=1), rooms)
    groups, number, members = grouped_kinds(kinds, counts, rooms, _MOST_KINDS)
    fitted = fit_sequences(groups, number, rooms, cap)
    rows = sum(x.rows for x in fitted)
    found = _fuller(
        fitted,
        functools.partial(pooled_rows, groups, number, rooms, cap, fewer_than=rows),
        lambda patterns: sum(x.rows for x in patterns),
        int(max(-(-(counts @ kinds.astype(np.int64)) // rooms))),
    )
    pattern_rows = np.array([x.rows for x in found])
    slots = _slots((x.kinds, x.rows) for x in found)
    # Each slot of a group takes the next of its members.
    order = np.argsort(slots, kind="stable")
    slots[order] = np.repeat(members, counts[members])
    segments = np.array([len(x.kinds) for x in found])
    most = int(segments.max())
    if max_segments_per_row is not None:
        # So many could be in a row of other data as well.
        fits = (np.array(rooms) // kinds.min(axis=0)).min()
        most = min(max_segments_per_row, int(fits))
    sizes = np.repeat(segments, pattern_rows)
    slot_parts = kinds[slots]
    return Packing(
        (sum(rooms),),
        slot_parts.sum(axis=1, dtype=np.int32),
        np.concatenate([[0], np.cumsum(sizes)]),
        most,
        capacities,
        slot_parts,
    )


def from_patterns(
    patterns: Sequence[Pattern],
    seq_lens: tuple[int, ...],
    max_segments_per_row: int | None,
) -> Packing:
    """Returns the rows of patterns, one after the other."""
    slot_lengths = _slots((x.slots, x.rows) for x in patterns)
    segments = np.array([len(pattern.slots) for pattern in patterns])
    sizes = np.repeat(segments, [pattern.rows for pattern in patterns])
    most = int(segments.max())
    if max_segments_per_row is not None:
        # So many could be in a row of other data as well.
        shortest = min(pattern.slots[-1] for pattern in patterns)
        most = min(max_segments_per_row, seq_lens[-1] // shortest)
    splits = np.concatenate([[0], np.cumsum(sizes)])
    return Packing(seq_lens, slot_lengths, splits, most)


def _slots(patterns: Iterable[tuple[tuple[int, ...], int]]) -> np.ndarray:
    """`[S]` int32: the slots of each pattern, as often as there are rows of it."""
    pieces: list[np.ndarray] = []
    few: list[int] = []
    for slots, rows in patterns:
        # Arrays of a few numbers each would take longer than the numbers.
        if rows < _FEW_ROWS:
            few += slots * rows
            continue
        pieces.append(np.array(few, np.int32))
        pieces.append(np.tile(np.array(slots, np.int32), rows))
        few = []
    return np.concatenate([*pieces, np.array(few, np.int32)])


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
    return patterns[:first] + _fuller(patterns[first:], other, positions, fewest)


_Found = TypeVar("_Found")


def _fuller(
    found: _Found,
    other: Callable[[], _Found | None],
    size: Callable[[_Found], int],
    fewest: int,
) -> _Found:
    """Returns rows, or those of another way where they are fewer.

    Args:
      found: the rows.
      other: the other way, which may give up.
      size: what there is less of in fuller rows.
      fewest: a bound of it; where little can be saved the other way is not tried.
    """
    if size(found) <= fewest * (1 + _WORTH_MORE):
        return found
    others = other()
    return found if others is None or size(others) >= size(found) else others


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
        given = np.atleast_1d(max_seq_len).tolist() if max_seq_len.ndim < 2 else []
    elif isinstance(max_seq_len, Iterable) and given is not max_seq_len:
        # Of a set or a generator there is no order, or no second time.
        given = []
    seq_lens = tuple(check_positive("max_seq_len", x) for x in given)
    if not seq_lens or any(np.diff(seq_lens) <= 0):
        raise ValueError(
            f"`max_seq_len={max_seq_len}` must be one T, or a list of several that "
            "increase."
        )
    if seq_lens[-1] > MAX_ROW:
        raise ValueError(
            f"`max_seq_len={seq_lens[-1]}` is beyond {MAX_ROW}: give shorter rows."
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
