"""Rows in an order in which every device has about the same work."""

from __future__ import annotations

import numpy as np


def spread_evenly(work: np.ndarray) -> np.ndarray:
    """Returns the rows in an order whose parts have even sums of work.

    It is the same however many devices there are: rows are halved, and halves are
    halved, so long as they can be. Of two halves, the next largest row goes to the one
    that has less, until it has its number of rows (Graham, "Bounds on multiprocessing
    timing anomalies", 1969: the longest first).

    Example:
      >>> spread_evenly(np.array([9, 8, 1, 2]))
      array([0, 2, 1, 3])

    Args:
      work: `[n]` numbers, of each row.

    Returns:
      `[n]` int64.
    """
    weights = work.tolist()
    order = np.argsort(-work, kind="stable").tolist()
    return np.array(_halved(order, weights), np.int64)


def _halved(rows: list[int], weights: list[float]) -> list[int]:
    """The rows, the largest first, as one half behind the other."""
    if len(rows) < 2 or len(rows) % 2:
        return rows
    halves: tuple[list[int], list[int]] = ([], [])
    more, full = 0.0, len(rows) // 2
    for row in rows:
        is_second = len(halves[0]) == full or (len(halves[1]) < full and more > 0)
        halves[is_second].append(row)
        more += -weights[row] if is_second else weights[row]
    return [row for half in halves for row in _halved(half, weights)]


def imbalance(work: np.ndarray, num_parts: int) -> float:
    """Returns the work of the part that has most, by the mean of all equal parts.

    Example:
      >>> imbalance(np.array([9, 1, 8, 2]), num_parts=2)
      1.0

    Args:
      work: `[n]` numbers, of rows in order.
      num_parts: of as many rows each.
    """
    sums = work.reshape(num_parts, -1).sum(axis=1)
    return float(sums.max() / sums.mean()) if sums.any() else 1.0
