"""Exchanges runs of keys between all devices, in chunks of a fixed capacity.

An `all_to_all` sends the same number of keys between each pair of devices. So runs are
sent in rounds of chunks that are small compared to the share of a device. The pair with
the longest run determines the number of rounds, but not the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.sort.collectives import Devices

# Bounds on the bytes that a device sends in a round. The lower bound keeps rounds few
# for small shares, the upper bound keeps chunks in the processor's cache.
_MIN_BYTES = 1 << 21
_MAX_BYTES = 1 << 22
# Within these bounds a round sends 1/4 of a share, because chunks need memory as well.
_CHUNKS_PER_SHARE = 4


def exchange_runs(
    parts: Sequence[np.ndarray], counts: np.ndarray, devices: Devices
) -> list[np.ndarray]:
    """Returns the keys that each local device receives, the keys from device 0 first.

    All processes must call this.

    Args:
      parts: one `[n]` array for each local device, the keys for device 0 first.
      counts: `[D, D]` int64, the number of keys from each device to each device.
      devices: the devices of all processes.
    """
    starts = np.cumsum(counts, axis=1) - counts
    targets = np.cumsum(counts, axis=0) - counts
    received = [np.empty(counts[:, i].sum(), parts[0].dtype) for i in devices.local]
    # Keys that stay on their device are copied without an exchange.
    for part, merged, i in zip(parts, received, devices.local, strict=True):
        run = part[starts[i, i] : starts[i, i] + counts[i, i]]
        merged[targets[i, i] : targets[i, i] + len(run)] = run
    capacity = chunk_capacity(counts, parts[0].dtype.itemsize)
    counts = counts - np.diag(np.diag(counts))
    # A power of two, to compile few shapes.
    capacity = min(capacity, 1 << (int(counts.max()) - 1).bit_length())
    for first in range(0, counts.max(), capacity):
        num = np.clip(counts - first, 0, capacity)
        chunks = [
            _chunks(part, starts[i] + first, num[i], capacity)
            for part, i in zip(parts, devices.local, strict=True)
        ]
        for merged, chunk, j in zip(
            received, devices.exchange(chunks), devices.local, strict=True
        ):
            for i in np.flatnonzero(num[:, j]):
                target = targets[i, j] + first
                merged[target : target + num[i, j]] = chunk[i, : num[i, j]]
    return received


def chunk_capacity(counts: np.ndarray, itemsize: int) -> int:
    """Returns the number of keys per pair and round, a power of two for few shapes."""
    num_devices = len(counts)
    share = counts.sum(axis=0).max() * itemsize // _CHUNKS_PER_SHARE
    num_bytes = int(np.clip(share, _MIN_BYTES, _MAX_BYTES))
    keys = max(1, num_bytes // (num_devices * itemsize))
    return 1 << (keys.bit_length() - 1)


def _chunks(
    part: np.ndarray, starts: np.ndarray, num: np.ndarray, capacity: int
) -> np.ndarray:
    """Returns `[D, capacity]` chunks, of which row j starts with `num[j]` keys."""
    chunks = np.zeros((len(num), capacity), part.dtype)
    for chunk, start, count in zip(chunks, starts, num, strict=True):
        chunk[:count] = part[start : start + count]
    return chunks
