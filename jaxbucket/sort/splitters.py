"""Exact splitters: the positions at which sorted parts are split over the devices.

Keys are unique, because they contain their index, so exactly one key has a given rank.
All devices count how many of their keys are below each of many trial keys. The sums of
these counts are ranks, so the key of a given rank is between two neighboring trials.
The next trials are between these two, until one has the rank: a bisection with
thousands of ways, for all ranks at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.sort.collectives import Devices

# The number of trial keys per round, for all ranks together, and for each at least.
_TRIALS = 1 << 13
_MIN_TRIALS = 8


def cut_positions(
    parts: Sequence[np.ndarray], ranks: np.ndarray, devices: Devices
) -> np.ndarray:
    """Returns the number of keys of each part before the key of each rank.

    All processes must call this.

    Args:
      parts: one sorted `[n]` array for each local device, with unique composite keys.
      ranks: `[K]` int64, at least 0 and below the number of keys.
      devices: the devices of all processes.

    Returns:
      `[D, K]` int64.
    """
    dtype, num = parts[0].dtype, max(_MIN_TRIALS, _TRIALS // len(ranks))
    # The key of each rank is in `[low, high)`. Python's integers have any size.
    bounds = [(0, 1 << 8 * dtype.itemsize)] * len(ranks)
    while True:
        trials = [
            [low + (high - low) * i // num for i in range(num)] for low, high in bounds
        ]
        keys = _as_keys([key for row in trials for key in row], dtype)
        positions = devices.gather([np.searchsorted(part, keys) for part in parts])
        positions = positions.reshape(devices.count, len(ranks), num)
        below = positions.sum(axis=0)
        # The last trial with no more smaller keys than the rank.
        last = (below <= ranks[:, None]).sum(axis=1) - 1
        every = np.arange(len(ranks))
        if (below[every, last] == ranks).all():
            return positions[:, every, last]
        bounds = [
            (row[i], [*row, high][i + 1])
            for row, i, (_, high) in zip(trials, last.tolist(), bounds, strict=True)
        ]


def _as_keys(numbers: list[int], dtype: np.dtype) -> np.ndarray:
    """Returns integers as composite keys: of 64 bits, or big-endian byte strings."""
    if dtype.kind == "u":
        return np.array(numbers, dtype)
    size = dtype.itemsize
    return np.frombuffer(b"".join(x.to_bytes(size, "big") for x in numbers), dtype)
