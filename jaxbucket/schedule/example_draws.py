"""Random numbers of one example, by where it stands in the data and nothing else.

`example_rng` is a Philox generator (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011), which is a function of a key and a counter. All of its numbers are
given in words of 64 bits: no hash, so no two examples share a draw by chance. Only the
generators that it spawns are seeded by a hash of these words, numpy's `SeedSequence`.

    key      seed, run
    counter  0, index, draw, epoch       (the first word counts what has been drawn)

The layout is part of the format of a run: golden numbers guard it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Of the number of a draw, those that name the place in a micro-batch.
_PLACE_BITS = 32


def example_rng(
    seed: int, run: int, epoch: int, index: int, draw: int = 0
) -> np.random.Generator:
    """Returns the random numbers of one example in one epoch.

    Example:
      >>> example_rng(0, 0, epoch=1, index=7).integers(100, size=4)
      array([93,  1, 39, 22])

    Args:
      seed: below 2**64, and so are all others.
      run: what tells apart those that have the same seed: the first step of a schedule,
        or which part of the rows a stream fills.
      epoch: in which the example is read.
      index: of the example.
      draw: what tells apart several readings of it in one epoch.
    """
    words = np.array([seed, run, 0, index, draw, epoch], np.uint64)
    # Without a seed of its own it would have none to give: `default_rng(None)` is
    # seeded by the operating system.
    philox = np.random.Philox(np.random.SeedSequence(words.view(np.uint32)))
    state = philox.state
    state["state"] = {"key": words[:2], "counter": words[2:]}
    philox.state = state
    return np.random.Generator(philox)


class BatchDraws(NamedTuple):
    """The random numbers of the examples of a micro-batch.

    Attributes:
      seed: of the schedule that they are drawn by.
      epoch: of that schedule.
      number: the micro-batch, counted in its epoch, where an epoch may have an example
        several times; None where each comes once.
      first_step: that the epochs are counted from.
    """

    seed: int
    epoch: int
    number: int | None
    first_step: int = 0

    def rng(self, index: int, place: int) -> np.random.Generator:
        """Returns those of an example, at a place among all of the micro-batch."""
        draw = 0 if self.number is None else (self.number << _PLACE_BITS) + place
        return example_rng(self.seed, self.first_step, self.epoch, index, draw)
