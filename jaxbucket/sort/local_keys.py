"""The keys of this process, checked and cut for its devices."""

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
class LocalKeys:
    """The keys of this process.

    Attributes:
      columns: dtype and direction of each column.
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
    def check(
        cls,
        keys: Keys | tuple[Keys, ...],
        descending: bool | Sequence[bool],
        devices: Devices,
    ) -> LocalKeys:
        """Checks the arguments of `sample_sort`.

        Raises:
          ValueError: if they are not keys.
        """
        arrays = keys if isinstance(keys, tuple) else (keys,)
        if not 1 <= len(arrays) <= MAX_COLUMNS:
            raise ValueError(
                f"`keys` is a tuple of {len(arrays)} columns: give 1 to {MAX_COLUMNS}."
            )
        directions = _check_descending(descending, len(arrays))
        is_global = [isinstance(x, jax.Array) and _is_global(x) for x in arrays]
        if all(is_global):
            first, parts = _local_shards(arrays, devices)  # pyright: ignore
        elif not any(is_global):
            first = None
            parts = _cut([_check_column(x) for x in arrays], len(devices.local))
        else:
            raise ValueError(
                "`keys` has columns that are global arrays and others of this process "
                "alone: give all of them in one way."
            )
        dtypes = [column.dtype for column in parts[0]]
        return cls(tuple(map(Column, dtypes, directions)), parts, first)

    def ranges(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        """Returns the least and the greatest encoded key of each column of a part.

        Returns:
          `[columns, 2]` uint64; of no keys, the neutral elements of min and max.
        """
        pairs = zip(self.columns, part, strict=True)
        return np.array([_range(column, keys) for column, keys in pairs], np.uint64)


def _check_descending(
    descending: bool | Sequence[bool], num_columns: int
) -> list[bool]:
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


def _is_global(keys: jax.Array) -> bool:
    """Whether it is one array of all processes, and not the keys of this one."""
    if jax.process_count() == 1:
        return len(keys.sharding.device_set) > 1
    return not keys.is_fully_addressable


def _check_column(keys: Any) -> np.ndarray:
    """The keys as an array of numbers, `[n]`."""
    if isinstance(keys, np.ma.MaskedArray):
        raise ValueError(
            "`keys` is a masked array: fill in what is masked, or leave it out."
        )
    try:
        column = np.asarray(keys)
    except ValueError:
        raise ValueError("`keys` is ragged: give one number for each, [n].") from None
    if isinstance(keys, list) and column.dtype.kind == "f":
        if any(isinstance(key, int) and abs(key) > 2**53 for key in keys):
            raise ValueError(
                "`keys` has integers that no dtype of numpy holds together: it would "
                "make floats of them. Give an array."
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


def _cut(columns: list[np.ndarray], num_parts: int) -> list[tuple[np.ndarray, ...]]:
    """The keys of this process, cut evenly for its devices."""
    sizes = {len(column) for column in columns}
    if len(sizes) > 1:
        raise ValueError(
            f"`keys` has columns of {sorted(sizes)} rows: give each as many."
        )
    split = [np.array_split(column, num_parts) for column in columns]
    return list(zip(*split, strict=True))


def _local_shards(
    columns: Sequence[jax.Array], devices: Devices
) -> tuple[list[int], list[tuple[np.ndarray, ...]]]:
    """Where the shard of each local device begins, and its keys; of copies one.

    A device without a shard has an empty part.
    """
    first_column = columns[0]
    for keys in columns:
        _check_column(np.empty((0,) * keys.ndim, keys.dtype))
        if not keys.sharding.device_set <= set(devices.devices):
            raise ValueError(
                "`keys` is on devices that the mesh lacks: give the mesh over which it "
                "is cut, or numpy arrays."
            )
        if keys.shape != first_column.shape or not keys.sharding.is_equivalent_to(
            first_column.sharding, 1
        ):
            raise ValueError(
                "`keys` has columns of different lengths or shardings: give all alike."
            )
    shards = [
        {x.device: x for x in keys.addressable_shards if x.replica_id == 0}
        for keys in columns
    ]
    first, parts = [], []
    for i in devices.local:
        device = devices.devices[i]
        if device in shards[0]:
            (rows,) = shards[0][device].index
            first.append(rows.indices(len(first_column))[0])
            parts.append(tuple(np.asarray(x[device].data) for x in shards))
        else:
            first.append(0)
            parts.append(tuple(np.empty(0, keys.dtype) for keys in columns))
    return first, parts


def _range(column: Column, keys: np.ndarray) -> tuple[int, int]:
    if not len(keys):
        return 2**64 - 1, 0
    # numpy warns of some NaNs. The last is NaN if there is one.
    with np.errstate(invalid="ignore"):
        ends = [np.fmin.reduce(keys), np.fmax.reduce(keys), keys.max()]
    encoded = column.encode(np.array(ends, column.dtype))
    return int(encoded.min()), int(encoded.max())
