"""Chooses B of each bucket for its rows, so that no B is larger than its rows fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxbucket.plan.flow.remainder import RowFlow, epoch_cost, flow_remainders
from jaxbucket.plan.flow.step_sizes import StepSizes

# The number of B with a promoted remainder that are tried, for each number of batches,
# and the number of partial choices, for one length and for several.
_MOST_SIZES, _MOST_STATES = 64, 1024
_FEW_SIZES, _FEW_STATES = 4, 1 << 13
# Ranges of remainders, the cheapest of which rule out most choices before any sorting.
_NUM_RANGES = 1 << 12


class Fit(NamedTuple):
    """The steps of K buckets.

    Attributes:
      rows: `[K]` int64, the rows of a step of each bucket.
      steps: `[K]` int64, the steps of each bucket in an epoch.
      cost: the cost of the epoch.
    """

    rows: np.ndarray
    steps: np.ndarray
    cost: float


def fitted(sizes: StepSizes, counts: Sequence[int] | np.ndarray) -> Fit:
    """Returns the cheapest steps of each bucket.

    Each bucket either holds all its rows, in the smallest steps, or fills its steps and
    promotes the remainder to the next bucket. Partial choices are extended bucket by
    bucket. One that costs no less than another and promotes more rows is left out.

    Example: 5 rows of T = 4 take two steps of at most 4 rows, and 3 rows are enough.
      >>> rows, one = np.array([1, 4]), np.array([1])
      >>> sizes = StepSizes(one, rows, one, rows[1:], 4 * rows[None], rows[None])
      >>> fitted(sizes, [5])
      Fit(rows=array([3]), steps=array([2]), cost=24)

    Args:
      sizes: the possible steps of K shapes, each longer than the previous one.
      counts: `[K]` integers, the number of examples in each bucket.
    """
    counts = np.asarray(counts, np.int64)
    carry, cost = np.zeros(1, np.int64), np.zeros(1, sizes.costs.dtype)
    batches, history = np.zeros(1, np.int64), []
    for k, count in enumerate(counts.tolist()):
        most_sizes = _MOST_SIZES if k < len(counts) - 1 else 0
        parent, size, steps, rest = _options(sizes, k, count + carry, most_sizes)
        cost = cost[parent] + steps * sizes.cost(k, size)
        batches = batches[parent] + steps
        best = _best(rest, cost, batches, size)
        carry, cost, batches = rest[best], cost[best], batches[best]
        history.append((parent[best], size[best], steps[best]))
    columns, last = [], 0
    for parent, size, steps in reversed(history):
        columns.append((size[last], steps[last]))
        last = parent[last]
    rows, number = np.array(columns[::-1], np.int64).T
    rows = sizes.holding(np.arange(len(rows)), rows)
    return Fit(rows, number, cost[0].item())


def _options(
    sizes: StepSizes, k: int, rows: np.ndarray, most_sizes: int
) -> tuple[np.ndarray, ...]:
    """Returns what bucket k can do with some rows.

    Args:
      sizes: the possible steps.
      k: the bucket.
      rows: `[S]` integers, the rows of several partial choices.
      most_sizes: the number of B to try with a remainder; 0 if none is possible.

    Returns:
      `[n]` each: the index in `rows`, the rows of a step, the number of steps, and the
      remainder. All rows are a remainder if they do not fill a step.
    """
    shape = np.full(len(rows), k)
    size, steps = sizes.padded(shape, rows)
    parent = np.arange(len(rows))
    if not most_sizes:
        return parent, size, steps, np.zeros_like(rows)
    up = np.flatnonzero((0 < rows) & (rows < sizes.most[k]))
    unfilled = size[up] + sizes.multiples[k] * (size[up] == rows[up])
    filler, filled, number, _ = sizes.filled(shape, rows, most_sizes)
    left_over = rows[filler] - filled * number
    return (
        np.concatenate([parent, up, filler]),
        np.concatenate([size, unfilled, filled]),
        np.concatenate([steps, np.zeros_like(up), number]),
        np.concatenate([np.zeros_like(rows), rows[up], left_over]),
    )


def _best(
    rest: np.ndarray, cost: np.ndarray, batches: np.ndarray, size: np.ndarray
) -> np.ndarray:
    """Returns the choices to extend: each promotes more rows, and costs less."""
    number = min(_NUM_RANGES, len(rest))
    place = rest * number // (int(rest.max()) + 1)
    least = np.full(number, cost.max())
    np.minimum.at(least, place, cost)
    least = np.minimum.accumulate(least)
    open_ = np.flatnonzero((place == 0) | (cost < least[place - 1]))
    order = np.lexsort([-size[open_], batches[open_], cost[open_], rest[open_]])
    order = open_[order]
    cheapest = np.minimum.accumulate(cost[order])
    order = order[np.append(True, cost[order][1:] < cheapest[:-1])]
    if len(order) <= _MOST_STATES:
        return order
    places = np.linspace(0, len(order) - 1, _MOST_STATES).astype(np.int64)
    return order[places]


def fitted_between(
    sizes: StepSizes, counts: np.ndarray, dominates: np.ndarray
) -> tuple[np.ndarray, float, RowFlow]:
    """Returns the rows of a step of each bucket if examples have several lengths.

    As in `fitted`, but the remainder of a bucket may go to any bucket that dominates
    it. Only the most promising partial choices are extended, so the cost may be above
    the least one, but never above that of the largest steps.

    Args:
      sizes: as for `fitted`.
      counts: as for `fitted`.
      dominates: `[K, K]` bool, `above` of `flow_remainders`.

    Returns:
      `[K]` int64 rows of a step, the cost of an epoch, and its rows and batches.
    """
    number, width = len(counts), max(16, _FEW_STATES // len(counts))
    rates = sizes.row_costs().min(axis=1)
    carried, chosen = np.zeros((2, 1, number), np.int64)
    cost = np.zeros(1)
    for k in range(number):
        above = np.flatnonzero(dominates[k])
        most_sizes = _FEW_SIZES if above.size else 0
        options = _options(sizes, k, counts[k] + carried[:, k], most_sizes)
        # A remainder may go to any bucket above, and nothing goes to the bucket itself.
        repeats = np.where(options[-1] > 0, max(above.size, 1), 1)
        parent, size, steps, rest = (np.repeat(x, repeats) for x in options)
        place = np.arange(len(parent)) - np.repeat(
            np.cumsum(repeats) - repeats, repeats
        )
        target = np.append(above, k)[np.where(rest > 0, place, -1)]
        cost = cost[parent] + steps * sizes.cost(k, size)
        carried, chosen = carried[parent], chosen[parent]
        carried[np.arange(len(parent)), target] += rest
        chosen[:, k] = size
        bound = cost + (carried[:, k + 1 :] + counts[k + 1 :]) @ rates[k + 1 :]
        best = np.lexsort((steps, bound))[:width]
        cost, carried, chosen = cost[best], carried[best], chosen[best]
    choices = []
    for rows in (sizes.holding(np.arange(number), chosen[0]), sizes.most):
        costs = sizes.cost(np.arange(number), rows)
        flow = flow_remainders(counts, rows, costs, above=dominates)
        choices.append((rows, float(epoch_cost(flow.batches, costs)), flow))
    return min(choices, key=lambda choice: choice[1])
