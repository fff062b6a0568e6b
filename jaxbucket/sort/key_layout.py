"""The layout of all keys, which the processes exchange before they sort."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from jaxbucket.base.checks import check_choice
from jaxbucket.sort.collectives import Devices
from jaxbucket.sort.composite import Column
from jaxbucket.sort.local_keys import MAX_COLUMNS, Keys, LocalKeys

ASSIGNMENTS = ("contiguous", "interleaved")
# Positions in a message of int64.
_PROCESS, _FIRST, _SIZE, _DIGEST, _RANGES = range(5)
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
    parts: list[tuple[np.ndarray, ...]]
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
        check_choice("assignment", assignment, ASSIGNMENTS)
        local = LocalKeys.check(keys, descending, devices)
        description = f"{local}, {assignment}"
        firsts = local.first or [_IMPLIED] * len(local.parts)
        messages = [
            _message(first, len(part[0]), description, local.ranges(part))
            for first, part in zip(firsts, local.parts, strict=True)
        ]
    # Any error must reach the other processes, because they wait for this one.
    except Exception:
        devices.gather([_message(_IMPLIED, _INVALID, "")] * len(devices.local))
        raise
    gathered = devices.gather(messages)
    _check_agreement(gathered, description)
    sizes = gathered[:, _SIZE]
    ranges = gathered[:, _RANGES:].view(np.uint64).reshape(-1, MAX_COLUMNS, 2)
    ends = np.stack([ranges[..., 0].min(axis=0), ranges[..., 1].max(axis=0)], axis=1)
    return KeyLayout(
        local.columns,
        local.parts,
        local.first or _starts(gathered[:, _PROCESS], sizes)[devices.local].tolist(),
        ends[: len(local.columns)],
        sizes,
    )


def _message(
    first: int, size: int, description: str, ranges: np.ndarray | None = None
) -> np.ndarray:
    digest = hashlib.blake2b(description.encode(), digest_size=8).digest()
    head = [jax.process_index(), first, size, int.from_bytes(digest, signed=True)]
    # The length is fixed, even if processes do not agree on the number of columns.
    fixed = np.zeros((MAX_COLUMNS, 2), np.uint64)
    if ranges is not None:
        fixed[: len(ranges)] = ranges
    return np.concatenate([np.array(head, np.int64), fixed.view(np.int64).reshape(-1)])


def _check_agreement(gathered: np.ndarray, description: str) -> None:
    """Raises a ValueError unless all processes have valid keys of the same kind."""
    here = jax.process_index()
    processes, sizes, digests = (gathered[:, i] for i in (_PROCESS, _SIZE, _DIGEST))
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
