"""The layout of all keys, which the processes exchange before they sort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_choice
from jaxbucket.base.digest import digest
from jaxbucket.sort.collectives import Devices
from jaxbucket.sort.keys import Column, Composite

Keys: TypeAlias = "ArrayLike | tuple[ArrayLike, ...]"

_INVALID = -1


def gather_layout(
    keys: Keys, descending: bool | Sequence[bool], assignment: str, devices: Devices
) -> tuple[Composite, list[tuple[np.ndarray, ...]], list[int], np.ndarray]:
    """Checks the arguments of `sample_sort` and returns the layout of the keys.

    All processes must call this.

    Returns:
      The layout of composite keys; the columns of each local device, `[n]` each; the
      index of the first key of each local device; and `[D]` int64, the number of keys
      of each device.
    """
    try:
        check_choice("assignment", assignment, ("contiguous", "interleaved"))
        arrays = _arrays(keys)
        columns = _columns(arrays, descending)
    # Any error must reach the other processes, because they wait for this one.
    except Exception:
        devices.gather([_message(_INVALID, "")] * len(devices.local))
        raise
    split = [np.array_split(array, len(devices.local)) for array in arrays]
    parts = list(zip(*split, strict=True))
    description = f"{', '.join(map(str, columns))}, {assignment}"
    gathered = devices.gather([_message(len(x[0]), description) for x in parts])
    processes, sizes, digests = gathered.T
    _check_agreement(processes, sizes, digests, description)
    ranges = devices.gather([_ranges(columns, part) for part in parts])
    ends = np.stack([ranges[..., 0].min(axis=0), ranges[..., 1].max(axis=0)], axis=1)
    # The keys of process 0 come first.
    order = np.argsort(processes, kind="stable")
    starts = np.empty_like(sizes)
    starts[order] = np.cumsum(sizes[order]) - sizes[order]
    composite = Composite(columns, ends, int(sizes.sum()))
    return composite, parts, starts[devices.local].tolist(), sizes


def _message(size: int, description: str) -> np.ndarray:
    number = int(digest(description.encode())[:15], 16)
    return np.array([jax.process_index(), size, number], np.int64)


def _check_agreement(
    processes: np.ndarray, sizes: np.ndarray, digests: np.ndarray, description: str
) -> None:
    """Raises a ValueError unless all processes have valid keys of the same kind."""
    invalid = processes[sizes == _INVALID]
    if len(invalid):
        raise ValueError(
            f"The `keys` of process {invalid[0]} are invalid. See its error."
        )
    if len(set(digests.tolist())) > 1:
        raise ValueError(
            f"`keys` of this process ({description}) are of a different kind than "
            "those of another one. Call `sample_sort` with the same dtypes and options "
            "in all processes."
        )
    if not sizes.any():
        raise ValueError("`keys` is empty in every process. Pass at least one key.")


def _arrays(keys: Keys) -> list[np.ndarray]:
    """Returns the columns of this process, in the byte order of the machine."""
    columns = keys if isinstance(keys, tuple) else (keys,)
    arrays = [np.asarray(column) for column in columns]
    for x in arrays:
        if x.ndim != 1 or x.dtype.kind not in "biuf" or x.dtype.itemsize > 8:
            raise ValueError(
                f"`keys` is {x.dtype}{list(x.shape)}. Pass an array [n] of integers, "
                "floats or bools of at most 64 bits, or a tuple of such arrays for "
                "several columns."
            )
    if len({len(x) for x in arrays}) != 1:
        raise ValueError(
            f"`keys` has columns of the lengths {[len(x) for x in arrays]}. Pass at "
            "least one column, all of the same length."
        )
    return [x.astype(x.dtype.newbyteorder("="), copy=False) for x in arrays]


def _columns(
    arrays: Sequence[np.ndarray], descending: bool | Sequence[bool]
) -> tuple[Column, ...]:
    flags = np.asarray(descending)
    if flags.dtype != bool or flags.shape not in ((), (len(arrays),)):
        raise ValueError(
            f"`descending={descending!r}` is not a bool. Pass True or False, or a list "
            f"with a bool for each column, here {len(arrays)}."
        )
    flags = np.broadcast_to(flags, len(arrays)).tolist()
    return tuple(Column(x.dtype, flag) for x, flag in zip(arrays, flags, strict=True))


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
