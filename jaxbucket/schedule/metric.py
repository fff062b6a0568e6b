"""One metric of a curriculum: the difficulty of every example, and its pacing."""

from __future__ import annotations

import bisect
import functools
import math

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.digest import digest
from jaxbucket.schedule.difficulty_index import DifficultyIndex, as_stored
from jaxbucket.schedule.pacing import (
    SHARE_TOLERANCE,
    ByValue,
    Pacing,
    check_pacing,
    open_share,
    pacing_name,
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
        not callable, or it is by value and opens no example.
    """

    def __init__(
        self, name: str, difficulty: ArrayLike | DifficultyIndex, pacing: Pacing
    ):
        self.name = name
        self._index = difficulty if isinstance(difficulty, DifficultyIndex) else None
        self.values = self._index.difficulty if self._index else np.asarray(difficulty)
        self._check_values()
        check_pacing(pacing)
        self.pacing = pacing
        if isinstance(pacing, ByValue) and pacing.last < (least := self.values.min()):
            raise ValueError(
                f"`pacing` of `{name}` opens no example at any time: its last value, "
                f"{pacing.last}, is below the smallest difficulty, {least}. Raise "
                "`high`."
            )

    def _check_values(self) -> None:
        name, array = self.name, self.values
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iuf":
            raise ValueError(
                f"`{name}` is {array.dtype}{list(array.shape)}. Pass one number for "
                "each example, [N]."
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(np.argmin(np.isfinite(array)))
            raise ValueError(
                f"`{name}[{bad}]={array[bad]}` is not finite. Pass a finite number or "
                "leave the example out."
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
