"""Packs lengths into rows of several examples, before any example is read.

The packers work on the histogram of the lengths. A row follows a *pattern* of lengths,
which may be shared by thousands of rows. It has a *slot* for each of its lengths. The
schedule later draws the example for each slot from all examples of the slot's length.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.assignment import cheapest
from jaxbucket.base.checks import MAX_LENGTH, check_positive
from jaxbucket.base.digest import digest
from jaxbucket.base.policies import Overlong
from jaxbucket.base.sizes import Lengths, Sizes, each_size, total
from jaxbucket.packing.best_fit import best_fit
from jaxbucket.packing.pattern import Pattern, positions
from jaxbucket.packing.sequences import count_kinds, group_kinds, row_shapes
from jaxbucket.packing.subset_sum import choose_fuller, fewest_positions, fullest_rows
from jaxbucket.packing.vector_best_fit import fit_sequences, pooled_rows
from jaxbucket.plan.chunks import kept_lengths

# Patterns with at least this many rows get an array of their own.
_MIN_ROWS_PER_ARRAY = 16
# With more kinds, neighboring kinds are grouped. Packing takes about three seconds.
_MAX_KINDS = 300_000


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """Rows of slots, where each slot holds one example of a certain length.

    Example:
      >>> packing = pack([3, 5, 2, 4, 6], max_seq_len=8)
      >>> [packing.slots(row).tolist() for row in range(packing.num_rows)]
      [[4], [5, 3], [6, 2]]
      >>> packing.row_lengths, f"{packing.fill:.1%}"
      (array([4, 8, 8]), '83.3%')

    Attributes:
      seq_lens: the possible T of a row, increasing. A row uses the shortest T that it
        fits. If examples have several sequences, `Sizes` with a T for each.
      slot_lengths: `[S]` int32, the lengths of the slots of all rows, concatenated.
        Every length has as many slots as there are examples of this length.
      row_splits: `[R + 1]` int64: row r has the slots from `row_splits[r]` to
        `row_splits[r + 1] - 1`.
      max_segments: the maximum number of slots in a row. Features with one value per
        example have the shape `[B, max_segments]`.
      slot_parts: `[S, Q]` int32, the length of each sequence in each slot; None unless
        examples have several sequences.
    """

    seq_lens: tuple[int | Sizes, ...]
    slot_lengths: np.ndarray
    row_splits: np.ndarray
    max_segments: int
    slot_parts: np.ndarray | None = None

    @property
    def sequences(self) -> tuple[str, ...]:
        """The names of the sequences of an example; empty if it has one length."""
        seq_len = self.seq_lens[0]
        return tuple(seq_len) if isinstance(seq_len, Sizes) else ()

    @property
    def num_rows(self) -> int:
        """The number of rows, R."""
        return len(self.row_splits) - 1

    @property
    def num_examples(self) -> int:
        """The number of examples, S, which is also the number of slots."""
        return len(self.slot_lengths)

    def slots(self, row: int) -> np.ndarray:
        """Returns the lengths of the slots of a row."""
        return self.slot_lengths[self.row_splits[row] : self.row_splits[row + 1]]

    @property
    def parts(self) -> np.ndarray:
        """`[S, Q]` int32, `slot_parts`; or the one length of each slot."""
        return (
            self.slot_lengths[:, None] if self.slot_parts is None else self.slot_parts
        )

    @functools.cached_property
    def row_parts(self) -> np.ndarray:
        """`[R, Q]` int64, the number of tokens of each sequence in each row."""
        return np.add.reduceat(self.parts, self.row_splits[:-1], dtype=np.int64)

    @property
    def row_lengths(self) -> Any:
        """`[R]` int64, the number of tokens in each row; by name of a sequence."""
        if not self.sequences:
            return self.row_parts[:, 0]
        return dict(zip(self.sequences, self.row_parts.T, strict=True))

    @functools.cached_property
    def row_work(self) -> np.ndarray:
        """`[R]` int64, the number of query-key pairs of attention within examples."""
        squares = np.square(self.parts, dtype=np.int64).sum(axis=1)
        return np.add.reduceat(squares, self.row_splits[:-1])

    @functools.cached_property
    def row_segments(self) -> np.ndarray:
        """`[R]` int64, the number of slots in each row."""
        return np.diff(self.row_splits)

    @functools.cached_property
    def fill(self) -> float:
        """The share of all positions, padding included, that hold a token."""
        shapes = np.array([each_size(x) for x in self.seq_lens])
        rows, totals = self.row_parts, shapes.sum(axis=1)
        return float(rows.sum() / totals[cheapest(rows, shapes, totals)].sum())

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify all rows."""
        parts = [
            str((self.seq_lens, self.max_segments)).encode(),
            np.ascontiguousarray(self.slot_lengths, "<i4").data,
            np.ascontiguousarray(self.row_splits, "<i8").data,
        ]
        if self.slot_parts is not None:
            parts.append(np.ascontiguousarray(self.slot_parts, "<i4").data)
        return digest(*parts)

    def __repr__(self) -> str:
        shapes = ", ".join(str(total(x)) for x in self.seq_lens)
        return (
            f"Packing({self.num_examples} examples in {self.num_rows} rows of "
            f"{shapes}, fill {self.fill:.1%})"
        )


def pack(
    lengths: Lengths,
    max_seq_len: int | Mapping[str, int] | Sequence[int | Mapping[str, int]],
    *,
    max_segments_per_row: int | None = None,
    overlong: Overlong | Mapping[str, Overlong] = "error",
) -> Packing:
    """Packs lengths into as few rows as possible.

    The rows come from best fit decreasing, which puts each length, the longest first,
    into the row with the least room that it fits. If a lower bound shows that more than
    1 in 10,000 rows may be saved, a second packer fills one row after the other as full
    as possible, unless that would take more than seconds, and the fuller result wins.
    Both packers work on the histogram of lengths, so their time depends on the number
    of distinct lengths and not on the number of examples.

    With several values of T, a new row gets the shortest T that its longest example
    fits. Shorter examples then fill up the rows of any T.

    Examples may have several sequences, such as inputs and targets. A row then has a
    capacity for each sequence, and the n-th segments of all sequences belong to the
    same example. The packing time then depends on the number of distinct combinations
    of lengths. Up to 100,000 examples are also packed by a second packer, from a pool
    of examples, if all rows have one shape.

    Example:
      >>> pack([3, 5, 2, 4, 6], max_seq_len=(4, 8))
      Packing(5 examples in 3 rows of 4, 8, fill 100.0%)
      >>> lengths = {"inputs": [3, 5, 2], "targets": [1, 4, 3]}
      >>> packing = pack(lengths, {"inputs": 8, "targets": 4})
      >>> packing.seq_lens, packing.num_rows
      (({'inputs': 8, 'targets': 4},), 2)
      >>> shapes = [{"inputs": 4, "targets": 4}, {"inputs": 8, "targets": 4}]
      >>> pack({"inputs": [3, 7, 1], "targets": [1, 4, 3]}, shapes)
      Packing(3 examples in 2 rows of 8, 12, fill 95.0%)

    Args:
      lengths: `[N]` integers, one per example; or sequence name -> `[N]` integers.
      max_seq_len: T of the rows, or several; or sequence name -> tokens of this
        sequence that a row can hold, or several such mappings, one of which has the
        longest T of every sequence.
      max_segments_per_row: the maximum number of examples in a row; by default as many
        as fit.
      overlong: what happens to examples that are longer than the longest row, as in
        `plan_buckets`. Plan with the same policy for `packing.row_lengths`.

    Returns:
      The `Packing` with fewer padded positions.

    Raises:
      ValueError: if a length is not a positive integer or exceeds the longest row under
        `overlong="error"`, or `lengths` is empty; if a T or `max_segments_per_row` is
        not positive; if the sequences differ in their numbers of examples, or do not
        match the capacities.
    """
    shapes = row_shapes(max_seq_len)
    kept = kept_lengths(lengths, shapes[-1], overlong)
    return pack_kept(kept, shapes, cap_of(max_segments_per_row))


def pack_kept(
    lengths: np.ndarray, shapes: Sequence[Any], cap: int, *, fuller: bool = True
) -> Packing:
    """Packs as `pack` does, with lengths and shapes that are checked.

    Args:
      lengths: `[N, Q]` integers, a row for each example.
      shapes: the T of the rows in increasing order, `Sizes` for several sequences.
      cap: the maximum number of examples in a row.
      fuller: whether the second packer may fill rows more than best fit.
    """
    seq_lens = np.array([each_size(x) for x in shapes], np.int64)
    kinds, counts = count_kinds(lengths, seq_lens[-1].tolist())
    pack_kinds = _pack_sequences if kinds.shape[1] > 1 else _pack_lengths
    patterns, slots = pack_kinds(kinds, counts, seq_lens, cap, fuller)
    segments = np.array([len(pattern.slots) for pattern in patterns])
    sizes = np.repeat(segments, [pattern.rows for pattern in patterns])
    most = int(segments.max())
    if cap < MAX_LENGTH:
        # It depends only on the limit, and on how many of the shortest examples fit.
        least = np.append(kinds.min(axis=0), kinds.sum(axis=1).min())
        sizes_of_row = np.append(seq_lens[-1], seq_lens[-1].sum())
        bounds = sizes_of_row[least > 0] // least[least > 0]
        most = min(cap, int(bounds.min()))
    return Packing(
        seq_lens=tuple(shapes),
        slot_lengths=slots.sum(axis=1, dtype=np.int32),
        row_splits=np.concatenate([[0], np.cumsum(sizes)]),
        max_segments=most,
        slot_parts=slots if kinds.shape[1] > 1 else None,
    )


def _pack_lengths(
    kinds: np.ndarray, counts: np.ndarray, shapes: np.ndarray, cap: int, fuller: bool
) -> tuple[list[Pattern], np.ndarray]:
    """Returns the rows of examples with one length, and their slots, `[S, 1]`."""
    values, seq_lens = kinds[:, 0], shapes[:, 0].tolist()
    patterns = best_fit(values, counts, seq_lens, cap)
    if fuller:
        other = functools.partial(fullest_rows, values, counts, seq_lens, cap)
        fewest = fewest_positions(values, counts, seq_lens)
        patterns = choose_fuller(patterns, other, fewest)
    return patterns, _slots(patterns)[:, None]


def _pack_sequences(
    kinds: np.ndarray, counts: np.ndarray, shapes: np.ndarray, cap: int, fuller: bool
) -> tuple[list[Pattern], np.ndarray]:
    """Returns the rows of examples with several lengths, and their slots, `[S, Q]`."""
    rooms = shapes[-1].tolist()
    groups, sizes, members = group_kinds(kinds, counts, rooms, _MAX_KINDS)
    # A small shape may not pay off.
    choices = (
        fit_sequences(groups, sizes, shapes[i:], cap) for i in range(len(shapes))
    )
    patterns = min(choices, key=positions)
    if fuller and len(shapes) == 1:
        rows = sum(pattern.rows for pattern in patterns)
        other = functools.partial(
            pooled_rows, groups, sizes, rooms, cap, fewer_than=rows
        )
        fewest = int(max(-(-(counts @ kinds.astype(np.int64)) // rooms)))
        patterns = choose_fuller(patterns, other, fewest * sum(rooms))
    slots = _slots(patterns)
    # The slots of a group are assigned to its members in order.
    order = np.argsort(slots, kind="stable")
    slots[order] = np.repeat(members, counts[members])
    return patterns, kinds[slots]


def _slots(patterns: Iterable[Pattern]) -> np.ndarray:
    """Returns `[S]` int32, the slots of each pattern, repeated for each of its rows."""
    pieces: list[np.ndarray] = []
    few: list[int] = []
    for pattern in patterns:
        # Creating many small arrays would be slower than extending a list.
        if pattern.rows < _MIN_ROWS_PER_ARRAY:
            few += pattern.slots * pattern.rows
            continue
        pieces.append(np.array(few, np.int32))
        pieces.append(np.tile(np.array(pattern.slots, np.int32), pattern.rows))
        few = []
    return np.concatenate([*pieces, np.array(few, np.int32)])


def cap_of(max_segments_per_row: int | None) -> int:
    """Returns the maximum number of examples in a row."""
    if max_segments_per_row is None:
        return MAX_LENGTH
    return check_positive("max_segments_per_row", max_segments_per_row)
