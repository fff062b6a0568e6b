"""Sorts (key, global index) pairs over all devices of a mesh."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.sort.accelerator import can_sort_on_devices, sort_on_devices
from jaxbucket.sort.collectives import Devices
from jaxbucket.sort.exchange import exchange_runs, is_skewed
from jaxbucket.sort.keys import Composite
from jaxbucket.sort.layout import KeyLayout, Keys, gather_layout
from jaxbucket.sort.splitters import cut_positions

Assignment: TypeAlias = Literal["contiguous", "interleaved"]
_R = TypeVar("_R")

_MAX_INT32 = 2**31 - 1
_MAX_MERGED_RUNS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class SortedShare:
    """The sorted keys of one device.

    Example:
      >>> from jaxbucket import data_mesh
      >>> (share,) = sample_sort([3, 1, 2], data_mesh(jax.devices()[:1])).local_shares()
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


@dataclasses.dataclass(frozen=True, eq=False)
class SortedKeys:
    """Sorted keys, sharded evenly over all D devices of a mesh.

    Example:
      >>> from jaxbucket import data_mesh
      >>> result = sample_sort(
      ...     [5, 3, 4], data_mesh(jax.devices()[:2]), assignment="interleaved"
      ... )
      >>> np.asarray(result.keys).tolist(), np.asarray(result.index).tolist()
      ([[3, 5], [4, 0]], [[1, 0], [2, -1]])

    Attributes:
      keys: `[D, C]` global array, or a tuple of them for several columns. Row d is on
        device d of the mesh. 64-bit dtypes are preserved even without jax_enable_x64;
        then read them with numpy, because jax would truncate them to 32 bits.
      index: `[D, C]` int32, or int64 for 2**31 or more keys: the global index of each
        key before the sort. Positions without a key have index -1 and key 0.
      size: the number of keys.
      assignment: "contiguous" if device d has the ranks from `d * size // D` to
        `(d + 1) * size // D - 1`, "interleaved" if it has the ranks d, d + D,
        d + 2 * D, ...
    """

    keys: jax.Array | tuple[jax.Array, ...]
    index: jax.Array
    size: int
    assignment: Assignment

    def ranks(self, device: int) -> range:
        """Returns the positions of the keys of a row in the global order.

        Args:
          device: the index of the row, from 0 to D - 1.

        Raises:
          ValueError: if there is no such row.
        """
        count = len(self.index)
        if not 0 <= device < count:
            raise ValueError(
                f"`device={device}` is out of range. Pass 0 to {count - 1}."
            )
        if self.assignment == "interleaved":
            return range(device, self.size, count)
        return range(device * self.size // count, (device + 1) * self.size // count)

    def local_shares(self) -> list[SortedShare]:
        """Returns the keys of this process's devices, without empty positions."""
        columns = self.keys if isinstance(self.keys, tuple) else (self.keys,)
        rows = [_rows(column) for column in columns]
        shares = []
        for row, index in _rows(self.index).items():
            ranks = self.ranks(row)
            keys = tuple(x[row][: len(ranks)] for x in rows)
            row_keys = keys if isinstance(self.keys, tuple) else keys[0]
            shares.append(SortedShare(ranks, row_keys, index[: len(ranks)]))
        return shares


def sample_sort(
    keys: Keys | tuple[Keys, ...],
    mesh: Mesh,
    *,
    descending: bool | Sequence[bool] = False,
    assignment: Assignment = "contiguous",
) -> SortedKeys:
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
      >>> result = sample_sort(np.array([3, 1, 2, 1]), data_mesh())
      >>> [int(i) for share in result.local_shares() for i in share.index]
      [1, 3, 2, 0]

    Args:
      keys: `[n]` integers, floats or bools of up to 64 bits: the keys of this process,
        or a global array over devices of the mesh. The global index counts the keys of
        process 0 first. A tuple of columns is compared from left to right. -0.0 equals
        0.0 and is returned as 0.0.
      mesh: the mesh of all devices that take part. Its axes do not matter.
      descending: whether the largest keys come first, for all columns or for each
        column. In both cases NaN comes last, and equal keys are in ascending order of
        their index.
      assignment: "contiguous" to give each device the ranks that follow those of the
        previous device, or "interleaved" to give device d the ranks d, d + D, ...

    Returns:
      The sorted keys with their index, on the devices of the mesh.

    Raises:
      ValueError: in every process, if the keys of any process are invalid, the keys or
        options differ in kind between processes, or there are no keys.
    """
    devices = Devices(mesh)
    layout = gather_layout(keys, descending, assignment, devices)
    composite = Composite(layout.columns, layout.ranges, layout.size)
    parts = _sorted_parts(layout, composite, devices)
    if assignment == "interleaved" and devices.count > 1:
        ends = np.arange(devices.count + 1) * layout.size // devices.count
        parts, _ = _deal(parts, ends[:-1], np.diff(ends), devices)
    columns, index = _global_arrays(parts, layout, composite, mesh, devices)
    sorted_keys = columns if isinstance(keys, tuple) else columns[0]
    return SortedKeys(sorted_keys, index, layout.size, assignment)


def _sorted_parts(
    layout: KeyLayout, composite: Composite, devices: Devices
) -> list[np.ndarray]:
    """Returns the sorted composite keys of each local device."""
    parts = _on_each(composite.encode, layout.parts, layout.first)
    _sort(parts, layout.sizes, devices)
    if devices.count == 1:
        return parts
    counts = _counts(parts, layout.sizes, devices)
    if is_skewed(counts):
        parts, sizes = _deal(parts, np.zeros_like(layout.sizes), layout.sizes, devices)
        _sort(parts, sizes, devices, runs=devices.count)
        counts = _counts(parts, sizes, devices)
    received = exchange_runs(parts, counts, devices)
    # Frees the sent keys before the received keys are sorted.
    parts.clear()
    _sort(received, counts.sum(axis=0), devices, runs=devices.count)
    return received


def _sort(
    parts: list[np.ndarray], sizes: np.ndarray, devices: Devices, runs: int = 0
) -> None:
    """Sorts the parts of the local devices in place.

    Args:
      parts: one `[n]` array for each local device.
      sizes: `[D]`, the sizes of the parts of all devices.
      devices: the devices of all processes.
      runs: the number of sorted runs in each part; 0 if unknown.
    """
    if can_sort_on_devices(sizes, parts[0].dtype, devices):
        sort_on_devices(parts, sizes, devices)
        return
    # Only a few runs are merged, because numpy merges two at a time, but sorts by
    # vector instructions.
    kind = "stable" if 0 < runs <= _MAX_MERGED_RUNS else "quicksort"
    _on_each(lambda part: part.sort(kind=kind), parts)


def _counts(parts: list[np.ndarray], sizes: np.ndarray, devices: Devices) -> np.ndarray:
    """Returns `[D, D]`, the number of keys from each device to each device."""
    size = int(sizes.sum())
    ranks = np.arange(1, devices.count) * size // devices.count
    cuts = cut_positions(parts, sizes, ranks, devices)
    ends = np.concatenate([cuts, sizes[:, None]], axis=1)
    return np.diff(ends, axis=1, prepend=0)


def _deal(
    parts: list[np.ndarray], firsts: np.ndarray, sizes: np.ndarray, devices: Devices
) -> tuple[list[np.ndarray], np.ndarray]:
    """Sends key j of part i to device `(firsts[i] + j) % D`.

    Returns:
      The received parts of the local devices, and the `[D]` sizes of all parts.
    """
    count = devices.count
    offsets = (np.arange(count) - firsts[:, None]) % count
    counts = np.maximum(0, -((offsets - sizes[:, None]) // count))
    runs = [
        np.concatenate([part[offset::count] for offset in offsets[i]])
        for part, i in zip(parts, devices.local, strict=True)
    ]
    parts.clear()
    return exchange_runs(runs, counts, devices), counts.sum(axis=0)


def _global_arrays(
    parts: list[np.ndarray],
    layout: KeyLayout,
    composite: Composite,
    mesh: Mesh,
    devices: Devices,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns the columns and the index as global arrays, `[D, C]`."""
    width = -(-layout.size // devices.count)
    index_dtype = np.int64 if layout.size - 1 > _MAX_INT32 else np.int32
    dtypes = [column.dtype for column in layout.columns]
    rows: list[list[np.ndarray]] = []
    for part in parts:
        columns = [np.zeros((1, width), dtype) for dtype in dtypes]
        index = np.full((1, width), -1, index_dtype)
        filled = [x[0, : len(part)] for x in (*columns, index)]
        composite.decode_into(part, filled[:-1], filled[-1])
        rows.append([*columns, index])
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    # Without x64, jax would truncate 64-bit arrays to 32 bits.
    with jax.enable_x64(True):
        *columns, index = (devices.put(x, sharding) for x in zip(*rows, strict=True))
    return tuple(columns), index


def _rows(array: jax.Array) -> dict[int, np.ndarray]:
    """Returns the local rows of a `[D, C]` array by their index."""
    rows = (
        (shard.index[0].indices(len(array))[0], np.asarray(shard.data)[0])
        for shard in array.addressable_shards
    )
    return dict(sorted(rows))


def _on_each(function: Callable[..., _R], *values: Sequence[Any]) -> list[_R]:
    """Calls a function for each local device in threads; numpy releases the GIL."""
    if len(values[0]) == 1:
        return [function(*(value[0] for value in values))]
    with ThreadPoolExecutor(min(len(values[0]), os.cpu_count() or 1)) as pool:
        return list(pool.map(function, *values))
