"""The examples of packed rows: which example of the right length takes each slot.

For every length, a keyed permutation that changes with the epoch assigns the examples
of this length to the slots, or they are assigned in source order. It is evaluated only
for the rows that are requested, so starting a new epoch costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxbucket.base.assignment import cheapest
from jaxbucket.base.batch import EMPTY_ROW
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.lengths import lengths_matrix, total_lengths
from jaxbucket.base.permutation import fold, mix_each, permute_each
from jaxbucket.packing.rows import Packing
from jaxbucket.schedule.balance import balance_rows

_PLAN_ROWS = "Plan for `packing.row_lengths` with `boundaries=packing.seq_lens`."
# Keeps these keys distinct from the keys of rows and batches.
_SLOT_KEY = 0x510


class PackedRows:
    """Maps packed rows to the examples of their slots.

    Args:
      packing: the packing of these lengths.
      lengths: `[N]` integers, one per example.
      parts: sequence name -> `[N]` lengths; None unless examples have several
        sequences.
      examples: `[N]` integers, the index of each example in the source; None for 0 to
        N - 1.
      seed: the seed of the permutations; None for source order in every epoch.

    Raises:
      ValueError: if `packing` was created for different lengths.
    """

    def __init__(
        self,
        packing: Packing,
        lengths: np.ndarray,
        parts: Mapping[str, np.ndarray] | None,
        examples: np.ndarray | None,
        seed: int | None,
    ):
        self._packing = packing
        self._seed = seed
        slot_lengths = packing.slot_lengths
        packed, sequences = list(packing.sequences), list(parts or ())
        if packed != sequences:
            raise ValueError(
                f"`packing` has the sequences {packed}, but `lengths` has {sequences}. "
                "Pack these lengths."
            )
        if parts is not None and packing.slot_parts is not None:
            # A kind stands for a combination of lengths, one of each sequence.
            lengths, slot_lengths = _kinds(parts, packing.slot_parts)
        self._examples = _by_length(lengths)
        slots = _by_length(slot_lengths)
        ordered = lengths[self._examples]
        if examples is not None:
            self._examples = examples[self._examples]
        self._check_same(ordered, slot_lengths[slots])
        # Every length has as many slots as examples, so sorted slots match examples.
        self._places = np.empty(len(slots), slots.dtype)
        self._places[slots] = np.arange(len(slots), dtype=slots.dtype)
        self._starts = np.flatnonzero(np.diff(ordered, prepend=0))
        self._lengths = ordered[self._starts]
        self._sizes = np.diff(self._starts, append=len(ordered))

    def _check_same(self, lengths: np.ndarray, packed: np.ndarray) -> None:
        if len(packed) != len(lengths) or np.any(packed != lengths):
            raise ValueError(
                f"`packing` was created for {len(packed)} examples with "
                f"{self._packing.slot_lengths.sum()} tokens, which are not the "
                f"{len(lengths)} examples of `lengths` that the plan keeps. The data "
                "changed since it was packed, or the plan has a different `overlong`: "
                "pack these lengths, with `overlong` and `max_ratio` of the plan."
            )

    def examples(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """Returns the examples of the rows of a batch, in a balanced order.

        The order gives each of 2, 4, 8, ... devices rows with about the same work.

        Args:
          epoch: the epoch, counted from 0.
          rows: `[B]` rows, -1 for an empty row.

        Returns:
          `[B, max_segments]` int64, -1 after the last example of a row.
        """
        packing = self._packing
        work = np.where(rows == EMPTY_ROW, 0, packing.row_work[rows])
        rows = rows[balance_rows(work)]
        filled = np.flatnonzero(rows != EMPTY_ROW)
        first, last = (packing.row_splits[rows[filled] + i] for i in range(2))
        sizes = last - first
        ends = np.cumsum(sizes)
        within = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
        slots = np.repeat(first, sizes) + within
        examples = np.full((len(rows), packing.max_segments), EMPTY_ROW, np.int64)
        examples[np.repeat(filled, sizes), within] = self._drawn(epoch, slots)
        return examples

    def _drawn(self, epoch: int, slots: np.ndarray) -> np.ndarray:
        """Returns the examples in `[n]` slots."""
        places = self._places[slots].astype(np.int64)
        if self._seed is None:
            return self._examples[places]
        group = np.searchsorted(self._starts, places, side="right") - 1
        starts, sizes = self._starts[group], self._sizes[group]
        keys = mix_each(self._lengths[group], fold(self._seed, epoch, _SLOT_KEY))
        return self._examples[starts + permute_each(places - starts, sizes, keys)]


def packed_rows(
    packing: Packing, plan: BucketPlan, lengths: np.ndarray, seed: int | None
) -> PackedRows:
    """Returns the packed rows of the examples that a plan keeps.

    Args:
      packing: the packing of these examples.
      plan: the shapes, and the policy for overlong examples.
      lengths: `[N]` or `[N, Q]` integers that the plan accepts.
      seed: the seed of the permutations; None for source order in every epoch.

    Raises:
      ValueError: if `packing` was created for different lengths.
    """
    is_kept = plan.assign(lengths) >= 0
    examples = None if is_kept.all() else np.flatnonzero(is_kept)
    kept = plan.truncated(lengths if examples is None else lengths[examples])
    parts = None
    if plan.sequences:
        parts = dict(zip(plan.sequences, kept.T, strict=True))
    return PackedRows(packing, total_lengths(kept), parts, examples, seed)


def _kinds(
    parts: Mapping[str, np.ndarray], slot_parts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[N]` and `[S]` numbers from 1, equal where all lengths are equal."""
    examples = np.stack(list(parts.values()), axis=1)
    both = np.concatenate([examples, slot_parts])
    kinds = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1) + 1
    return kinds[: len(examples)], kinds[len(examples) :]


def _by_length(lengths: np.ndarray) -> np.ndarray:
    """Returns `[N]` indices in a stable sort by length."""
    # numpy uses a radix sort, which is linear, for 16-bit integers.
    small = lengths.max() < 1 << 16
    order = np.argsort(lengths.astype(np.uint16) if small else lengths, kind="stable")
    return order.astype(np.int32) if len(order) < 1 << 31 else order


def row_lengths(packing: Any, plan: BucketPlan) -> np.ndarray:
    """Returns the lengths of packed rows, `[R]`, or `[R, Q]` for Q sequences.

    Raises:
      ValueError: if `packing` is not a `Packing`, or the plan does not hold its rows.
    """
    if not isinstance(packing, Packing):
        raise ValueError(
            f"`packing` is a {type(packing).__name__}, not a `Packing`. Create one "
            "with `jb.packing.pack(lengths, max_seq_len)`."
        )
    if packing.sequences != plan.sequences:
        raise ValueError(
            f"`packing` has the sequences {list(packing.sequences)}, but `plan` has "
            f"{list(plan.sequences)}. {_PLAN_ROWS}"
        )
    lengths = packing.row_lengths
    if isinstance(lengths, Mapping):
        lengths = lengths_matrix(lengths, plan.sequences)
    columns = lengths.reshape(packing.num_rows, -1)
    is_unheld = cheapest(columns, plan.seq_lens, plan.costs / plan.batch_sizes) < 0
    if is_unheld.any():
        row = " + ".join(map(str, columns[np.argmax(columns.sum(axis=1) * is_unheld)]))
        raise ValueError(
            f"`packing` has rows of {row} tokens, which do not fit the longest "
            f"bucket, `seq_len={plan.buckets[-1].seq_len}`. {_PLAN_ROWS}"
        )
    return plan.of_rows.check(lengths)
