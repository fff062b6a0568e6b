"""Searches for the T of packed rows by packing each choice and costing its epoch.

The search adds one T at a time, and then moves each of them in ever smaller steps.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.packing.best_fit import best_fit
from jaxbucket.packing.pattern import Pattern
from jaxbucket.packing.row_choice import (
    RowChoice,
    log_variance,
    separation,
    sparse_cost,
)
from jaxbucket.packing.rows import Packing, from_patterns
from jaxbucket.packing.subset_sum import fuller_patterns
from jaxbucket.plan.flow.remainder import flow_remainders
from jaxbucket.plan.histogram import grouped
from jaxbucket.plan.limits import Limits

# The ratio between neighboring T of the first grid. Refinements use smaller ratios.
RATIO = math.sqrt(2)
_REFINEMENTS = 3
# With more distinct lengths than this, the search merges them into groups. The most
# promising choices are then packed with all lengths, up to a total number of lengths
# that takes about a second.
_MAX_LENGTHS, _NUM_GROUPS, _MAX_LENGTHS_PACKED = 1024, 512, 100_000

Choice = TypeVar("Choice", bound=RowChoice)
Key: TypeAlias = Callable[[RowChoice], Any]
BY_RANK: Key = operator.attrgetter("rank")
_BY_COST: Key = operator.attrgetter("cost")


class RowSearch(abc.ABC, Generic[Choice]):
    """A search for the shapes of rows, of one length or of several sequences.

    Args:
      limits: the limits and costs of rows.
      block_sparse: whether attention takes time within examples only.

    Attributes:
      last: the T of the longest row, or the tuple of its T.
      tried: the choices that were packed so far, by their shapes.
    """

    last: Any

    def __init__(self, limits: Limits, block_sparse: bool):
        self.limits = limits
        # Tokens have no quadratic part.
        self.block_sparse = block_sparse and limits.cost_fn is not None
        self.tried: dict[tuple[Any, ...], Choice] = {}

    @abc.abstractmethod
    def search(self, num_buckets: int) -> Choice:
        """Returns the cheapest choice found, with at most `num_buckets` shapes."""

    @abc.abstractmethod
    def single(self) -> Choice:
        """Returns the rows of the longest T."""

    @abc.abstractmethod
    def _packed(self, shapes: tuple[Any, ...]) -> Choice:
        """Returns the rows for a choice of shapes, whose last one holds all."""

    @abc.abstractmethod
    def _sorted(self, shapes: Iterable[Any]) -> tuple[Any, ...]:
        """Returns distinct shapes in the order of a plan."""

    @abc.abstractmethod
    def _moved(self, shape: Any, ratio: float) -> list[Any]:
        """Returns the neighbors of a shape, longer or shorter by a ratio."""

    @abc.abstractmethod
    def _rounded(self, sizes: Any) -> Any:
        """Returns the nearest possible shape."""

    @abc.abstractmethod
    def _is_valid(self, shapes: tuple[Any, ...]) -> bool:
        """Returns whether the last shape holds all examples, and each fits a batch."""

    def _descend(
        self, num_buckets: int, grid: Sequence[Any], key: Key = BY_RANK
    ) -> Choice:
        """Adds one shape at a time, and then moves each of them.

        Args:
          num_buckets: the largest number of shapes.
          grid: the shapes to add.
          key: the sort key of choices.
        """
        best = self._cheapest([(x,) for x in grid], self._packed((self.last,)), key)
        for _ in range(num_buckets - 1):
            cheapest = self._cheapest([(*best.shapes, x) for x in grid], best, key)
            if cheapest is best:
                break
            best = cheapest
        for turn in range(_REFINEMENTS):
            for shape in best.shapes:
                others = [x for x in best.shapes if x != shape]
                moved = self._moved(shape, RATIO ** (0.5**turn))
                nearby = [others, *([*others, x] for x in moved)]
                best = self._cheapest(nearby, best, key)
        return best

    def _cheapest(
        self, candidates: Iterable[Iterable[Any]], best: Choice, key: Key = BY_RANK
    ) -> Choice:
        """Returns the cheapest choice among valid candidates and the best so far."""
        shapes = [x for x in map(self._sorted, candidates) if x and self._is_valid(x)]
        choices = (self._packed(x) for x in shapes)
        return min([best, *choices], key=key)

    def _sparse_costs(
        self, plan: BucketPlan, pairs: np.ndarray, rows: np.ndarray
    ) -> tuple[float, ...]:
        """Returns the costs of steps that attend within examples only, `[K]`.

        Args:
          plan: the buckets.
          pairs: `[K]`, the pairs of tokens of the same example in all rows.
          rows: `[K]`, the number of rows.
        """
        share = pairs / np.maximum(rows, 1) / np.square(plan.tokens_per_row)
        share[rows == 0] = 1
        seq_lens = plan.seq_lens if plan.sequences else plan.boundaries
        costs = []
        columns = zip(plan.batch_sizes, seq_lens, share.tolist(), strict=True)
        for batch_size, seq_len, attended in columns:
            scaled = np.array([self._rounded(seq_len / n) for n in (1, 2, 4)])
            dense = self.limits.costs(np.full(3, batch_size), scaled).tolist()
            totals = scaled.reshape(3, -1).sum(axis=1).tolist()
            costs.append(sparse_cost(totals, dense, attended))
        return tuple(costs)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PatternChoice(RowChoice):
    """The packed rows of examples with one length.

    Attributes:
      patterns: the rows.
    """

    patterns: list[Pattern]

    def packing(self, max_segments_per_row: int | None) -> Packing:
        return from_patterns(self.patterns, self.shapes, max_segments_per_row)


class LengthSearch(RowSearch[PatternChoice]):
    """A search for the T of rows of examples with one length.

    Args:
      values: `[V]` distinct lengths, increasing.
      counts: `[V]` integers, the number of examples of each length.
      longest: the longest length.
      limits: the limits and costs of rows.
      cap: the maximum number of slots in a row.
      block_sparse: whether attention takes time within examples only.
    """

    def __init__(
        self,
        values: np.ndarray,
        counts: np.ndarray,
        longest: int,
        limits: Limits,
        cap: int,
        block_sparse: bool,
    ):
        super().__init__(limits, block_sparse)
        self._values, self._counts, self._longest = values, counts, longest
        self._cap = cap
        self.last = limits.longest(np.array([longest]))
        self._variance = log_variance(values, counts)

    def search(self, num_buckets: int) -> PatternChoice:
        return self._fuller(self._searched(num_buckets))

    def single(self) -> PatternChoice:
        return self._fuller(self._packed((self.last,)))

    def _searched(self, num_buckets: int) -> PatternChoice:
        """Returns the cheapest choice found.

        If there are very many distinct lengths, the search first merges neighbors, and
        then packs all lengths for the most promising choices.
        """
        size = len(self._values)
        if size <= _MAX_LENGTHS:
            # The shortest T of the grid fits few examples and may mislead the greedy
            # search, so try without it as well.
            grids = [self._grid(extra_steps) for extra_steps in (0, 1)]
            # The search is greedy, so it may end at better rows by the plain cost.
            choices = [
                self._descend(num_buckets, grid, key)
                for key in (_BY_COST, BY_RANK)
                for grid in grids
            ]
        else:
            values, counts = grouped(self._values, self._counts, _NUM_GROUPS)
            parts = (self._longest, self.limits, self._cap, self.block_sparse)
            coarse = LengthSearch(values, counts, *parts)
            coarse._searched(num_buckets)
            promising = sorted(coarse.tried.values(), key=BY_RANK)
            number = max(1, _MAX_LENGTHS_PACKED // size)
            choices = [self._packed(x.shapes) for x in promising[:number]]
            choices.insert(0, self._packed((self.last,)))
        best = min(choices, key=BY_RANK)
        return self._cheapest([self._tightened(best)], best)

    def _fuller(self, choice: PatternChoice) -> PatternChoice:
        """Returns the same choice of T with rows of the second packer if cheaper."""
        arguments = self._values, self._counts, choice.shapes, self._cap
        patterns = fuller_patterns(choice.patterns, *arguments)
        fuller = self._choice(choice.shapes, patterns)
        best = min([choice, fuller], key=BY_RANK)
        # A T without rows would only cost a compilation.
        used = tuple(itertools.compress(best.shapes, best.rows))
        return best if used == best.shapes else self._choice(used, best.patterns)

    def _packed(self, shapes: tuple[int, ...]) -> PatternChoice:
        if shapes not in self.tried:
            patterns = best_fit(self._values, self._counts, shapes, self._cap)
            self.tried[shapes] = self._choice(shapes, patterns)
        return self.tried[shapes]

    def _grid(self, extra_steps: int) -> list[int]:
        """Returns a geometric grid of T, from the longest to the shortest length."""
        steps = extra_steps + int(math.log(self.last / self._values[0], RATIO))
        return sorted({self._rounded(self.last / RATIO**i) for i in range(steps)})

    def _sorted(self, shapes: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(set(shapes)))

    def _moved(self, shape: int, ratio: float) -> list[int]:
        return [self._rounded(shape * x) for x in (ratio, 1 / ratio)]

    def _rounded(self, sizes: float) -> int:
        multiple = int(self.limits.multiples[0])
        return min(self.last, max(1, round(sizes / multiple)) * multiple)

    def _tightened(self, choice: PatternChoice) -> list[int]:
        """Returns the T of a choice, each reduced to the length of its fullest row."""
        longest: dict[int, int] = {}
        for row in choice.patterns:
            longest[row.seq_len] = max(longest.get(row.seq_len, 0), sum(row.slots))
        return self.limits.rounded(np.array(list(longest.values()))).tolist()

    def _is_valid(self, shapes: tuple[int, ...]) -> bool:
        # A budget that is a function of T may allow no batch.
        fits = self.limits.batch_sizes(shapes) > 0
        return shapes[-1] >= self._longest and bool(fits.all())

    def _choice(
        self, shapes: tuple[int, ...], patterns: list[Pattern]
    ) -> PatternChoice:
        """Returns the choice for given rows, with the cost of an epoch."""
        size = len(shapes)
        bucket = np.searchsorted(shapes, [x.seq_len for x in patterns])
        number = np.array([x.rows for x in patterns])
        slots = np.array([len(x.slots) for x in patterns])
        lengths = np.concatenate([x.slots for x in patterns])
        tokens, squares, logs = (
            np.add.reduceat(x, np.cumsum(slots) - slots)
            for x in (lengths, lengths * lengths, lengths * np.log(lengths))
        )
        rows, segments, pairs = (
            np.bincount(bucket, x, size)
            for x in (number, number * slots, number * squares)
        )
        rows = rows.astype(np.int64)
        plan = self.limits.plan(shapes, rows)
        if self.block_sparse:
            costs = self._sparse_costs(plan, pairs, rows)
            plan = dataclasses.replace(plan, step_costs=costs)
        flow = flow_remainders(rows, plan.batch_sizes, plan.costs)
        real = float(self._values @ self._counts)
        return PatternChoice(
            shapes=shapes,
            patterns=patterns,
            plan=plan,
            rows=rows,
            segments=segments,
            padding=1 - real / int(rows @ plan.boundaries),
            separation=separation(
                *(bucket, logs / tokens, number * tokens),
                *(plan.batch_sizes, self._variance),
            ),
            cost=float((flow.batches * plan.costs).sum()),
        )
