"""Packed and padded rows of the same examples, and the choice between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import (
    check_lengths,
    check_number,
    check_positive,
    check_share,
)
from jaxbucket.base.lengths import lengths_matrix
from jaxbucket.packing.overlong import kept_lengths
from jaxbucket.packing.packed_plan import Pack, PackedPlan
from jaxbucket.packing.row_choice import RowChoice
from jaxbucket.packing.row_search import RowSearch
from jaxbucket.packing.rows import check_cap, check_longest, check_seq_lens
from jaxbucket.packing.separation import log_variance, separation
from jaxbucket.packing.sequences import MAX_CAPACITY
from jaxbucket.packing.shape_search import ShapeSearch
from jaxbucket.plan.histogram import value_counts
from jaxbucket.plan.joint_plan import plan_sequences
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.planner import plan_within
from jaxbucket.plan.reports.epoch import Report, report
from jaxbucket.plan.sequence_limits import SequenceLimits

_Limits = TypeVar("_Limits", Limits, SequenceLimits)
_Choice = TypeVar("_Choice", bound=RowChoice)
# Rows may be longer than the longest example by this factor, if they save this share of
# the cost.
_MAX_FACTOR, _MIN_SAVING = 4, 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options of `plan_packing` about packed rows."""

    packed_cost_fn: Any
    num_buckets: int
    block_sparse: bool
    mixing: float
    max_padding: float
    max_segments_per_row: int | None

    def __post_init__(self):
        check_positive("num_buckets", self.num_buckets)
        check_share("mixing", self.mixing)
        if not 0 < check_number("max_padding", self.max_padding) <= 1:
            raise ValueError(
                f"`max_padding={self.max_padding}` must be a share, above 0 and at "
                "most 1."
            )
        check_cap(self.max_segments_per_row)

    def packed_limits(self, limits: _Limits) -> _Limits:
        """Returns the limits with the costs of packed rows."""
        if self.packed_cost_fn is None:
            return limits
        return dataclasses.replace(limits, cost_fn=self.packed_cost_fn)

    def rank(self, choice: RowChoice) -> tuple[float, float, int]:
        """Returns the sort key of packed rows."""
        return choice.rank(self.max_padding, self.mixing)


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """Packed and padded rows of the same examples.

    Attributes:
      several: packed rows of several T.
      single: packed rows of a single T.
      padded: the best plan for rows of one example.
      separation: the share of the variance of lengths between batches of that plan.
      epoch: the report of that plan.
    """

    several: RowChoice
    single: RowChoice
    padded: BucketPlan
    separation: float
    epoch: Report

    def chosen(self, pack: Pack, options: RowOptions) -> PackedPlan:
        """Returns the cheaper rows, or those that `pack` requires.

        Raises:
          ValueError: if `pack` is "always" and all rows have too much padding.
        """
        packed = min([self.several, self.single], key=options.rank)
        if pack == "always" and packed.padding > options.max_padding:
            raise ValueError(
                f"`max_padding={options.max_padding}` cannot be met: the best rows "
                f"found have {packed.padding:.2%} padding. Raise `max_padding`, "
                "`max_seq_len` or `num_buckets`."
            )
        is_packed, cause = pack == "always", f"`pack={pack!r}`"
        if pack == "auto":
            mixing = options.mixing
            weighted = self.epoch.epoch_cost * (1 + mixing * self.separation)
            is_better = packed.weighted_cost(mixing) < weighted
            is_packed = is_better and packed.padding <= options.max_padding
            cause = self._cause(is_packed, is_better, packed)
        chosen = self._padded
        if is_packed:
            chosen = _packed_plan(packed, options.max_segments_per_row)
        costs = {
            "padded": self.epoch.epoch_cost,
            "packed": packed.cost,
            "packed in one T": self.single.cost,
        }
        return dataclasses.replace(chosen, epoch_costs=costs, cause=cause)

    def _cause(self, is_packed: bool, is_better: bool, packed: RowChoice) -> str:
        """Returns why packed rows were chosen or not, as a clause."""
        more = packed.cost / self.epoch.epoch_cost - 1
        if is_better and not is_packed:
            return "packed rows would exceed `max_padding`"
        if more < 0 and is_packed:
            return "packed rows cost less"
        if more < 0:
            return "packed rows mix fewer lengths"
        if not is_packed:
            return "packed rows do not cost less"
        cost = f"cost {more:.1%} more" if more >= 0.0005 else "cost as much"
        return f"packed rows {cost} and mix more lengths"

    @property
    def _padded(self) -> PackedPlan:
        """The result for rows of one example each."""
        return PackedPlan(
            self.padded,
            None,
            self.epoch,
            epoch_costs={},
            rows=tuple(bucket.examples for bucket in self.epoch.buckets),
            segments=(1.0,) * len(self.padded),
            padded_up_to=int(self.padded.tokens_per_row[-1]),
        )


def _packed_plan(choice: RowChoice, max_segments_per_row: int | None) -> PackedPlan:
    """Returns the result for packed rows."""
    packing = choice.packing(max_segments_per_row)
    epoch = report(choice.plan, packing.row_lengths)
    segments = choice.segments / np.maximum(choice.rows, 1)
    return PackedPlan(
        dataclasses.replace(choice.plan, packed=True),
        packing,
        dataclasses.replace(epoch, packed_examples=packing.num_examples),
        epoch_costs={},
        rows=tuple(choice.rows.tolist()),
        segments=tuple(segments.tolist()),
        padded_up_to=choice.padded_up_to,
    )


def length_alternatives(
    lengths: ArrayLike, limits: Limits, options: RowOptions
) -> Alternatives:
    """Returns the rows of examples with one length."""
    kept, last = check_lengths(lengths), limits.max_seq_len
    if last is not None and limits.overlong == "error":
        check_longest(kept, last)
    elif last is not None:
        kept = kept_lengths(kept, last, limits.overlong)
    limits = dataclasses.replace(limits, overlong="error")
    check_seq_lens(limits.longest(kept))
    values, counts = value_counts(kept)

    def search_within(limits: Limits) -> RowSearch:
        return RowSearch(
            *(values, counts, int(kept.max())),
            *(limits, options.packed_limits(limits)),
            check_cap(options.max_segments_per_row),
            *(options.block_sparse, options.max_padding, options.mixing),
        )

    search = search_within(limits)
    several = search.fuller(search.search(options.num_buckets))
    factor = _longer_by(limits, np.array([search.last]), several)
    if last is None and factor > 1:
        longer = search_within(
            dataclasses.replace(limits, max_seq_len=factor * search.last)
        )
        choice = longer.fuller(longer.search(options.num_buckets))
        several = _longer_if_better(several, choice, options)
    # Padded rows gain nothing from a T beyond the longest length.
    tight = dataclasses.replace(limits, max_seq_len=None)
    padded = plan_within(kept, tight, options.num_buckets, "optimal")
    separated = separation(
        *(np.searchsorted(padded.boundaries, values), np.log(values)),
        *(values * counts, padded.batch_sizes, log_variance(values, counts)),
    )
    return Alternatives(
        several=several,
        single=search.fuller(search.packed((search.last,))),
        padded=padded,
        separation=separated,
        epoch=report(padded, kept),
    )


def _longer_by(limits: Any, longest: np.ndarray, choice: RowChoice) -> int:
    """Returns a factor for longer rows: what the budget allows, 1 if none can save.

    Args:
      limits: the limits of all rows.
      longest: `[1]` or `[1, Q]` integers, the T of the longest row.
      choice: the packed rows that are no longer than this.
    """
    if choice.padding <= _MIN_SAVING:
        return 1
    factors = range(min(_MAX_FACTOR, MAX_CAPACITY // int(longest.max())), 1, -1)
    return next((x for x in factors if limits.batch_sizes(x * longest)[0] > 0), 1)


def _longer_if_better(choice: _Choice, longer: _Choice, options: RowOptions) -> _Choice:
    """Returns the rows that may be longer if they save enough.

    Longer rows take more memory for attention, which a cost may not count.
    """
    cost, other = (x.weighted_cost(options.mixing) for x in (choice, longer))
    saves = options.rank(longer) < options.rank(choice)
    return longer if saves and other < cost * (1 - _MIN_SAVING) else choice


def sequence_alternatives(
    lengths: Mapping[str, ArrayLike], limits: SequenceLimits, options: RowOptions
) -> Alternatives:
    """Returns the rows of examples with several sequences."""
    names = limits.sequences
    kept = limits.planned_lengths(lengths_matrix(lengths, names))
    parts = dict(zip(names, kept.T, strict=True))
    # Padded rows gain nothing from T beyond the longest lengths. One bucket must hold
    # all of these to truncate.
    longest = limits.rounded(kept.max(axis=0)).tolist()
    last = dict(zip(names, longest, strict=True)) if limits.truncates else None
    # It was applied already.
    limits = dataclasses.replace(limits, overlong="error")

    def search_within(limits: SequenceLimits) -> ShapeSearch:
        return ShapeSearch(
            kept,
            options.packed_limits(limits),
            options.max_segments_per_row,
            *(options.block_sparse, options.max_padding, options.mixing),
        )

    search = search_within(limits)
    several = search.search(options.num_buckets)
    factor = _longer_by(limits, np.array([search.last]), several)
    if limits.max_seq_len is None and factor > 1:
        longest = (factor * np.array(search.last)).tolist()
        longer = dict(zip(names, longest, strict=True))
        choice = search_within(dataclasses.replace(limits, max_seq_len=longer))
        several = _longer_if_better(
            several, choice.search(options.num_buckets), options
        )
    tight = dataclasses.replace(limits, max_seq_len=last)
    padded = plan_sequences(parts, tight, options.num_buckets)
    totals = kept.sum(axis=1, dtype=np.int64)
    variance = log_variance(totals, np.ones_like(totals))
    buckets = padded.assign(parts).astype(np.int64)
    return Alternatives(
        several=several,
        single=search.packed([search.last]),
        padded=padded,
        separation=separation(
            *(buckets, np.log(totals), totals, padded.batch_sizes, variance)
        ),
        epoch=report(padded, parts),
    )
