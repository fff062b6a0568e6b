"""Chooses padded or packed rows, whichever make an epoch cheaper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_choice, check_positive
from jaxbucket.base.policies import Overlong
from jaxbucket.base.sizes import Lengths, any_lengths, each_size
from jaxbucket.base.table import Record, format_cost, number_table
from jaxbucket.packing.row_choice import (
    RowChoice,
    Shape,
    log_variance,
    mixed_cost,
    separation,
)
from jaxbucket.packing.row_search import RowSearch
from jaxbucket.packing.rows import Packing, cap_of
from jaxbucket.packing.vector_best_fit import MAX_CAPACITY
from jaxbucket.plan.costs import CostFn, TokenCost
from jaxbucket.plan.limits import Budget, Limits
from jaxbucket.plan.planner import plan_within
from jaxbucket.plan.reports.epoch import Report, report
from jaxbucket.plan.tally import Tally

# Rows may be longer than the longest example by this factor, if they save this share of
# the cost.
_MAX_FACTOR, _MIN_SAVING = 4, 0.05

Pack: TypeAlias = Literal["auto", "always", "never"]
PACK_CHOICES: tuple[str, ...] = get_args(Pack)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedPlan(Record):
    """A bucket plan and, if rows are packed, the packing for it.

    Attributes:
      plan: the buckets, with the cost of their steps.
      packing: rows of several examples; None if every row has one example.
      report: the report of one epoch.
      epoch_costs: the cost of an epoch for each alternative, "padded", "packed" and
        "packed in one T", in `plan.cost_unit`.
      rows: the number of rows of each bucket, before remainders are promoted.
      segments: the mean number of examples in a row of each bucket.
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
    block_sparse: bool = False
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
        padded, packed, single = (
            format_cost(self.epoch_costs[name], self.plan.cost_unit)
            for name in ("padded", "packed", "packed in one T")
        )
        text = (
            f"Rows are {name}, because {self.cause}. Cost of an epoch: {padded} "
            f"padded, {packed} packed, {single} packed with a single T."
        )
        if self.counts_attention:
            where = "within examples" if self.block_sparse else "over whole rows"
            text += f" Attention in packed rows is counted {where}."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python objects."""
        return {
            "packed": self.is_packed,
            "block_sparse": self.block_sparse,
            "epoch_costs": self.epoch_costs,
            "rows": list(self.rows),
            "segments_per_row": list(self.segments),
            "cause": self.cause,
            "report": self.report.to_dict(),
        }

    def __rich__(self) -> Any:
        """Returns a `rich` table for the terminal."""
        names = [f"T of {name}" for name in self.plan.sequences] or ["T"]
        names = ["B", *names, "rows", "examples per row", "padding", "cost"]
        columns = self.rows, self.segments, self.report.buckets
        lines = (
            (
                *(str(b.batch_size), *map(str, each_size(b.seq_len))),
                *(str(rows), f"{segments:.1f}"),
                *(f"{b.padding:.1%}", f"{b.cost_share:.1%}"),
            )
            for rows, segments, b in zip(*columns, strict=True)
        )
        return number_table(names, lines, self.reason)


def plan_packing(
    lengths: Lengths,
    *,
    max_tokens: Budget,
    max_seq_len: int | Mapping[str, int] | None = None,
    num_buckets: int = 8,
    pack: Pack = "auto",
    cost_fn: CostFn | None = None,
    block_sparse: bool = False,
    max_segments_per_row: int | None = None,
    batch_size_multiple: int | Callable[[Any], int] = 1,
    seq_len_multiple: int | Mapping[str, int] = 1,
    overlong: Overlong | Mapping[str, Overlong] = "error",
) -> PackedPlan:
    """Plans buckets for padded or packed rows, whichever makes an epoch cheaper.

    Packed rows may have several values of T. Because attention is quadratic in T, long
    rows can cost more than the padding that they save, so short examples are better
    packed into short rows. The search adds one T at a time, and evaluates each choice
    by packing the lengths.

    Batches of rows that mix lengths are preferred if they cost at most 1% more, because
    the gradient of a batch with examples of one length is biased towards what that
    length holds (see docs/decide/pack_or_bucket.md).

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
      cost_fn: `(batch_size, seq_len)` -> cost of a step; by default its tokens. With
        several sequences, the function receives a mapping of T.
      block_sparse: whether the attention of packed rows takes time within examples
        only. This holds for fused kernels with segment ids, but not for attention
        with a mask. The quadratic part of the cost is then multiplied by the share of
        pairs of tokens, of all sequences, that are in the same example.
      max_segments_per_row: the maximum number of examples in a row; by default as many
        as fit.
      batch_size_multiple: every B is a multiple of this number, or of that which a
        function returns for T.
      seq_len_multiple: every T is a multiple of this number, or of that of its
        sequence.
      overlong: what happens to examples longer than `max_seq_len`, as for
        `plan_buckets`. The plan has this policy, and the report counts them.

    Returns:
      A `PackedPlan`. Its `packing` is None if rows are padded.

    Raises:
      ValueError: if a length is not a positive integer or exceeds `max_seq_len` under
        `overlong="error"`, or if no batch fits the limits.
    """
    check_choice("pack", pack, PACK_CHOICES)
    num_buckets = check_positive("num_buckets", num_buckets)
    cap = cap_of(max_segments_per_row)
    limits = Limits(
        max_tokens=max_tokens,
        max_seq_len=max_seq_len,
        batch_size_multiple=batch_size_multiple,
        seq_len_multiple=seq_len_multiple,
        overlong=overlong,
        cost_fn=cost_fn,
        sequences=tuple(lengths) if isinstance(lengths, Mapping) else (),
    )
    columns = any_lengths(lengths, limits.sequences)
    kept = limits.planned_lengths(columns.reshape(len(columns), -1))
    padded, apart = _padded(kept, limits, num_buckets)
    several, single = _packed(kept, limits, num_buckets, cap, block_sparse)
    packed = min([several, single], key=lambda choice: choice.rank)
    is_packed = pack == "always"
    cause = f"`pack={pack!r}`"
    if pack == "auto":
        is_packed, cause = _cheaper(packed, padded.report.epoch_cost, apart)
    chosen = _packed_plan(packed) if is_packed else padded
    plan = dataclasses.replace(chosen.plan, overlong=limits.overlong)
    return dataclasses.replace(
        chosen,
        plan=plan,
        report=dataclasses.replace(chosen.report, **Tally.of(plan, lengths).changes),
        epoch_costs={
            "padded": padded.report.epoch_cost,
            "packed": packed.cost,
            "packed in one T": single.cost,
        },
        block_sparse=block_sparse,
        cause=cause,
        counts_attention=not isinstance(cost_fn, TokenCost | None),
    )


def _packed(
    kept: np.ndarray, limits: Limits, num_buckets: int, cap: int, block_sparse: bool
) -> tuple[RowChoice, RowChoice]:
    """Returns the best packed rows found, and those of a single T."""
    rows = dataclasses.replace(limits, overlong="error")
    search = RowSearch(kept, rows, cap, block_sparse)
    several, single = search.search(num_buckets), search.of_all([search.last])
    if (longer := _longer(rows, search.last, several)) is not None:
        choice = RowSearch(kept, longer, cap, block_sparse).search(num_buckets)
        # Longer rows take more memory for attention, which a cost may not count.
        if choice.rank[0] < several.rank[0] * (1 - _MIN_SAVING):
            several = choice
    return several, single


def _longer(limits: Limits, last: Shape, choice: RowChoice) -> Limits | None:
    """Returns limits with longer rows, as the budget allows, if these may save enough.

    `choice` is the best of the packed rows that are no longer than `last`.
    """
    if limits.max_seq_len is not None or choice.padding <= _MIN_SAVING:
        return None
    for factor in range(min(_MAX_FACTOR, MAX_CAPACITY // max(last)), 1, -1):
        longest = np.array([last]) * factor
        if limits.batch_sizes(longest)[0] > 0:
            (seq_len,) = limits.named(longest)
            return dataclasses.replace(limits, max_seq_len=seq_len)
    return None


def _padded(
    kept: np.ndarray, limits: Limits, num_buckets: int
) -> tuple[PackedPlan, float]:
    """Returns the result for rows of one example, and the separation of its batches."""
    # Padded rows gain nothing from T beyond the longest lengths. One bucket must hold
    # all of these to truncate.
    last, parts = None, kept[:, 0]
    if limits.sequences:
        parts: Any = dict(zip(limits.sequences, kept.T, strict=True))
        if limits.truncates:
            (last,) = limits.named(limits.rounded(kept.max(axis=0))[None])
    tight = dataclasses.replace(limits, max_seq_len=last, overlong="error")
    plan = plan_within(parts, tight, num_buckets=num_buckets)
    epoch = report(plan, parts)
    totals = kept.sum(axis=1, dtype=np.int64)
    variance = log_variance(totals, np.ones_like(totals))
    buckets = plan.assign(parts).astype(np.int64)
    apart = separation(buckets, np.log(totals), totals, plan.batch_sizes, variance)
    rows = tuple(bucket.examples for bucket in epoch.buckets)
    segments = (1.0,) * len(plan)
    return PackedPlan(plan, None, epoch, {}, rows, segments), apart


def _cheaper(
    packed: RowChoice, padded_cost: float, separation: float
) -> tuple[bool, str]:
    """Returns whether packed rows are the better ones, and why, as a clause."""
    is_packed = packed.rank[0] < mixed_cost(padded_cost, separation)
    more = packed.cost / padded_cost - 1
    if not is_packed:
        reason = "mix fewer lengths" if more < 0 else "do not cost less"
        return False, f"packed rows {reason}"
    if more < 0:
        return True, "packed rows cost less"
    cost = f"cost {more:.1%} more" if more >= 0.0005 else "cost as much"
    return True, f"packed rows {cost} and mix more lengths"


def _packed_plan(choice: RowChoice) -> PackedPlan:
    """Returns the result for packed rows."""
    packing = choice.packing
    assert packing is not None
    epoch = report(choice.plan, packing.row_lengths)
    segments = choice.segments / np.maximum(choice.rows, 1)
    return PackedPlan(
        dataclasses.replace(choice.plan, packed=True),
        packing,
        dataclasses.replace(epoch, packed_examples=packing.num_examples),
        epoch_costs={},
        rows=tuple(choice.rows.tolist()),
        segments=tuple(segments.tolist()),
    )
