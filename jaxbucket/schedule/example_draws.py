"""Random numbers for one example, which depend only on its position in the data.

`example_rng` returns a Philox generator (Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", SC 2011), which is a function of a key and a counter of 64-bit words:

    key      seed, run
    counter  0, index, draw, epoch       (the first word counts the numbers drawn)

The words are not hashed, so no two examples share a counter, and their random streams
never overlap. Only generators spawned from it are seeded by a hash, numpy's
`SeedSequence` of these words. Runs depend on this layout, and golden
numbers in the tests guard it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The low bits of a draw hold the place in the micro-batch.
_PLACE_BITS = 32


def example_rng(
    seed: int, run: int, epoch: int, index: int, draw: int = 0
) -> np.random.Generator:
    """Returns the random number generator of one example in one epoch.

    Example:
      >>> example_rng(0, 0, epoch=1, index=7).integers(100, size=4)
      array([93,  1, 39, 22])

    Args:
      seed: the seed, below 2**64 like all other arguments.
      run: distinguishes runs with the same seed: the first step of a schedule, or the
        part of the rows that a stream fills.
      epoch: the epoch in which the example is read.
      index: the index of the example.
      draw: distinguishes several uses of the example in one epoch.
    """
    words = np.array([seed, run, 0, index, draw, epoch], np.uint64)
    # An explicit seed sequence makes spawned generators reproducible. By default the
    # operating system would seed them.
    philox = np.random.Philox(np.random.SeedSequence(words.view(np.uint32)))
    state = philox.state
    state["state"] = {"key": words[:2], "counter": words[2:]}
    philox.state = state
    return np.random.Generator(philox)


class BatchDraws(NamedTuple):
    """The random number generators of the examples of a micro-batch.

    Attributes:
      seed: the seed of the schedule.
      epoch: the epoch of that schedule.
      number: the number of the micro-batch in its epoch if the epoch may have an
        example several times; None if every example comes once.
      first_step: the step from which epochs are counted.
      first_example: the number of examples in earlier components of a mixture.
    """

    seed: int
    epoch: int
    number: int | None
    first_step: int = 0
    first_example: int = 0

    def rng(self, index: int, place: int) -> np.random.Generator:
        """Returns the generator of an example.

        Args:
          index: the index of the example.
          place: the place of the example among all examples of the micro-batch.
        """
        draw = 0 if self.number is None else (self.number << _PLACE_BITS) + place
        index += self.first_example
        return example_rng(self.seed, self.first_step, self.epoch, index, draw)
