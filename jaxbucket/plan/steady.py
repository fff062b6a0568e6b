"""Shapes that minimize the cost of an epoch if every batch is full."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxbucket.plan.additions import Choice, Grid
from jaxbucket.plan.flow.dominance import fits
from jaxbucket.plan.points import Points
from jaxbucket.plan.pricing import Pricing

# A choice counts as cheaper only beyond rounding errors.
_SLACK = 1 - 1e-9
# The number of points that are joined at a time.
_JOINED = 1024


class Steady:
    """A search for the best shapes of some points.

    Args:
      points: the examples.
      pricing: the prices of shapes.
      num_buckets: the largest number of shapes.
      num_fixed: how many of the first shapes are never replaced.
    """

    def __init__(
        self, points: Points, pricing: Pricing, num_buckets: int, num_fixed: int
    ):
        self.points, self.pricing = points, pricing
        self.num_buckets, self.num_fixed = num_buckets, num_fixed

    def choice(self, shapes: np.ndarray) -> Choice:
        """Returns the assignment of all points to shapes, `[K, Q]` indices."""
        return Choice.of(self.points, shapes, self.pricing)

    def covered(self, shapes: np.ndarray, grid: Grid) -> np.ndarray:
        """Returns shapes that hold all points, by adding what holds most of the rest.

        Only points that no other point dominates matter. There may be more shapes than
        allowed.

        Args:
          shapes: `[K, Q]` indices, the first shapes.
          grid: the shapes that can be added.
        """
        choice = self.choice(shapes)
        frontier = self.points.frontier(choice.first == len(shapes))
        while len(frontier):
            ends = grid.shapes[np.isfinite(grid.prices.rates)]
            held = fits(frontier, ends).sum(axis=0)
            if not held.any():
                break
            best = ends[[np.argmax(held)]]
            shapes = np.append(shapes, best, axis=0)
            frontier = frontier[~fits(frontier, best)[:, 0]]
        return shapes

    def grown(self, shapes: np.ndarray, grid: Grid, size: int) -> np.ndarray:
        """Returns up to `size` shapes, by adding the best one at a time."""
        choice = self.choice(shapes)
        while len(choice) < size:
            costs = choice.additions(grid).costs
            best = int(np.argmin(costs))
            if not costs[best] < choice.cost * _SLACK:
                break
            choice = self.choice(np.append(choice.shapes, grid.shapes[[best]], axis=0))
        return choice.shapes

    def swapped(
        self, shapes: np.ndarray, grid_of: Callable[[np.ndarray, int], Grid]
    ) -> np.ndarray:
        """Returns shapes of which none can be replaced for a lower cost.

        Args:
          shapes: `[K, Q]` indices.
          grid_of: returns the shapes that can replace shape k of the given shapes.
        """
        choice, failures = self.choice(shapes), 0
        k, cost = self.num_fixed, choice.cost
        while failures < len(choice) - self.num_fixed:
            grid = grid_of(choice.shapes, k)
            costs = choice.additions(grid, without=k).costs
            best = int(np.argmin(costs))
            failures += 1
            if costs[best] < cost * _SLACK:
                shapes = choice.shapes.copy()
                shapes[k] = grid.shapes[best]
                choice, failures = self.choice(shapes), 0
                cost = choice.cost
            k = k + 1 if k + 1 < len(choice) else self.num_fixed
        return choice.shapes


def few_shapes(points: Points, pricing: Pricing) -> np.ndarray | None:
    """Returns shapes that hold all points, `[K, Q]` indices; None if one is too long.

    Points that no other point dominates are joined in the order of one sequence, as
    long as the budget allows. With two sequences, the other one falls in this order, so
    no fewer shapes hold them, if the budget allows every shape that another allowed
    shape holds. With more sequences, the best of the orders is taken.

    Args:
      points: the examples.
      pricing: the prices of shapes.
    """
    frontier = points.frontier()
    choices = [
        _joined(frontier[np.argsort(column, kind="stable")], points, pricing)
        for column in frontier.T
    ]
    complete = [shapes for shapes in choices if shapes is not None]
    return min(complete, key=len, default=None)


def _joined(
    frontier: np.ndarray, points: Points, pricing: Pricing
) -> np.ndarray | None:
    """Returns the joins of consecutive points, each as long as is allowed."""
    shapes, first = [], 0
    while first < len(frontier):
        joins = np.maximum.accumulate(frontier[first : first + _JOINED], axis=0)
        is_allowed = np.isfinite(pricing(points.seq_lens(joins)).rates)
        if not is_allowed[0]:
            return None
        number = int(np.argmin(np.append(is_allowed, False)))
        shapes.append(joins[number - 1])
        first += number
    return np.array(shapes)
