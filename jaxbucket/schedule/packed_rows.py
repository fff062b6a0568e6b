"""The examples of packed rows: which example of the right length takes each slot.

For every length, a keyed permutation that changes with the epoch assigns the examples
of this length to the slots, or they are assigned in source order. It is evaluated only
for the rows that are requested, so starting a new epoch costs nothing.

For a curriculum, easy examples share rows instead: every epoch puts the rows in a new
order, and the slots of each length, in this order, get its examples from easy to hard.
Neighbors in this order are shuffled, because rows that hold the same lengths would
otherwise hold the same examples in every epoch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxbucket.base.assignment import cheapest
from jaxbucket.base.batch import EMPTY_ROW
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_type
from jaxbucket.base.permutation import fold, mix_each, permute, permute_each
from jaxbucket.base.sizes import total_lengths
from jaxbucket.packing.rows import Packing
from jaxbucket.schedule.balance import balance_rows
from jaxbucket.schedule.recent import recent

# Keeps these keys distinct from those of the buckets of most plans, and of batches.
_SLOT_KEY = 0x510
_ROW_KEY, _EXAMPLE_KEY = 0x511, 0x512
# Examples of one length move by up to an eighth of their number, from 2 to 64 places.
_MOST_PLACES = 64
# The unit of fractions of a place.
_PLACE_BITS = 20


class PackedRows:
    """Maps packed rows to the examples of their slots.

    Args:
      packing: the packing of the examples that take part.
      plan: the shapes, and the policy for overlong examples.
      lengths: `[N]` integers, or `[N, Q]` with a column for each of Q sequences.
      is_kept: `[N]` bool, whether each example takes part; None if all do.
      seed: the seed of the permutations; None for source order in every epoch.
      difficulty: `[N]` numbers, if easy examples share rows; this needs a seed.
    """

    def __init__(
        self,
        packing: Packing,
        plan: BucketPlan,
        lengths: np.ndarray,
        is_kept: np.ndarray | None,
        seed: int | None,
        difficulty: np.ndarray | None = None,
    ):
        self.is_kept = is_kept
        self._packing = packing
        self._seed = seed
        slot_lengths = packing.slot_lengths
        columns = plan.truncated(lengths if is_kept is None else lengths[is_kept])
        lengths = total_lengths(columns)
        if packing.slot_parts is not None:
            # A kind stands for a combination of lengths, one of each sequence.
            lengths, slot_lengths = _kinds(columns, packing.slot_parts)
        self._examples = _by_length(lengths)
        slots = _by_length(slot_lengths)
        ordered = lengths[self._examples]
        if is_kept is not None:
            self._examples = np.flatnonzero(is_kept)[self._examples]
        if not np.array_equal(slot_lengths[slots], ordered):
            raise ValueError(
                f"`packing` was created for {len(slots)} examples with "
                f"{packing.slot_lengths.sum()} tokens, and not for the {len(ordered)} "
                "examples of `lengths` that take part. The data, the `subset` or the "
                "plan's `overlong` differ: pack with those of the schedule."
            )
        # Every length has as many slots as examples, so sorted slots match examples.
        self._places = np.empty(len(slots), slots.dtype)
        self._places[slots] = np.arange(len(slots), dtype=slots.dtype)
        self._starts = np.flatnonzero(np.diff(ordered, prepend=0))
        self._lengths = ordered[self._starts]
        self._sizes = np.diff(self._starts, append=len(ordered))
        self._by_difficulty = None
        if difficulty is not None:
            assert seed is not None
            self._by_difficulty = _SlotsByDifficulty(
                packing, self._examples, ordered, slot_lengths, difficulty, seed
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
        if self._by_difficulty is not None:
            return self._by_difficulty.examples(epoch)[slots]
        places = self._places[slots].astype(np.int64)
        if self._seed is None:
            return self._examples[places]
        group = np.searchsorted(self._starts, places, side="right") - 1
        starts, sizes = self._starts[group], self._sizes[group]
        keys = mix_each(self._lengths[group], fold(self._seed, epoch, _SLOT_KEY))
        return self._examples[starts + permute_each(places - starts, sizes, keys)]

    def largest(self, values: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the largest value of the examples of each row in an epoch, `[R]`."""
        starts = self._packing.row_splits[:-1]
        examples = self._drawn(epoch, np.arange(self._packing.num_examples))
        return np.maximum.reduceat(values[examples], starts)


class _SlotsByDifficulty:
    """The example in each slot, if easy examples share rows.

    An epoch is computed when it is first needed. The two most recent ones are cached,
    at 4 bytes per example each.

    Args:
      packing: the packing, with the `slot_lengths` of its n slots.
      examples, lengths: `[n]` integers each, the packed examples and their lengths.
      difficulty: `[N]` numbers, one per example of the source.
      seed: the seed of all random choices.
    """

    def __init__(
        self,
        packing: Packing,
        examples: np.ndarray,
        lengths: np.ndarray,
        slot_lengths: np.ndarray,
        difficulty: np.ndarray,
        seed: int,
    ):
        self._packing = packing
        self._slot_lengths = slot_lengths
        self._seed = seed
        order = np.argsort(difficulty[examples], kind="stable")
        order = order[_by_length(lengths[order])]
        dtype = np.uint32 if len(difficulty) < 1 << 32 else np.int64
        self._sorted = examples[order].astype(dtype)
        self._lengths, difficulty = lengths[order], difficulty[self._sorted]
        is_first = np.append(True, np.diff(self._lengths) != 0)
        _, sizes = _groups(is_first)
        is_first[1:] |= difficulty[1:] != difficulty[:-1]
        # Equal examples are shuffled among themselves.
        self._places, ties = _groups(is_first)
        self._moves = np.maximum(ties, np.clip(sizes // 8, 2, _MOST_PLACES))
        self._epochs: dict[int, np.ndarray] = {}

    def examples(self, epoch: int) -> np.ndarray:
        """Returns the example in each slot, `[n]` integers."""
        return recent(self._epochs, epoch, lambda: self._assign(epoch))

    def _assign(self, epoch: int) -> np.ndarray:
        size = len(self._sorted)
        key = fold(self._seed, epoch, _EXAMPLE_KEY)
        fractions = (permute(np.arange(size), size, key) << _PLACE_BITS) // size
        places = (self._places << _PLACE_BITS) + fractions * self._moves
        examples = self._sorted[np.lexsort((places, self._lengths))]
        # The slots of all rows, in the order of the rows in this epoch.
        packing, key = self._packing, fold(self._seed, epoch, _ROW_KEY)
        rows = permute(np.arange(packing.num_rows), packing.num_rows, key)
        sizes = packing.row_segments[rows]
        shift = packing.row_splits[rows] - (np.cumsum(sizes) - sizes)
        slots = np.arange(packing.num_examples) + np.repeat(shift, sizes)
        slots = slots[_by_length(self._slot_lengths[slots])]
        assigned = np.empty_like(examples)
        assigned[slots] = examples
        return assigned


def _groups(is_first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the start and the size of the group of each element, `[N]` int64 each.

    Args:
      is_first: `[N]` bool, whether a group starts at an element.
    """
    starts = np.flatnonzero(is_first)
    sizes = np.diff(starts, append=len(is_first))
    return np.repeat(starts, sizes), np.repeat(sizes, sizes)


def _kinds(
    examples: np.ndarray, slot_parts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[N]` and `[S]` numbers from 1, equal where all lengths are equal."""
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
    """Returns the lengths of packed rows, `[R]`, or `[R, Q]` for Q sequences."""
    remedy = "Create one with `jb.packing.pack(lengths, max_seq_len)`."
    check_type("packing", packing, Packing, remedy)
    parts = packing.row_parts
    if packing.sequences != plan.sequences or np.any(
        cheapest(parts, plan.seq_lens, plan.row_costs) < 0
    ):
        raise ValueError(
            f"`packing` has rows of up to {parts.max(axis=0).tolist()} tokens, above "
            f"{plan.buckets[-1]}, the last of `plan`. Plan for `packing.row_lengths` "
            "with `boundaries=packing.seq_lens`."
        )
    return parts if packing.sequences else parts[:, 0]
