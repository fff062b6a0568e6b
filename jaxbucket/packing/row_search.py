"""A search for the T of packed rows: each choice is packed, and its epoch counted."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from jaxbucket.base.types import BucketPlan
from jaxbucket.packing.pattern import Pattern
from jaxbucket.packing.row_patterns import fuller_patterns, row_patterns
from jaxbucket.plan.histogram import grouped
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.remainder import flow_remainders

# T that are tried lie apart by this factor at first, and then by steps between them.
_RATIO = math.sqrt(2)
_REFINEMENTS = 3
# With more different lengths T are searched for by so many groups of these. Then so
# many are packed as they are, in one choice of T after the other: about a second.
_MOST_LENGTHS, _GROUPS, _MOST_PACKED = 1024, 512, 100_000
# Of a step without any pairs, of what its cost function says.
_LEAST = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class RowChoice:
    """Rows of some T.

    Attributes:
      seq_lens: these T.
      padded_up_to: that of them up to which examples are alone in their rows, or 0.
      patterns: the rows.
      plan: the shapes, with what a step of each costs.
      rows: `[K]` how many have each T.
      segments: `[K]` examples in them.
      padding: share of the rows behind their last example.
      cost: of an epoch, remainders included.
    """

    seq_lens: tuple[int, ...]
    padded_up_to: int
    patterns: list[Pattern]
    plan: BucketPlan
    rows: np.ndarray
    segments: np.ndarray
    padding: float
    cost: float


class RowSearch:
    """Packs the same lengths into rows of any T, and says what an epoch of it costs.

    Attributes:
      last: T of the longest row.
    """

    def __init__(
        self,
        histogram: tuple[np.ndarray, np.ndarray],
        limits: tuple[Limits, Limits],
        cap: int,
        block_sparse: bool,
        max_padding: float,
        longest: int | None = None,
    ):
        self._options = limits, cap, block_sparse, max_padding
        self._padded_limits, self._limits = limits
        self._cap = cap
        self._block_sparse = block_sparse
        self._max_padding = max_padding
        self._values, self._counts = histogram
        self._longest = longest or int(self._values[-1])
        self.last = self._limits.longest(np.array([self._longest]))
        self._held: dict[int, bool] = {}
        self._seen: dict[tuple[tuple[int, ...], int], RowChoice] = {}

    def search(self, num_buckets: int) -> RowChoice:
        """Returns the cheapest that is found, of at most so many T.

        Where there are very many lengths, neighbours are taken as equal first, and the
        most promising T are packed as they are.
        """
        size = len(self._values)
        if size > _MOST_LENGTHS:
            histogram = grouped(self._values, self._counts, _GROUPS)
            coarse = RowSearch(histogram, *self._options, longest=self._longest)
            coarse.search(num_buckets)
            promising = sorted(coarse._seen.items(), key=lambda x: self._rank(x[1]))
            number = max(1, _MOST_PACKED // size)
            found = [self.packed(*x) for x, _ in promising[:number]]
            best = min([self.packed((self.last,)), *found], key=self._rank)
            return self._cheapest([self._needed(best)], best)
        # The shortest T, which few fit into, may lead away from what is better.
        ways = [self._search(num_buckets, self._grid(more)) for more in (0, 1)]
        return min(ways, key=self._rank)

    def _search(self, num_buckets: int, grid: list[int]) -> RowChoice:
        best = self._cheapest([(x,) for x in grid], self.packed((self.last,)))
        for _ in range(num_buckets - 1):
            found = self._cheapest([(*best.seq_lens, x) for x in grid], best)
            if found is best:
                break
            best = found
        for turn in range(_REFINEMENTS):
            best = self._refined(best, _RATIO ** (0.5**turn))
        return self._cheapest([self._needed(best)], best)

    def _grid(self, more: int) -> list[int]:
        steps = more + int(math.log(self.last / self._values[0], _RATIO))
        return sorted({self._rounded(self.last / _RATIO**i) for i in range(steps)})

    def _refined(self, best: RowChoice, ratio: float) -> RowChoice:
        """The cheapest with each T in turn moved by a factor, or left out."""
        for seq_len in best.seq_lens:
            rest = [x for x in best.seq_lens if x != seq_len]
            moved = [self._rounded(seq_len * x) for x in (ratio, 1 / ratio)]
            best = self._cheapest([rest, *([*rest, x] for x in moved)], best)
        return best

    def _needed(self, packed: RowChoice) -> list[int]:
        """T that its rows need, as long as the longest of them."""
        longest: dict[int, int] = {}
        for row in packed.patterns:
            longest[row.seq_len] = max(longest.get(row.seq_len, 0), sum(row.slots))
        multiple = self._limits.seq_len_multiple
        return [-(-length // multiple) * multiple for length in longest.values()]

    def _cheapest(self, tried: Iterable[Iterable[int]], best: RowChoice) -> RowChoice:
        """Of those that hold the longest, and the best so far."""
        every = [tuple(sorted(set(x))) for x in tried]
        longest = self._longest
        held = [
            x for x in every if x and x[-1] >= longest and all(map(self._has_rows, x))
        ]
        # Without a mask that costs something, rows are the better the fuller they are.
        is_same = self._padded_limits is self._limits
        found = [
            self.packed(x, alone) for x in held for alone in range(is_same or len(x))
        ]
        return min([best, *found], key=self._rank)

    def _rank(self, packed: RowChoice) -> tuple[float, float]:
        """What is too much padding, and then the cost."""
        return max(packed.padding - self._max_padding, 0.0), packed.cost

    def _has_rows(self, seq_len: int) -> bool:
        """Whether the budget holds a batch; one that is a function of T may not."""
        if seq_len not in self._held:
            self._held[seq_len] = False
            with contextlib.suppress(ValueError):
                self._held[seq_len] = len(self._limits.plan((seq_len,))) == 1
        return self._held[seq_len]

    def _rounded(self, seq_len: float) -> int:
        multiple = self._limits.seq_len_multiple
        return min(self.last, max(1, round(seq_len / multiple)) * multiple)

    def packed(self, seq_lens: tuple[int, ...], alone: int = 0) -> RowChoice:
        """Returns the rows of some T, increasing; the last one holds every length.

        Args:
          seq_lens: these T.
          alone: for how many of them, the shortest, examples have a row each.
        """
        if (seq_lens, alone) not in self._seen:
            patterns = row_patterns(
                *(self._values, self._counts, seq_lens, self._cap),
                padded_up_to=(0, *seq_lens)[alone],
            )
            self._seen[seq_lens, alone] = self._of(seq_lens, alone, patterns)
        return self._seen[seq_lens, alone]

    def fuller(self, packed: RowChoice) -> RowChoice:
        """Returns rows of the same T, of another way to pack if these are cheaper."""
        alone = (0, *packed.seq_lens).index(packed.padded_up_to)
        patterns = fuller_patterns(
            packed.patterns,
            *(self._values, self._counts, packed.seq_lens, self._cap),
            packed.padded_up_to,
        )
        other = self._of(packed.seq_lens, alone, patterns)
        return min([packed, other], key=self._rank)

    def _of(
        self, seq_lens: tuple[int, ...], alone: int, patterns: list[Pattern]
    ) -> RowChoice:
        """What an epoch of these rows costs."""
        size = len(seq_lens)
        up_to = (0, *seq_lens)[alone]
        bucket = np.searchsorted(seq_lens, [x.seq_len for x in patterns])
        number = np.array([x.rows for x in patterns])
        rows, segments, squares = (
            np.bincount(bucket, number * np.array(x), size)
            for x in (
                [1] * len(patterns),
                [len(x.slots) for x in patterns],
                [sum(n * n for n in x.slots) for x in patterns],
            )
        )
        plan = self._limits.plan(seq_lens)
        if self._block_sparse:
            share = squares / np.maximum(rows, 1) / np.square(plan.boundaries)
            share[rows == 0] = 1
            plan = dataclasses.replace(
                plan, step_costs=tuple(self._sparse_costs(plan, share))
            )
        if alone:
            own = self._padded_limits.plan(seq_lens).costs[:alone]
            costs = np.concatenate([own, plan.costs[alone:]])
            plan = dataclasses.replace(plan, step_costs=tuple(costs.tolist()))
        rows = rows.astype(np.int64)
        flow = flow_remainders(rows, plan.batch_sizes, plan.costs)
        cost = float((flow.batches * plan.costs).sum())
        padding = 1 - float(self._values @ self._counts) / int(rows @ plan.boundaries)
        return RowChoice(seq_lens, up_to, patterns, plan, rows, segments, padding, cost)

    def _sparse_costs(self, plan: BucketPlan, share: np.ndarray) -> list[float]:
        """What steps cost where of all pairs of a row only a share is attended."""
        cost_fn = self._limits.cost_fn
        assert cost_fn is not None
        costs = []
        for bucket, attended in zip(plan.buckets, share.tolist(), strict=True):
            size, seq_len = bucket.batch_size, bucket.seq_len
            x = [seq_len, self._rounded(seq_len / 2), self._rounded(seq_len / 4)]
            y = np.array([cost_fn(size, n) for n in x])
            # What grows with T squared is that of pairs.
            per_pair = np.polyfit(x, y, 2)[0] if len(set(x)) == 3 else 0.0
            pairs = np.clip(per_pair * seq_len**2, 0.0, y[0])
            costs.append(float(max(y[0] - pairs * (1 - attended), _LEAST * y[0])))
        return costs
