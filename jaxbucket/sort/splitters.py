"""Exact splitters: the positions at which sorted parts are split over the devices.

Keys are unique, because they contain their index, so exactly one key has a given rank.
All devices know the positions of regular samples of every part. These bound the rank of
a sample without further communication: the number of smaller keys in a part is at least
the number of keys up to its last smaller sample, and at most the number of keys before
its next sample. So the split position of each part lies in a small window. The next
samples are drawn from this window, until they cover the whole window.

The sampling is that of Shi and Schaeffer, "Parallel sorting by regular sampling"
(1992); exact splitters by narrowing windows are the multisequence selection of Varman
et al., "Merging multiple lists on hierarchical-memory multiprocessors" (1991).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxbucket.sort.collectives import Devices

# The number of samples per device and round.
_SAMPLES = 1 << 13
_MIN_SAMPLES = 8


class _Window(NamedTuple):
    """The `[D]` first and last possible split positions of each part, for `ranks`."""

    low: np.ndarray
    high: np.ndarray
    ranks: np.ndarray

    def positions(self, num: int) -> list[np.ndarray]:
        """Returns the positions of at most `num` samples in each part."""
        widths = self.high - self.low
        return [
            low + np.arange(min(num, width)) * width // min(num, width)
            if width
            else np.empty(0, np.int64)
            for low, width in zip(self.low.tolist(), widths.tolist(), strict=True)
        ]

    def narrowed(
        self, positions: list[np.ndarray], samples: list[np.ndarray]
    ) -> list[_Window]:
        """Returns a narrower window for each rank.

        The new windows are empty if the samples are all keys of this window.

        Args:
          positions: the positions of the samples in each part.
          samples: the keys at these positions.
        """
        sizes = [len(part) for part in positions]
        part = np.repeat(np.arange(len(sizes)), sizes)
        order = np.argsort(np.concatenate(samples), kind="stable")
        part = part[order]
        # Bounds on the number of smaller keys in each part, by the number of smaller
        # samples in it.
        lower = list(map(np.append, self.low, [x + 1 for x in positions]))
        upper = list(map(np.append, positions, self.high))
        lower_ranks = _rank_bounds(lower, order)
        upper_ranks = _rank_bounds(upper, order)
        windows = []
        for rank in self.ranks:
            below = np.searchsorted(upper_ranks, rank, side="right") - 1
            above = np.searchsorted(lower_ranks, rank, side="left")
            windows.append(
                _Window(
                    _bounds_after(lower, part[: max(below, 0)]),
                    _bounds_after(upper, part[:above])
                    if above < len(part)
                    else self.high,
                    np.array([rank]),
                )
            )
        return windows


def _rank_bounds(bounds: list[np.ndarray], order: np.ndarray) -> np.ndarray:
    """Returns the bounds of each sample in order, summed over all parts."""
    steps = np.concatenate([np.diff(x) for x in bounds])[order]
    first = sum(int(x[0]) for x in bounds)
    return first + np.cumsum(steps) - steps


def _bounds_after(bounds: list[np.ndarray], parts: np.ndarray) -> np.ndarray:
    """Returns the bound of each part after the samples from `parts`."""
    counts = np.bincount(parts, minlength=len(bounds))
    return np.array([x[n] for x, n in zip(bounds, counts, strict=True)])


def cut_positions(
    parts: Sequence[np.ndarray],
    sizes: np.ndarray,
    ranks: np.ndarray,
    devices: Devices,
) -> np.ndarray:
    """Returns the number of keys of each part before the key of each rank.

    All processes must call this.

    Args:
      parts: one sorted `[n]` array for each local device, with unique keys.
      sizes: `[D]`, the sizes of the parts of all devices.
      ranks: `[K]` int64, at least 0 and below the number of keys.
      devices: the devices of all processes.

    Returns:
      `[D, K]` int64.
    """
    windows = [_Window(np.zeros_like(sizes), sizes, ranks)]
    while any((x.low < x.high).any() for x in windows):
        num = max(_MIN_SAMPLES, _SAMPLES // len(windows))
        positions = [window.positions(num) for window in windows]
        samples = _gather_samples(parts, positions, num, devices)
        windows = [
            narrow
            for window, at, keys in zip(windows, positions, samples, strict=True)
            for narrow in window.narrowed(at, keys)
        ]
    return np.stack([x.low for x in windows], axis=1)


def _gather_samples(
    parts: Sequence[np.ndarray],
    positions: list[list[np.ndarray]],
    num: int,
    devices: Devices,
) -> list[list[np.ndarray]]:
    """Returns the keys of all parts at the positions of each window and part."""
    # Powers of two, to compile few shapes.
    largest = max(len(x) for by_part in positions for x in by_part)
    width = min(num, 1 << (largest - 1).bit_length())
    local = []
    for part, i in zip(parts, devices.local, strict=True):
        keys = np.zeros((len(positions), width), part.dtype)
        for row, by_part in zip(keys, positions, strict=True):
            row[: len(by_part[i])] = part[by_part[i]]
        local.append(keys)
    gathered = devices.gather(local)
    return [
        [gathered[i, k, : len(x)] for i, x in enumerate(by_part)]
        for k, by_part in enumerate(positions)
    ]
