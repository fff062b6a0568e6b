"""Lengths in files: written a part at a time, whole all at once, mapped when read."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """A file for the examples from `start` to before `stop`.

    Attributes:
      path: of the file.
      start: the first example.
      stop: the one behind the last.
      missing: what stands for an example that is not measured yet, in the dtype of all:
        0 for lengths, which are positive.
    """

    path: pathlib.Path
    start: int
    stop: int
    missing: np.generic = np.int32(0)

    @contextlib.contextmanager
    def writing(self) -> Iterator[np.ndarray]:
        """Gives an array in a file; it is this one once all is in it.

        Raises:
          ValueError: if the folder cannot be written to.
        """
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            array = _begun(partial, (self.stop - self.start,), self.missing)
        except OSError as error:
            raise ValueError(
                f"`cache={str(self.path.parent)!r}` is no folder that can be written "
                f"to: {error}. Name another one."
            ) from None
        yield array
        array.flush()
        # Another run may have measured the same, in the same file.
        with contextlib.suppress(FileNotFoundError):
            os.replace(partial, self.path)

    def read(self) -> np.ndarray | None:
        """Returns what was written, mapped into memory; None if it is not there.

        Raises:
          ValueError: if the file is cut or foreign.
        """
        if not self.path.exists():
            return None
        found = _mapped(self.path)
        if (
            found.shape != (self.stop - self.start,)
            or found.dtype != self.missing.dtype
        ):
            raise ValueError(
                f"{self.path} is {found.dtype}{list(found.shape)}, and not the "
                f"{self.missing.dtype} of {self.stop - self.start} examples. {_REMEDY}"
            )
        return found


def _begun(
    path: pathlib.Path, shape: tuple[int, ...], missing: np.generic
) -> np.memmap:
    """What is there of a file, or an array of which all is missing."""
    # A header that is damaged fails in many ways.
    with contextlib.suppress(Exception):
        found = np.lib.format.open_memmap(path, "r+")
        if found.shape == shape and found.dtype == missing.dtype:
            return found
    # Whole at once: what is missing is known by its value.
    begun = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        found = np.lib.format.open_memmap(begun, "w+", missing.dtype, shape)
        if hasattr(os, "posix_fallocate"):
            # A disk that is full says so now, and not by a signal in the middle.
            with begun.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, begun.stat().st_size)
        if missing:
            found[:] = missing
            # Else zeros might be there in place of it, once power was lost.
            found.flush()
        os.replace(begun, path)
    finally:
        begun.unlink(missing_ok=True)
    return found


def share_of(size: int, index: int, count: int) -> tuple[int, int]:
    """Returns where the examples of one of so many processes begin and end."""
    return size * index // count, size * (index + 1) // count


class LengthCache:
    """The files of one source in a folder.

    Attributes:
      key: names the source, and how it is measured.
      whole: the file that is read.
    """

    def __init__(self, folder: pathlib.Path, key: str, size: int):
        self.key = key
        self._folder = folder
        self._size = size
        self.whole = folder / f"lengths-{key}.npy"

    def part(self, index: int, count: int) -> Part:
        """Returns the file of one of so many processes."""
        if count == 1:
            return Part(self.whole, 0, self._size)
        name = f"lengths-{self.key}-{index}-of-{count}.npy"
        return Part(self._folder / name, *share_of(self._size, index, count))

    def join(self, count: int) -> None:
        """Makes one file of all parts.

        Raises:
          ValueError: if one is missing, cut or foreign.
        """
        if count == 1:
            return
        parts = [self.part(index, count) for index in range(count)]
        missing = [str(part.path) for part in parts if not part.path.exists()]
        if missing:
            raise ValueError(
                f"{missing} are not there, though all have measured: `cache` must be a "
                "folder that all processes share."
            )
        with Part(self.whole, 0, self._size).writing() as array:
            for part in parts:
                array[part.start : part.stop] = _read(part.path, part.stop - part.start)
        for part in parts:
            part.path.unlink()

    def read(self) -> np.ndarray:
        """Returns the lengths, `[N]` int32, mapped into memory.

        Raises:
          ValueError: if the file is missing, cut or foreign.
        """
        return _read(self.whole, self._size)


_REMEDY = "Delete the file, to measure again."


def _mapped(path: pathlib.Path) -> np.ndarray:
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there, though it was written: `cache` must be a folder "
            "that all processes share."
        ) from None
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}. {_REMEDY}") from None


def _read(path: pathlib.Path, size: int) -> np.ndarray:
    found = _mapped(path)
    if found.shape != (size,) or found.dtype != np.int32 or found.min() < 1:
        raise ValueError(
            f"{path} is {found.dtype}{list(found.shape)}, and not the lengths of "
            f"{size} examples. {_REMEDY}"
        )
    return found
