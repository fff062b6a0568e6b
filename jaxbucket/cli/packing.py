"""Packed rows in the commands: supported options, plans, and sentences about them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.lengths import Lengths
from jaxbucket.cli.options import ShapeOptions
from jaxbucket.packing.packed_plan import Pack, PackedPlan
from jaxbucket.packing.planner import plan_packing
from jaxbucket.packing.rows import pack
from jaxbucket.plan.flow.remainder import Remainder
from jaxbucket.plan.formatting import format_cost
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.reports.comparison import ComparedPlan, Comparison
from jaxbucket.plan.reports.epoch import Report, changed_examples, report
from jaxbucket.plan.sequence_limits import SequenceLimits

# What a model must do to train on packed rows.
_REQUIRES = (
    "Packed rows hold several examples, so attention must use segment ids to stay "
    "within each example, as `jb.segment_attention` does."
)
_ONE_SHAPE = "packed, one shape"
# Relative differences of costs below this are not shown.
_SAME = 0.0005


def check_packable(pack: Pack, shape: ShapeOptions, others: Iterable[str] = ()) -> None:
    """Raises a ValueError that names the options that packing does not support.

    Args:
      pack: the value of `--pack`.
      shape: the limits of shapes.
      others: more options that were given and are not supported.
    """
    names = [*others, *_unsupported(shape)]
    if names:
        remedy = "Remove one of the two."
        if len(names) > 1:
            remedy = f"Remove `--pack {pack}`, or the other options."
        raise ValueError(
            f"`--pack {pack}` cannot be combined with {_quoted(names)}. {remedy}"
        )


def _quoted(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _unsupported(shape: ShapeOptions) -> list[str]:
    """Returns the options among the limits of shapes that packing does not support."""
    values = shape.limit_values
    names = ("min_batch_size", "max_batch_size", "accumulate")
    used = [f"--{x.replace('_', '-')}" for x in names if values[x] not in (None, 1)]
    if values["max_tokens"] and isinstance(shape.max_tokens, list):
        used.append(f"--max-tokens {values['max_tokens']}")
    return used


def plan_rows(
    lengths: Lengths,
    limits: Limits | SequenceLimits,
    num_buckets: int,
    pack: Pack,
    block_sparse: bool,
    **options: Any,
) -> PackedPlan:
    """Returns the plan of `plan_packing` within the limits of the options.

    More options of `plan_packing` are passed on.
    """
    names = ("max_tokens", "max_seq_len", "batch_size_multiple", "seq_len_multiple")
    names += ("overlong", "cost_fn", "sample")
    if isinstance(limits, SequenceLimits):
        names += ("max_ratio",)
    return plan_packing(
        lengths,
        num_buckets=num_buckets,
        pack=pack,
        block_sparse=block_sparse,
        **{name: getattr(limits, name) for name in names},
        **options,
    )


def packed_report(
    plan: BucketPlan, lengths: Lengths, **options: Any
) -> tuple[Lengths, Report]:
    """Packs lengths into rows of a plan's T.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, one per example; by name if there are several sequences.
      options: the options of `report`.

    Returns:
      The lengths of the rows `[R]`, or by name, and the report of an epoch of them.
    """
    packing = pack(
        lengths,
        [bucket.seq_len for bucket in plan.buckets],
        overlong=plan.overlong,
        max_ratio=plan.max_ratio,
    )
    epoch = report(plan.of_rows, packing.row_lengths, **options)
    # The mean over epochs, if rows are dropped.
    examples = round(epoch.examples / packing.num_rows * packing.num_examples)
    changes = changed_examples(plan, lengths)
    epoch = dataclasses.replace(epoch, packed_examples=examples, **changes)
    return packing.row_lengths, epoch


def reason(packed: PackedPlan, unit: str) -> str:
    """Returns why rows are packed or padded, as one line."""
    chosen, other = ("packed", "padded") if packed.is_packed else ("padded", "packed")
    costs, cost_unit = packed.epoch_costs, packed.plan.cost_unit
    shown = {x: format_cost(costs[x], cost_unit, unit) for x in (chosen, other)}
    change = 1 - costs[chosen] / costs[other]
    # Below half of the last digit, the costs are shown as equal.
    difference = "as much as"
    if abs(change) >= _SAME:
        difference = f"{abs(change):.1%} {'less' if change > 0 else 'more'} than"
    mixing = ""
    if "mix" in packed.cause:
        mixing = "Batches of packed rows mix more lengths. "
        if not packed.is_packed:
            mixing = "Batches of packed rows would mix fewer lengths. "
    return (
        f"Rows are {chosen}: an epoch costs {shown[chosen]}, {difference} "
        f"the {shown[other]} with {other} rows. {mixing}"
        f"{_attention(packed)}"
    )


def _attention(packed: PackedPlan) -> str:
    """Returns how the cost counts attention, as a sentence."""
    if not packed.counts_attention:
        options = "--cost-fn" if packed.plan.sequences else "--width and --depth"
        return f"This cost does not include attention. Add {options} to include it."
    if packed.block_sparse:
        return "The cost assumes attention within examples."
    return (
        "The cost assumes attention over whole rows. Add --block-sparse if your "
        "attention skips pairs in different examples."
    )


def with_packed_rows(
    comparison: Comparison,
    lengths: Lengths,
    limits: Limits | SequenceLimits,
    shape: ShapeOptions,
    *,
    pack: Pack,
    block_sparse: bool,
    remainder: Remainder,
) -> Comparison:
    """Returns the comparison with packed rows, for several values of T and for one.

    Under `pack="auto"`, a note says why they are missing if packing does not support
    the limits.
    """
    if pack == "never":
        return comparison
    unsupported = _unsupported(shape)
    if pack == "auto" and unsupported:
        names = _quoted(unsupported)
        note = f"Packed rows are not compared: packing does not support {names}."
        return comparison.extended((), note)
    try:
        check_packable(pack, shape)
        make = functools.partial(plan_rows, lengths, limits, pack="always")
        packed = [
            make(num_buckets=size, block_sparse=block_sparse)
            for size in (comparison.num_buckets, 1)
        ]
    except ValueError as error:
        if pack == "always":
            raise
        return comparison.extended((), f"Packed rows are not compared: {error}")
    note = f"{_REQUIRES} {_attention(packed[0])}"
    plans = [
        _compared(name, rows, lengths, remainder)
        for name, rows in zip(("packed", _ONE_SHAPE), packed, strict=True)
    ]
    # One T may be the best choice anyway.
    return comparison.extended(plans[:1] if len(plans[0].plan) == 1 else plans, note)


def _compared(
    name: str, packed: PackedPlan, lengths: Lengths, remainder: Remainder
) -> ComparedPlan:
    assert packed.packing is not None
    epoch = report(packed.plan.of_rows, packed.packing.row_lengths, remainder=remainder)
    epoch = dataclasses.replace(
        epoch,
        packed_examples=packed.packing.num_examples,
        **changed_examples(packed.plan, lengths),
    )
    return ComparedPlan(name, packed.plan, epoch)
