"""An index of difficulty, written by all processes at once."""

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
    WORDS,
    DifficultyIndex,
    SortedBy,
    Words,
    difficulty_digest,
    index_dtype,
    share_sum,
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

    Each process gives the difficulties of its share of the source, those of process 0
    first, and writes its part of every file. The folder gets its name last: an
    unfinished index is never read, and the next call writes it anew. An existing index
    of the same difficulties is returned as it is.

    Example:
      >>> import tempfile
      >>> from jaxbucket import data_mesh
      >>> folder = tempfile.mkdtemp() + "/index"
      >>> index = write_difficulty_index(folder, [0.3, 0.1, 0.2, 0.1], data_mesh())
      >>> index.examples.tolist(), index.percentiles(0, 50).tolist()
      ([1, 3, 2, 0], [1, 3])

    Args:
      folder: of the index, on a file system that all processes share.
      difficulty: `[n]` finite numbers, integers or floats of up to 64 bits, one for
        each example of this process's share: from `measure_difficulty`, lengths, a
        model's losses, human scores.
      mesh: of devices of all processes, which sort together.
      processes: all of them, as `Processes` returned them; None for one process.
      sorted_by: "all" for one order of all examples. With "process" each process
        sorts its own share; the easiest of each come first, then the second of each,
        and so on. That is not faster, depends on the number of processes, and follows
        difficulty less closely the fewer examples a process has: it is for comparing
        with runs whose processes sorted for themselves.
      num_examples: the size of the source, to refuse shares that are something else:
        `measure_lengths`, for one, gives every process all lengths, of which it must
        pass its part.

    Returns:
      The index, whose files are mapped into memory.

    Raises:
      ValueError: in every process, if difficulties are refused, or the folder has an
        index of other difficulties or is not shared by all processes.
      OSError: if the index cannot be written.
    """
    group = processes or SingleProcess()
    if jax.process_count() != group.count:
        raise ValueError(
            f"`processes` has {group.count} of {jax.process_count()}: pass what "
            "`Processes` returned."
        )
    path = pathlib.Path(folder).resolve()
    share = _gather_share(difficulty, mesh, sorted_by, group)
    exists = _exists_for_all(path, share.words, group)
    if num_examples is not None and share.words.size != num_examples:
        raise ValueError(
            f"`difficulty` is of {share.words.size} examples over all processes, and "
            f"the source has `num_examples={num_examples}`. Give each process its "
            "share: that of `measure_difficulty`, or a part of all lengths."
        )
    if exists:
        return DifficultyIndex(path)
    by_all = sorted_by == "all"
    keys = share.difficulty if by_all else _local_ranks(share.difficulty)
    parts = sample_sort(keys, mesh).local_shares()
    # A name of this call alone: a process of an earlier call may still be writing.
    partial = path.with_name(f"{path.name}.{share.token}{_PARTIAL}")
    try:
        _write(partial, path, share, parts, group)
    except Exception:
        # All of them have failed; perhaps because another run was first.
        if group.index == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if not _exists_for_all(path, share.words, group):
            raise
    _wait_for(path)
    return DifficultyIndex(path)


@dataclasses.dataclass(frozen=True)
class _Share:
    """The examples of this process.

    Attributes:
      difficulty: `[n]`.
      first: the number of its first example.
      words: the description of the index of all examples.
      token: a word of this call, the same in all processes.
    """

    difficulty: np.ndarray
    first: int
    words: Words
    token: str


def _gather_share(
    difficulty: ArrayLike, mesh: Mesh, sorted_by: SortedBy, group: ProcessGroup
) -> _Share:
    """Checks the arguments of all processes, and describes the index of all."""
    local = np.empty(0)
    with _raised_in_all(group, "difficulty checked"):
        check_choice("sorted_by", sorted_by, get_args(SortedBy))
        present = {device.process_index for device in mesh.devices.flat}
        if missing := set(range(group.count)) - present:
            raise ValueError(
                f"`mesh` has no device of processes {sorted(missing)}: build it from "
                "`jax.devices()`, those of all processes."
            )
        local = _check_difficulty(difficulty)
    ids = [device.id for device in mesh.devices.flat]
    message = f"{len(local)} {local.dtype.str} {sorted_by}, devices {ids}"
    replies = group.gather("difficulty", message)
    sizes, kinds = zip(*(text.split(maxsplit=1) for text in replies), strict=True)
    if len(set(kinds)) > 1:
        raise ValueError(
            f"The processes give difficulties of {list(kinds)}: give all of one "
            "dtype, sort them alike, and over one mesh."
        )
    sizes = list(map(int, sizes))
    first, size = sum(sizes[: group.index]), sum(sizes)
    if not size:
        raise ValueError("`difficulty` is empty: there is no example to sort.")
    message = f"{share_sum(local, first)} {uuid.uuid4().hex}"
    replies = group.gather("difficulty added up", message)
    sums, tokens = zip(*map(str.split, replies), strict=True)
    words = Words(
        size,
        local.dtype.str,
        sorted_by,
        sizes if sorted_by == "process" else [],
        difficulty_digest(sum(map(int, sums)), size),
    )
    return _Share(local, first, words, tokens[0])


def _check_difficulty(difficulty: ArrayLike) -> np.ndarray:
    """Finite numbers in one of the dtypes of an index."""
    if isinstance(difficulty, np.ma.MaskedArray):
        raise ValueError(
            "`difficulty` is a masked array: fill in what is masked, or leave it out."
        )
    array = np.asarray(difficulty)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.ndim != 1 or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(
            f"`difficulty` is {array.dtype}{list(array.shape)}: give one number for "
            "each example, [n]."
        )
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            bad = int(np.argmin(np.isfinite(array)))
            raise ValueError(
                f"`difficulty[{bad}]={array[bad]}` is not finite. Give the example a "
                "number, or leave it out."
            )
        return array.astype("<f8" if array.dtype.itemsize == 8 else "<f4")
    if array.dtype == np.uint64 and array.size and array.max() > _MAX_INT64:
        raise ValueError(f"`difficulty` has {array.max()}, which is beyond 2**63 - 1.")
    return array.astype("<i4" if np.can_cast(array.dtype, np.int32) else "<i8")


def _exists_for_all(folder: pathlib.Path, words: Words, group: ProcessGroup) -> bool:
    """Whether the folder is this index, for all processes.

    Raises:
      ValueError: if it is something else, or exists for some of them only.
    """
    for _ in range(_ATTEMPTS):
        exists = False
        with _raised_in_all(group, "folder looked at"):
            exists = _exists(folder, words)
        if len(set(group.gather("folder seen", str(exists)))) == 1:
            return exists
        # Another run may have named it just now.
        time.sleep(_POLL_SECONDS)
    raise ValueError(
        f"`folder={str(folder)!r}` is there for some processes alone: name one that "
        "all of them share."
    )


def _exists(folder: pathlib.Path, words: Words) -> bool:
    """Whether the folder is this index; an empty one counts as missing.

    Raises:
      ValueError: if it is something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / WORDS).exists():
        raise ValueError(
            f"`folder={str(folder)!r}` is there, and is no index: name another one."
        )
    if DifficultyIndex(folder).words != words:
        raise ValueError(
            f"`folder={str(folder)!r}` has an index of other difficulties, or by other "
            "means. Delete it, or name another folder."
        )
    return True


def _local_ranks(difficulty: np.ndarray) -> np.ndarray:
    """The rank of each example among those of this process."""
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
    """Writes this process's part; process 0 creates the files and names the folder."""
    size, dtype = share.words.size, index_dtype(share.words.size)
    with _raised_in_all(group, "index begun"):
        if group.index == 0:
            partial.mkdir(parents=True)
            for name, kind in ((DIFFICULTY, share.words.dtype), (EXAMPLES, dtype)):
                np.lib.format.open_memmap(partial / name, "w+", kind, (size,))
    with _raised_in_all(group, "index written"):
        _write_part(partial / DIFFICULTY, share.difficulty, share.first)
        for part in parts:
            examples = part.index.astype(dtype)
            _write_part(partial / EXAMPLES, examples, part.ranks.start)
    with _raised_in_all(group, "index named"):
        if group.index == 0:
            _publish(partial, folder, share.words)


@contextlib.contextmanager
def _raised_in_all(group: ProcessGroup, name: str) -> Iterator[None]:
    """Raises an error of one process in all of them."""
    try:
        yield
    # Whatever it is, the others wait.
    except Exception as error:
        group.gather(name, f"{type(error).__name__}: {error}")
        raise
    for index, failure in enumerate(group.gather(name, "")):
        if failure:
            raise ValueError(f"Process {index} has failed: {failure}")


def _write_part(path: pathlib.Path, values: np.ndarray, first: int) -> None:
    """Writes values into an array file of process 0, from an index on.

    Not by `np.memmap`: parts of two hosts may share a page.

    Raises:
      ValueError: if it is not there.
      OSError: if it cannot be written.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there, though process 0 has begun it: name a folder that "
            "all processes share."
        ) from None
    with file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        file.seek(first * values.itemsize, os.SEEK_CUR)
        file.write(np.ascontiguousarray(values).data)
        file.flush()
        os.fsync(file)


def _publish(partial: pathlib.Path, folder: pathlib.Path, words: Words) -> None:
    """Gives the complete folder its name."""
    with (partial / WORDS).open("w") as file:
        file.write(words.to_json())
        file.flush()
        os.fsync(file)
    os.rename(partial, folder)
    # Not every file system can sync a folder.
    with contextlib.suppress(OSError):
        _sync(folder.parent)
    # Of earlier calls that did not come to their end.
    partial_name = re.compile(
        re.escape(folder.name) + r"\.[0-9a-f]{32}" + re.escape(_PARTIAL)
    )
    for path in folder.parent.iterdir():
        if partial_name.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _sync(folder: pathlib.Path) -> None:
    """Makes the names in a folder outlive a machine that goes down."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _wait_for(folder: pathlib.Path) -> None:
    """Waits until a shared file system shows the folder that process 0 has named."""
    deadline = time.monotonic() + _SECONDS_TO_SHOW
    while not (folder / WORDS).exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
