"""Few shapes that hold all examples, where the budget excludes the longest ones."""

from __future__ import annotations

import numpy as np

from jaxbucket.plan.joint.points import Points
from jaxbucket.plan.joint.pricing import Pricing

# The number of points that are joined at a time.
_JOINED = 1024


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
