"""Measured values in files: written in parts, named once whole, mapped when read."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_REMEDY = "Delete the file, to measure again."


class ArrayFile(NamedTuple):
    """A file of one value for each example from `start` to before `stop`.

    Attributes:
      path: of the file.
      start: the first example.
      stop: the one after the last.
      dtype: int32 for lengths, or float32.
    """

    path: pathlib.Path
    start: int
    stop: int
    dtype: np.dtype = np.dtype(np.int32)

    @contextlib.contextmanager
    def writing(self) -> Iterator[np.ndarray]:
        """Gives a mapped array to fill; the file has its name once that is done.

        The array has what a run that was killed has left of it.

        Raises:
          ValueError: if the folder cannot be written to.
        """
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            array = self._open_partial(partial)
        except OSError as error:
            raise ValueError(
                f"`cache={str(self.path.parent)!r}` is not a folder that can be "
                f"written to: {error}. Name another one."
            ) from None
        yield array
        array.flush()
        # Another run may have measured the same, in the same file.
        with contextlib.suppress(FileNotFoundError):
            os.replace(partial, self.path)

    def _open_partial(self, path: pathlib.Path) -> np.memmap:
        shape = (self.stop - self.start,)
        # A damaged header fails in many ways.
        with contextlib.suppress(Exception):
            array = np.lib.format.open_memmap(path, "r+")
            if array.shape == shape and array.dtype == self.dtype:
                return array
        # Under another name until it is filled with what says that nothing is measured.
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            array = np.lib.format.open_memmap(draft, "w+", self.dtype, shape)
            if hasattr(os, "posix_fallocate"):
                # A full disk is an error here, and would be a signal later.
                with draft.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, draft.stat().st_size)
            if self.dtype.kind == "f":
                array[:] = np.nan
                # Else a loss of power could leave zeros, which are difficulties.
                array.flush()
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return array

    def read(self) -> np.ndarray:
        """Returns the values, mapped into memory.

        Raises:
          ValueError: if the file is missing, cut or foreign.
        """
        try:
            values = np.asarray(np.lib.format.open_memmap(self.path, mode="r"))
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} is missing, though it was written: `cache` must be a "
                "folder that all processes share."
            ) from None
        except Exception as error:
            raise ValueError(
                f"{self.path} cannot be read: {error}. {_REMEDY}"
            ) from None
        size = self.stop - self.start
        if values.shape != (size,) or values.dtype != self.dtype:
            raise ValueError(
                f"{self.path} is {values.dtype}{list(values.shape)}, and not the "
                f"{self.dtype} of {size} examples. {_REMEDY}"
            )
        if not is_measured(values).all():
            raise ValueError(f"{self.path} is not complete. {_REMEDY}")
        return values


def is_measured(values: np.ndarray) -> np.ndarray:
    """Returns which lengths or difficulties are there, `[n]` bool."""
    return np.isfinite(values) if values.dtype.kind == "f" else values > 0


def share_of(size: int, index: int, count: int) -> tuple[int, int]:
    """Returns where the examples of one of `count` processes begin and end."""
    return size * index // count, size * (index + 1) // count


def join(whole: ArrayFile, parts: Sequence[ArrayFile]) -> None:
    """Makes one file of all parts, and deletes these.

    Raises:
      ValueError: if a part is missing, cut or foreign.
    """
    with whole.writing() as array:
        for part in parts:
            array[part.start : part.stop] = part.read()
    for part in parts:
        part.path.unlink()
