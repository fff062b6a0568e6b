"""How many rows the steps of a bucket have: the largest B is only a bound.

Rows that take s batches of the largest B also fit in s batches of a smaller B, which
leaves fewer rows empty. So B of a bucket is chosen for its rows, and no bucket has a B
that its rows cannot fill.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxbucket.plan.costs import FlopCost, TokenCost

# Costs are computed for at most this many B of each shape, and for about this many
# shapes and B in all. Between these B, they are interpolated.
_MAX_KNOTS, _MAX_COSTS = 64, 1 << 14
# The number of B with a promoted remainder, for each number of batches, and the number
# of partial choices, from which the B of given shapes are chosen.
_MOST_SIZES, _MOST_STATES = 64, 1024


class SizeLimits(Protocol):
    """The limits on B that `Limits` and `SequenceLimits` share."""

    @property
    def batch_size_multiple(self) -> int: ...
    @property
    def min_batch_size(self) -> int: ...
    @property
    def max_batch_size(self) -> int | None: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def cost_fn(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The numbers of rows that a step of each of G shapes may have, and their costs.

    A step of fewer rows than the largest number holds fewer rows, but costs less. The
    cost is linear between the given numbers of rows.

    Attributes:
      multiple: numbers of rows are multiples of this number.
      knots: `[L]` int64, numbers of rows, increasing. The first is the smallest.
      most: `[G]` int64, the largest number of rows of each shape.
      costs: `[G, L]`, the cost of a step that holds the rows of each knot, or `most` if
        that is less; non-decreasing along a row.
    """

    multiple: int
    knots: np.ndarray
    most: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(
        cls,
        batch_sizes: np.ndarray,
        costs_fn: Callable[[np.ndarray, np.ndarray], np.ndarray],
        examples: np.ndarray,
        limits: SizeLimits,
    ) -> StepSizes:
        """Returns the sizes of G shapes.

        Args:
          batch_sizes: `[G]` int64, the largest B that the budget allows.
          costs_fn: `[n]` shapes and `[n]` B -> `[n]`, the cost of a batch.
          examples: `[G]` int64, the largest number of examples of each shape. No B is
            larger than these fill.
          limits: the other limits on B.
        """
        multiple, accumulate = limits.batch_size_multiple, limits.accumulate
        least = -(-limits.min_batch_size // multiple) * multiple
        filled = -(-examples // (multiple * accumulate)) * multiple
        most = np.minimum(batch_sizes, np.maximum(filled, least))
        number = max(2, _MAX_COSTS // max(len(most), 1))
        if limits.cost_fn is None or isinstance(limits.cost_fn, TokenCost | FlopCost):
            # These costs are linear in B.
            number = 2
        knots = _knots(least, int(most.max(initial=least)), multiple, number)
        rows = np.minimum(knots, most[:, None])
        shapes = np.repeat(np.arange(len(most)), len(knots))
        costs = costs_fn(shapes, rows.ravel()).reshape(rows.shape)
        # A batch that holds more rows and costs less holds these rows, too.
        costs = np.minimum.accumulate(costs[:, ::-1], axis=1)[:, ::-1] * accumulate
        return cls(multiple * accumulate, knots * accumulate, most * accumulate, costs)

    @property
    def least(self) -> int:
        """The smallest number of rows of a step."""
        return int(self.knots[0])

    @functools.cached_property
    def _slopes(self) -> np.ndarray:
        """`[G, L]`: the cost of a row between each knot and the previous one."""
        rows = np.minimum(self.knots, self.most[:, None])
        width = np.maximum(np.diff(rows, axis=1, prepend=rows[:, :1]), 1)
        rise = np.diff(self.costs, axis=1, prepend=self.costs[:, :1])
        return rise // width if rise.dtype.kind == "i" else rise / width

    def row_costs(self) -> np.ndarray:
        """Returns the cost of a row in steps of the known costs, `[G, L]`."""
        rows = np.minimum(self.knots, self.most[:, None])
        is_integer = self.costs.dtype.kind == "i"
        return self.costs // rows if is_integer else self.costs / rows

    def take(self, index: np.ndarray) -> StepSizes:
        """Returns the sizes of some of the shapes."""
        return dataclasses.replace(self, most=self.most[index], costs=self.costs[index])

    def cost(self, shape: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns the cost of a step of some rows, `[n]`.

        Args:
          shape: `[n]` integers, the indices of shapes.
          rows: `[n]` integers, possible numbers of rows of a step of this shape.
        """
        upper = np.searchsorted(self.knots, rows)
        excess = np.minimum(self.knots[upper], self.most[shape]) - rows
        return self.costs[shape, upper] - self._slopes[shape, upper] * excess

    def padded(
        self, shape: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the smallest steps that hold all rows in as few steps as possible.

        Args:
          shape: `[n]` integers, the indices of shapes.
          rows: `[n]` integers, the rows to hold.

        Returns:
          `[n]` integers, the rows of a step; and `[n]` integers, the number of steps.
        """
        steps = -(-rows // self.most[shape])
        size = -(-rows // (np.maximum(steps, 1) * self.multiple)) * self.multiple
        return np.maximum(size, self.least), steps

    def padded_costs(self, shape: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns the cost of the steps of `padded`, `[n]`."""
        size, steps = self.padded(shape, rows)
        return steps * self.cost(shape, size)

    def filled(
        self, shape: np.ndarray, rows: np.ndarray, most_sizes: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns steps without empty rows, whose remainder is promoted.

        The steps are as few as possible for the rows that they hold, and the remainder
        does not fill another one.

        Args:
          shape: `[n]` integers, the indices of shapes.
          rows: `[n]` integers, the rows.
          most_sizes: for each number of steps, only so many of the largest steps are
            returned.

        Returns:
          For every possible size of a step, `[m]`: the index in `shape`, the rows of a
          step, and the number of steps.
        """
        multiple, parts = self.multiple, []
        largest = self.most[shape] // multiple
        full = rows // self.most[shape]
        # If the rows fill the steps, one number of steps occurs twice.
        for steps in (full, full + (rows > full * self.most[shape])):
            divisor = np.maximum(steps, 1)
            high = np.minimum(largest, rows // (divisor * multiple))
            low = np.maximum(rows // ((steps + 1) * multiple), 0) + 1
            low = np.maximum(low, (steps - 1) * largest // divisor + 1)
            low = np.maximum(low, self.least // multiple)
            number = np.clip(high - low + 1, 0, most_sizes) * (steps > 0)
            if steps is not full:
                number *= steps > full
            parent = np.repeat(np.arange(len(rows)), number)
            below = np.arange(len(parent)) - np.repeat(
                np.cumsum(number) - number, number
            )
            parts.append((parent, (high[parent] - below) * multiple, steps[parent]))
        parent, size, steps = map(np.concatenate, zip(*parts, strict=True))
        is_rest = rows[parent] > size * steps
        return parent[is_rest], size[is_rest], steps[is_rest]


def _knots(least: int, most: int, multiple: int, number: int) -> np.ndarray:
    """Returns B from the smallest to the largest, at most about `number`, `[L]`."""
    number = min(number, _MAX_KNOTS, (most - least) // multiple + 1)
    places = np.geomspace(least, most, number) if number > 1 else np.array([most])
    if number == (most - least) // multiple + 1:
        places = np.linspace(least, most, number)
    knots = np.rint(places / multiple).astype(np.int64) * multiple
    return np.unique(np.clip(knots, least, most))


def fitted(
    sizes: StepSizes, counts: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, float]:
    """Returns the cheapest rows of a step of each bucket, and the cost of an epoch.

    Each bucket either holds all its rows, in the smallest steps, or fills its steps and
    promotes the remainder to the next bucket. Partial choices are extended bucket by
    bucket. One that costs no less than another and promotes more rows is left out.

    Example: 5 rows of T = 4 under 16 tokens take two steps, of 3 rows.
      >>> knots = np.array([1, 4])
      >>> fitted(StepSizes(1, knots, most=np.array([4]), costs=4 * knots[None]), [5])
      (array([3]), 24)

    Args:
      sizes: the possible steps of K shapes, each longer than the previous one.
      counts: `[K]` integers, the number of examples in each bucket.

    Returns:
      `[K]` int64 rows of a step, and the cost.
    """
    counts = np.asarray(counts, np.int64)
    carry, cost = np.zeros(1, np.int64), np.zeros(1, sizes.costs.dtype)
    batches, history = np.zeros(1, np.int64), []
    for k, count in enumerate(counts.tolist()):
        rows, shape = count + carry, np.full(len(carry), k)
        size, steps = sizes.padded(shape, rows)
        parent, rest = np.arange(len(carry)), np.zeros_like(carry)
        if k < len(counts) - 1:
            filler, filled_size, filled_steps = sizes.filled(shape, rows, _MOST_SIZES)
            parent = np.append(parent, filler)
            size, steps = np.append(size, filled_size), np.append(steps, filled_steps)
            rest = np.append(rest, rows[filler] - filled_size * filled_steps)
        cost = cost[parent] + steps * sizes.cost(np.full(len(size), k), size)
        batches = batches[parent] + steps
        best = _best(rest, cost, batches, size)
        carry, cost, batches = rest[best], cost[best], batches[best]
        history.append((parent[best], size[best]))
    chosen, last = [], 0
    for parent, size in reversed(history):
        chosen.append(int(size[last]))
        last = parent[last]
    return np.array(chosen[::-1], np.int64), cost[0].item()


def _best(
    rest: np.ndarray, cost: np.ndarray, batches: np.ndarray, size: np.ndarray
) -> np.ndarray:
    """Returns the choices to extend: each promotes more rows, and costs less."""
    order = np.lexsort((-size, batches, cost, rest))
    cheapest = np.minimum.accumulate(cost[order])
    is_less = np.append(True, cost[order][1:] < cheapest[:-1])
    order = order[is_less]
    if len(order) <= _MOST_STATES:
        return order
    places = np.linspace(0, len(order) - 1, _MOST_STATES).astype(np.int64)
    return order[places]
