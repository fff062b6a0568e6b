"""Writes a difficulty index, in all processes together."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jaxbucket.base import files
from jaxbucket.base.process_group import ProcessGroup, SingleProcess
from jaxbucket.schedule.difficulty_index import (
    DIFFICULTY,
    EXAMPLES,
    DifficultyIndex,
    check_difficulties,
    index_dtype,
)
from jaxbucket.sort.sorting import SortedShare, sample_sort

_SECONDS_TO_SHOW = 30.0
_POLL_SECONDS = 0.1
_T = TypeVar("_T")


def write_difficulty_index(
    folder: str | os.PathLike[str],
    difficulty: ArrayLike,
    mesh: Mesh,
    *,
    processes: ProcessGroup | None = None,
    num_examples: int | None = None,
) -> DifficultyIndex:
    """Sorts the examples of all processes by difficulty, and writes their index.

    Each process passes the difficulties of its share of the source, process 0 the first
    share, and writes its part of every file. Renaming the folder to its final name is
    the last step, so an unfinished index is never read, and the next call writes a new
    one. An existing index of the same difficulties is returned unchanged.

    If each process is to have its own order, pass the rank of each example in its share
    as its difficulty, `np.argsort(np.argsort(difficulty, kind="stable"))`: the easiest
    example of every process then comes first, then the second of every process.

    Example:
      >>> import tempfile
      >>> from jaxbucket import data_mesh
      >>> folder = tempfile.mkdtemp() + "/index"
      >>> index = write_difficulty_index(folder, [0.3, 0.1, 0.2, 0.1], data_mesh())
      >>> index.examples.tolist()
      [1, 3, 2, 0]

    Args:
      folder: the folder of the index, on a file system that all processes share.
      difficulty: `[n]` finite integers or floats of up to 64 bits, one for each example
        of this process's share: the result of `measure_difficulty`, lengths, losses of
        a model, or human scores.
      mesh: a mesh with devices of all processes, which are used for sorting.
      processes: the `Processes` of the run; None for a single process.
      num_examples: the number of examples in the source, to detect wrong shares. For
        example, `measure_lengths` returns all lengths in every process, but each
        process must pass only its part.

    Returns:
      The index, whose files are mapped into memory.

    Raises:
      ValueError: in every process, if a difficulty is invalid, the folder has an index
        of different difficulties, or not all processes share the folder.
      OSError: if the index cannot be written.
    """
    group = processes or SingleProcess()
    if jax.process_count() != group.count:
        raise ValueError(
            f"`processes` has {group.count} of {jax.process_count()} processes. Pass "
            "the `Processes` of the run."
        )
    path = pathlib.Path(folder).resolve()
    share = _in_all(group, "checking difficulties", lambda: _as_stored(difficulty))
    kinds = _gather_kinds(share, mesh, group)
    size, first = (
        sum(x["size"] for x in kinds[:n]) for n in (group.count, group.index)
    )
    if not size or size != (num_examples or size):
        raise ValueError(
            f"`difficulty` has {size} examples over all processes, and the source has "
            f"`num_examples={num_examples}`. Pass the share of this process: the "
            "result of `measure_difficulty`, or its part of all lengths."
        )
    exists = _in_all(
        group, "checking the folder", lambda: _exists(path, share, first, size)
    )
    if len(set(group.gather("comparing the folder", str(exists)))) > 1:
        raise ValueError(
            f"`folder={str(path)!r}` exists only in some processes. Pass a folder that "
            "all processes share."
        )
    if not exists:
        parts = sample_sort(share, mesh)
        _write(path, share, first, size, parts, group)
    return DifficultyIndex(path)


def _in_all(group: ProcessGroup, name: str, function: Callable[[], _T]) -> _T:
    """Calls a function in all processes. An error of one is raised in all of them."""
    try:
        result = function()
    # Any error must reach the other processes, because they wait for this one.
    except Exception as error:
        group.gather(name, f"{type(error).__name__}: {error}")
        raise
    for index, failure in enumerate(group.gather(name, "")):
        if failure:
            raise ValueError(f"Process {index} failed: {failure}")
    return result


def _gather_kinds(
    share: np.ndarray, mesh: Mesh, group: ProcessGroup
) -> list[dict[str, Any]]:
    """Returns the size and the dtype of the share of each process."""
    kind = {
        "size": len(share),
        "dtype": share.dtype.str,
        "mesh": [device.id for device in mesh.devices.flat],
        "processes": sorted({x.process_index for x in mesh.devices.flat}),
    }
    texts = group.gather("comparing difficulties", json.dumps(kind))
    kinds = [json.loads(text) for text in texts]
    every = list(range(group.count))
    if (
        any({**x, "size": len(share)} != kind for x in kinds)
        or every != kind["processes"]
    ):
        raise ValueError(
            f"`difficulty` or `mesh` is of a different kind in some process: {kinds}. "
            "Pass the same dtype, and the same mesh of the devices of all processes."
        )
    return kinds


def _as_stored(difficulty: ArrayLike) -> np.ndarray:
    """Returns the difficulties in one of the dtypes of an index."""
    array = np.asarray(difficulty)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    check_difficulties("difficulty", array, "biuf")
    if array.dtype.kind == "f":
        return array.astype("<f8" if array.dtype.itemsize == 8 else "<f4")
    return array.astype("<i4" if np.can_cast(array.dtype, np.int32) else "<i8")


def _exists(folder: pathlib.Path, share: np.ndarray, first: int, size: int) -> bool:
    """Returns whether the folder holds this index; an empty folder does not."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    stored = DifficultyIndex(folder).difficulty
    own = stored[first : first + len(share)]
    if stored.dtype != share.dtype or len(stored) != size or np.any(own != share):
        raise ValueError(
            f"`folder={str(folder)!r}` has an index of different difficulties. Delete "
            "it, or pass a different folder."
        )
    return True


def _write(
    folder: pathlib.Path,
    share: np.ndarray,
    first: int,
    size: int,
    parts: list[SortedShare],
    group: ProcessGroup,
) -> None:
    """Writes the part of this process; process 0 creates and renames the folder."""
    dtype = index_dtype(size)
    (name, *_) = group.gather("naming the index", files.new_draft(folder).name)
    draft = folder.with_name(name)

    def create() -> None:
        if group.index == 0:
            draft.mkdir(parents=True)
            for name, kind in ((DIFFICULTY, share.dtype), (EXAMPLES, dtype)):
                np.lib.format.open_memmap(draft / name, "w+", kind, (size,))

    def write() -> None:
        _write_part(draft / DIFFICULTY, share, first)
        for part in parts:
            _write_part(draft / EXAMPLES, part.index.astype(dtype), part.ranks.start)

    def rename() -> None:
        if group.index == 0:
            files.publish(draft, folder)

    try:
        _in_all(group, "creating the index", create)
        _in_all(group, "writing the index", write)
        _in_all(group, "renaming the index", rename)
    finally:
        if group.index == 0:
            # Those of earlier calls as well, whose processes were killed.
            for unfinished in files.drafts(folder):
                files.delete(unfinished)
    # Waits until a shared file system shows the folder that process 0 renamed.
    deadline = time.monotonic() + _SECONDS_TO_SHOW
    while not folder.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _write_part(path: pathlib.Path, values: np.ndarray, first: int) -> None:
    """Writes values into an array file that process 0 created, starting at an index.

    `np.memmap` is not used, because the parts of two hosts may share a page.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist in this process, but process 0 created it. Pass a "
            "folder that all processes share."
        ) from None
    with file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        file.seek(first * values.itemsize, os.SEEK_CUR)
        file.write(np.ascontiguousarray(values).data)
        file.flush()
        os.fsync(file)
