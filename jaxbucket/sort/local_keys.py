"""What a process gives to be sorted, checked and cut for its devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.sort.collectives import Devices
from jaxbucket.sort.composite import Column

Keys: TypeAlias = "ArrayLike | jax.Array"

MAX_COLUMNS = 8


@dataclasses.dataclass(frozen=True)
class Given:
    """The keys of this process.

    Attributes:
      columns: what is known of each column.
      parts: for each local device its columns, each `[n]`.
      first: `[local devices]` the index of the first key of each part; None where it
        follows from the sizes of all parts.
    """

    columns: tuple[Column, ...]
    parts: list[tuple[np.ndarray, ...]]
    first: list[int] | None

    def __str__(self) -> str:
        kind = "of each process" if self.first is None else "of a global array"
        return f"{kind}, {', '.join(map(str, self.columns))}"

    @classmethod
    def of(
        cls,
        keys: Keys | tuple[Keys, ...],
        descending: bool | Sequence[bool],
        devices: Devices,
    ) -> Given:
        """Checks what `sample_sort` is given.

        Raises:
          ValueError: if these are no keys.
        """
        given = keys if isinstance(keys, tuple) else (keys,)
        if not 1 <= len(given) <= MAX_COLUMNS:
            raise ValueError(
                f"`keys` is a tuple of {len(given)} columns: give 1 to {MAX_COLUMNS}."
            )
        descending = _flags(descending, len(given))
        shared = [x for x in given if isinstance(x, jax.Array) and _is_cut(x)]
        if not shared:
            first, parts = None, _cut([_checked(x) for x in given], len(devices.local))
        elif len(shared) == len(given):
            first, parts = _held(shared, devices)
        else:
            raise ValueError(
                "`keys` has columns that are global arrays and others of this process "
                "alone: give all of them in one way."
            )
        dtypes = [keys.dtype for keys in parts[0]]
        return cls(tuple(map(Column, dtypes, descending)), parts, first)

    def ranges(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        """Returns the least and the greatest encoded key of each column of a part.

        Returns:
          `[columns, 2]` uint64; of no keys, what changes neither of others.
        """
        pairs = zip(self.columns, part, strict=True)
        return np.array([_range(column, keys) for column, keys in pairs], np.uint64)


def _flags(descending: bool | Sequence[bool], num_columns: int) -> list[bool]:
    if isinstance(descending, (bool, np.bool_)):
        return [bool(descending)] * num_columns
    is_list = isinstance(descending, (list, tuple))
    if not is_list or not all(isinstance(x, (bool, np.bool_)) for x in descending):
        raise ValueError(
            f"`descending={descending!r}`: give True or False, or one for each column."
        )
    if len(descending) != num_columns:
        raise ValueError(
            f"`descending={descending!r}` has {len(descending)} entries for "
            f"{num_columns} columns: give one for each, or one for all."
        )
    return [bool(flag) for flag in descending]


def _is_cut(keys: jax.Array) -> bool:
    """Whether it is one array of all processes, and not what this one has."""
    several = len(keys.sharding.device_set) > 1
    return several if jax.process_count() == 1 else not keys.is_fully_addressable


def _checked(keys: Any) -> np.ndarray:
    """It as an array of numbers, `[n]`."""
    if isinstance(keys, np.ma.MaskedArray):
        raise ValueError(
            "`keys` is a masked array: fill in what is masked, or leave it out."
        )
    try:
        column = np.asarray(keys)
    except ValueError:
        raise ValueError("`keys` is ragged: give one number for each, [n].") from None
    if isinstance(keys, list) and column.dtype.kind == "f" and _has_large(keys):
        raise ValueError(
            "`keys` has integers that no dtype of numpy holds together: it would make "
            "floats of them. Give an array."
        )
    if not hasattr(keys, "dtype") and column.size == 0:
        raise ValueError(
            "`keys` is an empty list, which has no dtype: give an empty array of the "
            "dtype that the other processes give."
        )
    if column.ndim != 1 or column.dtype.kind not in "biuf" or column.itemsize > 8:
        raise ValueError(
            f"`keys` is {column.dtype}{list(column.shape)}: give integers, floats or "
            "bools that numpy knows, of at most 64 bits, [n]; several columns as a "
            "tuple of these."
        )
    return column.astype(column.dtype.newbyteorder("="), copy=False)


def _has_large(keys: list[Any]) -> bool:
    return any(isinstance(key, int) and abs(key) > 2**53 for key in keys)


def _cut(columns: list[np.ndarray], num_parts: int) -> list[tuple[np.ndarray, ...]]:
    """The share of a process, cut evenly for its devices."""
    sizes = {len(column) for column in columns}
    if len(sizes) > 1:
        raise ValueError(
            f"`keys` has columns of {sorted(sizes)} rows: give each as many."
        )
    ends = [len(columns[0]) * i // num_parts for i in range(num_parts + 1)]
    spans = zip(ends[:-1], ends[1:], strict=True)
    return [tuple(column[a:b] for column in columns) for a, b in spans]


def _held(
    columns: list[jax.Array], devices: Devices
) -> tuple[list[int], list[tuple[np.ndarray, ...]]]:
    """What each local device holds of global arrays, where that begins; of copies one.

    A device that holds none has an empty part.
    """
    for keys in columns:
        _checked(np.empty((0,) * keys.ndim, keys.dtype))
        if not keys.sharding.device_set <= set(devices.devices):
            raise ValueError(
                "`keys` is on devices that the mesh lacks: give the mesh over which it "
                "is cut, or numpy arrays."
            )
        if keys.shape != columns[0].shape or not keys.sharding.is_equivalent_to(
            columns[0].sharding, 1
        ):
            raise ValueError(
                "`keys` has columns of different lengths or shardings: give all alike."
            )
    held = [
        {x.device: x for x in keys.addressable_shards if x.replica_id == 0}
        for keys in columns
    ]
    first, parts = [], []
    for i in devices.local:
        shard = held[0].get(devices.devices[i])
        first.append(shard.index[0].indices(len(columns[0]))[0] if shard else 0)
        parts.append(
            tuple(np.asarray(x[shard.device].data) for x in held)
            if shard
            else tuple(np.empty(0, keys.dtype) for keys in columns)
        )
    return first, parts


def _range(column: Column, keys: np.ndarray) -> tuple[int, int]:
    if not len(keys):
        return 2**64 - 1, 0
    # numpy warns of some NaNs.
    with np.errstate(invalid="ignore"):
        least, greatest = keys.min(), keys.max()
    ends = [least, greatest]
    if least != least:
        # A NaN hides all others, and comes last whatever they are.
        some = keys[~np.isnan(keys)]
        ends = [least, some.min(), some.max()] if len(some) else [least]
    encoded = column.encode(np.array(ends, column.dtype)).tolist()
    return min(encoded), max(encoded)
