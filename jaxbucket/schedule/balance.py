"""Balance: rows in an order in which every device has about the same work."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, BatchIndices


def balance_rows(work: np.ndarray) -> np.ndarray:
    """Returns the rows in an order whose parts have even sums of work.

    It is the same however many devices there are: rows are divided by the smallest
    prime factor of their number, and so are these parts. The next largest row goes to
    the part that has least, until it has its number of rows (Graham, "Bounds on
    multiprocessing timing anomalies", 1969: the longest first). So it is even for 2, 4,
    8, ... devices, and for another number not worse than as rows come.

    Example:
      >>> balance_rows(np.array([9, 8, 1, 2]))
      array([0, 2, 1, 3])

    Args:
      work: `[n]` numbers, of each row.

    Returns:
      `[n]` int64.
    """
    weights = work.tolist()
    order = np.argsort(-work, kind="stable").tolist()
    return np.array(_divided(order, weights), np.int64)


def _divided(rows: list[int], weights: list[float]) -> list[int]:
    """The rows, the largest first, as one part behind the other."""
    if len(rows) < 3:
        return rows
    count = next(n for n in range(2, len(rows) + 1) if len(rows) % n == 0)
    if count == len(rows):
        # No device has one of these alone: in turn, and not by their size.
        return rows[::2] + rows[1::2]
    parts: list[list[int]] = [[] for _ in range(count)]
    sums = [0.0] * count
    for row in rows:
        free = [i for i in range(count) if len(parts[i]) < len(rows) // count]
        least = min(free, key=sums.__getitem__)
        parts[least].append(row)
        sums[least] += weights[row]
    return [row for part in parts for row in _divided(part, weights)]


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


def mean_imbalance(
    batches: Iterable[BatchIndices], work: np.ndarray, num_devices: int
) -> float:
    """Returns the mean `imbalance` of batches.

    Args:
      batches: whose rows are divided among the devices.
      work: `[N]` numbers, of each example.
      num_devices: by which every B can be divided.
    """
    ratios = []
    for batch in batches:
        rows = batch.rows.reshape(batch.bucket.batch_size, -1)
        row_work = np.where(rows == EMPTY_ROW, 0, work[rows]).sum(axis=1)
        ratios.append(imbalance(row_work, num_devices))
    return float(np.mean(ratios))
