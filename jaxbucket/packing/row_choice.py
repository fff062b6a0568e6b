"""`RowChoice`, the packed rows for one choice of their T, with the cost of an epoch."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.packing.rows import Packing

# The minimum cost of a step with sparse attention, as a share of its full cost.
_MIN_COST_SHARE = 1e-3


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowChoice(abc.ABC):
    """The packed rows for one choice of T.

    Attributes:
      plan: the buckets, with the cost of a step of each.
      rows: `[K]` int64, the number of rows of each T.
      segments: `[K]` numbers, the number of examples in the rows of each T.
      padding: the share of padding in the rows.
      separation: the share of the variance of lengths that is between batches.
      cost: the cost of an epoch, remainders included.
      padded_up_to: the T up to which examples get rows of their own; 0 if none.
    """

    plan: BucketPlan
    rows: np.ndarray
    segments: np.ndarray
    padding: float
    separation: float
    cost: float
    padded_up_to: int = 0

    def weighted_cost(self, mixing: float) -> float:
        """Returns the cost, raised by up to `mixing` if batches separate lengths."""
        return self.cost * (1 + mixing * self.separation)

    def rank(self, max_padding: float, mixing: float) -> tuple[float, float, int]:
        """Returns the sort key of a choice: excess padding, weighted cost, shapes."""
        excess = max(self.padding - max_padding, 0.0)
        return excess, self.weighted_cost(mixing), len(self.plan)

    @abc.abstractmethod
    def packing(self, max_segments_per_row: int | None) -> Packing:
        """Returns the rows, with slots for all examples."""


def sparse_cost(
    positions: Sequence[int], costs: Sequence[float], attended: float
) -> float:
    """Returns the cost of a step whose attention skips some pairs of positions.

    The cost of the pairs is the quadratic part of the cost of a step.

    Example: of a cost of 10 T + T**2, a quarter of the pairs remains.
      >>> round(sparse_cost([8, 4, 2], [144, 56, 24], attended=0.25), 6)
      96.0

    Args:
      positions: three T of rows; the first one is that of the step.
      costs: the cost of a step of each T, if no pair is skipped.
      attended: the share of the pairs that is not skipped, from 0 to 1.
    """
    per_pair = 0.0
    if len(set(positions)) == 3:
        per_pair = np.polyfit(positions, costs, 2)[0]
    pairs = np.clip(per_pair * positions[0] ** 2, 0.0, costs[0])
    return float(max(costs[0] - pairs * (1 - attended), _MIN_COST_SHARE * costs[0]))
