"""What every shape of a fine grid collects, if groups of examples pay given prices."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxbucket.plan.joint.additions import Grid
from jaxbucket.plan.joint.points import Points
from jaxbucket.plan.joint.pricing import Pricing
from jaxbucket.plan.joint.relaxation import Relaxation

# The most shapes of a fine grid, and the most for which rates are computed.
_MAX_FINE, _MAX_PRICED = 1 << 17, 1 << 18
# The number of rates between which is interpolated.
_LEVELS = 48


@dataclasses.dataclass(frozen=True)
class FineGrid:
    """All shapes, or if there are too many, neighbors as one.

    Such neighbors hold what the longest of them holds, at the lowest rate of them.

    Attributes:
      points: the examples, with the T of the grid.
      rates: `[F]` float64, the cost of a row of each shape; infinite if not allowed.
    """

    points: Points
    rates: np.ndarray

    @classmethod
    def of(cls, points: Points, pricing: Pricing) -> FineGrid:
        """Returns the grid of all T of the points, or of some of them."""
        axes = [np.arange(len(values)) for values in points.values]
        if _size(axes) > _MAX_FINE:
            axes = points.quantiles(int(_MAX_FINE ** (1 / len(axes))))
        return cls(points.restricted(axes), lowest_rates(points, axes, pricing))

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.points.values))

    def collected(self, prices: np.ndarray) -> np.ndarray:
        """Returns an upper bound of what each shape collects, `[F]`.

        What a shape collects is a convex function of its rate. It is computed for a few
        rates, and interpolated between them.

        Args:
          prices: `[P]` float64, what an example of each point pays.
        """
        collected = np.zeros(len(self.rates))
        lowest, highest = self.rates.min(), prices.max()
        if not lowest < highest:
            return collected
        levels = np.geomspace(lowest, highest, _LEVELS)
        levels[0], levels[-1] = lowest, highest
        level_of = np.searchsorted(levels, self.rates, side="right") - 1
        order = np.argsort(level_of, kind="stable")
        ends = np.searchsorted(level_of[order], np.arange(_LEVELS))
        cells = np.zeros(len(self.points), np.int64)
        for column, size in zip(self.points.columns, self._sizes, strict=True):
            cells = cells * size + column
        after = self._collected_at(levels[0], prices, cells)
        for level in range(_LEVELS - 1):
            before, after = after, self._collected_at(levels[level + 1], prices, cells)
            shapes = order[ends[level] : ends[level + 1]]
            width = levels[level + 1] - levels[level]
            share = (self.rates[shapes] - levels[level]) / width
            collected[shapes] = before[shapes] * (1 - share) + after[shapes] * share
        return collected

    def _collected_at(
        self, rate: float, prices: np.ndarray, cells: np.ndarray
    ) -> np.ndarray:
        """Returns what each shape would collect at the same rate, `[F]`."""
        gains = self.points.counts * np.maximum(prices - rate, 0)
        table = np.bincount(cells, gains, len(self.rates)).reshape(self._sizes)
        for axis in range(table.ndim):
            np.cumsum(table, axis=axis, out=table)
        return table.ravel()

    def best_of_cells(
        self, collected: np.ndarray, axes: list[np.ndarray]
    ) -> np.ndarray:
        """Returns the shape of each cell of a coarse grid that collects most, `[n]`.

        Args:
          collected: `[F]` float64, what each shape collects.
          axes: for each sequence the T of the coarse grid, as indices.
        """
        cells = [
            np.searchsorted(axis, np.arange(size))
            for axis, size in zip(axes, self._sizes, strict=True)
        ]
        mesh = np.meshgrid(*cells, indexing="ij")
        keys = np.ravel_multi_index([x.ravel() for x in mesh], [*map(len, axes)])
        order = np.lexsort([-collected, keys])
        is_first = np.diff(keys[order], prepend=-1) > 0
        best = order[is_first]
        return best[collected[best] > 0]

    def extended(
        self, relaxation: Relaxation, groups: np.ndarray, new: np.ndarray
    ) -> Relaxation:
        """Returns a relaxed problem with more shapes.

        Args:
          relaxation: the problem.
          groups: `[P]` int64, the group of each point.
          new: `[n]` int64, the new shapes.
        """
        shapes = np.stack(np.unravel_index(new, self._sizes), axis=1)
        parts = [(relaxation.groups, relaxation.shapes, relaxation.held)]
        for number, shape in enumerate(shapes, len(relaxation.rates)):
            held = self.points.held(shape)
            counts = np.bincount(groups[held], self.points.counts[held])
            some = np.flatnonzero(counts)
            parts.append((some, np.full(len(some), number), counts[some]))
        pairs = map(np.concatenate, zip(*parts, strict=True))
        rates = np.append(relaxation.rates, self.rates[new])
        columns = dict(zip(("groups", "shapes", "held"), pairs, strict=True))
        return dataclasses.replace(relaxation, rates=rates, **columns)


def lowest_rates(
    points: Points, axes: list[np.ndarray], pricing: Pricing
) -> np.ndarray:
    """Returns the lowest rate from each grid point down to the previous ones, `[F]`."""
    starts = [np.append(0, axis[:-1] + 1) for axis in axes]
    every = [np.arange(len(values)) for values in points.values]
    if _size(every) <= _MAX_PRICED:
        rates = Grid.of(points, every, pricing).prices.rates
        rates = rates.reshape([*map(len, every)])
        for axis, start in enumerate(starts):
            rates = np.minimum.reduceat(rates, start, axis=axis)
        return rates.ravel()
    corners = (Grid.of(points, sides, pricing) for sides in (starts, axes))
    return np.minimum.reduce([corner.prices.rates for corner in corners])


def _size(axes: list[np.ndarray]) -> float:
    return np.prod([len(axis) for axis in axes], dtype=np.float64)
