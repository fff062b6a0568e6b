"""A lower bound of the cost of an epoch with any K shapes, by Lagrangian relaxation.

Choosing shapes is a K-median problem: each example pays the rate of a shape that holds
it. The condition that each example is in one shape is replaced by a price that an
example pays, and of which any shape with a lower rate may collect the difference. Then
the best K shapes are those that collect most, and for all prices the total is a lower
bound (Cornuejols, Fisher and Nemhauser, "Location of bank accounts to optimize float",
1977). A subgradient method finds prices for which it is high.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxbucket.plan.dominance import fits
from jaxbucket.plan.joint.additions import Choice, Grid
from jaxbucket.plan.joint.points import Points
from jaxbucket.plan.joint.pricing import Pricing
from jaxbucket.plan.joint.search import Search

# The number of steps, and after how many without progress they become shorter.
_STEPS, _PATIENCE = 400, 10
# The most pairs of an example and a shape that a step considers. To stay below it,
# prices are limited to a multiple of what an example pays in known shapes.
_MAX_PAIRS = 250_000
_MULTIPLES = np.inf, 8.0, 4.0, 3.0, 2.5, 2.0, 1.75, 1.5, 1.4, 1.3, 1.2, 1.1
# The most shapes in the relaxed problem, and the most whose prices are computed for it.
_MAX_SHAPES, _MAX_PRICED = 2048, 1 << 18
# The number of pairs that are compared at a time.
_CHUNK = 1 << 22
# Makes up for rounding errors.
_SLACK = 1 - 1e-9


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound, for all choices of shapes and for those with a certain shape.

    Attributes:
      cost: the bound.
      shapes: `[C, Q]` int64, the shapes as indices of T.
      with_shape: `[C]` float64, the bound if shape c is chosen.
    """

    cost: float
    shapes: np.ndarray
    with_shape: np.ndarray


def lower_bound(problem: Search, seq_lens: np.ndarray | None) -> Bound:
    """Returns a lower bound for all choices of shapes.

    If there are too many shapes, neighbors are treated as one. Examples count as if
    they had the shortest lengths of their cell, and shapes as if they had the longest
    T at the lowest rate.

    Args:
      problem: the points and prices.
      seq_lens: `[K, Q]` T of known shapes, if there are any.
    """
    points, pricing = problem.points, problem.pricing
    side = int(_MAX_SHAPES ** (1 / len(points.values)))
    axes = [np.arange(len(values)) for values in points.values]
    if np.prod(list(map(len, axes)), dtype=np.float64) > _MAX_SHAPES:
        axes = points.quantiles(side)
    cells = points.restricted(axes)
    grid = Grid.of(points, axes, pricing)
    rates = _lowest_rates(points, axes, pricing)
    fixed = len(grid) - 1 if problem.must_hold_all else None
    relaxation = Relaxation(
        cells.indices,
        cells.counts,
        cells.indices_of(points.seq_lens(grid.shapes)),
        rates,
        problem.num_buckets,
        fixed,
    )
    paid = np.full(len(cells), rates[np.isfinite(rates)].max(initial=1.0))
    if seq_lens is not None:
        shapes = cells.indices_of(seq_lens)
        choice = Choice.of(cells, shapes, pricing)
        paid = choice.rates[choice.first]
    return relaxation.bound(paid)


def _lowest_rates(
    points: Points, axes: list[np.ndarray], pricing: Pricing
) -> np.ndarray:
    """Returns the lowest rate from each grid point down to the previous ones, `[C]`."""
    starts = [np.append(0, axis[:-1] + 1) for axis in axes]
    sizes = [len(values) for values in points.values]
    if np.prod(sizes, dtype=np.float64) <= _MAX_PRICED:
        every = Grid.of(points, [np.arange(size) for size in sizes], pricing)
        rates = every.prices.rates.reshape(sizes)
        for axis, start in enumerate(starts):
            rates = np.minimum.reduceat(rates, start, axis=axis)
        return rates.ravel()
    corners = (Grid.of(points, sides, pricing) for sides in (starts, axes))
    return np.minimum.reduce([corner.prices.rates for corner in corners])


class Relaxation:
    """The relaxed problem.

    Args:
      indices: `[P, Q]` integers, the T that each point needs.
      counts: `[P]` integers, its number of examples.
      shapes: `[C, Q]` integers, the T of all shapes.
      rates: `[C]` float64, the cost of a row of each shape; infinite if not allowed.
      num_buckets: the largest number of shapes.
      fixed: the index of a shape that is always chosen, if any.
    """

    def __init__(
        self,
        indices: np.ndarray,
        counts: np.ndarray,
        shapes: np.ndarray,
        rates: np.ndarray,
        num_buckets: int,
        fixed: int | None,
    ):
        self.indices, self.counts = indices, counts.astype(np.float64)
        self.shapes, self.rates = shapes, rates
        self.num_buckets, self.fixed = num_buckets, fixed

    def bound(self, paid: np.ndarray) -> Bound:
        """Returns a lower bound.

        Args:
          paid: `[P]` float64, the rate that each point pays in known shapes.
        """
        target = float(paid @ self.counts)
        most, pairs = self._pairs(paid)
        prices = best_prices = paid.copy()
        best, scale, waited = -np.inf, 1.0, 0
        for _ in range(_STEPS):
            collected, held = self._collected(prices, pairs)
            total, chosen = self._total(prices, collected)
            waited += 1
            if total > best:
                best, best_prices, waited = total, prices, 0
            if waited > _PATIENCE:
                scale, waited, prices = scale / 2, 0, best_prices
                continue
            times = np.bincount(
                pairs[0][held & chosen[pairs[1]]], minlength=len(prices)
            )
            slope = 1.0 - times
            norm = slope @ slope
            if not norm or target * _SLACK <= best:
                break
            step = scale * (target - total) / norm
            prices = np.clip(prices + step * slope / self.counts, 0, most)
        return self._at(best_prices, pairs)

    def _pairs(
        self, paid: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Returns the largest price of each point, and the pairs that can matter.

        These are the pairs of a point and a shape that can collect from it, by shape.
        """
        points, shapes, ratios = [], [], []
        size = max(1, _CHUNK // len(paid))
        for start in range(0, len(self.shapes), size):
            part = slice(start, start + size)
            held = fits(self.indices, self.shapes[part]).T
            held &= np.isfinite(self.rates[part, None])
            shape, point = np.nonzero(held)
            points.append(point)
            shapes.append(shape + start)
            ratios.append(self.rates[shape + start] / paid[point])
        points, shapes, ratios = map(np.concatenate, (points, shapes, ratios))
        for multiple in _MULTIPLES:
            kept = ratios < multiple
            if np.count_nonzero(kept) <= _MAX_PAIRS:
                break
        return paid * multiple, (points[kept], shapes[kept])

    def _collected(
        self, prices: np.ndarray, pairs: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns what each shape collects, and which pairs contribute to it."""
        points, shapes = pairs
        gain = prices[points] - self.rates[shapes]
        gains = np.maximum(gain, 0) * self.counts[points]
        return np.bincount(shapes, gains, len(self.rates)), gain > 0

    def _total(
        self, prices: np.ndarray, collected: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """Returns the bound, and which shapes collect most, `[C]` bool."""
        chosen = np.zeros(len(collected), bool)
        value = collected.copy()
        if self.fixed is not None:
            value[self.fixed] = np.inf
        top = np.argpartition(-value, min(self.num_buckets, len(value)) - 1)
        chosen[top[: self.num_buckets]] = True
        return float(prices @ self.counts - collected[chosen].sum()), chosen

    def _at(self, prices: np.ndarray, pairs: tuple[np.ndarray, np.ndarray]) -> Bound:
        collected, _ = self._collected(prices, pairs)
        total, chosen = self._total(prices, collected)
        # Another shape would replace the chosen one that collects least.
        least = np.flatnonzero(chosen)
        if self.fixed is not None:
            least = least[least != self.fixed]
        replaced = collected[least].min() if least.size else 0.0
        if chosen.sum() < self.num_buckets:
            replaced = 0.0
        with_shape = np.where(chosen, total, total + replaced - collected)
        if not least.size:
            with_shape[~chosen] = np.inf
        with_shape[~np.isfinite(self.rates)] = np.inf
        return Bound(total * _SLACK, self.shapes, with_shape * _SLACK)
