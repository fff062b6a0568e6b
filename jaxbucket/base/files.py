"""Files and folders that appear under their name only once they are complete.

Processes of a host share large arrays through such files.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxbucket.base.notes import Noting

_SUFFIX = ".partial"


@contextlib.contextmanager
def complete(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a draft, which replaces `path` at the end of the block.

    If the block fails, the draft is deleted.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.txt"
      >>> with complete(path) as draft:
      ...     _ = draft.write_text("x")
      >>> path.read_text(), len(list(path.parent.iterdir()))
      ('x', 1)

    Args:
      path: a file; or a folder that is missing or empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = new_draft(path)
    try:
        yield draft
        publish(draft, path)
    finally:
        delete(draft)


def new_draft(path: pathlib.Path) -> pathlib.Path:
    """Returns a path beside `path` that no other call returns, in any process."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}{_SUFFIX}")


def publish(draft: pathlib.Path, path: pathlib.Path) -> None:
    """Renames a complete draft, and makes this durable."""
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def sync(path: pathlib.Path) -> None:
    """Flushes a file, or the names in a folder, to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError:
        # Not every file system can flush a folder.
        if not path.is_dir():
            raise
    finally:
        os.close(file)


def delete(path: pathlib.Path) -> None:
    """Deletes a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def drafts(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the drafts of `path` that unfinished calls have left."""
    pattern = f"{glob.escape(path.name)}.{'[0-9a-f]' * 32}{_SUFFIX}"
    return list(path.parent.glob(pattern))


def shared_array(
    path: pathlib.Path | None,
    size: int,
    dtype: DTypeLike,
    fill: Callable[[np.ndarray], None],
) -> np.ndarray:
    """Returns an array in a file, which all processes of a host map.

    One of the processes that call this at the same time writes the file, if it is
    missing, and the others wait for it. If it cannot be written, each process has an
    array of its own, after a warning.

    Args:
      path: the file, whose name identifies the values; None for an array in memory.
      size: the number of elements.
      dtype: the dtype of the elements.
      fill: writes all elements of `[size]`.
    """
    if path is not None:
        try:
            # A folder may be read-only once the file is there.
            if not path.exists():
                with _locked(path):
                    if not path.exists():
                        _write_array(path, size, dtype, fill)
        except OSError as error:
            warnings.warn(
                f"`{path}`, an array that processes of a host would share, cannot be "
                f"written: {error}. Each process has a copy of its own.",
                stacklevel=2,
            )
        else:
            with Noting(f"This is {path}. Delete it, so that it is written again."):
                values = SharedArray.open(path)
                if values.shape != (size,) or values.dtype != dtype:
                    raise ValueError(
                        f"`{path}` has {values.dtype} of shape {values.shape}, not "
                        f"{np.dtype(dtype)} of shape {(size,)}."
                    )
                return values
    values = np.empty(size, dtype)
    fill(values)
    return values


class SharedArray(np.ndarray):
    """A mapped file. It is pickled as the name of the file, as for a loader's worker.

    Arrays made from it, such as slices, are pickled as usual.
    """

    path: str | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SharedArray:
        """Returns the array in a `.npy` file."""
        values = np.load(path, mmap_mode="r").view(cls)
        values.path = os.path.abspath(path)
        return values

    def __reduce__(self) -> Any:
        if self.path is None:
            return super().__reduce__()
        return SharedArray.open, (self.path,)


def _write_array(
    path: pathlib.Path,
    size: int,
    dtype: DTypeLike,
    fill: Callable[[np.ndarray], None],
) -> None:
    for draft in drafts(path):
        delete(draft)
    with complete(path) as draft:
        values = np.lib.format.open_memmap(draft, "w+", dtype, (size,))
        # Without it, writing to a map on a full disk would kill the process.
        if hasattr(os, "posix_fallocate"):
            with draft.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, draft.stat().st_size)
        fill(values)
        values.flush()


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Lets one process of a host at a time be in the block for `path`."""
    try:
        import fcntl
    except ImportError:
        # Windows, where several processes may write the same values.
        yield
        return
    lock = path.with_name(f"{path.name}.lock")
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # A process that waits for it, or locks a new one, finds the file.
            delete(lock)
