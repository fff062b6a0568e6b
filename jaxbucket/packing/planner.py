"""Chooses padded or packed rows, whichever make an epoch cheaper."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxbucket.base.checks import check_choice
from jaxbucket.base.lengths import Lengths
from jaxbucket.base.policies import Overlong
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.packing.alternatives import (
    RowOptions,
    length_alternatives,
    sequence_alternatives,
)
from jaxbucket.packing.packed_plan import PACK_CHOICES, Pack, PackedPlan
from jaxbucket.plan.costs import CostFn, TokenCost, unit_of
from jaxbucket.plan.limits import Budget, Limits
from jaxbucket.plan.reports.epoch import changed_examples
from jaxbucket.plan.sequence_limits import (
    SequenceBudget,
    SequenceCostFn,
    SequenceLimits,
)


@bar_if_slow("Planning rows")
def plan_packing(
    lengths: Lengths,
    *,
    max_tokens: Budget | SequenceBudget,
    max_seq_len: int | Mapping[str, int] | None = None,
    num_buckets: int = 8,
    pack: Pack = "auto",
    cost_fn: CostFn | SequenceCostFn | None = None,
    packed_cost_fn: CostFn | SequenceCostFn | None = None,
    block_sparse: bool = False,
    mixing: float = 0.01,
    max_padding: float = 1.0,
    max_segments_per_row: int | None = None,
    batch_size_multiple: int = 1,
    seq_len_multiple: int | Mapping[str, int] = 1,
    overlong: Overlong | Mapping[str, Overlong] = "error",
    sample: bool = False,
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
      >>> import numpy as np
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=1000)
      >>> from jaxbucket.plan import TransformerCost
      >>> cost = TransformerCost(width=64, depth=2)
      >>> packed = plan_packing(
      ...     lengths, max_tokens=4096, cost_fn=cost, block_sparse=True
      ... )
      >>> packed.is_packed, packed.epoch_costs["packed"] < packed.epoch_costs["padded"]
      (True, True)

    Example: several lengths per example.
      >>> pairs = {"source": lengths, "target": lengths // 4 + 1}
      >>> packed = plan_packing(
      ...     pairs, max_tokens=4096, num_buckets=2, seq_len_multiple=16
      ... )
      >>> packed.is_packed, packed.packing.sequences
      (True, ('source', 'target'))

    Args:
      lengths: `[N]` integers, one per example; or sequence name -> `[N]` integers.
      max_tokens: the maximum B * T of a global batch, padding included; or a function
        from T to this maximum. With several sequences, as for `plan_buckets`.
      max_seq_len: the maximum T of packed rows. Rows may be shorter, but hold the
        longest of these lengths. By default, T is the longest length, rounded up, or up
        to four times this, within `max_tokens`, if that saves at least 5% of the cost.
        Padded rows are never longer than the longest length, rounded up. With several
        sequences, one number for all or a mapping.
      num_buckets: the maximum number of buckets.
      pack: "auto" for the cheaper rows, "always" for packed or "never" for padded rows.
      cost_fn: `(batch_size, seq_len)` -> cost of a step; by default its tokens. It is
        required with `packed_cost_fn`, and both must use the same unit. With several
        sequences, the functions receive a mapping of T.
      packed_cost_fn: like `cost_fn`, for steps of packed rows, whose attention may be
        slower because it needs a mask. By default it is `cost_fn`, and then all rows
        with enough room are packed.
      block_sparse: whether the attention of packed rows takes time within examples
        only. This holds for fused kernels with segment ids, but not for attention
        with a mask. The quadratic part of the cost is then multiplied by the share of
        pairs of tokens, of all sequences, that are in the same example.
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
      seq_len_multiple: every T is a multiple of this number, or of that of its
        sequence.
      overlong: what happens to examples longer than `max_seq_len`, as for
        `plan_buckets`. The plan has this policy, and the report counts them.
      sample: whether `lengths` are a sample of more examples, as for `plan_buckets`.

    Returns:
      A `PackedPlan`. Its `packing` is None if rows are padded.

    Raises:
      ValueError: if a length is not a positive integer or exceeds `max_seq_len` under
        `overlong="error"`; if no batch fits the limits; if `pack="always"` and the
        search finds no rows within `max_padding`.
    """
    _check_choices(pack, max_tokens)
    _check_units(cost_fn, packed_cost_fn)
    options = RowOptions(
        packed_cost_fn=packed_cost_fn,
        num_buckets=num_buckets,
        block_sparse=block_sparse,
        mixing=mixing,
        max_padding=max_padding,
        max_segments_per_row=max_segments_per_row,
    )
    policies: dict[str, Any] = {"overlong": overlong}
    limits: dict[str, Any] = {
        "max_tokens": max_tokens,
        "max_seq_len": max_seq_len,
        "batch_size_multiple": batch_size_multiple,
        "seq_len_multiple": seq_len_multiple,
        "cost_fn": cost_fn,
        "sample": sample,
    }
    if isinstance(lengths, Mapping):
        several = SequenceLimits(sequences=tuple(lengths), **limits, **policies)
        rows = sequence_alternatives(lengths, several, options)
    else:
        limits["cost_fn"] = cost_fn or TokenCost()
        rows = length_alternatives(lengths, Limits(**limits, **policies), options)
    chosen = rows.chosen(pack, options)
    plan = dataclasses.replace(chosen.plan, **policies)
    return dataclasses.replace(
        chosen,
        plan=plan,
        report=dataclasses.replace(chosen.report, **changed_examples(plan, lengths)),
        block_sparse=block_sparse,
        counts_attention=not isinstance(cost_fn, TokenCost | None),
    )


def _check_choices(pack: Pack, max_tokens: Budget | SequenceBudget) -> None:
    """Raises a ValueError for choices that no packing can follow."""
    check_choice("pack", pack, PACK_CHOICES)
    if isinstance(max_tokens, Sequence):
        raise ValueError(
            f"`max_tokens={max_tokens}` has one entry per boundary, but `plan_packing` "
            "chooses the boundaries itself. Pass an integer, or a function of T."
        )


def _check_units(cost_fn: Any, packed_cost_fn: Any) -> None:
    """Raises a ValueError if the cost functions are known to have different units."""
    units = {getattr(x, "unit", None) for x in (cost_fn, packed_cost_fn)} - {None}
    if packed_cost_fn is not None and (cost_fn is None or len(units) > 1):
        raise ValueError(
            f"`packed_cost_fn` counts {unit_of(packed_cost_fn)}, but `cost_fn` counts "
            f"{unit_of(cost_fn or TokenCost())}. Pass both functions, in the same unit."
        )
