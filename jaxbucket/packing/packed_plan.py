"""Whether rows are packed, and of which T they are: what the cheapest epoch has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
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
from jaxbucket.packing.row_search import RowChoice, RowSearch
from jaxbucket.packing.rows import (
    Packing,
    check_cap,
    check_longest,
    check_seq_lens,
    from_patterns,
)
from jaxbucket.plan.costs import CostFn, TokenCost, unit_of
from jaxbucket.plan.formatting import in_unit
from jaxbucket.plan.histogram import value_counts
from jaxbucket.plan.limits import Budget, Limits
from jaxbucket.plan.planner import plan_within
from jaxbucket.plan.reports.epoch import Report, report

Pack: TypeAlias = Literal["auto", "always", "never"]
PACK: tuple[str, ...] = get_args(Pack)


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
    )
    single = search.fuller(search.packed((search.last,)))
    packed = search.fuller(search.search(check_positive("num_buckets", num_buckets)))
    is_possible = packed.padding <= max_padding
    if pack == "always" and not is_possible:
        raise ValueError(
            f"`max_padding={max_padding}`: of the rows that were tried, "
            f"{packed.padding:.2%} at least is padding. Raise it, or `max_seq_len`, or "
            "`num_buckets`."
        )
    # No longer than it has to be, as packed rows are.
    tight = dataclasses.replace(limits, max_seq_len=None)
    padded = plan_within(lengths, tight, num_buckets, "optimal")
    epoch = report(padded, lengths)
    others = {
        "padded": epoch.epoch_cost,
        "packed": packed.cost,
        "packed in one T": single.cost,
    }
    is_cheaper = is_possible and packed.cost < epoch.epoch_cost
    if pack == "always" or (pack == "auto" and is_cheaper):
        packing = from_patterns(packed.patterns, packed.seq_lens, max_segments_per_row)
        return _packed_plan(packed, packing, others, block_sparse)
    return PackedPlan(
        padded,
        None,
        epoch,
        others,
        rows=tuple(bucket.examples for bucket in epoch.buckets),
        segments=(1.0,) * len(padded),
        padded_up_to=padded.max_seq_len,
        block_sparse=block_sparse,
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


def _packed_plan(
    choice: RowChoice, packing: Packing, others: dict[str, float], block_sparse: bool
) -> PackedPlan:
    epoch = report(choice.plan, packing.row_lengths)
    segments = choice.segments / np.maximum(choice.rows, 1)
    return PackedPlan(
        choice.plan,
        packing,
        dataclasses.replace(epoch, packed_examples=packing.num_examples),
        others,
        rows=tuple(choice.rows.tolist()),
        segments=tuple(segments.tolist()),
        padded_up_to=choice.padded_up_to,
        block_sparse=block_sparse,
    )
