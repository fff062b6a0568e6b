"""Lower bounds of an epoch's cost, for every partial choice of boundaries.

Ignoring remainders, the cost of boundaries is a sum over buckets, and dynamic
programming gives its minimum. Ignoring the number of buckets, batches follow one
another, and dynamic programming over examples gives the minimum, remainders counted.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxbucket.plan.boundary_rules import Candidates
from jaxbucket.plan.remainder import least_cost

# Costs are counted in integers, so that a plan does not depend on how a machine rounds.
# The cost of an epoch has this many bits; sums of a few of them stay below 2**63.
_TOTAL_BITS = 59
INFINITE = 2**61


@dataclasses.dataclass(frozen=True)
class Problem:
    """The candidates, costs in integers.

    Attributes:
      below: `[G + 1]` int64, examples shorter than every candidate may hold, from 0.
      batch_sizes: `[G]` int64.
      costs: `[G]` int64, of a batch.
      rates: `[G]` int64, the least cost of a row in this bucket or a longer one; never
        falls.
      scale: units of these costs in one of the candidates' costs.
    """

    below: np.ndarray
    batch_sizes: np.ndarray
    costs: np.ndarray
    rates: np.ndarray
    scale: float

    @classmethod
    def of(cls, candidates: Candidates, max_buckets: int) -> Problem:
        costs = candidates.costs.astype(np.float64)
        worst = (costs / candidates.batch_sizes).max() * candidates.examples[-1]
        worst += costs.max() * max_buckets
        # A power of two, so that integers stay what they are.
        scale = 2.0 ** (_TOTAL_BITS - math.frexp(worst)[1])
        units = np.maximum(1, np.rint(costs * scale)).astype(np.int64)
        rates = units // candidates.batch_sizes
        return cls(
            below=np.concatenate([[0], candidates.examples]),
            batch_sizes=candidates.batch_sizes,
            costs=units,
            rates=np.minimum.accumulate(rates[::-1])[::-1],
            scale=scale,
        )

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def examples(self) -> np.ndarray:
        """`[G]`: how many examples a candidate and all shorter ones hold."""
        return self.below[1:]

    def take(self, index: np.ndarray) -> Problem:
        """Returns the problem of some of the candidates, the last among them."""
        below = np.append(0, self.examples[index])
        columns = (self.batch_sizes[index], self.costs[index], self.rates[index])
        return Problem(below, *columns, self.scale)

    def part(self, begin: int, end: int) -> Problem:
        """Returns the problem of the examples that candidates `begin` to `end` add."""
        part = self.take(np.arange(begin, end))
        below = self.below[begin : end + 1] - self.below[begin]
        return dataclasses.replace(part, below=below)

    def relaxed(self, index: np.ndarray) -> Problem:
        """Returns a problem of some of the candidates whose bounds hold for all.

        A row costs what it does in the shortest bucket that ends beyond the candidate
        before. So whatever choice there is, the next of these ends cost no more.
        """
        before = np.append(-1, index[:-1])
        return dataclasses.replace(self.take(index), rates=self.rates[before + 1])

    def shapes(self, chosen: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """`[K]` each: examples, batch sizes and costs of the buckets that end there."""
        counts = np.diff(self.examples[chosen], prepend=0)
        sizes, costs = self.batch_sizes[chosen], self.costs[chosen]
        return counts.tolist(), sizes.tolist(), costs.tolist()

    def epoch_cost(self, chosen: np.ndarray) -> int:
        """As `Candidates.epoch_cost`, in units."""
        cost, _ = least_cost(*self.shapes(chosen), [0] * len(chosen), 2**63)
        assert cost is not None
        return cost


def lower_bounds(
    problem: Problem, num_buckets: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The least that all examples beyond a boundary cost, remainders ignored.

    Returns:
      For k = 0 to `num_buckets` a `[G + 1]` int64 array: entry j is the cost of the
      examples that candidates j, j + 1, ... hold beyond candidate j - 1, when at most
      k buckets may end there; entry G, nothing left, is 0. And for k = 1 to
      `num_buckets` a `[G]` array: where the first of these buckets ends.
    """
    nothing_left = np.full(len(problem) + 1, INFINITE, np.int64)
    nothing_left[-1] = 0
    bounds, ends = [nothing_left], []
    for _ in range(num_buckets):
        costs, best = _best_ends(problem, bounds[-1])
        bounds.append(np.append(costs, 0))
        ends.append(best)
    return bounds, ends


def _best_ends(problem: Problem, beyond: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For a bucket that begins after candidate j - 1: its least cost and best end.

    The cost of ending at i, examples in between times rate plus `beyond[i + 1]`, obeys
    the Monge condition, for rates never fall. So the best end never moves back as j
    grows, and solving the middle j first halves the range of all others (divide and
    conquer, one level at a time).
    """
    size, rates = len(problem), problem.rates
    at_end = problem.examples * rates + beyond[1:]
    costs, ends = np.zeros(size, np.int64), np.zeros(size, np.int64)
    stride = 1 << (size - 1).bit_length()
    while stride:
        begins = np.arange(stride - 1, size, 2 * stride)
        before, after = begins - stride, begins + stride
        low = np.maximum(begins, np.where(before < 0, 0, ends[before]))
        # A level above may not have reached beyond `size`: then any end is possible.
        high = np.where(after < size, ends[np.minimum(after, size - 1)], size - 1)
        lengths = high - low + 1
        starts = np.cumsum(lengths) - lengths
        end = np.arange(lengths.sum()) + np.repeat(low - starts, lengths)
        total = at_end[end]
        total -= np.repeat(problem.below[begins], lengths) * rates[end]
        costs[begins] = np.minimum.reduceat(total, starts)
        is_best = np.flatnonzero(total == np.repeat(costs[begins], lengths))
        ends[begins] = end[is_best[np.searchsorted(is_best, starts)]]
        stride //= 2
    return costs, ends


def traced_ends(ends: list[np.ndarray]) -> np.ndarray:
    """The best choice when remainders are ignored."""
    chosen, begin = [], 0
    for best in reversed(ends):
        if begin < len(best):
            chosen.append(int(best[begin]))
            begin = chosen[-1] + 1
    return np.array(chosen)


def cost_ahead(problem: Problem) -> np.ndarray:
    """`[N + 1]`: the least cost of all examples but the n shortest, remainders counted.

    Of any number of buckets, so that it is a bound for every number. A batch takes the
    shortest examples that are left, as many as are no longer than its bucket; which of
    them go up into a longer one makes no difference.
    """
    examples, sizes, costs = problem.examples, problem.batch_sizes, problem.costs
    total = int(problem.below[-1])
    ahead = np.zeros(total + 1, np.int64)
    first = np.searchsorted(examples, np.arange(total), side="right")
    for taken in reversed(range(total)):
        ends = slice(int(first[taken]), None)
        after = np.minimum(examples[ends], taken + sizes[ends])
        ahead[taken] = (costs[ends] + ahead[after]).min()
    return ahead
