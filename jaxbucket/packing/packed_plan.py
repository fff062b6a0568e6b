"""Whether rows are packed, and of which T they are: what the cheapest epoch has."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import (
    check_choice,
    check_lengths,
    check_number,
    check_positive,
)
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.packing.pattern import Pattern
from jaxbucket.packing.rows import (
    Packing,
    check_cap,
    check_longest,
    check_seq_lens,
    from_patterns,
    fuller_patterns,
    row_patterns,
)
from jaxbucket.plan.buckets import plan_within
from jaxbucket.plan.costs import CostFn, TokenCost, unit_of
from jaxbucket.plan.histogram import grouped, value_counts
from jaxbucket.plan.limits import Budget, Limits
from jaxbucket.plan.remainder import flow_remainders
from jaxbucket.plan.reports.epoch import Report, in_unit, report

Pack: TypeAlias = Literal["auto", "always", "never"]
PACK: tuple[str, ...] = get_args(Pack)

# T that are tried lie apart by this factor at first, and then by steps between them.
_RATIO = math.sqrt(2)
_REFINEMENTS = 3
# With more different lengths T are searched for by so many groups of these. Then so
# many are packed as they are, in one choice of T after the other: about a second.
_MOST_LENGTHS, _GROUPS, _MOST_PACKED = 1024, 512, 100_000
# Of a step without any pairs, of what its cost function says.
_LEAST = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class PackedPlan:
    """Shapes, and the rows that fill them.

    Attributes:
      plan: the shapes; what their steps cost is known to it.
      packing: rows of several examples; None where each has one.
      report: an epoch of these.
      others: what epochs of the other ways cost, by name: "padded", "packed", and
        "packed in one T"; in `plan.cost_unit`.
      rows: for each bucket, how many rows have its T before remainders flow.
      segments: for each bucket, how many examples a row of it has, on average.
      padded_up_to: T up to which examples are alone in their rows, also where
        remainders flow: attention needs no mask there. 0 if there is none.
      block_sparse: whether attention was counted within examples alone.
    """

    plan: BucketPlan
    packing: Packing | None
    report: Report
    others: dict[str, float]
    rows: tuple[int, ...]
    segments: tuple[float, ...]
    padded_up_to: int
    block_sparse: bool

    @property
    def is_packed(self) -> bool:
        """Whether rows have several examples."""
        return self.packing is not None

    @property
    def why(self) -> str:
        """The choice in a sentence, with what it was made by."""
        name = "packed" if self.is_packed else "padded"
        is_sparse = self.is_packed and self.block_sparse
        attention = "within examples" if is_sparse else "over whole rows"
        unit = self.plan.cost_unit
        costs = ", ".join(f"{k} {in_unit(v, unit)}" for k, v in self.others.items())
        up_to = ""
        if self.is_packed and self.padded_up_to:
            up_to = f" beyond T={self.padded_up_to}, padded up to there"
        return (
            f"Rows are {name}{up_to}, attention counted {attention}; an epoch costs "
            f"{costs}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        return {
            "packed": self.is_packed,
            "block_sparse": self.block_sparse,
            "epoch_costs": self.others,
            "rows": list(self.rows),
            "segments_per_row": list(self.segments),
            "padded_up_to": self.padded_up_to,
            "report": self.report.to_dict(),
        }

    def to_json(self) -> str:
        """Every number, as one JSON object."""
        return json.dumps(self.to_dict())

    def __rich__(self) -> Any:
        """A `rich` table, for a terminal."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, caption=self.why, caption_justify="left")
        for name in ("B", "T", "", "rows", "examples a row", "padding", "cost"):
            table.add_column(name, justify="right")
        for row in zip(self.rows, self.segments, self.report.buckets, strict=True):
            rows, segments, b = row
            is_padded = b.seq_len <= self.padded_up_to
            table.add_row(
                *(str(b.batch_size), str(b.seq_len)),
                *("padded" if is_padded else "packed", str(rows), f"{segments:.1f}"),
                *(f"{b.padding:.1%}", f"{b.cost_share:.1%}"),
            )
        return table


@bar_if_slow("Planning rows")
def plan_packing(
    lengths: ArrayLike,
    *,
    max_tokens: Budget,
    max_seq_len: int | None = None,
    num_buckets: int = 4,
    pack: Pack = "auto",
    cost_fn: CostFn | None = None,
    packed_cost_fn: CostFn | None = None,
    block_sparse: bool = False,
    max_padding: float = 1.0,
    max_segments_per_row: int | None = None,
    batch_size_multiple: int = 1,
    seq_len_multiple: int = 1,
) -> PackedPlan:
    """Returns shapes for padded rows or for packed ones, whichever cost less.

    Packed rows are of several T: where attention is quadratic in T, long rows cost more
    than the padding that they save, and short examples are better packed in short rows.
    These T are searched for, one more at a time, by packing the lengths into them. With
    `packed_cost_fn`, examples up to some T may stay alone in their rows as well: those
    shapes cost what padded ones do.

    Example:
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=1000)
      >>> from jaxbucket.plan import TransformerCost
      >>> found = plan_packing(
      ...     lengths, max_tokens=4096, cost_fn=TransformerCost(width=64, depth=2)
      ... )
      >>> found.is_packed, found.others["packed"] < found.others["padded"]
      (True, True)

    Args:
      lengths: `[N]` integers, one per example.
      max_tokens: the hard budget of a global batch, padding counted; or a function of
        T that returns it.
      max_seq_len: the longest T there may be; by default the longest length, rounded
        up. Padded rows are not longer than that.
      num_buckets: how many shapes at most.
      pack: "auto", or "always" and "never" to have it one way.
      cost_fn: `(batch_size, seq_len)` -> what a step costs; by default its tokens.
        Of a `packed_cost_fn` it must be given, and count the same.
      packed_cost_fn: the same of a step of packed rows, where that is another: its
        attention may be slower for it has a mask. By default `cost_fn`, by which rows
        with room for more are filled always.
      block_sparse: whether the attention of packed rows takes time within examples
        alone, as that of fused kernels with segment ids; not so with a mask.
      max_padding: the share of packed rows that may be padding, whatever is cheaper:
        in the rows of an epoch, before the last ones of a T go up into longer ones.
      max_segments_per_row: the most examples of a row; by default as many as fit.
      batch_size_multiple: every B is a multiple of it.
      seq_len_multiple: every T is a multiple of it.

    Raises:
      ValueError: for lengths that `check_lengths` refuses, or beyond `max_seq_len`, or
        limits that no batch keeps to; if rows with so little padding are not found.
    """
    check_choice("pack", pack, PACK)
    if not 0 < check_number("max_padding", max_padding) <= 1:
        raise ValueError(f"`max_padding={max_padding}` must be a share, at most 1.")
    if isinstance(max_tokens, Sequence):
        raise ValueError(
            f"`max_tokens={max_tokens}` is one for each of some boundaries, which are "
            "not given here: pass an integer, or a function of T."
        )
    _check_units(cost_fn, packed_cost_fn)
    lengths = check_lengths(lengths)
    padded_limits = Limits(
        max_tokens=max_tokens,
        max_seq_len=max_seq_len,
        batch_size_multiple=batch_size_multiple,
        seq_len_multiple=seq_len_multiple,
        cost_fn=cost_fn or TokenCost(),
    )
    if max_seq_len is not None:
        check_longest(lengths, max_seq_len)
    check_seq_lens(padded_limits.longest(lengths))
    packed_limits = padded_limits
    if packed_cost_fn is not None:
        packed_limits = dataclasses.replace(padded_limits, cost_fn=packed_cost_fn)
    cap = check_cap(max_segments_per_row)
    limits = (padded_limits, packed_limits)
    histogram = value_counts(lengths)
    rows = _RowSearch(histogram, limits, cap, block_sparse, max_padding)
    single = rows.fuller(rows.packed((rows.last,)))
    packed = rows.fuller(rows.search(check_positive("num_buckets", num_buckets)))
    is_possible = packed.padding <= max_padding
    if pack == "always" and not is_possible:
        raise ValueError(
            f"`max_padding={max_padding}`: of the rows that were tried, "
            f"{packed.padding:.2%} at least is padding. Raise it, or `max_seq_len`, or "
            "`num_buckets`."
        )
    # No longer than it has to be, as packed rows are.
    tight = dataclasses.replace(padded_limits, max_seq_len=None)
    padded = plan_within(lengths, tight, num_buckets, "optimal")
    padded_report = report(padded, lengths)
    others = {
        "padded": padded_report.epoch_cost,
        "packed": packed.cost,
        "packed in one T": single.cost,
    }
    is_packed = pack == "always" or (
        pack == "auto" and is_possible and packed.cost < padded_report.epoch_cost
    )
    if is_packed:
        packing = from_patterns(packed.patterns, packed.seq_lens, max_segments_per_row)
        return packed.planned(packing, others, block_sparse)
    return PackedPlan(
        padded,
        None,
        padded_report,
        others,
        tuple(bucket.examples for bucket in padded_report.buckets),
        (1.0,) * len(padded),
        padded.max_seq_len,
        block_sparse,
    )


def _check_units(cost_fn: CostFn | None, packed_cost_fn: CostFn | None) -> None:
    """Raises a ValueError if two costs cannot be compared, so far as they say."""
    units = {getattr(x, "unit", None) for x in (cost_fn, packed_cost_fn)} - {None}
    if packed_cost_fn is not None and (cost_fn is None or len(units) > 1):
        raise ValueError(
            f"`packed_cost_fn` counts {unit_of(packed_cost_fn)}, and `cost_fn` "
            f"{unit_of(cost_fn or TokenCost())}: give both, in one unit, to compare "
            "them."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Packed:
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

    def planned(
        self, packing: Packing, others: dict[str, float], block_sparse: bool
    ) -> PackedPlan:
        """Returns the plan of these rows."""
        epoch = report(self.plan, packing.row_lengths)
        segments = self.segments / np.maximum(self.rows, 1)
        return PackedPlan(
            self.plan,
            packing,
            dataclasses.replace(epoch, packed_examples=packing.num_examples),
            others,
            tuple(self.rows.tolist()),
            tuple(segments.tolist()),
            self.padded_up_to,
            block_sparse,
        )


class _RowSearch:
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
        self._seen: dict[tuple[tuple[int, ...], int], _Packed] = {}

    def search(self, num_buckets: int) -> _Packed:
        """Returns the cheapest that is found, of at most so many T.

        Where there are very many lengths, neighbours are taken as equal first, and the
        most promising T are packed as they are.
        """
        size = len(self._values)
        if size > _MOST_LENGTHS:
            histogram = grouped(self._values, self._counts, _GROUPS)
            coarse = _RowSearch(histogram, *self._options, longest=self._longest)
            coarse.search(num_buckets)
            promising = sorted(coarse._seen.items(), key=lambda x: self._rank(x[1]))
            number = max(1, _MOST_PACKED // size)
            found = [self.packed(*x) for x, _ in promising[:number]]
            best = min([self.packed((self.last,)), *found], key=self._rank)
            return self._cheapest([self._needed(best)], best)
        # The shortest T, which few fit into, may lead away from what is better.
        ways = [self._search(num_buckets, self._grid(more)) for more in (0, 1)]
        return min(ways, key=self._rank)

    def _search(self, num_buckets: int, grid: list[int]) -> _Packed:
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

    def _refined(self, best: _Packed, ratio: float) -> _Packed:
        """The cheapest with each T in turn moved by a factor, or left out."""
        for seq_len in best.seq_lens:
            rest = [x for x in best.seq_lens if x != seq_len]
            moved = [self._rounded(seq_len * x) for x in (ratio, 1 / ratio)]
            best = self._cheapest([rest, *([*rest, x] for x in moved)], best)
        return best

    def _needed(self, packed: _Packed) -> list[int]:
        """T that its rows need, as long as the longest of them."""
        longest: dict[int, int] = {}
        for row in packed.patterns:
            longest[row.seq_len] = max(longest.get(row.seq_len, 0), sum(row.slots))
        multiple = self._limits.seq_len_multiple
        return [-(-length // multiple) * multiple for length in longest.values()]

    def _cheapest(self, tried: Iterable[Iterable[int]], best: _Packed) -> _Packed:
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

    def _rank(self, packed: _Packed) -> tuple[float, float]:
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

    def packed(self, seq_lens: tuple[int, ...], alone: int = 0) -> _Packed:
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

    def fuller(self, packed: _Packed) -> _Packed:
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
    ) -> _Packed:
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
        return _Packed(seq_lens, up_to, patterns, plan, rows, segments, padding, cost)

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
