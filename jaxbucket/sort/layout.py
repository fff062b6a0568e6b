"""The layout of all keys, which the processes exchange before they sort."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_choice
from jaxbucket.base.digest import digest
from jaxbucket.sort.collectives import Devices
from jaxbucket.sort.keys import Column

Keys: TypeAlias = "ArrayLike | jax.Array"
# The columns of each local device, each `[n]`.
_Parts: TypeAlias = list[tuple[np.ndarray, ...]]

_IMPLIED = -1
_INVALID = -1


@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """The keys of this process, and the sizes and ranges of all keys.

    Attributes:
      columns: the dtype and direction of each column.
      parts: the columns of each local device, each `[n]`.
      first: `[local devices]`, the index of the first key of each part.
      ranges: `[columns, 2]` uint64, the smallest and the largest encoded key over all
        devices.
      sizes: `[D]` int64, the number of keys of each device.
    """

    columns: tuple[Column, ...]
    parts: _Parts
    first: list[int]
    ranges: np.ndarray
    sizes: np.ndarray

    @property
    def size(self) -> int:
        """The total number of keys."""
        return int(self.sizes.sum())


def gather_layout(
    keys: Keys | tuple[Keys, ...],
    descending: bool | Sequence[bool],
    assignment: str,
    devices: Devices,
) -> KeyLayout:
    """Checks the arguments of `sample_sort` and returns the layout of the keys.

    All processes must call this.

    Args:
      keys: the argument of `sample_sort` in this process.
      descending: the argument of `sample_sort`.
      assignment: the argument of `sample_sort`.
      devices: the devices of all processes.

    Raises:
      ValueError: in every process, if the keys of any process are invalid, the
        arguments differ between processes, or there are no keys.
    """
    try:
        check_choice("assignment", assignment, ("contiguous", "interleaved"))
        first, parts = _local_parts(keys, devices)
        columns = tuple(
            Column(column.dtype, flag)
            for column, flag in zip(
                parts[0], _directions(descending, len(parts[0])), strict=True
            )
        )
    # Any error must reach the other processes, because they wait for this one.
    except Exception:
        devices.gather([_message(_IMPLIED, _INVALID, "")] * len(devices.local))
        raise
    kind = "of each process" if first is None else "of a global array"
    description = f"{kind}, {', '.join(map(str, columns))}, {assignment}"
    gathered = devices.gather(
        [
            _message(start, len(part[0]), description)
            for start, part in zip(first or [_IMPLIED] * len(parts), parts, strict=True)
        ]
    )
    processes, _, sizes, digests = gathered.T
    _check_agreement(processes, sizes, digests, description)
    ranges = devices.gather([_ranges(columns, part) for part in parts])
    ends = np.stack([ranges[..., 0].min(axis=0), ranges[..., 1].max(axis=0)], axis=1)
    first = first or _starts(processes, sizes)[devices.local].tolist()
    return KeyLayout(columns, parts, first, ends, sizes)


def _message(first: int, size: int, description: str) -> np.ndarray:
    number = int(digest(description.encode())[:15], 16)
    return np.array([jax.process_index(), first, size, number], np.int64)


def _check_agreement(
    processes: np.ndarray, sizes: np.ndarray, digests: np.ndarray, description: str
) -> None:
    """Raises a ValueError unless all processes have valid keys of the same kind."""
    here = jax.process_index()
    invalid = processes[sizes == _INVALID]
    if len(invalid):
        raise ValueError(
            f"The `keys` of process {_listed(invalid)} are invalid. See its error."
        )
    others = processes[digests != digests[processes == here][0]]
    if len(others):
        raise ValueError(
            f"The `keys` of process {here} ({description}) are of a different kind "
            f"than those of process {_listed(others)}. Call `sample_sort` with the "
            "same kind of keys and the same options in all processes."
        )
    if not sizes.any():
        raise ValueError("`keys` is empty in every process. Pass at least one key.")


def _listed(processes: np.ndarray) -> str:
    return ", ".join(map(str, np.unique(processes)))


def _starts(processes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns `[D]`, the index of the first key of each device.

    Parts are in the order of processes.
    """
    order = np.argsort(processes, kind="stable")
    starts = np.empty_like(sizes)
    starts[order] = np.cumsum(sizes[order]) - sizes[order]
    return starts


def _directions(descending: bool | Sequence[bool], num_columns: int) -> list[bool]:
    flags = np.asarray(descending)
    if flags.dtype != bool or flags.shape not in ((), (num_columns,)):
        raise ValueError(
            f"`descending={descending!r}` is not a bool. Pass True or False, or a list "
            f"with a bool for each column, here {num_columns}."
        )
    return np.broadcast_to(flags, num_columns).tolist()


def _local_parts(
    keys: Keys | tuple[Keys, ...], devices: Devices
) -> tuple[list[int] | None, _Parts]:
    """Returns the keys of each local device, and the index of the first of each.

    The index is None if it follows from the sizes of all parts.
    """
    arrays = keys if isinstance(keys, tuple) else (keys,)
    if not arrays:
        raise ValueError("`keys` has no columns. Pass at least one.")
    is_global = [isinstance(x, jax.Array) and _is_global(x) for x in arrays]
    if all(is_global):
        return _shards(arrays, devices)  # pyright: ignore
    if any(is_global):
        raise ValueError(
            "`keys` mixes global arrays and columns of this process. Pass columns of "
            "one kind."
        )
    columns = [np.asarray(array) for array in arrays]
    _check_columns(columns)
    # In the byte order of the machine.
    columns = [x.astype(x.dtype.newbyteorder("="), copy=False) for x in columns]
    split = [np.array_split(column, len(devices.local)) for column in columns]
    return None, list(zip(*split, strict=True))


def _is_global(keys: jax.Array) -> bool:
    """Returns whether `keys` is a global array, not the keys of this process alone."""
    if jax.process_count() == 1:
        return len(keys.sharding.device_set) > 1
    return not keys.is_fully_addressable


def _check_columns(columns: Sequence[Any]) -> None:
    for x in columns:
        if x.ndim != 1 or x.dtype.kind not in "biuf" or x.dtype.itemsize > 8:
            raise ValueError(
                f"`keys` is {x.dtype}{list(x.shape)}. Pass an array [n] of integers, "
                "floats or bools of at most 64 bits, or a tuple of such arrays for "
                "several columns."
            )
    sizes = {len(column) for column in columns}
    if len(sizes) > 1:
        raise ValueError(
            f"`keys` has columns of different lengths, {sorted(sizes)}. Pass columns "
            "of the same length."
        )


def _shards(columns: Sequence[jax.Array], devices: Devices) -> tuple[list[int], _Parts]:
    """Returns the first index and the keys of the shard of each local device.

    Only one copy of a replicated shard is used. A device without a shard has an empty
    part.
    """
    _check_columns(columns)
    sharding = columns[0].sharding
    if not all(keys.sharding.is_equivalent_to(sharding, 1) for keys in columns):
        raise ValueError(
            "`keys` has columns of different shardings. Pass columns of the same one."
        )
    if not sharding.device_set <= set(devices.devices):
        raise ValueError(
            "`keys` is on devices that are not in the mesh. Pass the mesh over which "
            "it is sharded, or numpy arrays."
        )
    shards = [
        {x.device: x for x in keys.addressable_shards if x.replica_id == 0}
        for keys in columns
    ]
    first = [0] * len(devices.local)
    parts = [tuple(np.empty(0, keys.dtype) for keys in columns) for _ in first]
    for place, i in enumerate(devices.local):
        device = devices.devices[i]
        if device in shards[0]:
            (rows,) = shards[0][device].index
            first[place] = rows.indices(len(columns[0]))[0]
            parts[place] = tuple(np.asarray(x[device].data) for x in shards)
    return first, parts


def _ranges(columns: Sequence[Column], part: tuple[np.ndarray, ...]) -> np.ndarray:
    """Returns the smallest and the largest encoded key of each column of a part.

    Returns:
      `[columns, 2]` uint64. For an empty part, the neutral elements of min and max.
    """
    ranges = np.array([[2**64 - 1, 0]] * len(columns), np.uint64)
    for row, column, keys in zip(ranges, columns, part, strict=True):
        if not len(keys):
            continue
        # fmin and fmax ignore NaN, and the maximum is NaN if there is one. numpy warns
        # about some NaNs.
        with np.errstate(invalid="ignore"):
            ends = [np.fmin.reduce(keys), np.fmax.reduce(keys), keys.max()]
        encoded = column.encode(np.array(ends, column.dtype))
        row[:] = encoded.min(), encoded.max()
    return ranges
