"""One metric of a curriculum: the difficulty of every example, and its pacing."""

from __future__ import annotations

import bisect
import functools
import math

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.digest import digest
from jaxbucket.schedule.difficulty_index import DifficultyIndex, as_stored
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.pacing import (
    SHARE_TOLERANCE,
    ByValue,
    Pacing,
    Unit,
    check_pacing,
    open_share,
    pacing_name,
    pacing_unit,
)


class Metric:
    """The difficulty of every example by one metric, and the function that opens them.

    Args:
      name: the argument that the difficulties come from, for messages.
      difficulty: `[N]` finite numbers, or a `DifficultyIndex`.
      pacing: the pacing function.

    Attributes:
      name: as above.
      values: `[N]` numbers, the difficulties.
      pacing: as above.

    Raises:
      ValueError: if the difficulties are empty, not `[N]` or not finite, `pacing` is
        not callable, or it is by value and opens no example, or the index has no
        global order.
    """

    def __init__(
        self, name: str, difficulty: ArrayLike | DifficultyIndex, pacing: Pacing
    ):
        self.name = name
        self.values = _check_difficulty(name, difficulty)
        self._index = difficulty if isinstance(difficulty, DifficultyIndex) else None
        check_pacing(pacing)
        self.pacing = pacing
        if isinstance(pacing, ByValue) and not self._is_sorted_by_all:
            raise ValueError(
                f"`pacing` of `{name}` is a `ByValue`, but its index has "
                "`sorted_by='process'`, which defines no values. Write the index with "
                "`sorted_by='all'`, or pace by a share."
            )
        if isinstance(pacing, ByValue) and pacing.last < (least := self.values.min()):
            rounded = f", rounded down to {pacing.last}," if pacing.multiple else ""
            raise ValueError(
                f"`pacing` of `{name}` opens no example at any time, because "
                f"`high={pacing.high}`{rounded} is below the smallest difficulty, "
                f"{least}. Raise `high`."
            )

    @property
    def _is_sorted_by_all(self) -> bool:
        return self._index is None or self._index.sorted_by == "all"

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the difficulties and the pacing function."""
        values = np.ascontiguousarray(self.values)
        name = f"{values.dtype.str} {pacing_name(self.pacing)}"
        return digest(values.data, name.encode())

    def ranks(self, is_kept: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ranks of all examples, and the sorted difficulties of kept ones.

        The rank of an example is the number of kept examples that are at most as
        difficult, `[N]` unsigned integers. It is 0 if the example is not kept.

        Args:
          is_kept: `[N]` bool, whether each example takes part; None if all do.
        """
        return self._all_ranks if is_kept is None else self._ranks(is_kept)

    @functools.cached_property
    def _all_ranks(self) -> tuple[np.ndarray, np.ndarray]:
        # Packed rows and the pace both need them.
        return self._ranks(None)

    def _ranks(self, is_kept: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        known = self._known_order(is_kept)
        if known is None:
            order = np.argsort(self.values)
            order = order if is_kept is None else order[is_kept[order]]
            known = order, self.values[order]
        order, values = known
        is_last = np.append(values[1:] != values[:-1], True)
        ends = np.flatnonzero(is_last) + 1
        dtype = np.uint32 if len(self.values) < 2**32 else np.int64
        ranks = np.zeros(len(self.values), dtype)
        ranks[order] = np.repeat(ends.astype(dtype), np.diff(ends, prepend=0))
        return ranks, values

    def _known_order(
        self, is_kept: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the kept examples in the order of an index, and their values."""
        if self._index is None or not self._is_sorted_by_all:
            return None
        examples, values = self._index.examples, self._index.sorted_difficulty()
        if is_kept is None:
            return examples, values
        is_kept = is_kept[examples]
        return examples[is_kept], values[is_kept]


class Pace:
    """The number of examples that one metric opens at each batch.

    Args:
      pacing: a function from progress to the share or the value that is open.
      values: `[N]` sorted difficulties of the examples that the plan keeps.
      rows: the rows of an epoch.

    Attributes:
      values: as above.
    """

    def __init__(self, pacing: Pacing, values: np.ndarray, rows: EpochRows):
        self._pacing = pacing
        self._unit: Unit = pacing_unit(pacing)
        self.values = values
        self._rows = rows

    def count(self, epoch: int, position: int) -> int:
        """Returns the number of open examples at one batch, including all ties."""
        progress = self._rows.progress(self._unit, epoch, position)
        if isinstance(self._pacing, ByValue):
            value = as_stored(self._pacing(progress), self.values.dtype)
            return bisect.bisect_right(self.values, value, key=np.generic.item)
        hardest = self.values[self._least(progress) - 1]
        return int(np.searchsorted(self.values, hardest, side="right"))

    def _least(self, progress: float) -> int:
        """Returns the number of examples that a share opens, without ties."""
        share = open_share(self._pacing, progress)
        # Lowered slightly, so that k / N opens exactly k of N examples.
        return max(1, math.ceil(share * len(self.values) * (1 - SHARE_TOLERANCE)))

    def counts(self, epoch: int) -> np.ndarray:
        """Returns the number of open examples at each batch, `[num_batches]` int64."""
        positions = range(self._rows.num_batches)
        return np.array([self.count(epoch, p) for p in positions], np.int64)


def _check_difficulty(name: str, difficulty: ArrayLike | DifficultyIndex) -> np.ndarray:
    if isinstance(difficulty, DifficultyIndex):
        # Without a global order, the position in the index defines the difficulty.
        is_global = difficulty.sorted_by == "all"
        return difficulty.difficulty if is_global else difficulty.ranks()
    array = np.asarray(difficulty)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iuf":
        raise ValueError(
            f"`{name}` is {array.dtype}{list(array.shape)}. Pass one number for each "
            "example, [N]."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int(np.argmin(np.isfinite(array)))
        raise ValueError(
            f"`{name}[{bad}]={array[bad]}` is not finite. Pass a finite number or "
            "leave the example out."
        )
    return array
