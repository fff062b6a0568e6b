"""Searches for the shapes of packed rows by packing each choice and costing its epoch.

The search adds one shape at a time, and then moves each of them in ever smaller steps.
Of many kinds of examples it packs representatives, and then all examples for the most
promising choices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.packing.best_fit import best_fit
from jaxbucket.packing.row_choice import (
    RowChoice,
    Shape,
    log_variance,
    separation,
    sparse_cost,
)
from jaxbucket.packing.rows import pack_kept
from jaxbucket.packing.sequences import count_kinds
from jaxbucket.packing.vector_best_fit import fit_sequences
from jaxbucket.plan.flow.remainder import epoch_cost, epoch_flow
from jaxbucket.plan.joint_planner import with_batch_sizes
from jaxbucket.plan.limits import Limits

# The ratio between neighboring T of the first grid. Refinements use smaller ratios.
_RATIO = math.sqrt(2)
_REFINEMENTS = 3
# With more kinds of examples, the search packs so many representatives. The most
# promising choices are then packed with all examples, up to a total number of kinds.
_MAX_KINDS, _NUM_REPRESENTATIVES = 1024, 512
_MAX_PROMISING, _MAX_PACKED = 8, 100_000
_SEED = 0x5A3
# How often rows are assigned to buckets to compute the costs of steps from them.
_COST_ROUNDS = 4

_by_rank = operator.attrgetter("rank")


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


class RowSearch:
    """A search for the shapes of packed rows, `[Q]` T each.

    Args:
      lengths: `[N, Q]` integers, a row for each example.
      limits: the limits and the costs of packed rows.
      cap: the maximum number of examples in a row.
      block_sparse: whether attention takes time within examples only.

    Attributes:
      last: the T of the longest row.
    """

    def __init__(
        self, lengths: np.ndarray, limits: Limits, cap: int, block_sparse: bool
    ):
        self._lengths, self._limits, self._cap = lengths, limits, cap
        # Tokens have no quadratic part.
        self._block_sparse = block_sparse and limits.cost_fn is not None
        self.last: Shape = tuple(limits.max_seq_lens(lengths).tolist())
        self._least = limits.rounded(lengths.max(axis=0))
        self._kinds, self._counts = count_kinds(lengths, self.last)
        self._variance = log_variance(self._kinds.sum(axis=1), self._counts)
        self._few = self._kinds, self._counts
        if len(self._kinds) > _MAX_KINDS:
            self._few = representatives(*self._few, _NUM_REPRESENTATIVES)
        # The choices that were packed so far, by their shapes.
        self._tried: dict[tuple[Shape, ...], RowChoice] = {}

    def search(self, num_buckets: int) -> RowChoice:
        """Returns the cheapest choice found, with at most `num_buckets` shapes."""
        self._descend(num_buckets)
        promising = sorted(self._tried.values(), key=_by_rank)
        best, every = promising[0], (self._kinds, self._counts)
        if self._few[0] is not self._kinds:
            number = min(_MAX_PROMISING, _MAX_PACKED // len(self._kinds))
            shapes = [x.shapes for x in promising[: max(1, number)]]
            choices = (self._choice(x, self._fitted(x, *every)) for x in shapes)
            best = min(choices, key=_by_rank)
        tight = self._sorted(self._tightened(best))
        if self._is_valid(tight):
            tightened = self._choice(tight, self._fitted(tight, *every))
            best = min(tightened, best, key=_by_rank)
        return self.of_all(best.shapes)

    def of_all(self, shapes: Iterable[Sequence[int]]) -> RowChoice:
        """Returns the rows of all examples for shapes of which one holds all others."""
        shapes = self._sorted(shapes)
        choices = (self._of_all(shapes, fuller=fuller) for fuller in (False, True))
        return min(choices, key=_by_rank)

    def _of_all(self, shapes: tuple[Shape, ...], *, fuller: bool) -> RowChoice:
        """Returns the rows of all examples, perhaps by the second packer."""
        seq_lens = self._limits.named(np.array(shapes))
        packing = pack_kept(self._lengths, seq_lens, self._cap, fuller=fuller)
        ones = np.ones(packing.num_rows, np.int64)
        rows = _Rows.of_slots(packing.parts, packing.row_splits[:-1], ones)
        choice = self._choice(shapes, rows)
        if not choice.is_used.all():
            # A shape without batches would only cost a compilation.
            kept = tuple(itertools.compress(packing.seq_lens, choice.is_used))
            packing = dataclasses.replace(packing, seq_lens=kept)
            used = tuple(itertools.compress(shapes, choice.is_used))
            choice = self._choice(used, rows)
        return dataclasses.replace(choice, packing=packing)

    def _descend(self, num_buckets: int) -> None:
        """Tries shapes of a grid, adding one at a time, and then moves each of them."""
        grid = self._grid()
        best = self._cheapest([(x,) for x in grid], self._packed((self.last,)))
        for _ in range(num_buckets - 1):
            cheapest = self._cheapest([(*best.shapes, x) for x in grid], best)
            if cheapest is best:
                break
            best = cheapest
        for turn in range(_REFINEMENTS):
            for shape in best.shapes:
                others = [x for x in best.shapes if x != shape]
                moved = self._moved(shape, _RATIO ** (0.5**turn))
                nearby = [others, *([*others, x] for x in moved)]
                best = self._cheapest(nearby, best)

    def _cheapest(
        self, candidates: Iterable[Iterable[Shape]], best: RowChoice
    ) -> RowChoice:
        """Returns the cheapest choice among valid candidates and the best so far."""
        shapes = [x for x in map(self._sorted, candidates) if x and self._is_valid(x)]
        return min([best, *map(self._packed, shapes)], key=_by_rank)

    def _packed(self, shapes: tuple[Shape, ...]) -> RowChoice:
        """Returns the rows of the sample for a choice of shapes."""
        if shapes not in self._tried:
            self._tried[shapes] = self._choice(shapes, self._fitted(shapes, *self._few))
        return self._tried[shapes]

    def _fitted(
        self, shapes: tuple[Shape, ...], kinds: np.ndarray, counts: np.ndarray
    ) -> _Rows:
        """Returns the rows of best fit decreasing, of `[V, Q]` kinds."""
        if self._limits.sequences:
            seq_lens = np.array(shapes, np.int64)
            patterns = fit_sequences(kinds, counts, seq_lens, self._cap)
            slots = kinds[np.concatenate([pattern.slots for pattern in patterns])]
        else:
            patterns = best_fit(kinds[:, 0], counts, [t for (t,) in shapes], self._cap)
            slots = np.concatenate([pattern.slots for pattern in patterns])[:, None]
        sizes = np.array([len(pattern.slots) for pattern in patterns])
        numbers = np.array([pattern.rows for pattern in patterns])
        return _Rows.of_slots(slots, np.cumsum(sizes) - sizes, numbers)

    def _grid(self) -> list[Shape]:
        """Returns shapes in proportion to the longest T, or to the mean lengths."""
        last, shortest = np.array(self.last), np.maximum(self._kinds.min(axis=0), 1)
        mean = np.maximum(self._counts @ self._kinds / len(self._lengths), 1e-9)
        shapes = set()
        for direction in (last, mean * (last / mean).min()):
            steps = int(math.log((direction / shortest).max(), _RATIO)) + 1
            sizes = [direction / _RATIO**i for i in range(steps)]
            shapes.update(map(self._rounded, sizes))
            # These hold every example.
            shapes.update(self._rounded(np.maximum(x, self._least)) for x in sizes)
        return sorted(shapes)

    def _sorted(self, shapes: Iterable[Sequence[int]]) -> tuple[Shape, ...]:
        """Returns distinct shapes in the order of a plan."""
        distinct = {*map(tuple, shapes)}
        return tuple(sorted(distinct, key=lambda shape: (sum(shape), shape)))

    def _moved(self, shape: Shape, ratio: float) -> list[Shape]:
        """Returns shapes with one T, or all, longer or shorter by a ratio."""
        size = len(shape)
        chosen = {(True,) * size, *map(tuple, np.eye(size, dtype=bool).tolist())}
        return [
            self._rounded(np.where(which, np.array(shape) * factor, shape))
            for which in sorted(chosen, reverse=True)
            for factor in (ratio, 1 / ratio)
        ]

    def _tightened(self, choice: RowChoice) -> list[Shape]:
        """Returns the shapes of a choice, reduced to their fullest rows."""
        tight = self._limits.rounded(choice.longest[choice.rows > 0])
        tight[-1] = np.maximum(tight[-1], tight.max(axis=0))
        return [tuple(shape) for shape in tight.tolist()]

    def _is_valid(self, shapes: tuple[Shape, ...]) -> bool:
        """Returns whether the last shape holds all examples, and each fits a batch."""
        array = np.array(shapes, np.int64)
        is_longest = array[-1] >= np.maximum(array.max(axis=0), self._least)
        is_increasing = np.diff(array.sum(axis=1)) > 0
        fits = self._limits.batch_sizes(array) > 0
        return bool(is_longest.all() and is_increasing.all() and fits.all())

    def _rounded(self, sizes: np.ndarray) -> Shape:
        """Returns the nearest possible shape."""
        multiples = self._limits.multiples
        rounded = np.maximum(np.rint(sizes / multiples), 1).astype(np.int64) * multiples
        return tuple(np.minimum(rounded, self.last).tolist())

    def _assign(self, plan: BucketPlan, rows: _Rows) -> np.ndarray:
        """Returns the bucket of each group of rows, `[P]`."""
        return plan.assign(rows.lengths if plan.sequences else rows.lengths[:, 0])

    def _choice(self, shapes: tuple[Shape, ...], rows: _Rows) -> RowChoice:
        """Returns the choice for given rows, with the cost of an epoch."""
        size = len(shapes)

        def counts(plan: BucketPlan, each: Any = 1) -> np.ndarray:
            index, each = self._assign(plan, rows), rows.numbers * each
            return np.bincount(index, each, size).astype(np.int64)

        plan = with_batch_sizes(self._limits, np.array(shapes), counts)
        if self._block_sparse:
            plan = self._sparse(plan, rows)
        index, numbers = self._assign(plan, rows), counts(plan)
        flow = epoch_flow(plan, numbers, plan.batch_sizes, plan.costs)
        totals = rows.lengths.sum(axis=1)
        longest = np.zeros_like(plan.seq_lens)
        np.maximum.at(longest, index, rows.lengths)
        positions = int(rows.numbers @ plan.tokens_per_row[index])
        return RowChoice(
            shapes=shapes,
            plan=plan,
            rows=numbers,
            segments=counts(plan, rows.segments),
            padding=1 - float(rows.numbers @ totals) / positions,
            separation=separation(
                *(index, rows.logs / totals, rows.numbers * totals),
                *(plan.batch_sizes, self._variance),
            ),
            cost=float(epoch_cost(flow.batches, plan.costs)),
            longest=longest,
            is_used=(flow.batches > 0) | (np.arange(size) == size - 1),
        )

    def _sparse(self, plan: BucketPlan, rows: _Rows) -> BucketPlan:
        """Returns the plan with the costs of steps that attend within examples only.

        Rows may move to other buckets because of these costs, which changes the costs.
        """
        index = None
        for _ in range(_COST_ROUNDS):
            before, index = index, self._assign(plan, rows)
            if before is not None and np.array_equal(index, before):
                break
            numbers, pairs = (
                np.bincount(index, x, len(plan))
                for x in (rows.numbers, rows.numbers * rows.pairs)
            )
            costs = self._sparse_costs(plan, pairs, numbers)
            plan = dataclasses.replace(plan, step_costs=costs)
        return plan

    def _sparse_costs(
        self, plan: BucketPlan, pairs: np.ndarray, rows: np.ndarray
    ) -> tuple[float, ...]:
        """Returns the costs of steps that attend within examples only, `[K]`.

        Each bucket has `[K]` rows, and `[K]` pairs of tokens of the same example in
        them.
        """
        share = pairs / np.maximum(rows, 1) / np.square(plan.tokens_per_row)
        share[rows == 0] = 1
        costs = []
        columns = zip(plan.batch_sizes, plan.seq_lens, share.tolist(), strict=True)
        for batch_size, seq_len, attended in columns:
            scaled = np.array([self._rounded(seq_len / n) for n in (1, 2, 4)])
            sizes = np.full(3, batch_size)
            dense = self._limits.costs(sizes, scaled).tolist()
            costs.append(sparse_cost(scaled.sum(axis=1).tolist(), dense, attended))
        return tuple(costs)


def representatives(
    kinds: np.ndarray, counts: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `most` kinds, each for examples with about as many tokens.

    Of `[V, Q]` sorted kinds, consecutive ones are represented by a random one of them,
    and its count is the number of their examples.
    """
    tokens = np.cumsum(kinds.sum(axis=1) * counts)
    ends = np.searchsorted(tokens, np.arange(1, most + 1) * (tokens[-1] / most))
    ends = np.unique(np.minimum(ends + 1, len(kinds)))
    ends[-1] = len(kinds)
    starts = np.append(0, ends[:-1])
    chosen = starts + np.random.default_rng(_SEED).integers(ends - starts)
    return kinds[chosen], np.add.reduceat(counts, starts)
