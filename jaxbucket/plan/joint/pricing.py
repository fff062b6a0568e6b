"""The batch size and cost of any shape, from the user's functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

BatchSizesFn: TypeAlias = Callable[[np.ndarray], np.ndarray]
CostsFn: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]

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
    """

    batch_sizes: np.ndarray
    costs: np.ndarray
    rates: np.ndarray


@dataclasses.dataclass(frozen=True)
class Pricing:
    """Prices of shapes.

    Rates are rounded to multiples of `unit`, so that sums over all examples are exact
    and do not depend on their order.

    Attributes:
      batch_sizes_fn: `[n, Q]` T -> `[n]` the largest allowed B, 0 if none is.
      costs_fn: `[n]` B and `[n, Q]` T -> `[n]` the cost of a batch.
      accumulate: the number of batches of the same shape in each step.
      unit: a power of two.
    """

    batch_sizes_fn: BatchSizesFn
    costs_fn: CostsFn
    accumulate: int = 1
    unit: float = 0.0

    def __call__(self, seq_lens: np.ndarray) -> Prices:
        """Returns the prices of shapes, `[n, Q]` T."""
        batch_sizes = np.asarray(self.batch_sizes_fn(seq_lens), np.int64)
        costs, rates = np.full((2, len(seq_lens)), np.inf)
        allowed = np.flatnonzero(batch_sizes > 0)
        costs[allowed] = self.costs_fn(batch_sizes[allowed], seq_lens[allowed])
        rates[allowed] = costs[allowed] / batch_sizes[allowed]
        if self.unit:
            rates = np.maximum(1, np.round(rates / self.unit)) * self.unit
        steps = self.accumulate
        return Prices(batch_sizes * steps, costs * steps, rates)

    def with_unit(self, seq_lens: np.ndarray, num_examples: int) -> Pricing:
        """Returns a pricing whose unit suits the rates of some shapes, `[n, Q]` T."""
        rates = self(seq_lens).rates
        rates = rates[np.isfinite(rates)]
        if not rates.size:
            return self
        highest = min(rates.max(), rates.min() * _MAX_RATIO)
        exponent = math.frexp(highest * num_examples)[1]
        return dataclasses.replace(self, unit=2.0 ** (exponent - _EXACT_BITS))
