"""Difficulty indexes: examples from easiest to hardest, in memory-mapped files.

An index is a folder with two arrays: the difficulties in source order, and the examples
sorted by difficulty. A writer renames the folder to its final name as the last step, so
a folder with that name is always complete.
"""

from __future__ import annotations

import os
import pathlib

import numpy as np

DIFFICULTY, EXAMPLES = "difficulty.npy", "examples.npy"
_REMEDY = "Write it again with `jb.sort.write_difficulty_index`, to an empty folder."


class DifficultyIndex:
    """A sorted index of difficulties, written by `write_difficulty_index`.

    A `Curriculum` accepts it in place of difficulties. A part of its examples is a
    `subset` of a schedule: `index.examples[: len(index) // 4]` is the easiest quarter,
    and `(20 <= index.difficulty) & (index.difficulty < 40)` a range of difficulties.
    The files are mapped into memory, so data is read only when it is used.

    Args:
      folder: the folder of the index.

    Attributes:
      difficulty: `[N]` numbers, in source order.
      examples: `[N]` int32, or int64 for 2**31 examples or more: the examples from
        easiest to hardest, with ties in source order.

    Raises:
      ValueError: if there is no index in the folder, or its files cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = pathlib.Path(folder)
        self.difficulty, self.examples = map(self._mapped, (DIFFICULTY, EXAMPLES))

    def __repr__(self) -> str:
        return f"DifficultyIndex({str(self._folder)!r}, {len(self)} examples)"

    def __len__(self) -> int:
        return len(self.difficulty)

    def _mapped(self, name: str) -> np.ndarray:
        try:
            return np.asarray(np.load(self._folder / name, mmap_mode="r"))
        # A damaged header can raise many types of errors.
        except Exception as error:
            raise ValueError(
                f"`folder={str(self._folder)!r}` is no difficulty index: {error}. "
                f"{_REMEDY}"
            ) from None

    def sorted_difficulty(self) -> np.ndarray:
        """Returns the difficulties from easiest to hardest, `[N]`.

        Raises:
          ValueError: if the files of the index do not belong together.
        """
        size = len(self)
        is_found = np.zeros(size, bool)
        is_found[self.examples[self.examples < size]] = True
        difficulty = self.difficulty[self.examples.clip(max=size - 1)]
        is_permutation = len(difficulty) == size and is_found.all()
        if not is_permutation or np.any(difficulty[1:] < difficulty[:-1]):
            raise ValueError(
                f"{self._folder / EXAMPLES} does not have the examples in the order of "
                f"their difficulty. {_REMEDY}"
            )
        return difficulty


def check_difficulties(name: str, array: np.ndarray, kinds: str = "iuf") -> None:
    """Raises a ValueError unless an array has a finite number for each example."""
    if array.ndim != 1 or array.dtype.kind not in kinds or array.dtype.itemsize > 8:
        raise ValueError(
            f"`{name}` is {array.dtype}{list(array.shape)}. Pass one number of at most "
            "64 bits for each example, [N]."
        )
    is_float = array.dtype.kind == "f"
    is_valid = np.isfinite(array) if is_float else array <= np.iinfo(np.int64).max
    if not is_valid.all():
        bad = int(np.argmin(is_valid))
        raise ValueError(
            f"`{name}[{bad}]={array[bad]}` is not finite, or above 2**63 - 1. Pass "
            "another number, or leave the example out."
        )


def as_stored(value: float, dtype: np.dtype) -> float:
    """Returns a value as a Python number, rounded as difficulties of a dtype are.

    Otherwise a difficulty of 0.3 that is stored in float32 would exceed a value of 0.3.
    Python numbers compare exactly with integers, too.
    """
    if dtype.kind != "f":
        return np.asarray(value).item()
    with np.errstate(over="ignore"):
        return dtype.type(value).item()


def index_dtype(size: int) -> np.dtype:
    """Returns the dtype in which the examples of a source of this size are stored."""
    return np.dtype("<i4" if size < 2**31 else "<i8")
