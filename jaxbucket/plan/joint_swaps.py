"""What every shape of a grid would take if it replaced one of the shapes.

A shape takes those examples that it holds and that cost more elsewhere. They are
counted for all shapes of a grid at once: a cumulative sum along each sequence counts
the examples up to every T.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxbucket.plan.joint_points import Points
from jaxbucket.plan.joint_pricing import Prices, Pricing


@dataclasses.dataclass(frozen=True)
class Grid:
    """All combinations of some T of each sequence, C shapes in total.

    Attributes:
      axes: for each sequence the increasing indices of these T.
      shapes: `[C, Q]` int64, the indices of the T of each shape.
      prices: what batches of these shapes hold and cost.
      ranks: `[C, Q + 2]` float64, by which examples prefer shapes.
    """

    axes: list[np.ndarray]
    shapes: np.ndarray
    prices: Prices
    ranks: np.ndarray

    @classmethod
    def of(cls, points: Points, axes: list[np.ndarray], pricing: Pricing) -> Grid:
        """Returns the grid of some T, given by their indices for each sequence."""
        mesh = np.meshgrid(*axes, indexing="ij")
        shapes = np.stack([side.ravel() for side in mesh], axis=1)
        seq_lens = points.seq_lens(shapes)
        prices = pricing(seq_lens)
        return cls(axes, shapes, prices, _ranks(prices.rates, seq_lens))

    def __len__(self) -> int:
        return len(self.shapes)

    def counts(self, points: Points, groups: np.ndarray, number: int) -> np.ndarray:
        """Returns the examples of each group that each shape holds, `[number, C]`.

        `groups` are the groups of the points, `[P]` integers below `number`.
        """
        sizes = tuple(map(len, self.axes))
        cells = np.zeros(len(points), np.int64)
        inside = np.ones(len(points), bool)
        for axis, column, values in zip(
            self.axes, points.columns, points.values, strict=True
        ):
            index = np.searchsorted(axis, np.arange(len(values)))[column]
            inside &= index < len(axis)
            cells = cells * len(axis) + index
        keys = (groups * len(self) + cells)[inside]
        counts = np.bincount(keys, points.counts[inside], number * len(self))
        counts = counts.reshape(number, *sizes)
        for axis in range(1, counts.ndim):
            np.cumsum(counts, axis=axis, out=counts)
        return counts.reshape(number, -1)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A set of shapes, and the two cheapest of them for each point.

    Attributes:
      points: the examples.
      shapes: `[K, Q]` int64, indices of T.
      ranks: `[K, Q + 2]` float64, by which examples prefer shapes.
      first: `[P]` int64, the cheapest shape that holds each point, K if none does.
      second: `[P]` int64, the second cheapest, K if there is none.
    """

    points: Points
    shapes: np.ndarray
    ranks: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @classmethod
    def of(cls, points: Points, shapes: np.ndarray, pricing: Pricing) -> Assignment:
        """Returns the assignment of points to shapes, `[K, Q]` indices."""
        seq_lens = points.seq_lens(shapes)
        ranks = _ranks(pricing(seq_lens).rates, seq_lens)
        first, second = np.full((2, len(points)), len(shapes))
        # The cheapest shape is last, and replaces all others.
        for shape in np.lexsort(ranks.T[::-1])[::-1].tolist():
            held = points.held(shapes[shape])
            second[held] = first[held]
            first[held] = shape
        return cls(points, shapes, ranks, first, second)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def rates(self) -> np.ndarray:
        """`[K]` float64: the cost of a row of each shape."""
        return self.ranks[:, 0]

    @property
    def cost(self) -> float:
        """The cost of all examples if every batch is full; infinite if one is left."""
        if (self.first == len(self)).any():
            return np.inf
        return float(self.counts(self.first)[:-1] @ self.rates)

    def counts(self, groups: np.ndarray) -> np.ndarray:
        """Returns the number of examples in each group, `[K + 1]` float64."""
        return np.bincount(groups, self.points.counts, len(self) + 1)

    def cheapest(self, without: int | None = None) -> np.ndarray:
        """Returns the cheapest shape of each point, `[P]`, without one of them."""
        if without is None:
            return self.first
        return np.where(self.first == without, self.second, self.first)


class Swaps:
    """What each of C shapes would take if it were added to K shapes.

    Args:
      assignment: the K shapes.
      grid: the C shapes.
      without: one of the K shapes, which they replace, if any.

    Attributes:
      costs: `[C]` float64, the cost of all examples if every batch is full; infinite if
        a shape is not allowed or an example is left.
    """

    def __init__(self, assignment: Assignment, grid: Grid, without: int | None = None):
        groups = assignment.cheapest(without)
        self._ranks, self._new_ranks = assignment.ranks, grid.ranks
        self._counts = counts = assignment.counts(groups)
        # `[K + 1, C]`: the examples that could move from each shape to each new one.
        self._tables = grid.counts(assignment.points, groups, len(counts))
        rates, new, tables = assignment.rates, grid.prices.rates, self._tables
        allowed = np.isfinite(new)
        new = np.where(allowed, new, 0)
        costs = np.full(len(new), counts[:-1] @ rates) + counts[-1] * new
        # The last table is of examples that have no shape yet.
        for rate, held in zip(rates.tolist(), tables, strict=False):
            costs += np.minimum(0, new - rate) * held
        self.costs = np.where(allowed & (tables[-1] == counts[-1]), costs, np.inf)

    def counts(self, added: np.ndarray) -> np.ndarray:
        """Returns the examples of each shape after a swap, `[n, K + 1]` int64.

        The last ones are those of the added shapes, whose indices are given.
        """
        # Examples that were in no shape move to any.
        moves = np.ones((len(self._counts), len(added)), bool)
        moves[:-1] = _precedes(self._new_ranks[added], self._ranks[:, None])
        moved = np.where(moves, self._tables[:, added], 0)
        left = (self._counts[:, None] - moved)[:-1]
        return np.append(left, moved.sum(axis=0)[None], axis=0).T.astype(np.int64)


def _ranks(rates: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Returns columns by which examples prefer shapes, `[n, Q + 2]`.

    The first is the cost of a row. The others are the order of the shapes in a plan.
    """
    return np.column_stack([rates, seq_lens.sum(axis=1), seq_lens])


def _precedes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns whether ranks `a` come before ranks `b`, `[...]` bool."""
    before = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1], bool)
    for column in reversed(range(a.shape[-1])):
        x, y = a[..., column], b[..., column]
        before = (x < y) | ((x == y) & before)
    return before
