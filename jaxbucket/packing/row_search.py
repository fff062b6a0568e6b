"""A search for the T of packed rows: each choice is packed, and its epoch counted."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from jaxbucket.base.buckets import BucketPlan
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


@dataclasses.dataclass(eq=False)
class RowSearch:
    """Packs the same lengths into rows of any T, and says what an epoch of it costs.

    Attributes:
      values: `[V]` lengths, increasing.
      counts: `[V]` how many examples of each there are.
      longest: the longest length.
      padded_limits: of rows with one example each.
      limits: of packed rows; the same object if these cost the same.
      cap: the most slots of a row.
      block_sparse: whether attention takes time within examples alone.
      max_padding: the share of the rows that may be padding, whatever is cheaper.
      last: T of the longest row.
    """

    values: np.ndarray
    counts: np.ndarray
    longest: int
    padded_limits: Limits
    limits: Limits
    cap: int
    block_sparse: bool
    max_padding: float

    def __post_init__(self):
        self.last = self.limits.longest(np.array([self.longest]))
        self._has_batch: dict[int, bool] = {}
        self._choices: dict[tuple[tuple[int, ...], int], RowChoice] = {}

    def search(self, num_buckets: int) -> RowChoice:
        """Returns the cheapest choice that is found, of at most so many T.

        Where there are very many lengths, neighbours are taken as equal first, and the
        most promising T are packed as they are.
        """
        size = len(self.values)
        if size <= _MOST_LENGTHS:
            # The shortest T, which few fit into, may lead away from what is better.
            ways = [self._descend(num_buckets, self._grid(more)) for more in (0, 1)]
            return min(ways, key=self._rank)
        values, counts = grouped(self.values, self.counts, _GROUPS)
        coarse = dataclasses.replace(self, values=values, counts=counts)
        coarse.search(num_buckets)
        promising = sorted(coarse._choices.values(), key=self._rank)
        number = max(1, _MOST_PACKED // size)
        choices = [self.packed(x.seq_lens, x.padded_up_to) for x in promising[:number]]
        best = min([self.packed((self.last,)), *choices], key=self._rank)
        return self._cheapest([self._needed(best)], best)

    def packed(self, seq_lens: tuple[int, ...], padded_up_to: int = 0) -> RowChoice:
        """Returns the rows of some T, increasing; the last one holds every length.

        Args:
          seq_lens: these T.
          padded_up_to: one of them, up to which examples have a row each; or 0.
        """
        key = seq_lens, padded_up_to
        if key not in self._choices:
            patterns = row_patterns(
                self.values, self.counts, seq_lens, self.cap, padded_up_to
            )
            self._choices[key] = self._choice(*key, patterns)
        return self._choices[key]

    def fuller(self, choice: RowChoice) -> RowChoice:
        """Returns rows of the same T, of another way to pack if these are cheaper."""
        key = choice.seq_lens, choice.padded_up_to
        patterns = fuller_patterns(
            *(choice.patterns, self.values, self.counts, key[0], self.cap, key[1])
        )
        return min([choice, self._choice(*key, patterns)], key=self._rank)

    def _descend(self, num_buckets: int, grid: list[int]) -> RowChoice:
        """One T more at a time, and then each of them moved in ever smaller steps."""
        best = self._cheapest([(x,) for x in grid], self.packed((self.last,)))
        for _ in range(num_buckets - 1):
            cheapest = self._cheapest([(*best.seq_lens, x) for x in grid], best)
            if cheapest is best:
                break
            best = cheapest
        for turn in range(_REFINEMENTS):
            best = self._refined(best, _RATIO ** (0.5**turn))
        return self._cheapest([self._needed(best)], best)

    def _grid(self, more: int) -> list[int]:
        steps = more + int(math.log(self.last / self.values[0], _RATIO))
        return sorted({self._rounded(self.last / _RATIO**i) for i in range(steps)})

    def _refined(self, best: RowChoice, ratio: float) -> RowChoice:
        """The cheapest with each T in turn moved by a factor, or left out."""
        for seq_len in best.seq_lens:
            others = [x for x in best.seq_lens if x != seq_len]
            moved = [self._rounded(seq_len * x) for x in (ratio, 1 / ratio)]
            best = self._cheapest([others, *([*others, x] for x in moved)], best)
        return best

    def _needed(self, choice: RowChoice) -> list[int]:
        """T that its rows need, as long as the longest of them."""
        longest: dict[int, int] = {}
        for row in choice.patterns:
            longest[row.seq_len] = max(longest.get(row.seq_len, 0), sum(row.slots))
        multiple = self.limits.seq_len_multiple
        return [-(-length // multiple) * multiple for length in longest.values()]

    def _cheapest(
        self, candidates: Iterable[Iterable[int]], best: RowChoice
    ) -> RowChoice:
        """Of those that hold the longest, and the best so far."""
        choices = [best]
        for seq_lens in [tuple(sorted(set(x))) for x in candidates]:
            holds_all = seq_lens and seq_lens[-1] >= self.longest
            if holds_all and all(map(self._holds_batch, seq_lens)):
                # Without a mask that costs something, the fuller rows are the better.
                is_same = self.padded_limits is self.limits
                limits = (0,) if is_same else (0, *seq_lens[:-1])
                choices += [self.packed(seq_lens, up_to) for up_to in limits]
        return min(choices, key=self._rank)

    def _rank(self, choice: RowChoice) -> tuple[float, float]:
        """What is too much padding, and then the cost."""
        return max(choice.padding - self.max_padding, 0.0), choice.cost

    def _holds_batch(self, seq_len: int) -> bool:
        """Whether the budget has room for a batch; a function of T may have none."""
        if seq_len not in self._has_batch:
            self._has_batch[seq_len] = False
            with contextlib.suppress(ValueError):
                self._has_batch[seq_len] = len(self.limits.plan((seq_len,))) == 1
        return self._has_batch[seq_len]

    def _rounded(self, seq_len: float) -> int:
        multiple = self.limits.seq_len_multiple
        return min(self.last, max(1, round(seq_len / multiple)) * multiple)

    def _choice(
        self, seq_lens: tuple[int, ...], padded_up_to: int, patterns: list[Pattern]
    ) -> RowChoice:
        """What an epoch of these rows costs."""
        size = len(seq_lens)
        bucket = np.searchsorted(seq_lens, [x.seq_len for x in patterns])
        number = np.array([x.rows for x in patterns])
        slots = np.array([len(x.slots) for x in patterns])
        pairs = np.array([sum(n * n for n in x.slots) for x in patterns])
        rows, segments, squares = (
            np.bincount(bucket, x, size)
            for x in (number, number * slots, number * pairs)
        )
        plan = self.limits.plan(seq_lens)
        costs = plan.costs
        if self.block_sparse:
            share = squares / np.maximum(rows, 1) / np.square(plan.boundaries)
            share[rows == 0] = 1
            costs = np.array(self._sparse_costs(plan, share))
        if padded_up_to:
            alone = seq_lens.index(padded_up_to) + 1
            padded_costs = self.padded_limits.plan(seq_lens).costs
            costs = np.concatenate([padded_costs[:alone], costs[alone:]])
        if self.block_sparse or padded_up_to:
            plan = dataclasses.replace(plan, step_costs=tuple(costs.tolist()))
        rows = rows.astype(np.int64)
        flow = flow_remainders(rows, plan.batch_sizes, plan.costs)
        return RowChoice(
            seq_lens,
            padded_up_to,
            patterns,
            plan,
            rows,
            segments,
            padding=1 - float(self.values @ self.counts) / int(rows @ plan.boundaries),
            cost=float((flow.batches * plan.costs).sum()),
        )

    def _sparse_costs(self, plan: BucketPlan, share: np.ndarray) -> list[float]:
        """What steps cost where of all pairs of a row only a share is attended."""
        cost_fn = self.limits.cost_fn
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
