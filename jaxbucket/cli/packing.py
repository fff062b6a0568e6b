"""Packed rows in the commands: supported options, plans, and sentences about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.cli.options import ShapeOptions, token_budget
from jaxbucket.packing.packed_plan import Pack, PackedPlan, plan_packing
from jaxbucket.packing.rows import pack
from jaxbucket.plan.chunks import chunk_lengths
from jaxbucket.plan.costs import TokenCost
from jaxbucket.plan.flow.remainder import Remainder
from jaxbucket.plan.formatting import format_cost
from jaxbucket.plan.reports.comparison import ComparedPlan, Comparison
from jaxbucket.plan.reports.epoch import Report, report

# What a model must do to train on packed rows.
_REQUIRES = (
    "Packed rows hold several examples, so attention must use segment ids to stay "
    "within each example, as `jb.segment_attention` does."
)
_ONE_SHAPE = "packed, one shape"
# Relative differences of costs below this are not shown.
_SAME = 0.0005
# The numbers of a report that count examples beyond the last bucket.
_LOST = (
    *("dropped_examples", "truncated_examples", "truncated_tokens"),
    *("split_examples", "chunks"),
)


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
    if isinstance(token_budget(values["max_tokens"] or "0"), list):
        used.append(f"--max-tokens {values['max_tokens']}")
    return used


def plan_rows(
    lengths: np.ndarray,
    shape: ShapeOptions,
    num_buckets: int,
    pack: Pack,
    block_sparse: bool,
    **options: Any,
) -> PackedPlan:
    """Returns the plan of `plan_packing` within the limits of the options.

    Examples that are too long are first dropped, truncated or split, according to
    `--overlong`, and the report counts them. More options of `plan_packing` are passed
    on.
    """
    limits = shape.limits()
    packed = plan_packing(
        kept_lengths(lengths, limits.overlong, limits.max_seq_len),
        max_tokens=limits.max_tokens,
        max_seq_len=limits.max_seq_len,
        num_buckets=num_buckets,
        pack=pack,
        cost_fn=limits.cost_fn,
        block_sparse=block_sparse,
        batch_size_multiple=limits.batch_size_multiple,
        seq_len_multiple=limits.seq_len_multiple,
        **options,
    )
    last = limits.max_seq_len
    if last is None:
        return packed
    lost = _lost(limits.plan([last]), lengths)
    return dataclasses.replace(
        packed,
        plan=dataclasses.replace(packed.plan, overlong=limits.overlong),
        report=dataclasses.replace(packed.report, **lost),
    )


def kept_lengths(
    lengths: np.ndarray, overlong: str, max_seq_len: int | None
) -> np.ndarray:
    """Returns the lengths after dropping, truncating or splitting long examples."""
    if max_seq_len is None or overlong == "error":
        return lengths
    if overlong == "split":
        return chunk_lengths(lengths, max_seq_len)
    if overlong == "drop":
        return lengths[lengths <= max_seq_len]
    return np.minimum(lengths, max_seq_len)


def packed_report(
    plan: BucketPlan, lengths: np.ndarray, **options: Any
) -> tuple[np.ndarray, Report]:
    """Packs lengths into rows of a plan's T.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, one per example.
      options: the options of `report`.

    Returns:
      The lengths of the rows `[R]`, and the report of an epoch of them.
    """
    of_rows = plan.unpacked
    lost = _lost(of_rows, lengths)
    kept = kept_lengths(lengths, plan.policy(), plan.max_seq_len)
    packing = pack(kept, plan.boundaries.tolist())
    epoch = report(of_rows, packing.row_lengths, **options)
    # The mean over epochs, if rows are dropped.
    examples = round(epoch.examples / packing.num_rows * packing.num_examples)
    epoch = dataclasses.replace(epoch, packed_examples=examples, **lost)
    return packing.row_lengths, epoch


def _lost(plan: BucketPlan, lengths: np.ndarray) -> dict[str, int]:
    """Returns the numbers of examples that are dropped, truncated or split."""
    padded = report(plan, lengths)
    return {name: getattr(padded, name) for name in _LOST}


def reason(packed: PackedPlan, shape: ShapeOptions, unit: str) -> str:
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
        f"{_attention(shape, packed.block_sparse)}"
    )


def _attention(shape: ShapeOptions, block_sparse: bool) -> str:
    """Returns how the cost counts attention, as a sentence."""
    if isinstance(shape.cost_fn, TokenCost | None):
        return (
            "This cost does not include attention. Add --width and --depth to include "
            "it."
        )
    if block_sparse:
        return "The cost assumes attention within examples."
    return (
        "The cost assumes attention over whole rows. Add --block-sparse if your "
        "attention skips pairs in different examples."
    )


def with_packed_rows(
    comparison: Comparison,
    lengths: np.ndarray,
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
        plans = _packed_plans(lengths, shape, comparison, block_sparse, remainder)
    except ValueError as error:
        if pack == "always":
            raise
        return comparison.extended((), f"Packed rows are not compared: {error}")
    note = f"{_REQUIRES} {_attention(shape, block_sparse)}"
    return comparison.extended(plans, note)


def _packed_plans(
    lengths: np.ndarray,
    shape: ShapeOptions,
    comparison: Comparison,
    block_sparse: bool,
    remainder: Remainder,
) -> list[ComparedPlan]:
    plans = []
    for name, num_buckets in (("packed", comparison.num_buckets), (_ONE_SHAPE, 1)):
        packed = plan_rows(lengths, shape, num_buckets, "always", block_sparse)
        assert packed.packing is not None
        plan = packed.plan.unpacked
        rows = report(plan, packed.packing.row_lengths, remainder=remainder)
        fields = {x: getattr(packed.report, x) for x in ("packed_examples", *_LOST)}
        epoch = dataclasses.replace(rows, **fields)
        plans.append(ComparedPlan(name, packed.plan, epoch))
    # One T may be the best choice anyway.
    return plans[:1] if len(plans[0].plan) == 1 else plans
