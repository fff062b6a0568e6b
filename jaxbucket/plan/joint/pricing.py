"""The batch size and cost of any shape, from the user's functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxbucket.plan.flow.step_sizes import StepSizes

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
      slopes: float64, how much less a step with one row less costs.
    """

    batch_sizes: np.ndarray
    costs: np.ndarray
    rates: np.ndarray
    slopes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Pricing:
    """Prices of shapes.

    Rates are rounded to multiples of `unit`, so that sums over all examples are exact
    and do not depend on their order.

    Attributes:
      batch_sizes_fn: `[n, Q]` T -> `[n]` the largest allowed B, 0 if none is.
      costs_fn: `[n]` B and `[n, Q]` T -> `[n]` the cost of a batch.
      accumulate: the number of batches of the same shape in each step.
      batch_size_multiple: the number of which every B is a multiple.
      min_batch_size: the smallest B.
      sample: whether every B is the largest.
      unit: a power of two.
    """

    batch_sizes_fn: BatchSizesFn
    costs_fn: CostsFn
    accumulate: int = 1
    batch_size_multiple: int = 1
    min_batch_size: int = 1
    sample: bool = False
    unit: float = 0.0

    @property
    def least(self) -> int:
        """The smallest possible B."""
        multiple = self.batch_size_multiple
        return -(-self.min_batch_size // multiple) * multiple

    def __call__(self, seq_lens: np.ndarray) -> Prices:
        """Returns the prices of shapes, `[n, Q]` T."""
        batch_sizes = np.asarray(self.batch_sizes_fn(seq_lens), np.int64)
        costs, rates = np.full((2, len(seq_lens)), np.inf)
        slopes = np.zeros(len(seq_lens))
        allowed = np.flatnonzero(batch_sizes > 0)
        most, allowed_lens = batch_sizes[allowed], seq_lens[allowed]
        costs[allowed] = self.costs_fn(most, allowed_lens)
        rates[allowed] = costs[allowed] / most
        least = self.costs_fn(np.full_like(most, self.least), allowed_lens)
        rise = np.maximum(costs[allowed] - least, 0)
        slopes[allowed] = rise / np.maximum(most - self.least, 1)
        if self.unit:
            rates = np.maximum(1, np.round(rates / self.unit)) * self.unit
        steps = self.accumulate
        return Prices(batch_sizes * steps, costs * steps, rates, slopes)

    def padded_costs(
        self, rows: np.ndarray, sizes: np.ndarray, costs: np.ndarray, slopes: np.ndarray
    ) -> np.ndarray:
        """Returns the cost of the smallest steps that hold rows, `[...]` each.

        Args:
          rows: the rows to hold.
          sizes: the rows of the largest step.
          costs: the cost of the largest step.
          slopes: how much less a step with one row less costs.
        """
        multiple = self.batch_size_multiple * self.accumulate
        steps = -(-rows // sizes)
        needed = -(-rows // (np.maximum(steps, 1) * multiple)) * multiple
        needed = np.maximum(needed, self.least * self.accumulate)
        needed = sizes if self.sample else needed
        return steps * (costs - slopes * (sizes - needed))

    def sizes(self, seq_lens: np.ndarray, examples: int) -> StepSizes:
        """Returns the possible steps of allowed shapes, `[n, Q]` T, for examples."""
        most = np.asarray(self.batch_sizes_fn(seq_lens), np.int64)
        shape = np.arange(len(most))
        return StepSizes.of(
            most,
            lambda shape, rows: self.costs_fn(rows, seq_lens[shape]),
            np.full_like(shape, examples),
            *(self.batch_size_multiple, self.min_batch_size, self.accumulate),
            sample=self.sample,
        )

    def with_unit(self, seq_lens: np.ndarray, num_examples: int) -> Pricing:
        """Returns a pricing whose unit suits the rates of some shapes, `[n, Q]` T."""
        rates = self(seq_lens).rates
        rates = rates[np.isfinite(rates)]
        if not rates.size:
            return self
        highest = min(rates.max(), rates.min() * _MAX_RATIO)
        exponent = math.frexp(highest * num_examples)[1]
        return dataclasses.replace(self, unit=2.0 ** (exponent - _EXACT_BITS))
