"""An index of difficulty, written by all processes at once."""

from __future__ import annotations

import contextlib
import dataclasses
import io
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
from jaxbucket.base.peers import ProcessGroup, SingleProcess
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
from jaxbucket.sort import SortedShare, sample_sort

_MAX_INT64 = 2**63 - 1
_PARTIAL = ".partial"
_SECONDS_TO_SHOW = 30.0
_SECONDS_BETWEEN_LOOKS = 0.1
_LOOKS = 3


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
    first, and writes its own part of every file. The folder has its name only once all
    is in it: one that was not ended is not read, and is written anew by the next call.
    An index of the same difficulties that is there already is returned as it is.

    Example:
      >>> import tempfile
      >>> from jaxbucket import data_mesh
      >>> folder = tempfile.mkdtemp() + "/index"
      >>> index = write_difficulty_index(folder, [0.3, 0.1, 0.2, 0.1], data_mesh())
      >>> index.examples.tolist(), index.percentiles(0, 50).tolist()
      ([1, 3, 2, 0], [1, 3])

    Args:
      folder: where; all processes share it.
      difficulty: `[n]` finite numbers: of `measure_difficulty`, lengths, a model's
        losses, human scores.
      mesh: of devices of all processes, which sort together.
      processes: all of them, where there are several.
      sorted_by: "all"; or "process", where each sorts its own share, and the easiest of
        each come first, then the second of each, and so on. That is no faster here, and
        an order that another number of processes does not have, and that is less by
        difficulty the fewer examples a process has: it is for comparing with runs whose
        processes have sorted for themselves.
      num_examples: how many the source has, so that shares which are something else
        are refused: `measure_lengths` gives every process all lengths, of which it has
        to pass its part.

    Raises:
      ValueError: in every process, if difficulties are refused, or the folder is one of
        other difficulties or no folder that all of them share.
    """
    group = processes or SingleProcess()
    if jax.process_count() != group.count:
        raise ValueError(
            f"`processes` has {group.count} of {jax.process_count()}: pass what "
            "`Processes` returned."
        )
    path = pathlib.Path(folder).resolve()
    share = _share_among(path, difficulty, mesh, sorted_by, group)
    if num_examples is not None and share.size != num_examples:
        raise ValueError(
            f"`difficulty` is of {share.size} examples over all processes, and the "
            f"source has `num_examples={num_examples}`. Give each process its share: "
            "that of `measure_difficulty`, or a part of all lengths."
        )
    if share.is_there:
        return DifficultyIndex(path)
    by_all = sorted_by == "all"
    keys = share.difficulty if by_all else _local_ranks(share.difficulty)
    found = sample_sort(keys, mesh)
    # Of this call alone: one that is over may still have a process that writes.
    partial = path.with_name(f"{path.name}.{share.token}{_PARTIAL}")
    try:
        _write(partial, path, share, found.local_shares(), group)
    except Exception:
        # All of them have failed. Another run may have been faster, with the same.
        if group.index == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if not _all_see(path, share.words, group):
            raise
    _wait_for(path)
    return DifficultyIndex(path)


def _write(
    partial: pathlib.Path,
    folder: pathlib.Path,
    share: _Share,
    found: list[SortedShare],
    group: ProcessGroup,
) -> None:
    """Writes the part of this process; process 0 begins the folder and names it."""
    size, dtype = share.size, index_dtype(share.size)
    with _together(group, "index begun"):
        if group.index == 0:
            partial.mkdir(parents=True)
            _begin(partial / DIFFICULTY, share.difficulty.dtype, size)
            _begin(partial / EXAMPLES, dtype, size)
    with _together(group, "index written"):
        _write_part(partial / DIFFICULTY, share.difficulty, share.first, size)
        for own in found:
            examples = own.index.astype(dtype)
            _write_part(partial / EXAMPLES, examples, own.ranks.start, size)
    with _together(group, "index named"):
        if group.index == 0:
            _name(partial, folder, share.words)


@dataclasses.dataclass(frozen=True)
class _Share:
    """What a process has, and what is known of all.

    Attributes:
      difficulty: `[n]` of this process.
      first: the example that its first one is of.
      words: what is said of the index.
      token: a word of this call, the same in all processes.
      is_there: whether all processes see the index in the folder.
    """

    difficulty: np.ndarray
    first: int
    words: Words
    token: str
    is_there: bool

    @property
    def size(self) -> int:
        """How many examples there are."""
        return self.words.size


def _share_among(
    folder: pathlib.Path,
    given: ArrayLike,
    mesh: Mesh,
    sorted_by: SortedBy,
    group: ProcessGroup,
) -> _Share:
    """Checks what all processes give, and what they find."""
    difficulty = np.empty(0)
    with _together(group, "difficulty checked"):
        check_choice("sorted_by", sorted_by, get_args(SortedBy))
        missing = set(range(group.count)) - {x.process_index for x in mesh.devices.flat}
        if missing:
            raise ValueError(
                f"`mesh` has no device of processes {sorted(missing)}: build it from "
                "`jax.devices()`, those of all processes."
            )
        difficulty = _checked(given)
    ids = [device.id for device in mesh.devices.flat]
    own = f"{len(difficulty)} {difficulty.dtype.str} {sorted_by}, devices {ids}"
    told = [text.split(maxsplit=1) for text in group.gather("difficulty", own)]
    if len({how for _, how in told}) > 1:
        raise ValueError(
            f"The processes give difficulties of {[how for _, how in told]}: give all "
            "of one dtype, sort them alike, and over one mesh."
        )
    sizes = [int(size) for size, _ in told]
    first, size = sum(sizes[: group.index]), sum(sizes)
    if not size:
        raise ValueError("`difficulty` is empty: there is no example to sort.")
    own = f"{share_sum(difficulty, first)} {uuid.uuid4().hex}"
    told = [text.split() for text in group.gather("difficulty added up", own)]
    words = Words(
        size,
        difficulty.dtype.str,
        sorted_by,
        sizes if sorted_by == "process" else [],
        difficulty_digest(sum(int(part) for part, _ in told), size),
    )
    is_there = _all_see(folder, words, group)
    return _Share(difficulty, first, words, told[0][1], is_there)


def _all_see(folder: pathlib.Path, words: Words, group: ProcessGroup) -> bool:
    """Whether the folder is this index, for all processes.

    Raises:
      ValueError: if it is something else, or is there for some of them alone.
    """
    for _ in range(_LOOKS):
        found = False
        with _together(group, "folder looked at"):
            found = _is_there(folder, words)
        seen = group.gather("folder seen", str(found))
        if len(set(seen)) == 1:
            return found
        # Another run may have named it just now.
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise ValueError(
        f"`folder={str(folder)!r}` is there for some processes alone: name one that "
        "all of them share."
    )


def _checked(given: ArrayLike) -> np.ndarray:
    """Finite numbers as one of a few dtypes."""
    if isinstance(given, np.ma.MaskedArray):
        raise ValueError(
            "`difficulty` is a masked array: fill in what is masked, or leave it out."
        )
    array = np.asarray(given)
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
    is_small = np.can_cast(array.dtype, np.int32)
    return array.astype("<i4" if is_small else "<i8")


def _is_there(folder: pathlib.Path, words: Words) -> bool:
    """Whether the folder is this index; one that is empty is as good as none.

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
    """The place of each example in this process's own order."""
    ranks = np.empty(len(difficulty), np.int64)
    ranks[np.argsort(difficulty, kind="stable")] = np.arange(len(difficulty))
    return ranks


@contextlib.contextmanager
def _together(group: ProcessGroup, name: str) -> Iterator[None]:
    """What fails in one process is raised in all of them."""
    try:
        yield
    # Whatever it is, the others wait.
    except Exception as error:
        group.gather(name, f"{type(error).__name__}: {error}")
        raise
    for index, failure in enumerate(group.gather(name, "")):
        if failure:
            raise ValueError(f"Process {index} has failed: {failure}")


def _header(dtype: np.dtype, size: int) -> bytes:
    header = io.BytesIO()
    description = {"descr": dtype.str, "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


def _begin(path: pathlib.Path, dtype: np.dtype, size: int) -> None:
    """Makes a file for an array, of which others write their parts."""
    with path.open("xb") as file:
        file.write(_header(dtype, size))
        file.truncate(file.tell() + size * dtype.itemsize)


def _write_part(path: pathlib.Path, values: np.ndarray, first: int, size: int) -> None:
    """Writes values into a file that was begun, from an index on.

    Raises:
      ValueError: if it is not there.
      OSError: if it cannot be written.
    """
    start = len(_header(values.dtype, size)) + first * values.itemsize
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there, though process 0 has begun it: name a folder that "
            "all processes share."
        ) from None
    try:
        content = np.ascontiguousarray(values).view(np.uint8)
        _write_all(file, content.data, start)
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, content: memoryview, offset: int) -> None:
    while len(content):
        count = os.pwrite(file, content, offset)
        content, offset = content[count:], offset + count


def _name(partial: pathlib.Path, folder: pathlib.Path, words: Words) -> None:
    """Gives the folder its name, now that all is in it."""
    with (partial / WORDS).open("w") as file:
        file.write(words.to_json())
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, folder)
    # Not every file system knows of it.
    with contextlib.suppress(OSError):
        _sync(folder.parent)
    # What calls have left that did not come to their end.
    own = re.compile(re.escape(folder.name) + r"\.[0-9a-f]{32}" + re.escape(_PARTIAL))
    for left in folder.parent.iterdir():
        if own.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)


def _sync(folder: pathlib.Path) -> None:
    """Has the names in a folder outlive a machine that goes down."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _wait_for(folder: pathlib.Path) -> None:
    """Until a shared file system shows what process 0 has named."""
    deadline = time.monotonic() + _SECONDS_TO_SHOW
    while not (folder / WORDS).exists() and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
