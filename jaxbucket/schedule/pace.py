"""The pace of one metric: how many examples its pacing function opens, and when."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.pacing import Pacing, Unit, open_share, pacing_unit

# Powers differ between machines in the last bit. So shares by epochs are rounded to
# multiples of 1 / _SHARE_UNITS. All others are lowered slightly, so that k / N opens
# exactly k of N examples; by epochs this would change the batches of earlier runs.
_SHARE_UNITS = 10**9
_TOLERANCE = 1e-12


class Pace:
    """The greatest difficulty that is open at each batch.

    Args:
      pacing: a function from progress to the share that is open.
      difficulty: `[N]` sorted difficulties of the examples that the plan keeps.
      rows: the rows of an epoch.
    """

    def __init__(self, pacing: Pacing, difficulty: np.ndarray, rows: EpochRows):
        self._pacing = pacing
        self._unit: Unit = pacing_unit(pacing)
        self._sorted = difficulty
        self._rows = rows

    def at(self, epoch: int, position: int) -> Any:
        """Returns the greatest open difficulty at one batch, in the array's dtype."""
        progress = self._rows.progress(self._unit, epoch, position)
        share = open_share(self._pacing, progress)
        if self._unit == "epochs":
            units = round(share * _SHARE_UNITS)
            count = -(-units * len(self._sorted) // _SHARE_UNITS)
        else:
            count = math.ceil(share * len(self._sorted) * (1 - _TOLERANCE))
        return self._sorted[max(count, 1) - 1]

    def of_epoch(self, epoch: int) -> np.ndarray:
        """Returns the greatest open difficulty at each batch, `[num_batches]`."""
        return np.array([self.at(epoch, p) for p in range(self._rows.num_batches)])
