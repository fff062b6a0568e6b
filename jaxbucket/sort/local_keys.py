"""The keys of this process, checked and split over its devices."""

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
      columns: the dtype and direction of each column.
      parts: the columns of each local device, each `[n]`.
      first: `[local devices]`, the index of the first key of each part; None if it
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
        """Checks the arguments of `sample_sort`, and returns the keys.

        Raises:
          ValueError: if an argument is invalid.
        """
        arrays = keys if isinstance(keys, tuple) else (keys,)
        if not 1 <= len(arrays) <= MAX_COLUMNS:
            raise ValueError(
                f"`keys` has {len(arrays)} columns. Pass a tuple of 1 to {MAX_COLUMNS}."
            )
        directions = _check_descending(descending, len(arrays))
        is_global = [isinstance(x, jax.Array) and _is_global(x) for x in arrays]
        if all(is_global):
            first, parts = _local_shards(arrays, devices)  # pyright: ignore
        elif not any(is_global):
            first = None
            parts = _split([_check_column(x) for x in arrays], len(devices.local))
        else:
            raise ValueError(
                "`keys` mixes global arrays and columns of this process. Pass columns "
                "of one kind."
            )
        dtypes = [column.dtype for column in parts[0]]
        return cls(tuple(map(Column, dtypes, directions)), parts, first)

    def ranges(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        """Returns the smallest and the largest encoded key of each column of a part.

        Returns:
          `[columns, 2]` uint64. For an empty part, the neutral elements of min and max.
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
            f"`descending={descending!r}` is not a bool. Pass True or False, or a list "
            "with a bool for each column."
        )
    if len(descending) != num_columns:
        raise ValueError(
            f"`descending={descending!r}` has {len(descending)} entries for "
            f"{num_columns} columns. Pass one for each column, or one for all."
        )
    return [bool(flag) for flag in descending]


def _is_global(keys: jax.Array) -> bool:
    """Returns whether `keys` is a global array, not the keys of this process alone."""
    if jax.process_count() == 1:
        return len(keys.sharding.device_set) > 1
    return not keys.is_fully_addressable


def _check_column(keys: Any) -> np.ndarray:
    """Returns the keys as an array of numbers, `[n]`.

    Raises:
      ValueError: if they are not numbers that can be sorted.
    """
    if isinstance(keys, np.ma.MaskedArray):
        raise ValueError(
            "`keys` is a masked array. Fill the masked values, or remove them."
        )
    try:
        column = np.asarray(keys)
    except ValueError:
        raise ValueError("`keys` is ragged. Pass one-dimensional columns.") from None
    if isinstance(keys, list) and column.dtype.kind == "f":
        if any(isinstance(key, int) and abs(key) > 2**53 for key in keys):
            raise ValueError(
                "`keys` has integers that do not fit into one integer dtype, so numpy "
                "would convert them to floats. Pass an array."
            )
    if not hasattr(keys, "dtype") and column.size == 0:
        raise ValueError(
            "`keys` is an empty list, which has no dtype. Pass an empty array with the "
            "dtype of the other processes."
        )
    if column.ndim != 1 or column.dtype.kind not in "biuf" or column.itemsize > 8:
        raise ValueError(
            f"`keys` is {column.dtype}{list(column.shape)}. Pass an array [n] of "
            "integers, floats or bools of at most 64 bits, or a tuple of such arrays "
            "for several columns."
        )
    return column.astype(column.dtype.newbyteorder("="), copy=False)


def _split(columns: list[np.ndarray], num_parts: int) -> list[tuple[np.ndarray, ...]]:
    """Splits the columns evenly over the devices of this process.

    Raises:
      ValueError: if the columns have different lengths.
    """
    sizes = {len(column) for column in columns}
    if len(sizes) > 1:
        raise ValueError(
            f"`keys` has columns of different lengths, {sorted(sizes)}. Pass columns "
            "of the same length."
        )
    split = [np.array_split(column, num_parts) for column in columns]
    return list(zip(*split, strict=True))


def _local_shards(
    columns: Sequence[jax.Array], devices: Devices
) -> tuple[list[int], list[tuple[np.ndarray, ...]]]:
    """Returns the first index and the keys of the shard of each local device.

    Only one copy of a replicated shard is used. A device without a shard has an empty
    part.
    """
    first_column = columns[0]
    for keys in columns:
        _check_column(np.empty((0,) * keys.ndim, keys.dtype))
        if not keys.sharding.device_set <= set(devices.devices):
            raise ValueError(
                "`keys` is on devices that are not in the mesh. Pass the mesh over "
                "which it is sharded, or numpy arrays."
            )
        if keys.shape != first_column.shape or not keys.sharding.is_equivalent_to(
            first_column.sharding, 1
        ):
            raise ValueError(
                "`keys` has columns of different lengths or shardings. Pass columns "
                "of the same length and sharding."
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
    # fmin and fmax ignore NaN, and the maximum is NaN if there is one. numpy warns
    # about some NaNs.
    with np.errstate(invalid="ignore"):
        ends = [np.fmin.reduce(keys), np.fmax.reduce(keys), keys.max()]
    encoded = column.encode(np.array(ends, column.dtype))
    return int(encoded.min()), int(encoded.max())
