"""Writes a difficulty index, in all processes together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import get_args

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_choice
from jaxbucket.base.process_group import ProcessGroup, SingleProcess
from jaxbucket.schedule.difficulty_index import (
    DIFFICULTY,
    EXAMPLES,
    METADATA,
    DifficultyIndex,
    IndexMetadata,
    SortedBy,
    difficulty_digest,
    index_dtype,
    share_checksum,
)
from jaxbucket.sort.sorting import SortedShare, sample_sort

_MAX_INT64 = 2**63 - 1
_PARTIAL = ".partial"
_SECONDS_TO_SHOW = 30.0
_POLL_SECONDS = 0.1
_ATTEMPTS = 3


def write_difficulty_index(
    folder: str | os.PathLike[str],
    difficulty: ArrayLike,
    mesh: Mesh,
    *,
    processes: ProcessGroup | None = None,
    sorted_by: SortedBy = "all",
    num_examples: int | None = None,
) -> DifficultyIndex:
    """Sorts the examples of all processes by difficulty, and writes their index.

    Each process passes the difficulties of its share of the source, process 0 the first
    share, and writes its part of every file. Renaming the folder to its final name is
    the last step, so an unfinished index is never read, and the next call writes a new
    one. An existing index of the same difficulties is returned unchanged.

    Example:
      >>> import tempfile
      >>> from jaxbucket import data_mesh
      >>> folder = tempfile.mkdtemp() + "/index"
      >>> index = write_difficulty_index(folder, [0.3, 0.1, 0.2, 0.1], data_mesh())
      >>> index.examples.tolist(), index.percentiles(0, 50).tolist()
      ([1, 3, 2, 0], [1, 3])

    Args:
      folder: the folder of the index, on a file system that all processes share.
      difficulty: `[n]` finite integers or floats of up to 64 bits, one for each example
        of this process's share: the result of `measure_difficulty`, lengths, losses of
        a model, or human scores.
      mesh: a mesh with devices of all processes, which are used for sorting.
      processes: the `Processes` of the run; None for a single process.
      sorted_by: "all" for one order of all examples. With "process", each process sorts
        its own share. The easiest example of every process comes first, then the second
        of every process, and so on. This is not faster and depends on the number of
        processes, and the fewer examples a process has, the less closely the order
        follows difficulty. Use it only to compare with runs that sorted in this way.
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
    share = _gather_share(difficulty, mesh, sorted_by, group)
    exists = _exists_for_all(path, share.metadata, group)
    if num_examples is not None and share.metadata.size != num_examples:
        raise ValueError(
            f"`difficulty` has {share.metadata.size} examples over all processes, but "
            f"the source has `num_examples={num_examples}`. Pass the share of this "
            "process only: the result of `measure_difficulty`, or its part of all "
            "lengths."
        )
    if exists:
        return DifficultyIndex(path)
    by_all = sorted_by == "all"
    keys = share.difficulty if by_all else _local_ranks(share.difficulty)
    parts = sample_sort(keys, mesh).local_shares()
    # The name is unique, because a process of an earlier call may still be writing.
    partial = path.with_name(f"{path.name}.{share.token}{_PARTIAL}")
    try:
        _write(partial, path, share, parts, group)
    except Exception:
        # All processes have failed, perhaps because another run finished first.
        if group.index == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if not _exists_for_all(path, share.metadata, group):
            raise
    _wait_for(path)
    return DifficultyIndex(path)


@dataclasses.dataclass(frozen=True)
class _Share:
    """The share of examples of this process.

    Attributes:
      difficulty: `[n]`, the difficulties of the share.
      first: the index of the first example of the share.
      metadata: the description of the index of all examples.
      token: a unique string of this call, the same in all processes.
    """

    difficulty: np.ndarray
    first: int
    metadata: IndexMetadata
    token: str


def _gather_share(
    difficulty: ArrayLike, mesh: Mesh, sorted_by: SortedBy, group: ProcessGroup
) -> _Share:
    """Checks the arguments of all processes, and describes the index."""
    local = np.empty(0)
    with _raised_in_all(group, "checking difficulties"):
        check_choice("sorted_by", sorted_by, get_args(SortedBy))
        present = {device.process_index for device in mesh.devices.flat}
        if missing := set(range(group.count)) - present:
            raise ValueError(
                f"`mesh` has no device of processes {sorted(missing)}. Build it from "
                "`jax.devices()`, the devices of all processes."
            )
        local = _check_difficulty(difficulty)
    ids = [device.id for device in mesh.devices.flat]
    message = f"{len(local)} {local.dtype.str} {sorted_by}, devices {ids}"
    replies = group.gather("comparing difficulties", message)
    sizes, kinds = zip(*(text.split(maxsplit=1) for text in replies), strict=True)
    if len(set(kinds)) > 1:
        raise ValueError(
            f"The difficulties of the processes are of different kinds: {list(kinds)}. "
            "Pass the same dtype, `sorted_by` and `mesh` in all processes."
        )
    sizes = list(map(int, sizes))
    first, size = sum(sizes[: group.index]), sum(sizes)
    if not size:
        raise ValueError("`difficulty` is empty. Pass at least one example.")
    message = f"{share_checksum(local, first)} {uuid.uuid4().hex}"
    replies = group.gather("summing difficulties", message)
    sums, tokens = zip(*map(str.split, replies), strict=True)
    metadata = IndexMetadata(
        size,
        local.dtype.str,
        sorted_by,
        sizes if sorted_by == "process" else [],
        difficulty_digest(sum(map(int, sums)), size),
    )
    return _Share(local, first, metadata, tokens[0])


def _check_difficulty(difficulty: ArrayLike) -> np.ndarray:
    """Returns the difficulties in one of the dtypes of an index.

    Raises:
      ValueError: if they are not finite numbers, one for each example.
    """
    if isinstance(difficulty, np.ma.MaskedArray):
        raise ValueError(
            "`difficulty` is a masked array. Fill the masked values, or remove them."
        )
    array = np.asarray(difficulty)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.ndim != 1 or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(
            f"`difficulty` is {array.dtype}{list(array.shape)}. Pass one number for "
            "each example, [n]."
        )
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            bad = int(np.argmin(np.isfinite(array)))
            raise ValueError(
                f"`difficulty[{bad}]={array[bad]}` is not finite. Assign a number to "
                "the example, or remove it."
            )
        return array.astype("<f8" if array.dtype.itemsize == 8 else "<f4")
    if array.dtype == np.uint64 and array.size and array.max() > _MAX_INT64:
        raise ValueError(
            f"`difficulty` has {array.max()}, which is too large. Pass numbers up to "
            "2**63 - 1."
        )
    return array.astype("<i4" if np.can_cast(array.dtype, np.int32) else "<i8")


def _exists_for_all(
    folder: pathlib.Path, metadata: IndexMetadata, group: ProcessGroup
) -> bool:
    """Returns whether the folder holds this index, in all processes.

    Raises:
      ValueError: if the folder holds something else, or only some processes see it.
    """
    for _ in range(_ATTEMPTS):
        exists = False
        with _raised_in_all(group, "checking the folder"):
            exists = _exists(folder, metadata)
        if len(set(group.gather("comparing the folder", str(exists)))) == 1:
            return exists
        # Another run may just have renamed its folder.
        time.sleep(_POLL_SECONDS)
    raise ValueError(
        f"`folder={str(folder)!r}` exists only in some processes. Pass a folder that "
        "all processes share."
    )


def is_free(folder: pathlib.Path) -> bool:
    """Returns whether an index can be written to a folder: it is missing or empty."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def is_index(folder: pathlib.Path) -> bool:
    """Returns whether a folder holds an index."""
    return (folder / METADATA).exists()


def _exists(folder: pathlib.Path, metadata: IndexMetadata) -> bool:
    """Returns whether the folder holds this index; an empty folder does not.

    Raises:
      ValueError: if the folder holds something else.
    """
    if is_free(folder):
        return False
    if not is_index(folder):
        raise ValueError(
            f"`folder={str(folder)!r}` exists but is not an index. Pass a different "
            "folder."
        )
    if DifficultyIndex(folder).metadata != metadata:
        raise ValueError(
            f"`folder={str(folder)!r}` has an index of different difficulties or with "
            "different options. Delete it, or pass a different folder."
        )
    return True


def _local_ranks(difficulty: np.ndarray) -> np.ndarray:
    """Returns the rank of each example among the examples of this process."""
    ranks = np.empty(len(difficulty), np.int64)
    ranks[np.argsort(difficulty, kind="stable")] = np.arange(len(difficulty))
    return ranks


def _write(
    partial: pathlib.Path,
    folder: pathlib.Path,
    share: _Share,
    parts: list[SortedShare],
    group: ProcessGroup,
) -> None:
    """Writes the part of this process; process 0 creates and renames the folder."""
    size, dtype = share.metadata.size, index_dtype(share.metadata.size)
    with _raised_in_all(group, "creating the index"):
        if group.index == 0:
            partial.mkdir(parents=True)
            for name, kind in ((DIFFICULTY, share.metadata.dtype), (EXAMPLES, dtype)):
                np.lib.format.open_memmap(partial / name, "w+", kind, (size,))
    with _raised_in_all(group, "writing the index"):
        _write_part(partial / DIFFICULTY, share.difficulty, share.first)
        for part in parts:
            examples = part.index.astype(dtype)
            _write_part(partial / EXAMPLES, examples, part.ranks.start)
    with _raised_in_all(group, "renaming the index"):
        if group.index == 0:
            _publish(partial, folder, share.metadata)


@contextlib.contextmanager
def _raised_in_all(group: ProcessGroup, name: str) -> Iterator[None]:
    """Raises an error of one process in all processes."""
    try:
        yield
    # Any error must reach the other processes, because they wait for this one.
    except Exception as error:
        group.gather(name, f"{type(error).__name__}: {error}")
        raise
    for index, failure in enumerate(group.gather(name, "")):
        if failure:
            raise ValueError(f"Process {index} failed: {failure}")


def _write_part(path: pathlib.Path, values: np.ndarray, first: int) -> None:
    """Writes values into an array file that process 0 created, starting at an index.

    `np.memmap` is not used, because the parts of two hosts may share a page.

    Raises:
      ValueError: if the file does not exist.
      OSError: if the file cannot be written.
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


def _publish(
    partial: pathlib.Path, folder: pathlib.Path, metadata: IndexMetadata
) -> None:
    """Renames the complete folder to its final name."""
    with (partial / METADATA).open("w") as file:
        file.write(metadata.to_json())
        file.flush()
        os.fsync(file)
    os.rename(partial, folder)
    # Not every file system can sync a folder.
    with contextlib.suppress(OSError):
        _sync(folder.parent)
    # Removes the folders of earlier calls that failed.
    partial_name = re.compile(
        re.escape(folder.name) + r"\.[0-9a-f]{32}" + re.escape(_PARTIAL)
    )
    for path in folder.parent.iterdir():
        if partial_name.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _sync(folder: pathlib.Path) -> None:
    """Flushes the names in a folder to disk, so that they survive a crash."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _wait_for(folder: pathlib.Path) -> None:
    """Waits until a shared file system shows the folder that process 0 renamed."""
    deadline = time.monotonic() + _SECONDS_TO_SHOW
    while not (folder / METADATA).exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
