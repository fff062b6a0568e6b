"""Difficulty indexes: examples from easiest to hardest, in memory-mapped files.

An index is a folder with three files: the difficulties in source order, the examples
sorted by difficulty, and metadata in JSON. A writer renames the folder to its final
name as the last step, so a folder with that name is always complete.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import numbers
import os
import pathlib
from typing import Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.digest import digest

SortedBy: TypeAlias = Literal["all", "process"]
DTYPES = ("<i4", "<i8", "<f4", "<f8")
DIFFICULTY, EXAMPLES, METADATA = "difficulty.npy", "examples.npy", "index.json"
VERSION = 1
# Examples that are processed at a time.
_CHUNK = 1 << 20


class DifficultyIndex:
    """A sorted index of difficulties, written by `write_difficulty_index`.

    A `Curriculum` accepts it in place of difficulties. Ranges of the order are slices
    of a memory-mapped file, so data is read only when it is used.

    Args:
      folder: the folder of the index.

    Attributes:
      difficulty: `[N]` numbers, in source order.
      examples: `[N]` int32, or int64 for 2**31 examples or more: the examples from
        easiest to hardest, with ties in source order.
      metadata: the metadata of the index.

    Raises:
      ValueError: if there is no index in the folder, or its files are truncated or have
        an unknown format.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = pathlib.Path(folder)
        self.metadata = IndexMetadata.read(self._folder)
        size = self.metadata.size
        self.difficulty = self._mapped(DIFFICULTY, self.metadata.dtype, size)
        self.examples = self._mapped(EXAMPLES, index_dtype(size).str, size)

    def __repr__(self) -> str:
        return f"DifficultyIndex({str(self._folder)!r}, {len(self)} examples)"

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def sorted_by(self) -> SortedBy:
        """The scope of the order, "all" or "process".

        With "process", every process has sorted its own examples, and the order takes
        one example of each process in turn.
        """
        return self.metadata.sorted_by

    def _mapped(self, name: str, dtype: str, size: int) -> np.ndarray:
        path = self._folder / name
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        # A damaged header can raise many types of errors.
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {error}. {_REMEDY}") from None
        if array.shape != (size,) or array.dtype != np.dtype(dtype):
            raise ValueError(
                f"{path} holds {array.dtype}{list(array.shape)}, but the index expects "
                f"{dtype} for {size} examples. {_REMEDY}"
            )
        return np.asarray(array)

    def percentiles(self, low: float, high: float) -> np.ndarray:
        """Returns the examples between two percentiles, `[n]`, the easiest first.

        Percentiles are rounded to the nearest example. So adjacent ranges, such as
        (0, 25) and (25, 100), together have every example once.

        Args:
          low: the lower percentile, from 0 to 100.
          high: the upper percentile, from `low` to 100.

        Raises:
          ValueError: unless `0 <= low <= high <= 100`.
        """
        if not 0 <= low <= high <= 100:
            raise ValueError(
                f"`low={low}` and `high={high}` must be percentiles from 0 to 100, and "
                "`low` must not exceed `high`."
            )
        first, last = (round(len(self) * x / 100) for x in (low, high))
        return self.examples[first:last]

    def between(self, low: float, high: float) -> np.ndarray:
        """Returns the examples with `low <= difficulty < high`, `[n]`, in order.

        If difficulties are float32, the bounds are rounded to float32, too.

        Args:
          low: the smallest difficulty to include.
          high: the smallest difficulty to exclude.

        Raises:
          ValueError: if `sorted_by` is not "all", or a bound is not a number.
        """
        for name, value in (("low", low), ("high", high)):
            if not isinstance(value, numbers.Real) or value != value:
                raise ValueError(f"`{name}={value!r}` is not a number. Pass one.")
        if self.sorted_by != "all":
            raise ValueError(
                "`between` requires an index with `sorted_by='all'`, and this one has "
                "`sorted_by='process'`. Use `percentiles`, or write a new index."
            )
        dtype = self.difficulty.dtype
        first, last = (self._count_below(as_stored(x, dtype)) for x in (low, high))
        return self.examples[first : max(first, last)]

    def _count_below(self, value: float) -> int:
        difficulty = self.difficulty
        return bisect.bisect_left(
            self.examples, value, key=lambda i: difficulty[i].item()
        )

    def ranks(self) -> np.ndarray:
        """Returns the place of each example in the order, `[N]` integers."""
        ranks = np.empty_like(self.examples)
        ranks[self.examples] = np.arange(len(self), dtype=ranks.dtype)
        return ranks

    def sorted_difficulty(self) -> np.ndarray:
        """Returns the difficulties from easiest to hardest, `[N]`.

        Raises:
          ValueError: if the files of the index do not belong together.
        """
        examples, path = self.examples, self._folder / EXAMPLES
        if examples.min() < 0 or examples.max() >= len(self):
            raise ValueError(
                f"{path} has examples from {examples.min()} to {examples.max()}, but "
                f"the index has {len(self)}. {_REMEDY}"
            )
        difficulty = self.difficulty[examples]
        if self.sorted_by == "all" and np.any(difficulty[1:] < difficulty[:-1]):
            raise ValueError(f"{path} is not sorted. {_REMEDY}")
        return difficulty

    def check(self) -> None:
        """Reads the whole index and verifies it.

        Raises:
          ValueError: if a file has changed since it was written.
        """
        inside = (self.examples >= 0) & (self.examples < len(self))
        counts = np.bincount(self.examples[inside], minlength=len(self))
        if np.any(counts != 1):
            raise ValueError(
                f"{self._folder / EXAMPLES} does not contain every example once. "
                f"{_REMEDY}"
            )
        total = share_checksum(self.difficulty, 0)
        if difficulty_digest(total, len(self)) != self.metadata.digest:
            raise ValueError(
                f"{self._folder / DIFFICULTY} has changed since it was written. "
                f"{_REMEDY}"
            )
        keys, examples = self.sorted_difficulty(), self.examples
        falls = (keys[1:] == keys[:-1]) & (examples[1:] < examples[:-1])
        if self.sorted_by == "all" and falls.any():
            raise ValueError(f"{self._folder / EXAMPLES} is not sorted. {_REMEDY}")


_REMEDY = "Delete the folder and write the index again."


def as_stored(value: float, dtype: np.dtype) -> float:
    """Returns a bound as a Python number, rounded as difficulties of a dtype are.

    Otherwise a difficulty of 0.3 that is stored in float32 would exceed a bound of 0.3.
    Python numbers compare exactly with integers, too.
    """
    if dtype.kind != "f":
        return np.asarray(value).item()
    with np.errstate(over="ignore"):
        return dtype.type(value).item()


def index_dtype(size: int) -> np.dtype:
    """Returns the dtype in which the examples of a source of this size are stored."""
    return np.dtype("<i4" if size < 2**31 else "<i8")


def share_checksum(difficulty: np.ndarray, first: int) -> int:
    """Returns the checksum of a share of the difficulties.

    The sum of the checksums of all shares, modulo 2**64, is the same however the
    examples are divided into shares.

    Args:
      difficulty: `[n]` numbers.
      first: the index of the first example of the share.
    """
    total = np.uint64(0)
    for start in range(0, len(difficulty), _CHUNK):
        part = difficulty[start : start + _CHUNK]
        index = np.arange(first + start, first + start + len(part), dtype=np.uint64)
        # 64 bits for every dtype, and different bits for different integers.
        kind = "<f8" if part.dtype.kind == "f" else "<i8"
        bits = np.ascontiguousarray(part, kind).view(np.uint64)
        total += _mix(bits ^ _mix(index)).sum(dtype=np.uint64)
    return int(total)


def _mix(x: np.ndarray) -> np.ndarray:
    """Returns the SplitMix64 hash of 64-bit integers.

    See Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def difficulty_digest(total: int, size: int) -> str:
    """Returns the digest of all difficulties from the sum of their checksums."""
    return digest(f"{total % 2**64} {size}".encode())


@dataclasses.dataclass(frozen=True)
class IndexMetadata:
    """The metadata of an index.

    Attributes:
      size: the number of examples.
      dtype: the dtype of the difficulties.
      sorted_by: the scope of the order, "all" or "process".
      shares: the number of examples of each process, if the order depends on it.
      digest: the digest of the difficulties.
    """

    size: int
    dtype: str
    sorted_by: SortedBy
    shares: list[int]
    digest: str

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def read(cls, folder: pathlib.Path) -> IndexMetadata:
        """Returns the metadata in a folder.

        Raises:
          ValueError: if the folder has no metadata, or metadata of an unknown format.
        """
        path = folder / METADATA
        try:
            fields = json.loads(path.read_text())
            version = fields.pop("version")
            if version == VERSION:
                metadata = cls(**fields)
                choices = get_args(SortedBy)
                if metadata.dtype in DTYPES and metadata.sorted_by in choices:
                    return metadata
                raise ValueError(
                    f"`dtype={metadata.dtype!r}` or "
                    f"`sorted_by={metadata.sorted_by!r}` is unknown"
                )
        except FileNotFoundError:
            raise ValueError(
                f"{folder} is not a difficulty index, because it has no {METADATA}. "
                "Write one with `write_difficulty_index`."
            ) from None
        # Damaged JSON can raise many types of errors.
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {error!r}. {_REMEDY}") from None
        raise ValueError(f"{path} has version {version}, not {VERSION}. {_REMEDY}")
