"""Balancing: sorts rows so that every device has about the same work."""

from __future__ import annotations

import numpy as np


def balance_rows(work: np.ndarray) -> np.ndarray:
    """Returns an order of the rows whose equal parts have about the same work.

    The order does not depend on the number of devices. The rows are divided into as
    many parts as the smallest prime factor of their number, and each part is divided
    again in the same way. At each level, rows are assigned from the largest to the
    smallest, each to the part with the least work that is not full (longest processing
    time first; Graham, "Bounds on multiprocessing timing anomalies", 1969). So the work
    is balanced for 2, 4, 8, ... devices, and no worse than unsorted for other numbers.

    Example:
      >>> balance_rows(np.array([9, 8, 1, 2]))
      array([0, 2, 1, 3])

    Args:
      work: `[n]` numbers, the work of each row.

    Returns:
      `[n]` int64, indices of the rows.
    """
    weights = work.tolist()
    order = np.argsort(-work, kind="stable").tolist()
    return np.array(_divide(order, weights), np.int64)


def _divide(rows: list[int], weights: list[float]) -> list[int]:
    """Divides rows, sorted by falling weight, and returns the concatenated parts."""
    if len(rows) < 3:
        return rows
    count = next(n for n in range(2, len(rows) + 1) if len(rows) % n == 0)
    if count == len(rows):
        # For a prime number of rows, parts of one row would stay sorted by weight.
        return rows[::2] + rows[1::2]
    parts: list[list[int]] = [[] for _ in range(count)]
    sums = [0.0] * count
    for row in rows:
        free = [i for i in range(count) if len(parts[i]) < len(rows) // count]
        least = min(free, key=sums.__getitem__)
        parts[least].append(row)
        sums[least] += weights[row]
    return [row for part in parts for row in _divide(part, weights)]
