"""Batch sizes that fit into memory, found for some T, as the budget of a plan."""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
import pathlib
from typing import Any

from jaxbucket.base.checks import check_integer, check_positive
from jaxbucket.base.sizes import Sizes
from jaxbucket.base.table import Record, bytes_text, number_table

_CAPTION = (
    "B: the largest batch size of this T that fits. memory: what its program needs on "
    "each device. next: the next batch size, which does not fit, and what it needs. "
    "programs: how many were compiled, and how many the compiler refused."
)


@dataclasses.dataclass(frozen=True)
class FittedBatchSize:
    """The largest batch size of one T that fits.

    Attributes:
      seq_len: T.
      batch_size: B; 0 if not even the smallest fits.
      num_bytes: what the program of `[B, T]` needs on each device.
      next_batch_size: the next batch size, which does not fit.
      next_bytes: what its program needs; None if the compiler does not say.
      num_compiled: the number of programs that were compiled for this T.
      num_refused: the number of programs that the compiler refused.
    """

    seq_len: int
    batch_size: int
    num_bytes: int
    next_batch_size: int
    next_bytes: int | None
    num_compiled: int
    num_refused: int


@dataclasses.dataclass(frozen=True, repr=False)
class FittedBatchSizes(Record):
    """The largest batch sizes that fit, the result of `fit_batch_sizes`.

    Example: a budget for each T, instead of one for all.
      >>> import jaxbucket as jb
      >>> rows = [FittedBatchSize(128, 40, 9, 48, 11, 3, 1),
      ...         FittedBatchSize(512, 16, 8, 24, 14, 2, 1)]
      >>> fitted = FittedBatchSizes(tuple(rows), 10)
      >>> fitted(512), fitted(256), fitted(100)
      (8192, 5120, 5120)
      >>> plan = jb.plan_buckets([100, 250, 500] * 99, max_tokens=fitted,
      ...                        num_buckets=3, batch_size_multiple=8)
      >>> [str(bucket) for bucket in plan.buckets]
      ['[40, 100]', '[16, 250]', '[8, 500]']

    Attributes:
      sizes: the batch sizes, by ascending T.
      limit_bytes: the memory of each device that programs may use; None if that is
        whatever the compiler accepts.
    """

    sizes: tuple[FittedBatchSize, ...]
    limit_bytes: int | None

    def __post_init__(self):
        by_seq_len = sorted(self.sizes, key=lambda size: size.seq_len)
        object.__setattr__(self, "sizes", tuple(by_seq_len))

    def __call__(self, seq_len: int) -> int:
        """Returns the number of tokens B * T that fits, as `max_tokens`.

        Between two T, it is the smaller number of theirs, and below the shortest T its
        number. What lies between may need more memory than both: `jaxbucket precompile
        --memory-gb` checks a plan.

        Raises:
          ValueError: if `seq_len` is above the longest T that fits, or consists of
            several lengths.
        """
        if isinstance(seq_len, Sizes):
            raise ValueError(
                "Batch sizes were fitted for one length, but examples have several: "
                f"{dict(seq_len)}. Pass `max_tokens` as a number or function."
            )
        fit = [size for size in self.sizes if size.batch_size]
        place = bisect.bisect_left([size.seq_len for size in fit], seq_len)
        if place == len(fit):
            raise ValueError(
                f"No batch size was fitted for T = {seq_len} or longer; the longest is "
                f"{fit[-1].seq_len if fit else 'none'}. Fit a longer `seq_lens`, or "
                "pass a smaller `max_seq_len`."
            )
        # A long row does not always need more memory per token than a short one.
        first = place if fit[place].seq_len == seq_len else max(place - 1, 0)
        return min(size.batch_size * size.seq_len for size in fit[first : place + 1])

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        sizes = [dataclasses.asdict(size) for size in self.sizes]
        return {"sizes": sizes, "limit_bytes": self.limit_bytes}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FittedBatchSizes:
        """Reads the file that `jaxbucket fit -o` wrote.

        Raises:
          ValueError: if it is not such a file.
        """
        try:
            numbers = json.loads(pathlib.Path(path).read_text("utf-8"))
            sizes = tuple(FittedBatchSize(**size) for size in numbers["sizes"])
            for size in sizes:
                check_positive("seq_len", size.seq_len)
                check_integer("batch_size", size.batch_size, least=0)
            return cls(sizes, numbers["limit_bytes"])
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(
                f"{path} is not a file of `jaxbucket fit -o`: {type(error).__name__}: "
                f"{error}"
            ) from error

    def __repr__(self) -> str:
        shapes = ", ".join(f"[{x.batch_size}, {x.seq_len}]" for x in self.sizes)
        return f"<FittedBatchSizes: {shapes}>"

    @property
    def legends(self) -> tuple[str, ...]:
        return (_CAPTION,)

    def __rich__(self) -> Any:
        """Returns the batch sizes as a `rich` table."""
        limit = (
            "XLA's own" if self.limit_bytes is None else bytes_text(self.limit_bytes)
        )
        rows = (
            (
                f"{size.seq_len:,}",
                f"{size.batch_size:,}",
                bytes_text(size.num_bytes) if size.batch_size else "",
                f"{size.next_batch_size:,}: {bytes_text(size.next_bytes)}",
                f"{size.num_compiled} + {size.num_refused}",
            )
            for size in self.sizes
        )
        names = ("T", "B", "memory", "next", "programs")
        return number_table(names, rows, f"Limit: {limit}.\n{_CAPTION}")
