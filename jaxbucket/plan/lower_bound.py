"""Lower bounds of the cost of an epoch, for every partial choice of boundaries.

The bound is computed by dynamic programming. It only knows that all longer examples
together take a multiple of the rows by which batches can grow, at the least cost of a
row, so that the cost is a sum over buckets.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Self

import numpy as np

from jaxbucket.plan.candidates import Candidates

# Costs are scaled to integers, so that a plan does not depend on rounding errors.
# The cost of an epoch has this many bits, so that the sum of a few stays below 2**63.
_TOTAL_BITS = 59
INFINITE = 2**61


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(Candidates):
    """The candidates, with costs as int64.

    A step costs one more than its share, so that of equally cheap choices the one with
    fewer steps is found.

    Attributes:
      beyond: `[G + 1]` int64, the fewest rows of all examples that are not `below`:
        their number, rounded up to a possible number of rows.
      rates: `[G]` int64, the least cost of a row in this bucket or a longer one;
        non-decreasing.
      scale: the factor from the candidates' costs to these integers.
    """

    beyond: np.ndarray
    rates: np.ndarray
    scale: float

    @classmethod
    def scaled(cls, candidates: Candidates, max_buckets: int) -> Problem:
        """Returns the problem of choosing at most `max_buckets` of the candidates."""
        sizes = candidates.sizes
        costs = sizes.costs.astype(np.float64)
        # At most half of the rows of a bucket are empty, but for a smallest step.
        worst = 2 * sizes.row_costs().max() * candidates.examples[-1]
        worst += costs[:, 0].max() * max_buckets
        # A power of two, so that integer costs are represented exactly.
        scale = 2.0 ** (_TOTAL_BITS - math.frexp(worst)[1])
        units = np.maximum(1, np.rint(costs * scale)).astype(np.int64) + 1
        sizes = dataclasses.replace(sizes, costs=units)
        left = candidates.examples[-1] - np.append(0, candidates.examples)
        return cls(
            **{**vars(candidates), "sizes": sizes},
            beyond=_rounded(left, sizes.multiple),
            rates=sizes.rates(),
            scale=scale,
        )

    @functools.cached_property
    def below(self) -> np.ndarray:
        """`[G + 1]`: the examples up to the candidate before each; at first, none."""
        return np.append(0, self.examples)

    def take(self, index: np.ndarray) -> Self:
        """Returns the problem restricted to some candidates, including the last."""
        beyond = self.beyond[np.append(0, index + 1)]
        part = super().take(index)
        return dataclasses.replace(part, beyond=beyond, rates=self.rates[index])

    def rows_left(self, taken: np.ndarray) -> np.ndarray:
        """Returns the fewest rows of all examples but the n shortest, `[S]`."""
        return _rounded(self.examples[-1] - taken, self.sizes.multiple)


def lower_bounds(
    problem: Problem, num_buckets: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns lower bounds of the cost of all examples after a boundary.

    Returns:
      For k = 0 to `num_buckets`, a `[G + 1]` int64 array: entry j bounds the cost of
      the examples longer than candidate j - 1 in at most k buckets. Entry G is 0,
      because no examples are left. And for k = 1 to `num_buckets`, a `[G]` array: entry
      j is the candidate at which the first of these buckets ends.
    """
    no_buckets = np.full(len(problem) + 1, INFINITE, np.int64)
    no_buckets[-1] = 0
    bounds, ends = [no_buckets], []
    for _ in range(num_buckets):
        costs, best = _best_ends(problem, bounds[-1])
        bounds.append(np.append(costs, 0))
        ends.append(best)
    return bounds, ends


def _best_ends(problem: Problem, beyond: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least cost and best end of a bucket after each candidate j - 1.

    The cost of ending at i is the number of rows in between times the rate, plus
    `beyond[i + 1]`. It satisfies the Monge condition, because the rates never decrease.
    Therefore the best end is monotone in j, and solving the middle j first halves the
    range of all others (divide and conquer, vectorized over each level).
    """
    size, rates = len(problem), problem.rates
    at_end = beyond[1:] - problem.beyond[1:] * rates
    stride = 1 << (size - 1).bit_length()
    # Entry j + 1 is the best end for j, and the entries around all j do not limit it.
    costs, ends = np.zeros(size, np.int64), np.full(2 * stride + 1, size - 1)
    ends[0] = 0
    while stride:
        first = np.arange(stride - 1, size, 2 * stride)
        known = ends[: 2 * stride * len(first) + 1 : 2 * stride]
        low, high = np.maximum(first, known[:-1]), known[1:]
        lengths = high - low + 1
        starts = np.cumsum(lengths) - lengths
        end = np.arange(lengths.sum()) + np.repeat(low - starts, lengths)
        total = at_end[end]
        total += np.repeat(problem.beyond[first], lengths) * rates[end]
        costs[first] = np.minimum.reduceat(total, starts)
        is_best = np.flatnonzero(total == np.repeat(costs[first], lengths))
        ends[first + 1] = end[is_best[np.searchsorted(is_best, starts)]]
        stride //= 2
    return costs, ends[1 : size + 1]


def _rounded(rows: np.ndarray, multiple: int) -> np.ndarray:
    return -(-rows // multiple) * multiple


def traced_ends(ends: list[np.ndarray]) -> np.ndarray:
    """Returns the best choice without remainders, from the ends of `lower_bounds`."""
    chosen, start = [], 0
    for best in reversed(ends):
        if start < len(best):
            chosen.append(int(best[start]))
            start = chosen[-1] + 1
    return np.array(chosen)
