"""The examples of packed rows: which one takes a slot, among all of the slot's length.

In every epoch anew, by one keyed permutation for each length, or in source order. It is
evaluated only for the rows that are asked for: another epoch costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW
from jaxbucket.base.permutation import fold, mix_each, permute_each
from jaxbucket.packing.rows import Packing
from jaxbucket.schedule.balance import spread_evenly

# Other keys than those of rows and batches.
_SLOTS = 0x510


class PackedRows:
    """Row -> the examples of its slots.

    Args:
      packing: made for these lengths.
      lengths: `[N]` integers, one per example.
      parts: those of each sequence, where examples have several.
      seed: what is drawn in every epoch; None for source order in all of them.

    Raises:
      ValueError: if `packing` was made for other lengths.
    """

    def __init__(
        self,
        packing: Packing,
        lengths: np.ndarray,
        parts: Mapping[str, np.ndarray] | None,
        seed: int | None,
    ):
        self._packing = packing
        self._seed = seed
        slot_lengths = packing.slot_lengths
        self._check_sequences(parts)
        if parts is not None and packing.slot_parts is not None:
            # In place of a length, the kind that all lengths together make.
            lengths, slot_lengths = _kinds(parts, packing.slot_parts)
        self._examples = _by_length(lengths)
        slots = _by_length(slot_lengths)
        self._check_same(lengths[self._examples], slot_lengths[slots])
        # Slots of a length, in order, are as many as its examples.
        self._places = np.empty(len(slots), slots.dtype)
        self._places[slots] = np.arange(len(slots), dtype=slots.dtype)
        ordered = lengths[self._examples]
        begins = np.flatnonzero(np.diff(ordered, prepend=0))
        self._lengths = ordered[begins]
        self._starts = begins
        self._sizes = np.diff(begins, append=len(ordered))

    def _check_sequences(self, parts: Mapping[str, np.ndarray] | None) -> None:
        packed = list(self._packing.capacities or ())
        given = list(parts or ())
        if packed != given:
            raise ValueError(
                f"`packing` is of the sequences {packed}, and `lengths` of {given}: "
                "pack these lengths."
            )

    def _check_same(self, lengths: np.ndarray, packed: np.ndarray) -> None:
        if len(packed) != len(lengths) or np.any(packed != lengths):
            raise ValueError(
                f"`packing` is of {len(packed)} examples with "
                f"{self._packing.slot_lengths.sum()} tokens, and `lengths` of "
                f"{len(lengths)}, or of others: the data changed since it was packed. "
                "Pack these lengths."
            )

    def examples(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """Returns the examples of `[B]` rows, -1 for an empty one, in an even order.

        2, 4, 8, ... devices have rows of about the same work.

        Returns:
          `[B, max_segments]` int64, -1 behind the last of a row.
        """
        packing = self._packing
        work = np.where(rows == EMPTY_ROW, 0, packing.row_work[rows])
        rows = rows[spread_evenly(work)]
        filled = np.flatnonzero(rows != EMPTY_ROW)
        first, last = (packing.row_splits[rows[filled] + i] for i in range(2))
        sizes = last - first
        ends = np.cumsum(sizes)
        within = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
        slots = np.repeat(first, sizes) + within
        found = np.full((len(rows), packing.max_segments), EMPTY_ROW, np.int64)
        found[np.repeat(filled, sizes), within] = self._drawn(epoch, slots)
        return found

    def _drawn(self, epoch: int, slots: np.ndarray) -> np.ndarray:
        """The examples of `[n]` slots."""
        places = self._places[slots].astype(np.int64)
        if self._seed is None:
            return self._examples[places]
        which = np.searchsorted(self._starts, places, side="right") - 1
        starts, sizes = self._starts[which], self._sizes[which]
        keys = mix_each(self._lengths[which], fold(self._seed, epoch, _SLOTS))
        return self._examples[starts + permute_each(places - starts, sizes, keys)]


def _kinds(
    parts: Mapping[str, np.ndarray], slot_parts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`[N]` and `[S]` numbers from 1 on, the same where all lengths are the same."""
    examples = np.stack(list(parts.values()), axis=1)
    both = np.concatenate([examples, slot_parts])
    kinds = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1) + 1
    return kinds[: len(examples)], kinds[len(examples) :]


def _by_length(lengths: np.ndarray) -> np.ndarray:
    """`[N]` indices, by length, and in order among those of one length."""
    # numpy sorts 16 bits by radix.
    small = lengths.max() < 1 << 16
    order = np.argsort(lengths.astype(np.uint16) if small else lengths, kind="stable")
    return order.astype(np.int32) if len(order) < 1 << 31 else order
