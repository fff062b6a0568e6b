"""`Candidates`: the lengths at which a bucket may end, and counts of what they hold."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_longest
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.policies import TRUNCATING, Overlong
from jaxbucket.plan.chunks import nothing_left
from jaxbucket.plan.flow.batch_sizes import Fit, fitted
from jaxbucket.plan.flow.step_sizes import StepSizes
from jaxbucket.plan.limits import Limits

# Up to this length, all multiples are counted, in a table.
_MAX_TABLE = 1 << 24
# With more possible T, only the rounded-up lengths of examples are candidates. Other T
# could save a little, in the last batch of a bucket, so the plan is not proven optimal.
_MAX_CANDIDATES = 1 << 18


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The lengths at which a bucket may end, and how many examples each holds.

    Attributes:
      seq_lens: `[G]` int64, the candidates, increasing.
      examples: `[G]` int64, the number of examples that are at most this long.
      tokens: `[G]` int64, the number of real tokens in these examples.
      sizes: the numbers of rows that a step of each length may have, and their costs.
      complete: whether every possible boundary is a candidate. False if there were too
        many, so that some are left out.
    """

    seq_lens: np.ndarray
    examples: np.ndarray
    tokens: np.ndarray
    sizes: StepSizes
    complete: bool = True

    @classmethod
    def of(cls, lengths: LengthCounts | ArrayLike, limits: Limits) -> Candidates:
        """Returns every T at which a bucket may end."""
        if isinstance(limits.max_tokens, tuple):
            raise ValueError(
                f"`max_tokens={limits.max_tokens}` requires `boundaries`. Pass one for "
                "each budget, or pass `max_tokens` as an integer or a function of T."
            )
        counted = LengthCounts.of(lengths)
        (last,) = limits.max_seq_lens(counted.lengths[:, None]).tolist()
        multiple = int(limits.multiples[0])
        if limits.overlong == "error":
            check_longest(counted.given, last)
        limits.check_shapes(np.array([last]))
        policy: Any = limits.overlong
        ends, examples, tokens = _cumulative(counted, last, multiple, policy)
        # If `last` is very large, only lengths that are needed are counted.
        complete = len(ends) == last // multiple <= _MAX_CANDIDATES
        if not complete:
            needed = np.append(np.diff(examples, prepend=0)[:-1] > 0, True)
            ends, examples, tokens = ends[needed], examples[needed], tokens[needed]
        batch_sizes = limits.batch_sizes(ends)
        # A budget that grows with T may be too small for any short row.
        fit = np.flatnonzero(batch_sizes)
        ends, examples, batch_sizes = ends[fit], examples[fit], batch_sizes[fit]
        sizes = limits.sizes(ends, batch_sizes, examples)
        return cls(ends, examples, tokens[fit], sizes, complete)

    def __len__(self) -> int:
        return len(self.seq_lens)

    @property
    def batch_sizes(self) -> np.ndarray:
        """`[G]` int64, the largest number of rows in a step of each length."""
        return self.sizes.most

    @property
    def costs(self) -> np.ndarray:
        """`[G]` float64 or int64, the cost of the largest step of each length."""
        return self.sizes.costs[:, -1]

    def take(self, index: np.ndarray) -> Self:
        """Returns the candidates of some indices, `[K]`."""
        names = ("seq_lens", "examples", "tokens")
        columns = {name: getattr(self, name)[index] for name in names}
        return dataclasses.replace(self, sizes=self.sizes.take(index), **columns)

    def counts(self, chosen: np.ndarray) -> np.ndarray:
        """Returns the number of examples in each bucket, `[K]`.

        Args:
          chosen: `[K]` increasing indices of the candidates at which buckets end.
        """
        return np.diff(self.examples[chosen], prepend=0)

    def epoch_cost(self, chosen: np.ndarray) -> float:
        """Returns the total cost of the batches of one epoch, remainders included."""
        return self.fit(chosen).cost

    def padded_cost(self, chosen: np.ndarray) -> float:
        """Returns the cost of an epoch in which no remainder is promoted."""
        return self.sizes.padded_costs(chosen, self.counts(chosen)).sum().item()

    def fit(self, chosen: np.ndarray) -> Fit:
        """Returns the cheapest steps of each bucket."""
        return fitted(self.sizes.take(chosen), self.counts(chosen))


def _cumulative(
    lengths: LengthCounts, last: int, multiple: int, overlong: Overlong
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lengths at which a bucket may end, and what is up to each, `[G]` int64.

    The lengths are multiples that increase up to `last`. The other results are the
    number of examples that are at most this long, and the number of their tokens. The
    chunks of examples that are split count as examples.
    """
    if overlong == "split":
        lengths = lengths.split(last)
    values, counts = lengths.lengths, lengths.counts
    is_over = values > last
    over = int(counts[is_over].sum())
    values, counts = values[~is_over], counts[~is_over]
    if last <= _MAX_TABLE:
        ends = np.arange(multiple, last + 1, multiple)
    else:
        ends = np.unique(np.append(-(-values // multiple) * multiple, last))
    # The number of distinct lengths up to each end; it may be 0 for the first ends.
    num_values = np.searchsorted(values, ends, side="right")
    examples = np.append(0, np.cumsum(counts))[num_values]
    tokens = np.append(0, np.cumsum(counts * values))[num_values]
    if overlong in TRUNCATING:
        examples[-1] += over
        tokens[-1] += over * last
    if examples[-1] == 0:
        raise ValueError(nothing_left(last))
    return ends, examples, tokens
