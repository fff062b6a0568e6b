"""The batch size and cost of any shape, from the limits."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from jaxbucket.plan.joint_points import Points
from jaxbucket.plan.limits import Limits

# A float64 represents integers up to 2**53 exactly.
_EXACT_BITS = 52
# Rates above the lowest by this factor may be rounded more coarsely.
_MAX_RATIO = 2.0**20


class Prices(NamedTuple):
    """What batches of some shapes hold and cost, `[n]` each.

    Attributes:
      batch_sizes: int64, the rows of a step; 0 if the shape is not allowed.
      costs: float64, the cost of a step.
      rates: float64, the cost of a row; infinite if the shape is not allowed.
      slopes: float64, how much less a step with one row less costs.
      multiples: int64, the number of which the rows of a step are a multiple.
      least: int64, the fewest rows of a step.
    """

    batch_sizes: np.ndarray
    costs: np.ndarray
    rates: np.ndarray
    slopes: np.ndarray
    multiples: np.ndarray
    least: np.ndarray

    def part(self, index: int | slice) -> Prices:
        """Returns some columns of prices `[n, K]`."""
        return Prices(*(column[:, index] for column in self))


@dataclasses.dataclass(frozen=True)
class Pricing:
    """Prices of shapes.

    Rates are rounded to multiples of `unit`, so that sums over all examples are exact
    and do not depend on their order.

    Attributes:
      limits: the limits of all shapes, and the cost of a step.
      unit: a power of two; 0 for rates that are not rounded.
    """

    limits: Limits
    unit: float = 0.0

    @classmethod
    def of(cls, limits: Limits, points: Points) -> Pricing:
        """Returns a pricing whose unit suits the shapes that points need."""
        rates = cls(limits)(points.seq_lens(points.indices)).rates
        rates = rates[np.isfinite(rates)]
        if not rates.size:
            return cls(limits)
        highest = min(rates.max(), rates.min() * _MAX_RATIO)
        exponent = math.frexp(highest * int(points.counts.sum()))[1]
        return cls(limits, 2.0 ** (exponent - _EXACT_BITS))

    def __call__(self, seq_lens: np.ndarray) -> Prices:
        """Returns the prices of shapes, `[n, Q]` T."""
        batch_sizes = self.limits.batch_sizes(seq_lens)
        costs, rates = np.full((2, len(seq_lens)), np.inf)
        slopes = np.zeros(len(seq_lens))
        allowed = np.flatnonzero(batch_sizes > 0)
        most, allowed_lens = batch_sizes[allowed], seq_lens[allowed]
        costs[allowed] = self.limits.costs(most, allowed_lens)
        rates[allowed] = costs[allowed] / most
        multiples = self.limits.batch_multiples(seq_lens)
        least = self.limits.least_batch_sizes(seq_lens)
        rise = costs[allowed] - self.limits.costs(least[allowed], allowed_lens)
        slopes[allowed] = np.maximum(rise, 0) / np.maximum(most - least[allowed], 1)
        if self.unit:
            rates = np.maximum(1, np.round(rates / self.unit)) * self.unit
        steps = self.limits.accumulate
        return Prices(
            *(batch_sizes * steps, costs * steps, rates, slopes),
            *(multiples * steps, least * steps),
        )

    def padded_costs(self, rows: np.ndarray, prices: Prices) -> np.ndarray:
        """Returns the cost of the smallest steps that hold rows, `[...]` each."""
        sizes, multiples = prices.batch_sizes, prices.multiples
        steps = -(-rows // sizes)
        needed = -(-rows // (np.maximum(steps, 1) * multiples)) * multiples
        needed = np.maximum(needed, prices.least)
        needed = sizes if self.limits.sample else needed
        return steps * (prices.costs - prices.slopes * (sizes - needed))
