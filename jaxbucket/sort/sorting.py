"""A sort of (key, global index) over all devices of a mesh."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.sort.accelerator import devices_sort, sort_on_devices
from jaxbucket.sort.collectives import Devices
from jaxbucket.sort.composite import Composite
from jaxbucket.sort.exchange import exchange_runs, is_skewed
from jaxbucket.sort.local_keys import Keys
from jaxbucket.sort.key_layout import Shares, gather_shares
from jaxbucket.sort.splitters import cut_positions

Assignment: TypeAlias = Literal["contiguous", "interleaved"]
_R = TypeVar("_R")

_MAX_INT32 = 2**31 - 1
_MOST_MERGED = 4


@dataclasses.dataclass(frozen=True, eq=False)
class SortedShare:
    """What one device has of the sorted keys, in order.

    Attributes:
      ranks: the places of its keys in the order of all.
      keys: `[n]`, a tuple of these for several columns.
      index: `[n]` where each key was among all.
    """

    ranks: range
    keys: np.ndarray | tuple[np.ndarray, ...]
    index: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class SortedKeys:
    """Keys in order, cut over all D devices of a mesh to within one key.

    Attributes:
      keys: `[D, C]` global array, or a tuple of them for several columns: row d is on
        device d of the mesh. Of dtypes of 64 bits even without jax_enable_x64: look at
        them by numpy then, for what jax makes of them has 32.
      index: `[D, C]` int32, or int64 for 2**31 keys and more: where each key was among
        all. -1 where a row has no key; its `keys` are 0 there.
      size: how many keys there are.
      assignment: "contiguous", if each device has the ranks that follow those of the
        device before, from `d * size // D` on; "interleaved", if device d has d,
        d + D, d + 2 * D, ...
    """

    keys: jax.Array | tuple[jax.Array, ...]
    index: jax.Array
    size: int
    assignment: Assignment

    def ranks(self, device: int) -> range:
        """Returns the places in the order of all of what a row has.

        Raises:
          ValueError: if there is no such row.
        """
        if not 0 <= device < len(self.index):
            raise ValueError(f"`device={device}`: there are {len(self.index)} rows.")
        return _ranks(self.size, len(self.index), self.assignment, device)

    def local_shares(self) -> list[SortedShare]:
        """Returns what the devices of this process have, without empty places."""
        columns = self.keys if isinstance(self.keys, tuple) else (self.keys,)
        rows = [_rows(column) for column in columns]
        shares = []
        for row, index in _rows(self.index).items():
            ranks = self.ranks(row)
            keys = tuple(x[row][: len(ranks)] for x in rows)
            own = keys if isinstance(self.keys, tuple) else keys[0]
            shares.append(SortedShare(ranks, own, index[: len(ranks)]))
        return shares


def sample_sort(
    keys: Keys | tuple[Keys, ...],
    mesh: Mesh,
    *,
    descending: bool | Sequence[bool] = False,
    assignment: Assignment = "contiguous",
) -> SortedKeys:
    """Sorts keys that are spread over processes; equal ones by their global index.

    The result is the same for any number of processes and devices, and every device
    gets its share of it to within one key, however many are equal. All processes have
    to call it.

    This is sorting by regular sampling (Shi and Schaeffer, "Parallel sorting by regular
    sampling", 1992) with samples taken again until the splitters are exact, so that
    nothing has to be balanced afterwards. Whatever the order the keys come in, a device
    needs memory for three times its share, of what it gives or gets, as that is sorted:
    8 bytes for a key and its index, or 16 and more where they do not fit. Chunks that
    are exchanged come on top, of 4 MB each way.

    Example:
      >>> from jaxbucket import data_mesh
      >>> found = sample_sort(np.array([3, 1, 2, 1]), data_mesh())
      >>> [int(rank) for share in found.local_shares() for rank in share.index]
      [1, 3, 2, 0]

    Args:
      keys: `[n]` integers, floats or bools of up to 64 bits: what this process has, the
        global index counting those of process 0 first; or a global array over devices
        of the mesh. A tuple of several is compared from left to right. -0.0 is equal to
        0.0 and comes back as that.
      mesh: all of its devices take part, whatever its axes.
      descending: the largest first, for all columns or for each. NaN comes last either
        way, and keys that are equal by ascending index.
      assignment: which ranks a device gets, see `SortedKeys`.

    Raises:
      ValueError: in every process, if the keys of one of them are refused, or are
        others than those of the rest, or there are none at all.
    """
    devices = Devices(mesh)
    shares = gather_shares(keys, descending, assignment, devices)
    composite = Composite(shares.columns, shares.ranges, shares.size)
    parts = _sorted_shares(shares, composite, devices)
    if assignment == "interleaved" and devices.count > 1:
        ends = np.arange(devices.count + 1) * shares.size // devices.count
        parts, _ = _dealt(parts, ends[:-1], np.diff(ends), devices)
    columns, index = _arrays(parts, shares, composite, mesh, devices)
    found = columns if isinstance(keys, tuple) else columns[0]
    return SortedKeys(found, index, shares.size, assignment)


def _sorted_shares(
    shares: Shares, composite: Composite, devices: Devices
) -> list[np.ndarray]:
    """The composite keys of the ranks of each local device."""
    parts = _on_each(composite.encode, shares.parts, shares.first)
    _sort(parts, shares.sizes, devices)
    if devices.count == 1:
        return parts
    counts = _counts(parts, shares.sizes, devices)
    if is_skewed(counts):
        parts, sizes = _dealt(parts, np.zeros_like(shares.sizes), shares.sizes, devices)
        _sort(parts, sizes, devices, runs=devices.count)
        counts = _counts(parts, sizes, devices)
    received = exchange_runs(parts, counts, devices)
    # What was sent is not needed while the rest is sorted.
    parts.clear()
    _sort(received, counts.sum(axis=0), devices, runs=devices.count)
    return received


def _sort(
    parts: list[np.ndarray], sizes: np.ndarray, devices: Devices, runs: int = 0
) -> None:
    """Sorts parts, of `[D]` sizes; each is so many sorted runs, if that is known."""
    if devices_sort(sizes, parts[0].dtype, devices):
        sort_on_devices(parts, sizes, devices)
        return
    # A few runs are merged; more of them are sorted once more, which is faster: numpy
    # sorts by vector instructions, and merges two at a time.
    kind = "stable" if 0 < runs <= _MOST_MERGED else "quicksort"
    _on_each(lambda part: part.sort(kind=kind), parts)


def _counts(parts: list[np.ndarray], sizes: np.ndarray, devices: Devices) -> np.ndarray:
    """How many keys of each device belong to each, `[D, D]`."""
    size = int(sizes.sum())
    ranks = np.arange(1, devices.count) * size // devices.count
    cuts = cut_positions(parts, sizes, ranks, devices)
    ends = np.concatenate([cuts, sizes[:, None]], axis=1)
    return np.diff(ends, axis=1, prepend=0)


def _dealt(
    parts: list[np.ndarray], firsts: np.ndarray, sizes: np.ndarray, devices: Devices
) -> tuple[list[np.ndarray], np.ndarray]:
    """Sends key j of part i to device (first of i + j) % D; returns parts and sizes."""
    count = devices.count
    offsets = (np.arange(count) - firsts[:, None]) % count
    counts = np.maximum(0, -((offsets - sizes[:, None]) // count))
    dealt = [
        np.concatenate([part[offset::count] for offset in offsets[i]])
        for part, i in zip(parts, devices.local, strict=True)
    ]
    parts.clear()
    return exchange_runs(dealt, counts, devices), counts.sum(axis=0)


def _arrays(
    parts: list[np.ndarray],
    shares: Shares,
    composite: Composite,
    mesh: Mesh,
    devices: Devices,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Columns and index as global arrays, `[D, C]`."""
    width = -(-shares.size // devices.count)
    wide = shares.size - 1 > _MAX_INT32
    dtypes = [column.dtype for column in shares.columns]
    rows: list[list[np.ndarray]] = []
    for part in parts:
        columns = [np.zeros((1, width), dtype) for dtype in dtypes]
        index = np.full((1, width), -1, np.int64 if wide else np.int32)
        filled = [x[0, : len(part)] for x in (*columns, index)]
        composite.decode_into(part, filled[:-1], filled[-1])
        rows.append([*columns, index])
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    # Else what has 64 bits would be cut to 32.
    with jax.enable_x64(True):
        found = [devices.put(x, sharding) for x in zip(*rows, strict=True)]
    return tuple(found[:-1]), found[-1]


def _ranks(size: int, count: int, assignment: Assignment, device: int) -> range:
    if assignment == "interleaved":
        return range(device, size, count)
    return range(device * size // count, (device + 1) * size // count)


def _rows(array: jax.Array) -> dict[int, np.ndarray]:
    """The rows of a `[D, C]` array that are here, by their number."""
    found = {
        shard.index[0].indices(len(array))[0]: np.asarray(shard.data)[0]
        for shard in array.addressable_shards
    }
    return dict(sorted(found.items()))


def _on_each(function: Callable[..., _R], *values: Sequence[Any]) -> list[_R]:
    """Calls it for each local device, in threads: numpy gives up the lock to sort."""
    if len(values[0]) == 1:
        return [function(*(value[0] for value in values))]
    with ThreadPoolExecutor(min(len(values[0]), os.cpu_count() or 1)) as pool:
        return list(pool.map(function, *values))
