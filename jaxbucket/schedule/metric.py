"""The metrics of a curriculum, and which examples they open at each batch.

A metric is the difficulty of every example, with a pacing function. An example is open
when all metrics open it. So it opens at the last of the batches at which one of them
does, and stays open until a share falls.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.digest import digest
from jaxbucket.schedule.difficulty_index import (
    DifficultyIndex,
    as_stored,
    check_difficulties,
)
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.pacing import (
    SHARE_TOLERANCE,
    ByValue,
    Pacing,
    check_pacing,
    open_share,
    pacing_name,
    pacing_unit,
)
from jaxbucket.schedule.recent import recent


class Metric:
    """The difficulty of every example by one metric, and the function that opens them.

    Attributes:
      name: the argument that the difficulties come from, for messages.
      values: `[N]` finite numbers, the difficulties.
      pacing: the pacing function.
    """

    def __init__(
        self, name: str, difficulty: ArrayLike | DifficultyIndex, pacing: Pacing
    ):
        self.name = name
        self._index = difficulty if isinstance(difficulty, DifficultyIndex) else None
        self.values = self._index.difficulty if self._index else np.asarray(difficulty)
        check_difficulties(name, self.values)
        check_pacing(pacing)
        self.pacing = pacing
        if isinstance(pacing, ByValue) and pacing.last < (least := self.values.min()):
            raise ValueError(
                f"`pacing` of `{name}` ends with {pacing.last}, below the smallest "
                f"difficulty, {least}. Raise `high`."
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the difficulties and the pacing function."""
        values = np.ascontiguousarray(self.values)
        name = f"{values.dtype.str} {pacing_name(self.pacing)}"
        return digest(values.data, name.encode())

    def ranks(self, is_kept: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ranks of all examples, and the sorted difficulties of kept ones.

        The rank of an example is the number of kept examples that are at most as
        difficult, `[N]` unsigned integers. It is N if the example is not kept.

        Args:
          is_kept: `[N]` bool, whether each example takes part; None if all do.
        """
        if self._index is None:
            order = np.argsort(self.values)
            values = self.values[order]
        else:
            order, values = self._index.examples, self._index.sorted_difficulty()
        if is_kept is not None:
            order, values = order[is_kept[order]], values[is_kept[order]]
        ends = np.flatnonzero(np.append(values[1:] != values[:-1], True)) + 1
        dtype = np.uint32 if len(self.values) < 2**32 else np.int64
        ranks = np.full(len(self.values), len(self.values), dtype)
        ranks[order] = np.repeat(ends.astype(dtype), np.diff(ends, prepend=0))
        return ranks, values

    def num_open(self, values: np.ndarray, progress: float) -> int:
        """Returns how many examples are open after some progress, including all ties.

        Args:
          values: `[n]` sorted difficulties of the examples that take part.
          progress: the number of completed epochs, or what the pacing function counts.
        """
        if isinstance(self.pacing, ByValue):
            value = as_stored(self.pacing(progress), values.dtype)
            return bisect.bisect_right(values, value, key=np.generic.item)
        share = open_share(self.pacing, progress)
        # Lowered slightly, so that k / N opens exactly k of N examples.
        least = max(1, math.ceil(share * len(values) * (1 - SHARE_TOLERANCE)))
        return int(np.searchsorted(values, values[least - 1], side="right"))


class Rise(NamedTuple):
    """Consecutive batches of an epoch in which no example closes.

    Attributes:
      num_batches: their number.
      opens: `[N]` integers, the first of them at which each example is open. It is
        greater for examples that open later in the epoch, and greatest for others.
      hardest: `[N]` integers, the greatest rank of each example by any metric.
    """

    num_batches: int
    opens: np.ndarray
    hardest: np.ndarray

    def by_opening(
        self, examples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns examples in the order in which they open, the easier ones first.

        Args:
          examples: `[n]` integers.

        Returns:
          The sorted examples; their keys, `[n]` int64, which rise in this order; and
          the number of open ones at each batch, `[num_batches]`.
        """
        unit = int(self.hardest.max()) + 1
        keys = self.opens[examples].astype(np.int64) * unit + self.hardest[examples]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        ends = np.arange(1, self.num_batches + 1) * unit
        # Indices of examples take 4 bytes where these are enough.
        examples = examples[order].astype(self.hardest.dtype)
        return examples, keys, np.searchsorted(keys, ends)


class OpenExamples:
    """The open examples of every epoch. The two most recent results are cached.

    At least the easiest examples are open at every batch.
    """

    def __init__(self, metrics: Sequence[Metric], rows: EpochRows):
        is_kept = rows.is_kept()
        self._rows = rows
        self._metrics = metrics
        self._ranks, self._values = zip(
            *(x.ranks(is_kept) for x in metrics), strict=True
        )
        self._epochs: dict[int, tuple[np.ndarray, list[int]]] = {}

    def start(self, epoch: int, position: int) -> int:
        """Returns the first batch of the rise that a batch of an epoch belongs to."""
        _, starts = self._counts_of(epoch)
        return starts[bisect.bisect_right(starts, position) - 1]

    def rise(self, epoch: int, start: int) -> Rise:
        """Returns the rise that starts at a batch.

        Args:
          epoch: the epoch, counted from 0.
          start: the position of the batch in the epoch.
        """
        counts, starts = self._counts_of(epoch)
        last = next((x for x in starts if x > start), len(counts))
        ranks = [self._rows.largest(x, epoch) for x in self._ranks]
        # Numbers that fall later do not close what has opened.
        counts = np.maximum.accumulate(counts[start:])
        return Rise(last - start, *_opening(counts, ranks))

    def _counts_of(self, epoch: int) -> tuple[np.ndarray, list[int]]:
        return recent(self._epochs, epoch, lambda: self._counts(epoch))

    def _counts(self, epoch: int) -> tuple[np.ndarray, list[int]]:
        """Returns `[num_batches, M]` numbers of open examples, and where rises start.

        A number is how many examples, including all ties, one metric opens at a batch.
        """
        rows, counts = self._rows, []
        for metric, values in zip(self._metrics, self._values, strict=True):
            unit = pacing_unit(metric.pacing)
            steps = (rows.progress(unit, epoch, x) for x in range(rows.num_batches))
            counts.append([metric.num_open(values, x) for x in steps])
        counts = np.array(counts, np.int64).T
        falls = np.any(np.diff(counts, axis=0) < 0, axis=1)
        return counts, [0, *(np.flatnonzero(falls) + 1).tolist()]


def _opening(
    counts: np.ndarray, ranks: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns when each example opens, and its greatest rank, `[N]` each.

    Args:
      counts: `[n, M]` integers that do not fall, the examples that each metric opens.
      ranks: M arrays `[N]` of integers, the ranks of each example.
    """
    hardest = np.maximum.reduce(ranks)
    opens = np.zeros(len(hardest), np.uint32)
    largest = int(hardest.max())
    for own, column in zip(ranks, counts.T, strict=True):
        at = np.searchsorted(column, np.arange(largest + 1)).astype(opens.dtype)
        np.maximum(opens, at[own], out=opens)
    if earliest := opens.min():
        easiest = hardest[opens == earliest].min()
        opens[(opens == earliest) & (hardest == easiest)] = 0
    return opens, hardest
