"""Runs of keys from every device to every device, in chunks of one capacity.

An `all_to_all` needs the same number from each device to each. So it is made in rounds,
with chunks that are small beside a device's share: the pair that has most to send sets
the number of rounds, and memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxbucket.sort.collectives import Devices

# Of all chunks that a device sends in a round: few rounds for small shares, and chunks
# within a processor's cache for large ones.
_MIN_BYTES = 1 << 21
_MAX_BYTES = 1 << 22
# Chunks sent and received come on top of the share and of the sorted share.
_CHUNKS_PER_SHARE = 4


def exchange_runs(
    parts: Sequence[np.ndarray], counts: np.ndarray, devices: Devices
) -> list[np.ndarray]:
    """Returns the keys that each local device receives, those of device 0 first.

    Args:
      parts: one `[n]` array for each local device: the keys for device 0 first.
      counts: `[D, D]` int64, the number of keys from each device to each.
      devices: of all processes, which all call this.
    """
    starts = np.cumsum(counts, axis=1) - counts
    places = np.cumsum(counts, axis=0) - counts
    received = [np.empty(counts[:, i].sum(), parts[0].dtype) for i in devices.local]
    # What stays on a device needs no exchange.
    for part, merged, i in zip(parts, received, devices.local, strict=True):
        run = part[starts[i, i] : starts[i, i] + counts[i, i]]
        merged[places[i, i] : places[i, i] + len(run)] = run
    capacity = chunk_capacity(counts, parts[0].dtype.itemsize)
    counts = _between_devices(counts)
    # Powers of two, for few shapes.
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
                place = places[i, j] + first
                merged[place : place + num[i, j]] = chunk[i, : num[i, j]]
    return received


def is_skewed(counts: np.ndarray) -> bool:
    """Returns whether two even exchanges take less time than the one of these counts.

    An exchange takes as long as its fullest pair: with reversed keys, as if every
    device sent its whole share to every other one.
    """
    count = len(counts)
    most = _between_devices(counts).max()
    dealt = -(-counts.sum(axis=1).max() // count)
    return bool(most > dealt + -(-counts.sum() // count**2))


def chunk_capacity(counts: np.ndarray, itemsize: int) -> int:
    """Returns the keys that a pair sends in a round: a power of two, for few shapes."""
    num_devices = len(counts)
    share = counts.sum(axis=0).max() * itemsize // _CHUNKS_PER_SHARE
    num_bytes = int(np.clip(share, _MIN_BYTES, _MAX_BYTES))
    keys = max(1, num_bytes // (num_devices * itemsize))
    return 1 << (keys.bit_length() - 1)


def _between_devices(counts: np.ndarray) -> np.ndarray:
    """The counts without the keys that stay on their device."""
    return counts - np.diag(np.diag(counts))


def _chunks(
    part: np.ndarray, starts: np.ndarray, num: np.ndarray, capacity: int
) -> np.ndarray:
    """`[D, capacity]`, the first `num` of each row filled."""
    chunks = np.zeros((len(num), capacity), part.dtype)
    for chunk, start, count in zip(chunks, starts, num, strict=True):
        chunk[:count] = part[start : start + count]
    return chunks
