"""Arrays in files, which all processes of a host map instead of having copies."""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxbucket.base.files import complete, delete, drafts
from jaxbucket.base.notes import Noting


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

    @classmethod
    def of(cls, values: Any) -> SharedArray | None:
        """Returns a memory map as the whole `.npy` file that it is; None otherwise.

        A part of a map, or a private copy of it ("c"), is not what the file has.
        """
        if not isinstance(values, np.memmap) or not isinstance(values.base, mmap.mmap):
            return None
        path = values.filename
        if path is None or values.mode == "c" or not os.path.exists(path):
            return None
        with open(path, "rb") as file:
            if not file.read(16).startswith(np.lib.format.MAGIC_PREFIX):
                return None
        whole = cls.open(path)
        # Others may map other numbers of the same file.
        base: Any = whole.base
        is_same = (values.dtype, values.offset) == (whole.dtype, base.offset)
        return whole if is_same and values.shape == whole.shape else None

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
