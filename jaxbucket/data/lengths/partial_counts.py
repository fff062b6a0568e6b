"""Counts of a part of the examples, from which a run that was killed resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import uuid

import numpy as np

from jaxbucket.data.lengths.cache import writable_folder


@dataclasses.dataclass
class PartialCounts:
    """The sum of the counts of some chunks of examples.

    Attributes:
      path: the file that stores the sum, or None.
      total: `[size]` int64, the sum.
      done: `[chunks]` bool, whether the sum includes each chunk.
    """

    path: pathlib.Path | None
    total: np.ndarray
    done: np.ndarray

    @classmethod
    def open(cls, path: pathlib.Path | None, size: int, chunks: int) -> PartialCounts:
        """Reads the sum in a file, or starts with zeros.

        Raises:
          ValueError: if the folder is not writable.
        """
        new = cls(path, np.zeros(size, np.int64), np.zeros(chunks, bool))
        if path is None:
            return new
        # A damaged file raises many kinds of exceptions; it is replaced below.
        with contextlib.suppress(Exception), path.open("rb") as file:
            arrays = np.load(file)
            old = cls(path, arrays["total"], arrays["done"])
            if old._layout() == new._layout():
                return old
        # Fails before counting, which may take hours, if the folder is not writable.
        new.save()
        return new

    def _layout(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(x.dtype.str, x.shape) for x in (self.total, self.done)]

    def add(self, chunk: int, counts: np.ndarray) -> None:
        """Adds the counts `[size]` of a chunk, unless the sum includes it already.

        Raises:
          ValueError: if a sum exceeds 2**63 - 1.
        """
        if self.done[chunk]:
            return
        self.total = add_counts(self.total, counts)
        self.done[chunk] = True

    def save(self) -> None:
        """Replaces the file."""
        if self.path is None:
            return
        draft = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        with writable_folder(self.path.parent):
            try:
                with draft.open("wb") as file:
                    np.savez(file, total=self.total, done=self.done)
                # A concurrent run of the same measurement deletes drafts at its end.
                with contextlib.suppress(FileNotFoundError):
                    os.replace(draft, self.path)
            finally:
                draft.unlink(missing_ok=True)

    def delete(self) -> None:
        """Deletes the file, and drafts of runs that were killed."""
        if self.path is not None:
            for path in self.path.parent.glob(f"{self.path.name}*"):
                path.unlink(missing_ok=True)


def add_counts(total: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the sum of two arrays of counts, `[size]` int64.

    Raises:
      ValueError: if a sum exceeds 2**63 - 1.
    """
    result = total + counts
    # Neither term is negative, so a sum that overflows is.
    if result.min() < 0:
        raise ValueError(
            f"The counts of entry {result.argmin()} add up to more than 2**63 - 1. "
            "Return smaller counts from `count_fn`."
        )
    return result
