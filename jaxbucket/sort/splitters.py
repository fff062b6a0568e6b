"""Exact splitters: where to cut sorted parts so that every device gets its share.

Keys are unique, because their index is in them, so the key of a given rank is one of
them. Regular samples of every part, at positions that all devices know, bound the rank
of each sample without more communication: a part has at least as many smaller keys as
stand before its last smaller sample, and at most as many as before its next one. That
leaves a small window of each part to cut in, from which the next samples are drawn,
until they are the whole window.

The sampling is that of Shi and Schaeffer, "Parallel sorting by regular sampling"
(1992); exact splitters by narrowing windows are the multisequence selection of Varman
et al., "Merging multiple lists on hierarchical-memory multiprocessors" (1991).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxbucket.sort.collectives import Devices

# Samples of a device in a round.
_SAMPLES = 1 << 13
_MIN_SAMPLES = 8


class _Window(NamedTuple):
    """Where to cut each part for some ranks, `[D]` first and last possible position."""

    low: np.ndarray
    high: np.ndarray
    ranks: np.ndarray

    def positions(self, num: int) -> list[np.ndarray]:
        """Returns the positions of the samples in each part: `num`, or all of fewer."""
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
        """Returns a window for each rank, given the keys at the positions of each part.

        It is empty in each part if the samples are all keys of this window.
        """
        sizes = [len(part) for part in positions]
        part = np.repeat(np.arange(len(sizes)), sizes)
        order = np.argsort(np.concatenate(samples), kind="stable")
        part = part[order]
        # Smaller keys of a part: at least up to the sample before, at most to the next.
        least = list(map(np.append, self.low, [x + 1 for x in positions]))
        most = list(map(np.append, positions, self.high))
        rank_least = _running(least, order)
        rank_most = _running(most, order)
        windows = []
        for rank in self.ranks:
            below = np.searchsorted(rank_most, rank, side="right") - 1
            above = np.searchsorted(rank_least, rank, side="left")
            windows.append(
                _Window(
                    _at(least, part[: max(below, 0)]),
                    _at(most, part[:above]) if above < len(part) else self.high,
                    np.array([rank]),
                )
            )
        return windows


def _running(values: list[np.ndarray], order: np.ndarray) -> np.ndarray:
    """The sum over parts of `values[part][samples before]`, at each sample in order."""
    steps = np.concatenate([np.diff(x) for x in values])[order]
    first = sum(int(x[0]) for x in values)
    return first + np.cumsum(steps) - steps


def _at(values: list[np.ndarray], parts: np.ndarray) -> np.ndarray:
    """`values` of each part behind those of its samples that are among `parts`."""
    counts = np.bincount(parts, minlength=len(values))
    return np.array([x[n] for x, n in zip(values, counts, strict=True)])


def cut_positions(
    parts: Sequence[np.ndarray],
    sizes: np.ndarray,
    ranks: np.ndarray,
    devices: Devices,
) -> np.ndarray:
    """Returns the number of keys of each part before the key of each rank.

    Args:
      parts: one sorted `[n]` array for each local device; all keys differ.
      sizes: `[D]` of the parts of all devices.
      ranks: `[K]` int64, from 0 to before the number of keys.
      devices: of all processes, which all call this.

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
            for window, where, keys in zip(windows, positions, samples, strict=True)
            for narrow in window.narrowed(where, keys)
        ]
    return np.stack([x.low for x in windows], axis=1)


def _gather_samples(
    parts: Sequence[np.ndarray],
    positions: list[list[np.ndarray]],
    num: int,
    devices: Devices,
) -> list[list[np.ndarray]]:
    """The keys of all parts at the positions of each window and part."""
    # Powers of two, for few shapes.
    most = max(len(x) for where in positions for x in where)
    width = min(num, 1 << (most - 1).bit_length())
    local = []
    for part, i in zip(parts, devices.local, strict=True):
        keys = np.zeros((len(positions), width), part.dtype)
        for row, where in zip(keys, positions, strict=True):
            row[: len(where[i])] = part[where[i]]
        local.append(keys)
    gathered = devices.gather(local)
    return [
        [gathered[i, k, : len(x)] for i, x in enumerate(where)]
        for k, where in enumerate(positions)
    ]
