"""Searches for the shapes of packed rows of examples with several sequences.

It packs a sample of the examples for each choice, and all examples for the most
promising choices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.permutation import permute
from jaxbucket.packing.pattern import Pattern
from jaxbucket.packing.row_choice import RowChoice, log_variance, separation
from jaxbucket.packing.row_search import BY_RANK, RATIO, RowSearch
from jaxbucket.packing.rows import Packing, pack
from jaxbucket.packing.sequences import count_kinds
from jaxbucket.packing.vector_best_fit import fit_sequences
from jaxbucket.plan.flow.remainder import epoch_cost, epoch_flow
from jaxbucket.plan.joint_planner import with_batch_sizes
from jaxbucket.plan.limits import Limits

# The examples that the search packs, and how many it packs in all at its end.
_SAMPLE = 1024
_MAX_PACKED = 400_000
_SEED = 0x5A3
# How often rows are assigned to buckets to compute the costs of steps from them.
_COST_ROUNDS = 4

# The T of each sequence.
Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ShapeChoice(RowChoice):
    """The packed rows of examples with several sequences, for one choice of shapes.

    Attributes:
      longest: `[K, Q]` integers, the fullest row of each shape in each sequence.
      is_used: `[K]` bool, whether a shape has batches, or is the last one.
      rows_of_all: the rows with slots for all examples; None for a sample.
    """

    longest: np.ndarray
    is_used: np.ndarray
    rows_of_all: Packing | None = None

    def packing(self, max_segments_per_row: int | None) -> Packing:
        assert self.rows_of_all is not None
        return self.rows_of_all


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Groups of equal rows.

    Attributes:
      lengths: `[P, Q]` integers, the tokens of each sequence in a row.
      numbers: `[P]` integers, the number of such rows.
      segments: `[P]` integers, the number of examples in a row.
      pairs: `[P]` integers, the number of pairs of tokens of the same example.
      logs: `[P]`, the sum over tokens of the logarithm of the length of their example.
    """

    lengths: np.ndarray
    numbers: np.ndarray
    segments: np.ndarray
    pairs: np.ndarray
    logs: np.ndarray

    @classmethod
    def of_slots(
        cls, slots: np.ndarray, starts: np.ndarray, numbers: np.ndarray
    ) -> _Rows:
        """Returns rows from the lengths in their slots, `[S, Q]`, one after another."""
        totals = slots.sum(axis=1, dtype=np.int64)
        return cls(
            np.add.reduceat(slots, starts, axis=0, dtype=np.int64),
            numbers,
            np.diff(starts, append=len(slots)),
            np.add.reduceat(totals * totals, starts),
            np.add.reduceat(totals * np.log(totals), starts),
        )


class ShapeSearch(RowSearch[ShapeChoice]):
    """A search for the shapes of rows of examples with several sequences.

    Args:
      lengths: `[N, Q]` integers, a row for each example.
      limits: the limits and the costs of packed rows.
      max_segments_per_row: the maximum number of examples in a row; None for no limit.
      block_sparse: whether attention takes time within examples only.
    """

    last: Shape

    def __init__(
        self,
        lengths: np.ndarray,
        limits: Limits,
        max_segments_per_row: int | None,
        block_sparse: bool,
    ):
        super().__init__(limits, block_sparse)
        self._lengths = lengths
        self._max_segments = max_segments_per_row
        self.last = tuple(limits.max_seq_lens(lengths).tolist())
        self._least = tuple(limits.rounded(lengths.max(axis=0)).tolist())
        totals = lengths.sum(axis=1, dtype=np.int64)
        self._variance = log_variance(totals, np.ones_like(totals))
        size = len(lengths)
        sample = permute(np.arange(min(size, _SAMPLE)), size, _SEED)
        self._kinds, self._counts = count_kinds(lengths[sample], self.last)

    def search(self, num_buckets: int) -> ShapeChoice:
        self._descend(num_buckets, self._grid())
        promising = sorted(self.tried.values(), key=BY_RANK)
        number = max(1, min(4, _MAX_PACKED // len(self._lengths)))
        choices = [self.of_all(choice.shapes) for choice in promising[:number]]
        best = min([self.single(), *choices], key=BY_RANK)
        tight = self._sorted(self._tightened(best))
        if not self._is_valid(tight):
            return best
        return min([self.of_all(tight), best], key=BY_RANK)

    def single(self) -> ShapeChoice:
        return self.of_all((self.last,))

    def of_all(self, shapes: Iterable[Shape]) -> ShapeChoice:
        """Returns the rows of all examples for a choice of shapes.

        Args:
          shapes: the T of each sequence in each shape; one of them is the longest in
            every sequence.
        """
        shapes = self._sorted(shapes)
        names = self.limits.sequences
        packing = pack(
            dict(zip(names, self._lengths.T, strict=True)),
            [dict(zip(names, shape, strict=True)) for shape in shapes],
            max_segments_per_row=self._max_segments,
        )
        assert packing.slot_parts is not None
        ones = np.ones(packing.num_rows, np.int64)
        rows = _Rows.of_slots(packing.slot_parts, packing.row_splits[:-1], ones)
        choice = self._choice(shapes, rows, scale=1.0)
        if not choice.is_used.all():
            # A shape without batches would only cost a compilation.
            seq_lens = tuple(itertools.compress(packing.seq_lens, choice.is_used))
            packing = dataclasses.replace(packing, seq_lens=seq_lens)
            used = tuple(itertools.compress(shapes, choice.is_used))
            choice = self._choice(used, rows, scale=1.0)
        return dataclasses.replace(choice, rows_of_all=packing)

    def _packed(self, shapes: tuple[Shape, ...]) -> ShapeChoice:
        """Returns the rows of the sample for a choice of shapes."""
        if shapes not in self.tried:
            cap = self._max_segments or len(self._lengths)
            patterns = fit_sequences(
                self._kinds, self._counts, np.array(shapes, np.int64), cap
            )
            rows = _rows_of_patterns(patterns, self._kinds)
            scale = len(self._lengths) / int(self._counts.sum())
            self.tried[shapes] = self._choice(shapes, rows, scale)
        return self.tried[shapes]

    def _grid(self) -> list[Shape]:
        """Returns shapes in proportion to the longest T, or to the mean lengths."""
        last, least = np.array(self.last), np.array(self._least)
        mean = self._lengths.mean(axis=0)
        fits = (last / mean).min()
        shortest = self._lengths.min(axis=0)
        shapes = set()
        for direction in (last, mean * fits):
            steps = int(math.log((direction / shortest).max(), RATIO)) + 1
            sizes = [direction / RATIO**i for i in range(steps)]
            shapes.update(map(self._rounded, sizes))
            # These hold every example.
            shapes.update(self._rounded(np.maximum(x, least)) for x in sizes)
        return sorted(shapes)

    def _sorted(self, shapes: Iterable[Shape]) -> tuple[Shape, ...]:
        distinct = {*map(tuple, shapes)}
        return tuple(sorted(distinct, key=lambda shape: (sum(shape), shape)))

    def _moved(self, shape: Shape, ratio: float) -> list[Shape]:
        # All its T, or one of them, are longer or shorter.
        size = len(shape)
        chosen = [np.ones(size, bool), *np.eye(size, dtype=bool)]
        return [
            self._rounded(np.where(which, np.array(shape) * factor, shape))
            for which in chosen
            for factor in (ratio, 1 / ratio)
        ]

    def _tightened(self, choice: ShapeChoice) -> list[Shape]:
        """Returns the shapes of a choice, reduced to their fullest rows."""
        tight = self.limits.rounded(choice.longest[choice.rows > 0])
        tight[-1] = np.maximum(tight[-1], tight.max(axis=0))
        return [tuple(shape) for shape in tight.tolist()]

    def _is_valid(self, shapes: tuple[Shape, ...]) -> bool:
        array = np.array(shapes, np.int64)
        is_longest = array[-1] >= np.maximum(array.max(axis=0), self._least)
        is_increasing = np.diff(array.sum(axis=1)) > 0
        fits = self.limits.batch_sizes(array) > 0
        return bool(is_longest.all() and is_increasing.all() and fits.all())

    def _rounded(self, sizes: np.ndarray) -> Shape:
        multiples = self.limits.multiples
        rounded = np.maximum(np.rint(sizes / multiples), 1).astype(np.int64) * multiples
        return tuple(np.minimum(rounded, self.last).tolist())

    def _choice(
        self, shapes: tuple[Shape, ...], rows: _Rows, scale: float
    ) -> ShapeChoice:
        """Returns the choice for given rows, with the cost of an epoch.

        Args:
          shapes: the shapes.
          rows: the rows of a sample of the examples.
          scale: the number of examples by that of the sample.
        """
        size = len(shapes)

        def counts(plan: BucketPlan, each: np.ndarray) -> np.ndarray:
            index = plan.assign(rows.lengths).astype(np.int64)
            return np.bincount(index, rows.numbers * each, size) * scale

        def whole(plan: BucketPlan) -> np.ndarray:
            numbers = counts(plan, np.ones(len(rows.numbers)))
            return np.ceil(numbers - 1e-9).astype(np.int64)

        plan = with_batch_sizes(self.limits, np.array(shapes, np.int64), whole)
        if self.block_sparse:
            plan = self._sparse(plan, rows)
        index = plan.assign(rows.lengths).astype(np.int64)
        numbers, segments = whole(plan), counts(plan, rows.segments)
        flow = epoch_flow(plan, numbers, "cheapest")
        totals = rows.lengths.sum(axis=1)
        longest = np.zeros_like(plan.seq_lens)
        np.maximum.at(longest, index, rows.lengths)
        return ShapeChoice(
            plan=plan,
            rows=numbers,
            segments=segments,
            padding=1 - float(rows.numbers @ totals) / _positions(plan, rows, index),
            separation=separation(
                *(index, rows.logs / totals, rows.numbers * totals),
                *(plan.batch_sizes, self._variance),
            ),
            cost=float(epoch_cost(flow.batches, plan.costs)),
            shapes=shapes,
            longest=longest,
            is_used=(flow.batches > 0) | (np.arange(size) == size - 1),
        )

    def _sparse(self, plan: BucketPlan, rows: _Rows) -> BucketPlan:
        """Returns the plan with the costs of steps that attend within examples only.

        Rows may move to other buckets because of these costs, which changes the costs.
        """
        index = None
        for _ in range(_COST_ROUNDS):
            before, index = index, plan.assign(rows.lengths).astype(np.int64)
            if before is not None and np.array_equal(index, before):
                break
            numbers, pairs = (
                np.bincount(index, x, len(plan))
                for x in (rows.numbers, rows.numbers * rows.pairs)
            )
            costs = self._sparse_costs(plan, pairs, numbers)
            plan = dataclasses.replace(plan, step_costs=costs)
        return plan


def _rows_of_patterns(patterns: Sequence[Pattern], kinds: np.ndarray) -> _Rows:
    sizes = np.array([len(pattern.slots) for pattern in patterns])
    slots = np.concatenate([pattern.slots for pattern in patterns])
    numbers = np.array([pattern.rows for pattern in patterns])
    return _Rows.of_slots(kinds[slots], np.cumsum(sizes) - sizes, numbers)


def _positions(plan: BucketPlan, rows: _Rows, index: np.ndarray) -> int:
    return int(rows.numbers @ plan.tokens_per_row[index])
