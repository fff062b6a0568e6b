"""Shapes that minimize the cost of an epoch, remainders included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxbucket.plan.additions import Choice, Grid
from jaxbucket.plan.flow.dominance import dominates, shape_order
from jaxbucket.plan.points import Points
from jaxbucket.plan.pricing import Prices, Pricing

# How many of the best shapes by full batches are compared with their remainders. With
# many buckets, fewer are, because the time of each grows with the square of K.
_MIN_CONTENDERS, _MAX_CONTENDERS, _CONTENDERS_WORK = 4, 64, 1 << 14
# The number of replacements that are tried: for each bucket on average, and times the
# number of buckets, because the time of each grows with it.
_TRIES, _TRIES_WORK = 16, 1 << 13
# A choice counts as cheaper only beyond rounding errors.
_SLACK = 1 - 1e-9
# How much a remainder is expected to fill up a batch at its target: with 0, each of its
# rows costs what a row costs there, and with 1, all rows may need a new batch.
_CAUTION = 0.0, 0.5, 1.0


def epoch_costs(
    counts: np.ndarray, seq_lens: np.ndarray, prices: Prices, pricing: Pricing
) -> np.ndarray:
    """Returns the cost of an epoch with each of several choices of shapes, `[n]`.

    Each remainder goes where it is expected to cost least, one after the other. So the
    cost may be above that of `fitted_between`, but is much faster to compute.

    Args:
      counts: `[n, K]` integers, the examples of each shape.
      seq_lens: `[n, K, Q]` integers, the T of each shape, in any order.
      prices: what batches of the shapes hold and cost, `[n, K]` each.
      pricing: how these prices were computed.
    """
    order = shape_order(seq_lens)
    above = dominates(np.take_along_axis(seq_lens, order[:, :, None], axis=1))
    number = len(_CAUTION)
    counts, *columns = (
        np.tile(np.take_along_axis(column, order, axis=1), (number, 1))
        for column in (counts, *prices)
    )
    above = np.tile(above, (number, 1, 1))
    caution = np.repeat(_CAUTION, len(order))[:, None]
    flows = _flow_costs(counts, Prices(*columns), pricing, above, caution)
    return flows.reshape(number, -1).min(axis=0)


def _flow_costs(
    counts: np.ndarray,
    prices: Prices,
    pricing: Pricing,
    above: np.ndarray,
    caution: np.ndarray,
) -> np.ndarray:
    """Returns the cost of each epoch, `[n]`, from arrays `[n, K]` and `[n, K, K]`.

    A bucket either holds all its rows in the smallest steps, or fills the largest steps
    and passes on the rest.

    Args:
      counts: the examples of each bucket.
      prices: what batches hold and cost.
      pricing: how these prices were computed.
      above: whether a bucket dominates another.
      caution: `[n, 1]`, the share of `_CAUTION` of each epoch.
    """
    sizes, costs, rates, slopes = prices
    rows, total = counts.copy(), np.zeros(len(counts))
    every = np.arange(len(counts))

    def padded_costs(rows: np.ndarray, columns: int | slice) -> np.ndarray:
        parts = (part[:, columns] for part in (sizes, costs, slopes))
        return pricing.padded_costs(rows, *parts)

    for k in range(counts.shape[1] - 1):
        full, rest = np.divmod(rows[:, k], sizes[:, k])
        later = slice(k + 1, None)
        before, extra = rows[:, later], rest[:, None]
        more = padded_costs(before + extra, later) - padded_costs(before, later)
        passed = caution * more + (1 - caution) * extra * rates[:, later]
        passed[~above[:, k, later]] = np.inf
        best = passed.argmin(axis=1)
        alone, filled = padded_costs(rows[:, k], k), full * costs[:, k]
        is_padded = (rest == 0) | (filled + passed[every, best] >= alone)
        total += np.where(is_padded, alone, filled)
        rows[every, k + 1 + best] += np.where(is_padded, 0, rest)
    return total + padded_costs(rows[:, -1], -1)


@dataclasses.dataclass(frozen=True)
class EpochSearch:
    """A local search: shapes are replaced, dropped and added.

    Attributes:
      points: the examples.
      pricing: the prices of shapes.
      num_buckets: the largest number of shapes.
      num_fixed: how many of the first shapes are never replaced.
    """

    points: Points
    pricing: Pricing
    num_buckets: int
    num_fixed: int

    @property
    def _num_contenders(self) -> int:
        work = _CONTENDERS_WORK // self.num_buckets**2
        return min(max(work, _MIN_CONTENDERS), _MAX_CONTENDERS)

    @property
    def _num_tries(self) -> int:
        tries = min(_TRIES * self.num_buckets, _TRIES_WORK // self.num_buckets)
        return max(tries, self.num_buckets)

    def cost(self, shapes: np.ndarray) -> float:
        """Returns about the cost of an epoch; infinite if a point is in no shape."""
        choice = Choice.of(self.points, shapes, self.pricing)
        return self._cost(choice, None)

    def improved(
        self, shapes: np.ndarray, grid_of: Callable[[np.ndarray, int], Grid]
    ) -> np.ndarray:
        """Returns shapes with a cheaper epoch, or the same.

        Args:
          shapes: `[K, Q]` indices.
          grid_of: returns the shapes that can replace shape k of the given shapes, or
            that can be added as shape k = K.
        """
        choice = Choice.of(self.points, shapes, self.pricing)
        cost, failures, k = self._cost(choice, None), 0, self.num_fixed
        for _ in range(self._num_tries):
            size = len(choice) + (len(choice) < self.num_buckets)
            if failures >= size - self.num_fixed:
                break
            k = k if k < size else self.num_fixed
            grid = grid_of(choice.shapes, k)
            better, better_cost = self._best(choice, k, grid, cost)
            failures += 1
            if better_cost < cost * _SLACK:
                choice = Choice.of(self.points, better, self.pricing)
                cost, failures = better_cost, 0
            k += 1
        return choice.shapes

    def _best(
        self, choice: Choice, k: int, grid: Grid, limit: float
    ) -> tuple[np.ndarray, float]:
        """Returns the best shapes without shape k or with another instead of it.

        Args:
          choice: the present shapes.
          k: the shape to replace, or K to add one.
          grid: the shapes that can replace it.
          limit: shapes that cost more are of no interest.
        """
        without = k if k < len(choice) else None
        others, best_cost = choice.shapes, np.inf
        if without is not None:
            others = np.delete(choice.shapes, k, axis=0)
            best_cost = self._cost(choice, k)
        additions = choice.additions(grid, without)
        promising = np.flatnonzero(additions.costs < min(limit, best_cost))
        cheapest = np.argsort(additions.costs[promising], kind="stable")
        added = promising[cheapest[: self._num_contenders]]
        if not added.size:
            return others, best_cost
        counts = additions.counts(added)
        if without is not None:
            counts = np.delete(counts, without, axis=1)
        repeated = np.broadcast_to(others, (len(added), *others.shape))
        new = grid.shapes[added]
        choices = np.concatenate([repeated, new[:, None]], axis=1)
        costs = self._costs(counts, choices)
        best = int(np.argmin(costs))
        if costs[best] < best_cost:
            return np.insert(others, k, new[best], axis=0), float(costs[best])
        return others, best_cost

    def _cost(self, choice: Choice, without: int | None) -> float:
        """Returns about the cost of an epoch, with or without one of the shapes."""
        counts = choice.counts(choice.groups(without)).astype(np.int64)
        if counts[-1]:
            return np.inf
        counts, shapes = counts[:-1], choice.shapes
        if without is not None:
            counts, shapes = np.delete(counts, without), np.delete(shapes, without, 0)
        return float(self._costs(counts[None], shapes[None])[0])

    def _costs(self, counts: np.ndarray, choices: np.ndarray) -> np.ndarray:
        """Returns the cost of an epoch with each choice, `[n, K, Q]` indices."""
        seq_lens = self.points.seq_lens(choices)
        prices = self.pricing(seq_lens.reshape(-1, seq_lens.shape[-1]))
        shaped = Prices(*(column.reshape(counts.shape) for column in prices))
        return epoch_costs(counts, seq_lens, shaped, self.pricing)
