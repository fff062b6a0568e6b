"""A Lagrangian relaxation of the choice of K shapes, and prices that make it tight.

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

# After how many steps without progress they become shorter.
_PATIENCE = 10
# The most pairs of a group and a shape that a step considers. To stay below it, prices
# are limited to a multiple of what an example pays in known shapes.
_MAX_PAIRS = 250_000
_MULTIPLES = np.inf, 8.0, 4.0, 3.0, 2.5, 2.0, 1.75, 1.5, 1.4, 1.3, 1.2, 1.1
# The steps stop this close to the cost of known shapes.
_ENOUGH = 1 - 1e-9


@dataclasses.dataclass(frozen=True)
class Relaxation:
    """The relaxed problem, for G groups of examples that pay the same price.

    A pair is a group and a shape that holds at least some of its examples.

    Attributes:
      counts: `[G]` float64, the examples of each group.
      rates: `[C]` float64, the cost of a row of each shape.
      groups: `[n]` int64, the group of each pair.
      shapes: `[n]` int64, the shape of each pair.
      held: `[n]` float64, the number of examples of the group that the shape holds.
      num_buckets: the largest number of shapes.
      fixed: the index of a shape that is always chosen, if any.
    """

    counts: np.ndarray
    rates: np.ndarray
    groups: np.ndarray
    shapes: np.ndarray
    held: np.ndarray
    num_buckets: int
    fixed: int | None

    def collected(self, prices: np.ndarray) -> np.ndarray:
        """Returns what each shape collects at some prices, `[C]`."""
        gain = np.maximum(prices[self.groups] - self.rates[self.shapes], 0)
        return np.bincount(self.shapes, gain * self.held, len(self.rates))

    def chosen(self, collected: np.ndarray) -> np.ndarray:
        """Returns the indices of the shapes that collect most, `[K]`."""
        value = collected.copy()
        if self.fixed is not None:
            value[self.fixed] = np.inf
        size = min(self.num_buckets, len(value))
        return np.argpartition(-value, size - 1)[:size]

    def total(self, prices: np.ndarray, collected: np.ndarray) -> float:
        """Returns the lower bound from what each shape collects, `[C]`."""
        return float(prices @ self.counts - collected[self.chosen(collected)].sum())

    def best_prices(
        self, paid: np.ndarray, start: np.ndarray, steps: int
    ) -> np.ndarray:
        """Returns prices with a high bound, `[G]`.

        Args:
          paid: `[G]` float64, what an example pays in known shapes.
          start: `[G]` float64, the first prices.
          steps: the number of steps.
        """
        target = float(paid @ self.counts)
        most, relaxation = self._limited(paid)
        prices = best_prices = np.minimum(start, most)
        best, scale, waited = -np.inf, 1.0, 0
        for _ in range(steps):
            collected = relaxation.collected(prices)
            total = relaxation.total(prices, collected)
            waited += 1
            if total > best:
                best, best_prices, waited = total, prices, 0
            if waited > _PATIENCE:
                scale, waited, prices = scale / 2, 0, best_prices
                continue
            slope = relaxation.slope(prices, collected)
            norm = slope @ slope
            if not norm or best >= target * _ENOUGH:
                break
            step = scale * (target - total) / norm
            prices = np.clip(prices + step * slope / self.counts, 0, most)
        return best_prices

    def slope(self, prices: np.ndarray, collected: np.ndarray) -> np.ndarray:
        """Returns the share of each group that no chosen shape collects from, `[G]`.

        It is negative if several shapes do.
        """
        chosen = np.zeros(len(collected), bool)
        chosen[self.chosen(collected)] = True
        pairs = np.flatnonzero(chosen[self.shapes])
        groups = self.groups[pairs]
        pairs = pairs[prices[groups] > self.rates[self.shapes[pairs]]]
        times = np.bincount(self.groups[pairs], self.held[pairs], len(prices))
        return 1 - times / self.counts

    def _limited(self, paid: np.ndarray) -> tuple[np.ndarray, Relaxation]:
        """Returns the largest prices, `[G]`, and the pairs that matter below them."""
        ratios = self.rates[self.shapes] / paid[self.groups]
        fitting = (x for x in _MULTIPLES if np.sum(ratios < x) <= _MAX_PAIRS)
        multiple = next(fitting, _MULTIPLES[-1])
        kept = ratios < multiple
        pairs = self.groups[kept], self.shapes[kept], self.held[kept]
        names = "groups", "shapes", "held"
        limited = dataclasses.replace(self, **dict(zip(names, pairs, strict=True)))
        return paid * multiple, limited
