"""Packed plans: padded or packed rows, with the T that make an epoch the cheapest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import (
    check_choice,
    check_lengths,
    check_number,
    check_positive,
    check_share,
)
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.packing.row_search import RowChoice, RowSearch
from jaxbucket.packing.rows import (
    Packing,
    check_cap,
    check_longest,
    check_seq_lens,
    from_patterns,
)
from jaxbucket.packing.separation import log_variance, separation
from jaxbucket.plan.costs import CostFn, TokenCost, unit_of
from jaxbucket.plan.formatting import format_cost
from jaxbucket.plan.histogram import value_counts
from jaxbucket.plan.limits import Budget, Limits
from jaxbucket.plan.planner import plan_within
from jaxbucket.plan.reports.epoch import Report, report

Pack: TypeAlias = Literal["auto", "always", "never"]
PACK_CHOICES: tuple[str, ...] = get_args(Pack)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedPlan:
    """A bucket plan and, if rows are packed, the packing for it.

    Attributes:
      plan: the buckets, with the cost of their steps.
      packing: rows of several examples; None if every row has one example.
      report: the report of one epoch.
      epoch_costs: the cost of an epoch for each alternative, "padded", "packed" and
        "packed in one T", in `plan.cost_unit`.
      rows: the number of rows of each bucket, before remainders are promoted.
      segments: the mean number of examples in a row of each bucket.
      padded_up_to: examples up to this length get rows of their own, even if they are
        promoted to longer buckets, so attention needs no mask in these buckets; 0 if
        all buckets are packed.
      block_sparse: whether attention was assumed to take time within examples only.
      cause: why rows are packed or padded, as a clause.
      counts_attention: whether the cost may include attention, unlike `TokenCost`.
    """

    plan: BucketPlan
    packing: Packing | None
    report: Report
    epoch_costs: dict[str, float]
    rows: tuple[int, ...]
    segments: tuple[float, ...]
    padded_up_to: int
    block_sparse: bool
    cause: str = ""
    counts_attention: bool = True

    @property
    def is_packed(self) -> bool:
        """Whether rows have several examples."""
        return self.packing is not None

    @property
    def reason(self) -> str:
        """The choice and the costs behind it, as sentences."""
        name = "packed" if self.is_packed else "padded"
        if self.is_packed and self.padded_up_to:
            name += f" (padded up to T={self.padded_up_to})"
        return (
            f"Rows are {name}, because {self.cause}. Cost of an epoch: "
            f"{self._costs}.{self._attention}"
        )

    @property
    def _costs(self) -> str:
        unit, costs = self.plan.cost_unit, self.epoch_costs
        padded, packed, single = (
            format_cost(costs[name], unit)
            for name in ("padded", "packed", "packed in one T")
        )
        return f"{padded} padded, {packed} packed, {single} packed with a single T"

    @property
    def _attention(self) -> str:
        """How the cost counts attention, as a sentence after a space, or nothing."""
        if not self.counts_attention:
            return ""
        attention = "within examples" if self.block_sparse else "over whole rows"
        return f" Attention in packed rows is counted {attention}."

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python objects."""
        return {
            "packed": self.is_packed,
            "block_sparse": self.block_sparse,
            "epoch_costs": self.epoch_costs,
            "rows": list(self.rows),
            "segments_per_row": list(self.segments),
            "padded_up_to": self.padded_up_to,
            "cause": self.cause,
            "report": self.report.to_dict(),
        }

    def to_json(self) -> str:
        """Returns all numbers as a JSON object."""
        return json.dumps(self.to_dict())

    def __rich__(self) -> Any:
        """Returns a `rich` table for the terminal."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, caption=self.reason, caption_justify="left")
        for name in ("B", "T", "", "rows", "examples per row", "padding", "cost"):
            table.add_column(name, justify="right")
        columns = self.rows, self.segments, self.report.buckets
        for rows, segments, b in zip(*columns, strict=True):
            is_padded = cast(int, b.seq_len) <= self.padded_up_to
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
    num_buckets: int = 8,
    pack: Pack = "auto",
    cost_fn: CostFn | None = None,
    packed_cost_fn: CostFn | None = None,
    block_sparse: bool = False,
    mixing: float = 0.01,
    max_padding: float = 1.0,
    max_segments_per_row: int | None = None,
    batch_size_multiple: int = 1,
    seq_len_multiple: int = 1,
) -> PackedPlan:
    """Plans buckets for padded or packed rows, whichever makes an epoch cheaper.

    Packed rows may have several values of T. Because attention is quadratic in T, long
    rows can cost more than the padding that they save, so short examples are better
    packed into short rows. The search adds one T at a time, and evaluates each choice
    by packing the lengths. With `packed_cost_fn`, examples up to some T may also get
    rows of their own, which then cost as much as padded rows.

    Batches of rows that mix lengths are preferred if they cost only a little more
    (`mixing`), because the gradient of a batch with examples of one length is biased
    towards what that length holds (see docs/learning.md).

    Example:
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=1000)
      >>> from jaxbucket.plan import TransformerCost
      >>> cost = TransformerCost(width=64, depth=2)
      >>> packed = plan_packing(
      ...     lengths, max_tokens=4096, cost_fn=cost, block_sparse=True
      ... )
      >>> packed.is_packed, packed.epoch_costs["packed"] < packed.epoch_costs["padded"]
      (True, True)

    Args:
      lengths: `[N]` integers, one per example.
      max_tokens: the maximum B * T of a global batch, padding included; or a function
        from T to this maximum.
      max_seq_len: the maximum T of packed rows; by default the longest length, rounded
        up. Rows may be shorter, but hold the longest of these lengths. Padded rows are
        never longer than the longest length, rounded up.
      num_buckets: the maximum number of buckets.
      pack: "auto" for the cheaper rows, "always" for packed or "never" for padded rows.
      cost_fn: `(batch_size, seq_len)` -> cost of a step; by default its tokens. It is
        required with `packed_cost_fn`, and both must use the same unit.
      packed_cost_fn: like `cost_fn`, for steps of packed rows, whose attention may be
        slower because it needs a mask. By default it is `cost_fn`, and then all rows
        with enough room are packed.
      block_sparse: whether the attention of packed rows takes time within examples
        only. This holds for fused kernels with segment ids, but not for attention
        with a mask.
      mixing: how much more an epoch may cost, as a share, if its batches mix lengths. A
        cost is raised by this share of itself if every batch has examples of one
        length, and by a part of it otherwise. With 0, rows are compared by their cost
        alone. (The search is greedy, so it may still miss cheaper rows.)
      max_padding: the maximum share of padding in packed rows, even if more padding
        would be cheaper. It refers to the rows before remainders are promoted
        to longer T.
      max_segments_per_row: the maximum number of examples in a row; by default as many
        as fit.
      batch_size_multiple: every B is a multiple of this number.
      seq_len_multiple: every T is a multiple of this number.

    Returns:
      A `PackedPlan`. Its `packing` is None if rows are padded.

    Raises:
      ValueError: if a length is not a positive integer or exceeds `max_seq_len`; if no
        batch fits the limits; if `pack="always"` and the search finds no rows within
        `max_padding`.
    """
    _check_choices(pack, mixing, max_padding, max_tokens)
    _check_units(cost_fn, packed_cost_fn)
    lengths = check_lengths(lengths)
    limits = Limits(
        max_tokens=max_tokens,
        max_seq_len=max_seq_len,
        batch_size_multiple=batch_size_multiple,
        seq_len_multiple=seq_len_multiple,
        cost_fn=cost_fn or TokenCost(),
    )
    if max_seq_len is not None:
        check_longest(lengths, max_seq_len)
    check_seq_lens(limits.longest(lengths))
    packed_limits = limits
    if packed_cost_fn is not None:
        packed_limits = dataclasses.replace(limits, cost_fn=packed_cost_fn)
    search = RowSearch(
        *value_counts(lengths),
        int(lengths.max()),
        limits,
        packed_limits,
        check_cap(max_segments_per_row),
        block_sparse,
        max_padding,
        mixing,
    )
    single = search.fuller(search.packed((search.last,)))
    several = search.fuller(search.search(check_positive("num_buckets", num_buckets)))
    packed = min([several, single], key=search.rank)
    if pack == "always" and packed.padding > max_padding:
        raise ValueError(
            f"`max_padding={max_padding}` cannot be met: the best rows found have "
            f"{packed.padding:.2%} padding. Raise `max_padding`, `max_seq_len` or "
            "`num_buckets`."
        )
    # Padded rows gain nothing from a T beyond the longest length.
    tight = dataclasses.replace(limits, max_seq_len=None)
    padded = plan_within(lengths, tight, num_buckets, "optimal")
    epoch = report(padded, lengths)
    epoch_costs = {
        "padded": epoch.epoch_cost,
        "packed": packed.cost,
        "packed in one T": single.cost,
    }
    is_packed, cause = pack == "always", f"`pack={pack!r}`"
    if pack == "auto":
        values, counts = search.values, search.counts
        separated = separation(
            *(np.searchsorted(padded.boundaries, values), np.log(values)),
            *(values * counts, padded.batch_sizes, log_variance(values, counts)),
        )
        weighted = epoch.epoch_cost * (1 + mixing * separated)
        is_packed = packed.padding <= max_padding
        is_packed &= packed.weighted_cost(mixing) < weighted
        cause = _cause(is_packed, packed, epoch.epoch_cost, max_padding)
    if is_packed:
        packing = from_patterns(packed.patterns, packed.seq_lens, max_segments_per_row)
        chosen = _packed_plan(packed, packing, epoch_costs, block_sparse)
    else:
        chosen = _padded_plan(padded, epoch, epoch_costs, block_sparse)
    counts_attention = not isinstance(limits.cost_fn, TokenCost)
    return dataclasses.replace(chosen, cause=cause, counts_attention=counts_attention)


def _cause(
    is_packed: bool, packed: RowChoice, padded_cost: float, max_padding: float
) -> str:
    """Returns why the cheaper rows were chosen, as a clause."""
    more = packed.cost / padded_cost - 1
    if not is_packed and packed.padding > max_padding and more < 0:
        return "packed rows would exceed `max_padding`"
    if more < 0:
        return "packed rows cost less" if is_packed else "packed rows mix fewer lengths"
    if not is_packed:
        return "packed rows do not cost less"
    cost = f"cost {more:.1%} more" if more >= 0.0005 else "cost as much"
    return f"packed rows {cost} and mix more lengths"


def _check_choices(
    pack: Pack, mixing: float, max_padding: float, max_tokens: Budget
) -> None:
    """Raises a ValueError for choices that no packing can follow."""
    check_choice("pack", pack, PACK_CHOICES)
    check_share("mixing", mixing)
    if not 0 < check_number("max_padding", max_padding) <= 1:
        raise ValueError(
            f"`max_padding={max_padding}` must be a share, above 0 and at most 1."
        )
    if isinstance(max_tokens, Sequence):
        raise ValueError(
            f"`max_tokens={max_tokens}` has one entry per boundary, but `plan_packing` "
            "chooses the boundaries itself. Pass an integer, or a function of T."
        )


def _padded_plan(
    plan: BucketPlan,
    epoch: Report,
    epoch_costs: dict[str, float],
    block_sparse: bool,
) -> PackedPlan:
    """Returns the result for rows of one example each."""
    return PackedPlan(
        plan,
        None,
        epoch,
        epoch_costs,
        rows=tuple(bucket.examples for bucket in epoch.buckets),
        segments=(1.0,) * len(plan),
        padded_up_to=plan.max_seq_len,
        block_sparse=block_sparse,
    )


def _check_units(cost_fn: CostFn | None, packed_cost_fn: CostFn | None) -> None:
    """Raises a ValueError if the cost functions are known to have different units."""
    units = {getattr(x, "unit", None) for x in (cost_fn, packed_cost_fn)} - {None}
    if packed_cost_fn is not None and (cost_fn is None or len(units) > 1):
        raise ValueError(
            f"`packed_cost_fn` counts {unit_of(packed_cost_fn)}, but `cost_fn` counts "
            f"{unit_of(cost_fn or TokenCost())}. Pass both functions, in the same unit."
        )


def _packed_plan(
    choice: RowChoice,
    packing: Packing,
    epoch_costs: dict[str, float],
    block_sparse: bool,
) -> PackedPlan:
    epoch = report(choice.plan, packing.row_lengths)
    segments = choice.segments / np.maximum(choice.rows, 1)
    return PackedPlan(
        dataclasses.replace(choice.plan, packed=True),
        packing,
        dataclasses.replace(epoch, packed_examples=packing.num_examples),
        epoch_costs,
        rows=tuple(choice.rows.tolist()),
        segments=tuple(segments.tolist()),
        padded_up_to=choice.padded_up_to,
        block_sparse=block_sparse,
    )
