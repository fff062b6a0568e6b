"""Searches for the T of packed rows by packing each choice and costing its epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.packing.pattern import Pattern
from jaxbucket.packing.row_choice import RowChoice, sparse_cost
from jaxbucket.packing.row_patterns import fuller_patterns, row_patterns
from jaxbucket.packing.rows import Packing, from_patterns
from jaxbucket.packing.separation import log_variance, separation
from jaxbucket.plan.flow.remainder import flow_remainders
from jaxbucket.plan.histogram import grouped
from jaxbucket.plan.limits import Limits, costed

# The ratio between neighboring T of the first grid. Refinements use smaller ratios.
_RATIO = math.sqrt(2)
_REFINEMENTS = 3
# With more distinct lengths than this, the search merges them into groups. The most
# promising choices are then packed with all lengths, up to a total number of lengths
# that takes about a second.
_MAX_LENGTHS, _NUM_GROUPS, _MAX_LENGTHS_PACKED = 1024, 512, 100_000


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PatternChoice(RowChoice):
    """The packed rows of examples with one length.

    Attributes:
      seq_lens: the chosen T, increasing.
      patterns: the rows.
    """

    seq_lens: tuple[int, ...]
    patterns: list[Pattern]

    def packing(self, max_segments_per_row: int | None) -> Packing:
        return from_patterns(self.patterns, self.seq_lens, max_segments_per_row)


@dataclasses.dataclass(eq=False)
class RowSearch:
    """Packs given lengths into rows of any T, and computes the cost of an epoch.

    Attributes:
      values: `[V]` distinct lengths, increasing.
      counts: `[V]` integers, the number of examples of each length.
      longest: the longest length.
      padded_limits: the limits and costs of rows with one example.
      limits: the limits and costs of packed rows; the same object if the costs are the
        same.
      cap: the maximum number of slots in a row.
      block_sparse: whether attention takes time within examples only.
      max_padding: the maximum share of padding in the rows.
      mixing: the share of the cost that is added for batches of equal lengths.
      choices: the choices that were packed so far, by T and `padded_up_to`.
      last: the T of the longest row.
    """

    values: np.ndarray
    counts: np.ndarray
    longest: int
    padded_limits: Limits
    limits: Limits
    cap: int
    block_sparse: bool
    max_padding: float
    mixing: float = 0.0
    choices: dict[tuple[tuple[int, ...], int], PatternChoice] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self):
        self.last = self.limits.longest(np.array([self.longest]))
        self._has_batch: dict[int, bool] = {}
        self._variance = log_variance(self.values, self.counts)

    def search(self, num_buckets: int) -> PatternChoice:
        """Returns the cheapest choice found, with at most `num_buckets` different T.

        If there are very many distinct lengths, the search first merges neighbors, and
        then packs all lengths for the most promising choices.
        """
        size = len(self.values)
        if size <= _MAX_LENGTHS:
            # The shortest T of the grid fits few examples and may mislead the greedy
            # search, so try without it as well.
            grids = [self._grid(extra_steps) for extra_steps in (0, 1)]
            # The search is greedy, so it may end at better rows if it ignores `mixing`.
            searches = {0.0: dataclasses.replace(self, mixing=0.0), self.mixing: self}
            choices = [
                search._descend(num_buckets, grid)
                for search in searches.values()
                for grid in grids
            ]
            return min(choices, key=self.rank)
        values, counts = grouped(self.values, self.counts, _NUM_GROUPS)
        coarse = dataclasses.replace(self, values=values, counts=counts, choices={})
        coarse.search(num_buckets)
        promising = sorted(coarse.choices.values(), key=self.rank)
        number = max(1, _MAX_LENGTHS_PACKED // size)
        choices = [self.packed(x.seq_lens, x.padded_up_to) for x in promising[:number]]
        best = min([self.packed((self.last,)), *choices], key=self.rank)
        return self._cheapest([self._tightened(best)], best)

    def packed(self, seq_lens: tuple[int, ...], padded_up_to: int = 0) -> PatternChoice:
        """Returns the rows for a choice of T.

        Args:
          seq_lens: the T, increasing; every length must fit the last one.
          padded_up_to: one of the T, up to which examples get rows of their own; or 0.
        """
        key = seq_lens, padded_up_to
        if key not in self.choices:
            patterns = row_patterns(
                self.values, self.counts, seq_lens, self.cap, padded_up_to
            )
            self.choices[key] = self._choice(*key, patterns)
        return self.choices[key]

    def fuller(self, choice: PatternChoice) -> PatternChoice:
        """Returns the same choice of T with rows of the second packer if cheaper."""
        key = choice.seq_lens, choice.padded_up_to
        patterns = fuller_patterns(
            *(choice.patterns, self.values, self.counts, key[0], self.cap, key[1])
        )
        best = min([choice, self._choice(*key, patterns)], key=self.rank)
        # A T without rows would only cost a compilation.
        used = tuple(itertools.compress(best.seq_lens, best.rows))
        if used == best.seq_lens or key[1] not in (0, *used):
            return best
        return self._choice(used, key[1], best.patterns)

    def _descend(self, num_buckets: int, grid: list[int]) -> PatternChoice:
        """Adds one T at a time, and then moves each of them in ever smaller steps."""
        best = self._cheapest([(x,) for x in grid], self.packed((self.last,)))
        for _ in range(num_buckets - 1):
            cheapest = self._cheapest([(*best.seq_lens, x) for x in grid], best)
            if cheapest is best:
                break
            best = cheapest
        for turn in range(_REFINEMENTS):
            best = self._refined(best, _RATIO ** (0.5**turn))
        return self._cheapest([self._tightened(best)], best)

    def _grid(self, extra_steps: int) -> list[int]:
        """Returns a geometric grid of T, from the longest to the shortest length."""
        steps = extra_steps + int(math.log(self.last / self.values[0], _RATIO))
        return sorted({self._rounded(self.last / _RATIO**i) for i in range(steps)})

    def _refined(self, best: PatternChoice, ratio: float) -> PatternChoice:
        """Returns the cheapest choice after moving or removing each T in turn."""
        for seq_len in best.seq_lens:
            others = [x for x in best.seq_lens if x != seq_len]
            moved = [self._rounded(seq_len * x) for x in (ratio, 1 / ratio)]
            best = self._cheapest([others, *([*others, x] for x in moved)], best)
        return best

    def _tightened(self, choice: PatternChoice) -> list[int]:
        """Returns the T of a choice, each reduced to the length of its fullest row."""
        longest: dict[int, int] = {}
        for row in choice.patterns:
            longest[row.seq_len] = max(longest.get(row.seq_len, 0), sum(row.slots))
        multiple = self.limits.seq_len_multiple
        return [-(-length // multiple) * multiple for length in longest.values()]

    def _cheapest(
        self, candidates: Iterable[Iterable[int]], best: PatternChoice
    ) -> PatternChoice:
        """Returns the cheapest choice among valid candidates and the best so far."""
        choices = [best]
        for seq_lens in [tuple(sorted(set(x))) for x in candidates]:
            fits_all = seq_lens and seq_lens[-1] >= self.longest
            if fits_all and all(map(self._fits_batch, seq_lens)):
                # If packed rows cost no more than padded ones, packing is never worse.
                is_same = self.padded_limits is self.limits
                limits = (0,) if is_same else (0, *seq_lens[:-1])
                choices += [self.packed(seq_lens, up_to) for up_to in limits]
        return min(choices, key=self.rank)

    def rank(self, choice: RowChoice) -> tuple[float, float, int]:
        """Returns the sort key of a choice."""
        return choice.rank(self.max_padding, self.mixing)

    def _fits_batch(self, seq_len: int) -> bool:
        """Returns whether the budget allows a batch of this T.

        A budget that is a function of T may allow none.
        """
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
    ) -> PatternChoice:
        """Returns the choice for given rows, with the cost of an epoch."""
        size = len(seq_lens)
        bucket = np.searchsorted(seq_lens, [x.seq_len for x in patterns])
        number = np.array([x.rows for x in patterns])
        slots = np.array([len(x.slots) for x in patterns])
        lengths = np.concatenate([x.slots for x in patterns])
        tokens, squares, logs = (
            np.add.reduceat(x, np.cumsum(slots) - slots)
            for x in (lengths, lengths * lengths, lengths * np.log(lengths))
        )
        rows, segments, pairs = (
            np.bincount(bucket, x, size)
            for x in (number, number * slots, number * squares)
        )
        rows = rows.astype(np.int64)
        plan = self.limits.plan(seq_lens, rows)
        costs = plan.costs
        if self.block_sparse:
            share = pairs / np.maximum(rows, 1) / np.square(plan.boundaries)
            share[rows == 0] = 1
            costs = np.array(self._sparse_costs(plan, share))
        if padded_up_to:
            alone = seq_lens.index(padded_up_to) + 1
            padded_costs = costed(plan, self.padded_limits.cost_fn).costs
            costs = np.concatenate([padded_costs[:alone], costs[alone:]])
        if self.block_sparse or padded_up_to:
            plan = dataclasses.replace(plan, step_costs=tuple(costs.tolist()))
        flow = flow_remainders(rows, plan.batch_sizes, plan.costs)
        return PatternChoice(
            seq_lens=seq_lens,
            padded_up_to=padded_up_to,
            patterns=patterns,
            plan=plan,
            rows=rows,
            segments=segments,
            padding=1 - float(self.values @ self.counts) / int(rows @ plan.boundaries),
            separation=separation(
                *(bucket, logs / tokens, number * tokens),
                *(plan.batch_sizes, self._variance),
            ),
            cost=float((flow.batches * plan.costs).sum()),
        )

    def _sparse_costs(self, plan: BucketPlan, share: np.ndarray) -> list[float]:
        """Returns the costs of steps that attend to a share of all pairs, `[K]`."""
        cost_fn = self.limits.cost_fn
        assert cost_fn is not None
        costs = []
        for bucket, attended in zip(plan.buckets, share.tolist(), strict=True):
            size, seq_len = bucket.batch_size, bucket.tokens_per_row
            x = [seq_len, self._rounded(seq_len / 2), self._rounded(seq_len / 4)]
            costs.append(sparse_cost(x, [cost_fn(size, n) for n in x], attended))
        return costs
