"""Examples from the easiest to the hardest, in files that are mapped into memory.

An index is a folder: the difficulties in the order of the source, the examples in the
order of their difficulty, and a few words about both. A folder that is there is whole,
for it is named last of all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.digest import digest

SortedBy: TypeAlias = Literal["all", "process"]
DTYPES = ("<i4", "<i8", "<f4", "<f8")
DIFFICULTY, EXAMPLES, WORDS = "difficulty.npy", "examples.npy", "index.json"
VERSION = 1
# Examples that are looked at together.
_PART = 1 << 20


class DifficultyIndex:
    """An index that `write_difficulty_index` has written.

    A `Curriculum` takes it in place of difficulties. Views of the order are slices of a
    mapped file: nothing is read before it is asked for.

    Args:
      folder: of the index.

    Attributes:
      difficulty: `[N]`, in the order of the source.
      examples: `[N]` int32, or int64 for 2**31 and more, the easiest first; of equal
        difficulty in the order of the source.
      words: what else is said of it.

    Raises:
      ValueError: if there is no index, or one that is cut or foreign.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = pathlib.Path(folder)
        self.words = Words.read(self._folder)
        size = self.words.size
        self.difficulty = self._mapped(DIFFICULTY, self.words.dtype, size)
        self.examples = self._mapped(EXAMPLES, index_dtype(size).str, size)

    def __repr__(self) -> str:
        return f"DifficultyIndex({str(self._folder)!r}, {len(self)} examples)"

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def sorted_by(self) -> SortedBy:
        """ "all", or "process": each process's examples alone, taken in turn."""
        return self.words.sorted_by

    def _mapped(self, name: str, dtype: str, size: int) -> np.ndarray:
        path = self._folder / name
        try:
            found = np.lib.format.open_memmap(path, mode="r")
        # A header that is damaged fails in many ways.
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {error}. {_REMEDY}") from None
        if found.shape != (size,) or found.dtype != np.dtype(dtype):
            raise ValueError(
                f"{path} is {found.dtype}{list(found.shape)}, and not the {dtype} of "
                f"{size} examples. {_REMEDY}"
            )
        return np.asarray(found)

    def percentiles(self, low: float, high: float) -> np.ndarray:
        """Returns the examples between two percentiles, `[n]`, the easiest first.

        Those of (0, 25) and (25, 100) are all examples, each once: a percentile is cut
        at the nearest example.

        Raises:
          ValueError: unless `0 <= low <= high <= 100`.
        """
        if not 0 <= low <= high <= 100:
            raise ValueError(
                f"`low={low}`, `high={high}`: percentiles are from 0 to 100, the lower "
                "one first."
            )
        first, last = (round(len(self) * x / 100) for x in (low, high))
        return self.examples[first:last]

    def between(self, low: float, high: float) -> np.ndarray:
        """Returns the examples with `low <= difficulty < high`, `[n]`, in order.

        Raises:
          ValueError: if the order is not that of all examples, or for NaN.
        """
        if low != low or high != high:
            raise ValueError(f"`low={low}`, `high={high}`: NaN is no bound.")
        if self.sorted_by != "all":
            raise ValueError(
                "`sorted_by='process'` has no order of all difficulties: take "
                "`percentiles`, or write an index with `sorted_by='all'`."
            )
        # As Python's numbers, which are compared exactly.
        ends = (np.asarray(x).item() for x in (low, high))
        first, last = (self._count_below(x) for x in ends)
        return self.examples[first : max(first, last)]

    def _count_below(self, value: float) -> int:
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.difficulty[self.examples[middle]].item() < value:
                low = middle + 1
            else:
                high = middle
        return low

    def ranks(self) -> np.ndarray:
        """Returns the place of each example in the order, `[N]`."""
        ranks = np.empty_like(self.examples)
        ranks[self.examples] = np.arange(len(self), dtype=ranks.dtype)
        return ranks

    def check(self) -> None:
        """Reads all of it.

        Raises:
          ValueError: if the files are not as they were written.
        """
        counted = np.zeros(len(self), bool)
        inside = (self.examples >= 0) & (self.examples < len(self))
        counted[self.examples[inside]] = True
        if not counted.all():
            raise ValueError(
                f"{self._folder / EXAMPLES} does not have every example once. {_REMEDY}"
            )
        found = difficulty_digest(share_sum(self.difficulty, 0), len(self))
        if found != self.words.digest:
            raise ValueError(
                f"{self._folder / DIFFICULTY} is not what was written. {_REMEDY}"
            )
        keys, examples = self.difficulty[self.examples], self.examples
        falls = keys[1:] < keys[:-1]
        falls |= (keys[1:] == keys[:-1]) & (examples[1:] < examples[:-1])
        if self.sorted_by == "all" and falls.any():
            raise ValueError(f"{self._folder / EXAMPLES} is not in order. {_REMEDY}")


_REMEDY = "Delete the folder, and write the index again."


def index_dtype(size: int) -> np.dtype:
    """What examples of a source of this size are kept as."""
    return np.dtype("<i4" if size < 2**31 else "<i8")


def share_sum(difficulty: np.ndarray, first: int) -> int:
    """Returns a number for difficulties from an example on, to be added to others'.

    However examples are divided, the sum is the same.
    """
    total = np.uint64(0)
    for start in range(0, len(difficulty), _PART):
        part = difficulty[start : start + _PART]
        index = np.arange(first + start, first + start + len(part), dtype=np.uint64)
        # Of the same size whatever the dtype, and no two integers the same.
        kind = "<f8" if part.dtype.kind == "f" else "<i8"
        bits = np.ascontiguousarray(part, kind).view(np.uint64)
        total += _mixed(bits ^ _mixed(index)).sum(dtype=np.uint64)
    return int(total)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def difficulty_digest(total: int, size: int) -> str:
    """Returns the name of all difficulties, of the sum of all shares."""
    return digest(f"{total % 2**64} {size}".encode())


@dataclasses.dataclass(frozen=True)
class Words:
    """What is said of an index.

    Attributes:
      size: how many examples it has.
      dtype: of their difficulties.
      sorted_by: by whom.
      shares: how many each process had, where that makes a difference.
      digest: of the difficulties.
    """

    size: int
    dtype: str
    sorted_by: SortedBy
    shares: list[int]
    digest: str

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def read(cls, folder: pathlib.Path) -> Words:
        """Returns what a folder says.

        Raises:
          ValueError: if it says nothing, or nothing that is known.
        """
        path = folder / WORDS
        try:
            told = json.loads(path.read_text())
            version = told.pop("version")
            if version == VERSION:
                words = cls(**told)
                if words.dtype in DTYPES and words.sorted_by in get_args(SortedBy):
                    return words
                raise ValueError(f"it speaks of {words.dtype}, {words.sorted_by}")
        except FileNotFoundError:
            raise ValueError(
                f"{folder} is no index: {WORDS} is not there. Write one by "
                "`write_difficulty_index`."
            ) from None
        # So do words.
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {error!r}. {_REMEDY}") from None
        raise ValueError(f"{path} is of version {version}, not {VERSION}. {_REMEDY}")
