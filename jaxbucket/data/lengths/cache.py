"""Files of measured values, published under their final names once complete."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_REMEDY = "Delete the file to measure again."


class ArrayFile(NamedTuple):
    """A file with one value for each `start <= index < stop`.

    Attributes:
      path: path of the complete file.
      start: index of the first value, such as that of an example.
      stop: index after the last value.
      dtype: dtype of the values.
      missing: the value of entries that are not measured yet.
    """

    path: pathlib.Path
    start: int
    stop: int
    dtype: np.dtype = np.dtype(np.int32)
    missing: float = 0

    @contextlib.contextmanager
    def writing(self) -> Iterator[np.ndarray]:
        """Yields a memory-mapped array to fill, then publishes it as `path`.

        The array contains the values that an interrupted run has already measured.

        Raises:
          ValueError: if the folder is not writable.
        """
        partial = self.path.with_suffix(".partial")
        with writable_folder(self.path.parent):
            array = self._open_partial(partial)
        yield array
        array.flush()
        # A concurrent run of the same measurement may already have renamed the file.
        with contextlib.suppress(FileNotFoundError):
            os.replace(partial, self.path)

    def _open_partial(self, path: pathlib.Path) -> np.memmap:
        shape = (self.stop - self.start,)
        # A damaged header raises many kinds of exceptions; the file is replaced below.
        with contextlib.suppress(Exception):
            array = np.lib.format.open_memmap(path, "r+")
            if array.shape == shape and array.dtype == self.dtype:
                return array
        # A reader must not see the file before it is marked as entirely unmeasured, so
        # it is prepared under a temporary name.
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            array = np.lib.format.open_memmap(draft, "w+", self.dtype, shape)
            if hasattr(os, "posix_fallocate"):
                # Writing to a memory map on a full disk would kill the process.
                with draft.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, draft.stat().st_size)
            if self.missing != 0:
                array[:] = self.missing
                # Without it a power loss could leave zeros, which are valid values.
                array.flush()
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return array

    def read(self) -> np.ndarray:
        """Returns the values, memory-mapped and read-only.

        Raises:
          ValueError: if the file is missing, truncated or not an array of this kind.
        """
        try:
            values = np.asarray(np.lib.format.open_memmap(self.path, mode="r"))
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} was written, but this process does not see it. Pass a "
                "`cache` folder that all processes share."
            ) from None
        except Exception as error:
            raise ValueError(
                f"{self.path} cannot be read: {error}. {_REMEDY}"
            ) from None
        size = self.stop - self.start
        if values.shape != (size,) or values.dtype != self.dtype:
            raise ValueError(
                f"{self.path} has {values.dtype}{list(values.shape)} instead of "
                f"{self.dtype}[{size}]. {_REMEDY}"
            )
        if not is_measured(values, self.missing).all():
            raise ValueError(f"{self.path} is incomplete. {_REMEDY}")
        return values


@contextlib.contextmanager
def writable_folder(folder: pathlib.Path) -> Iterator[None]:
    """Creates a folder, and raises a ValueError if files in it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(
            f"`cache={str(folder)!r}` is not a writable folder: {error}. Pass a "
            "different folder."
        ) from None


def is_measured(values: np.ndarray, missing: float) -> np.ndarray:
    """Returns which entries hold a measured value, `[n]` bool.

    Args:
      values: `[n]` integers or floats.
      missing: the value of the other entries: NaN, or less than any measured value.
    """
    return np.isfinite(values) if values.dtype.kind == "f" else values > missing


def share_of(size: int, index: int, count: int) -> tuple[int, int]:
    """Returns `(start, stop)`, the share of one of `count` processes."""
    return size * index // count, size * (index + 1) // count


def join(whole: ArrayFile, parts: Sequence[ArrayFile]) -> None:
    """Concatenates all parts into one file and deletes the parts.

    Raises:
      ValueError: if a part is missing, truncated or not an array of this kind.
    """
    with whole.writing() as array:
        for part in parts:
            array[part.start : part.stop] = part.read()
    for part in parts:
        part.path.unlink()
