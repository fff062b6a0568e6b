"""The pace of one metric: how many examples its pacing function opens, and when."""

from __future__ import annotations

import bisect
import math

import numpy as np

from jaxbucket.schedule.difficulty_index import as_stored
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.pacing import (
    SHARE_TOLERANCE,
    ByValue,
    Pacing,
    Unit,
    open_share,
    pacing_unit,
)


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
