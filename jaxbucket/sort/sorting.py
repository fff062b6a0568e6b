"""Sorts (key, global index) pairs over all devices of a mesh."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from jax.sharding import Mesh

from jaxbucket.sort.collectives import Devices
from jaxbucket.sort.exchange import exchange_runs
from jaxbucket.sort.layout import Keys, gather_layout
from jaxbucket.sort.splitters import cut_positions

Assignment: TypeAlias = Literal["contiguous", "interleaved"]
_R = TypeVar("_R")

_MAX_MERGED_RUNS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class SortedShare:
    """The sorted keys of one device.

    Example:
      >>> import jax
      >>> from jaxbucket import data_mesh
      >>> (share,) = sample_sort([3, 1, 2], data_mesh(jax.devices()[:1]))
      >>> share.ranks, share.keys.tolist(), share.index.tolist()
      (range(0, 3), [1, 2, 3], [1, 2, 0])

    Attributes:
      ranks: the positions of its keys in the global order.
      keys: `[n]` in global order; a tuple of arrays for several columns.
      index: `[n]` int32 or int64, the global index of each key before the sort.
    """

    ranks: range
    keys: np.ndarray | tuple[np.ndarray, ...]
    index: np.ndarray


def sample_sort(
    keys: Keys,
    mesh: Mesh,
    *,
    descending: bool | Sequence[bool] = False,
    assignment: Assignment = "contiguous",
) -> list[SortedShare]:
    """Sorts keys that are distributed over processes, equal keys by global index.

    The result is the same for any number of processes and devices. The shares of the
    devices differ by at most one key, even if many keys are equal. All processes must
    call this function.

    This is sorting by regular sampling (Shi and Schaeffer, "Parallel sorting by regular
    sampling", 1992). Sampling is repeated until the splitters are exact, so the result
    needs no rebalancing. For any order of the keys, a device needs memory for three
    times its share before or after the sort, whichever is larger. A key and its index
    take 8 bytes, or 16 and more if they do not fit into 8. Exchanged chunks take
    another 4 MB in each direction.

    Example:
      >>> from jaxbucket import data_mesh
      >>> shares = sample_sort(np.array([3, 1, 2, 1]), data_mesh())
      >>> [int(i) for share in shares for i in share.index]
      [1, 3, 2, 0]

    Args:
      keys: `[n]` integers, floats or bools of up to 64 bits, the keys of this process.
        The global index counts the keys of process 0 first. A tuple of columns is
        compared from left to right. -0.0 equals 0.0 and is returned as 0.0.
      mesh: the mesh of all devices that take part. Its axes do not matter.
      descending: whether the largest keys come first, for all columns or for each
        column. In both cases NaN comes last, and equal keys are in ascending order of
        their index.
      assignment: "contiguous" to give each device the ranks that follow those of the
        previous device, or "interleaved" to give device d the ranks d, d + D, ...

    Returns:
      The sorted keys of each device of this process, in the order of the mesh.

    Raises:
      ValueError: in every process, if the keys of any process are invalid, the keys or
        options differ in kind between processes, or there are no keys.
    """
    devices = Devices(mesh)
    layout = gather_layout(keys, descending, assignment, devices)
    composite, columns, first, sizes = layout
    parts = _on_each(composite.encode, columns, first)
    parts = _sorted_parts(parts, sizes, devices)
    size, count = int(sizes.sum()), devices.count
    ends = np.arange(count + 1) * size // count
    ranks = [range(ends[i], ends[i + 1]) for i in devices.local]
    if assignment == "interleaved":
        parts = _deal(parts, ends, devices)
        ranks = [range(i, size, count) for i in devices.local]
    decoded = _on_each(composite.decode, parts)
    return [
        SortedShare(own, columns if isinstance(keys, tuple) else columns[0], index)
        for own, (columns, index) in zip(ranks, decoded, strict=True)
    ]


def _sorted_parts(
    parts: list[np.ndarray], sizes: np.ndarray, devices: Devices
) -> list[np.ndarray]:
    """Returns the sorted composite keys of each local device; `parts` is cleared.

    `sizes` are the numbers of keys of all devices, `[D]`.
    """
    _on_each(lambda part: part.sort(), parts)
    if devices.count == 1:
        return parts
    ranks = np.arange(1, devices.count) * int(sizes.sum()) // devices.count
    cuts = cut_positions(parts, sizes, ranks, devices)
    counts = np.diff(cuts, axis=1, prepend=0, append=sizes[:, None])
    received = exchange_runs(parts, counts, devices)
    # Frees the sent keys before the received keys are sorted.
    parts.clear()
    # Only a few runs are merged, because numpy merges two at a time, but sorts by
    # vector instructions.
    kind = "stable" if devices.count <= _MAX_MERGED_RUNS else "quicksort"
    _on_each(lambda part: part.sort(kind=kind), received)
    return received


def _deal(
    parts: list[np.ndarray], ends: np.ndarray, devices: Devices
) -> list[np.ndarray]:
    """Sends the key of rank r to device `r % D`.

    Before, device d has the ranks from `ends[d]` to `ends[d + 1] - 1`.
    """
    count = devices.count
    offsets = (np.arange(count) - ends[:-1, None]) % count
    counts = np.maximum(0, -((offsets - np.diff(ends)[:, None]) // count))
    runs = [
        np.concatenate([part[offset::count] for offset in offsets[i]])
        for part, i in zip(parts, devices.local, strict=True)
    ]
    parts.clear()
    return exchange_runs(runs, counts, devices)


def _on_each(function: Callable[..., _R], *values: Sequence[Any]) -> list[_R]:
    """Calls a function for each local device in threads; numpy releases the GIL."""
    if len(values[0]) == 1:
        return [function(*(value[0] for value in values))]
    with ThreadPoolExecutor(min(len(values[0]), os.cpu_count() or 1)) as pool:
        return list(pool.map(function, *values))
