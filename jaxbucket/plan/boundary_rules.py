"""Rules of thumb for where one bucket ends and the next begins.

A chooser takes `Candidates` and a number of buckets, and returns the increasing
positions of the chosen `seq_lens`, the last of which is always the last candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from jaxbucket.plan.remainder import RowFlow, epoch_cost, flow_remainders


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Everything that a function which chooses boundaries is given.

    Attributes:
      seq_lens: `[G]` int64, increasing: lengths at which a bucket may end.
      examples: `[G]` int64, how many examples are at most that long.
      tokens: `[G]` int64, the real tokens of those.
      batch_sizes: `[G]` int64, the rows of a step at that length.
      costs: `[G]` float64 or int64, what such a step costs.
      complete: whether no other length could be a boundary; else there were too many.
    """

    seq_lens: np.ndarray
    examples: np.ndarray
    tokens: np.ndarray
    batch_sizes: np.ndarray
    costs: np.ndarray
    complete: bool = True

    def __len__(self) -> int:
        return len(self.seq_lens)

    def take(self, index: np.ndarray) -> Candidates:
        """Returns some of them."""
        names = ("seq_lens", "examples", "tokens", "batch_sizes", "costs")
        columns = {name: getattr(self, name)[index] for name in names}
        return dataclasses.replace(self, **columns)

    def counts(self, chosen: np.ndarray) -> np.ndarray:
        """`[K]`: examples of every bucket when the chosen candidates are its ends."""
        return np.diff(self.examples[chosen], prepend=0)

    def flow(self, chosen: np.ndarray) -> RowFlow:
        """How many rows and batches each of these buckets has in one epoch."""
        return flow_remainders(
            self.counts(chosen), self.batch_sizes[chosen], self.costs[chosen]
        )

    def epoch_cost(self, chosen: np.ndarray) -> float:
        """The costs of the batches of one epoch, summed, remainders included."""
        return epoch_cost(self.flow(chosen).batches, self.costs[chosen])


Chooser: TypeAlias = Callable[[Candidates, int], np.ndarray]


def quantile(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Equal numbers of examples in every bucket."""
    return _equal_shares(candidates, candidates.examples, num_buckets)


def equal_tokens(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Equal numbers of real tokens in every bucket: Lhotse's and NeMo's durations."""
    return _equal_shares(candidates, candidates.tokens, num_buckets)


def equal_width(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Boundaries at equal distances, from 0 to the longest."""
    ends = np.arange(1, num_buckets + 1) * candidates.seq_lens[-1] / num_buckets
    return _at(candidates, ends)


def quarters(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Boundaries at the quarters of the longest, however many buckets there may be."""
    return equal_width(candidates, min(4, num_buckets))


def geometric(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Boundaries in constant ratio, from the shortest example to the longest."""
    shortest = candidates.seq_lens[np.argmax(candidates.examples > 0)]
    ends = np.geomspace(shortest, candidates.seq_lens[-1], num_buckets + 1)[1:]
    return _at(candidates, ends)


def powers_of_two(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Boundaries at powers of two, the largest below the longest, and the longest."""
    longest = int(candidates.seq_lens[-1])
    below = (longest - 1).bit_length()
    return _at(candidates, 2.0 ** np.arange(max(0, below - num_buckets + 1), below))


def _equal_shares(
    candidates: Candidates, below: np.ndarray, num_buckets: int
) -> np.ndarray:
    total = int(below[-1])
    # The last bucket has the last share, and ends with the last candidate.
    shares = [-(-share * total // num_buckets) for share in range(1, num_buckets)]
    return _with_last(candidates, np.searchsorted(below, shares))


def _at(candidates: Candidates, ends: np.ndarray) -> np.ndarray:
    """The shortest candidates that are at least so long."""
    # Ends are rounded: without the slack one on a candidate can miss it.
    chosen = np.searchsorted(candidates.seq_lens, ends * (1 - 1e-12))
    return _with_last(candidates, chosen)


def _with_last(candidates: Candidates, chosen: np.ndarray) -> np.ndarray:
    last = len(candidates) - 1
    return np.unique(np.append(np.minimum(chosen, last), last))


_CHOOSERS = quantile, equal_tokens, equal_width, quarters, geometric, powers_of_two
RULES: dict[str, Chooser] = {chooser.__name__: chooser for chooser in _CHOOSERS}
