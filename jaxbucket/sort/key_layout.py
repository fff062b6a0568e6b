"""Where all keys are: the processes agree on it before they sort."""

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
# Places in a message of int64.
_PROCESS, _FIRST, _SIZE, _DIGEST, _RANGES = range(5)
_IMPLIED = -1
_REFUSED = -1


@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """The keys of this process, and sizes and ranges of all.

    Attributes:
      columns: dtype and direction of each column.
      parts: for each local device its columns, each `[n]`.
      first: `[local devices]` the index of the first key of each part.
      ranges: `[columns, 2]` uint64, the least and the greatest encoded key of all.
      sizes: `[D]` int64, the number of keys of each device.
    """

    columns: tuple[Column, ...]
    parts: list[tuple[np.ndarray, ...]]
    first: list[int]
    ranges: np.ndarray
    sizes: np.ndarray

    @property
    def size(self) -> int:
        """The number of keys."""
        return int(self.sizes.sum())


def gather_layout(
    keys: Keys | tuple[Keys, ...],
    descending: bool | Sequence[bool],
    assignment: str,
    devices: Devices,
) -> KeyLayout:
    """Returns the layout, or raises in every process if one of them is refused.

    Args:
      keys: this process's argument of `sample_sort`.
      descending: likewise.
      assignment: likewise.
      devices: of all processes, which all call this.

    Raises:
      ValueError: in every process, if the keys of one are refused or of other dtypes
        than those of another, or if there are none at all.
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
    # Whatever it is, the others wait.
    except Exception:
        devices.gather([_message(_IMPLIED, _REFUSED, "")] * len(devices.local))
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
    # Of one length even if processes do not agree on the number of columns.
    fixed = np.zeros((MAX_COLUMNS, 2), np.uint64)
    if ranges is not None:
        fixed[: len(ranges)] = ranges
    return np.concatenate([np.array(head, np.int64), fixed.view(np.int64).reshape(-1)])


def _check_agreement(gathered: np.ndarray, description: str) -> None:
    """Raises unless all take part and give the same kind of keys."""
    here = jax.process_index()
    processes, sizes, digests = (gathered[:, i] for i in (_PROCESS, _SIZE, _DIGEST))
    refused = processes[sizes == _REFUSED]
    if len(refused):
        raise ValueError(
            f"The `keys` of process {_listed(refused)} are refused: see what it raises."
        )
    others = processes[digests != digests[processes == here][0]]
    if len(others):
        raise ValueError(
            f"`keys` of process {here} are {description}; process {_listed(others)} "
            "has others. Call `sample_sort` alike in all of them."
        )
    if not sizes.any():
        raise ValueError("`keys` is empty in every process: there is nothing to sort.")


def _listed(processes: np.ndarray) -> str:
    return ", ".join(map(str, np.unique(processes)))


def _starts(processes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Where each device's part begins, `[D]`: parts are in the order of processes."""
    order = np.argsort(processes, kind="stable")
    starts = np.empty_like(sizes)
    starts[order] = np.cumsum(sizes[order]) - sizes[order]
    return starts
