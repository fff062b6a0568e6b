"""Whose keys are where: what the processes tell one another before they sort."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from jaxbucket.sort.collectives import Devices
from jaxbucket.sort.composite import Column
from jaxbucket.sort.local_keys import MAX_COLUMNS, Given, Keys

ASSIGNMENTS = ("contiguous", "interleaved")
# What stands where in a message of int64.
_PROCESS, _FIRST, _SIZE, _DIGEST, _RANGES = range(5)
_FOLLOWS = -1
_REFUSED = -1


@dataclasses.dataclass(frozen=True)
class Shares:
    """The keys of this process, and what is known of all.

    Attributes:
      columns: what is known of each column.
      parts: for each local device its columns, each `[n]`.
      first: `[local devices]` the index of the first key of each part.
      ranges: `[columns, 2]` uint64, the least and the greatest encoded key of all.
      sizes: `[D]` int64, how many keys each device has.
    """

    columns: tuple[Column, ...]
    parts: list[tuple[np.ndarray, ...]]
    first: list[int]
    ranges: np.ndarray
    sizes: np.ndarray

    @property
    def size(self) -> int:
        """How many keys there are."""
        return int(self.sizes.sum())


def gather_shares(
    keys: Keys | tuple[Keys, ...],
    descending: bool | Sequence[bool],
    assignment: str,
    devices: Devices,
) -> Shares:
    """Returns the shares, or raises in every process if one of them is refused.

    Args:
      keys: what this process gives to `sample_sort`.
      descending: likewise.
      assignment: likewise.
      devices: of all processes, which all call this.

    Raises:
      ValueError: in every process, if the keys of one are refused or of other dtypes
        than those of another, or if there are none at all.
    """
    try:
        if assignment not in ASSIGNMENTS:
            raise ValueError(
                f"`assignment={assignment!r}`: choose 'contiguous' or 'interleaved'."
            )
        given = Given.of(keys, descending, devices)
        description = f"{given}, {assignment}"
        firsts = given.first or [_FOLLOWS] * len(given.parts)
        messages = [
            _message(first, len(part[0]), description, given.ranges(part))
            for first, part in zip(firsts, given.parts, strict=True)
        ]
    # Whatever it is, the others wait.
    except Exception:
        devices.gather([_message(_FOLLOWS, _REFUSED, "")] * len(devices.local))
        raise
    told = devices.gather(messages)
    _check(told, description)
    sizes = told[:, _SIZE]
    ranges = told[:, _RANGES:].view(np.uint64).reshape(-1, MAX_COLUMNS, 2)
    ends = np.stack([ranges[..., 0].min(axis=0), ranges[..., 1].max(axis=0)], axis=1)
    return Shares(
        given.columns,
        given.parts,
        given.first or _starts(told[:, _PROCESS], sizes)[devices.local].tolist(),
        ends[: len(given.columns)],
        sizes,
    )


def _message(
    first: int, size: int, description: str, ranges: np.ndarray | None = None
) -> np.ndarray:
    digest = hashlib.blake2b(description.encode(), digest_size=8).digest()
    head = [jax.process_index(), first, size, int.from_bytes(digest, signed=True)]
    # As long whatever the number of columns, about which they may not agree.
    fixed = np.zeros((MAX_COLUMNS, 2), np.uint64)
    if ranges is not None:
        fixed[: len(ranges)] = ranges
    return np.concatenate([np.array(head, np.int64), fixed.view(np.int64).reshape(-1)])


def _check(told: np.ndarray, description: str) -> None:
    """Raises unless all take part and give the same kind of keys."""
    here = jax.process_index()
    refused = np.unique(told[told[:, _SIZE] == _REFUSED, _PROCESS])
    if len(refused):
        raise ValueError(
            f"The `keys` of process {_listed(refused)} are refused: see what it raises."
        )
    own = told[told[:, _PROCESS] == here, _DIGEST][0]
    others = np.unique(told[told[:, _DIGEST] != own, _PROCESS])
    if len(others):
        raise ValueError(
            f"`keys` of process {here} are {description}; process {_listed(others)} "
            "has others. Call `sample_sort` alike in all of them."
        )
    if not told[:, _SIZE].any():
        raise ValueError("`keys` is empty in every process: there is nothing to sort.")


def _listed(processes: np.ndarray) -> str:
    return ", ".join(map(str, processes))


def _starts(processes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Where each device's part begins, `[D]`: shares stand in the processes' order."""
    order = np.argsort(processes, kind="stable")
    starts = np.empty_like(sizes)
    starts[order] = np.cumsum(sizes[order]) - sizes[order]
    return starts
