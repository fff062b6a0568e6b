"""A stream whose lengths are no longer those that its plan was made for."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.packing.best_fit import best_fit
from jaxbucket.packing.packed_plan import plan_packing
from jaxbucket.packing.pattern import positions
from jaxbucket.plan.buckets import plan_buckets
from jaxbucket.plan.histogram import value_counts
from jaxbucket.plan.reports.epoch import report

# Lengths that are looked at together, and how many shares of padding are worth a word.
_WINDOW = 16_384
_WORTH = 0.05
# Of packed rows, where a plan was made and gained too little.
_WINDOWS_BETWEEN_PLANS = 16
# Rows without an example: several processes have buckets as often as the sample has.
_EMPTY = 0.15


@dataclasses.dataclass(frozen=True, eq=False)
class Drift:
    """What lengths have come to, and a plan for them.

    Attributes:
      step: the one that has just been given.
      lengths: `[N]` int32, the last that arrived.
      padding: of them under the plan in force, by `report`; of packed rows, when they
        are packed alone.
      promised: of the lengths that this plan was made for; None where not known.
      renewed: of the last lengths, under `plan`.
      empty_rows: the share of rows that had no example meanwhile.
      plan: made of the last lengths, within the same limits, but that packed rows may
        have two T. It is in force from a step on only if it is given:
        `plan={0: old, step: drift.plan}`.
    """

    step: int
    lengths: np.ndarray
    padding: float
    promised: float | None
    renewed: float
    empty_rows: float
    plan: BucketPlan

    def __str__(self) -> str:
        promised = ""
        if self.promised is not None:
            promised = f" ({self.promised:.1%} of what it was made for)"
        return (
            f"Lengths have drifted from the plan. At step {self.step} the last "
            f"{len(self.lengths)} have {self.padding:.1%} padding{promised}, and "
            f"{self.renewed:.1%} with a new plan; {self.empty_rows:.1%} of rows were "
            "empty. `drift.plan` has it: `plan={0: old, step: drift.plan}` takes it "
            "from a step on."
        )


class DriftWarning(UserWarning):
    """Says that a stream has drifted.

    Attributes:
      drift: the figures, and a plan.
    """

    def __init__(self, drift: Drift):
        super().__init__(str(drift))
        self.drift = drift


OnDrift: TypeAlias = Callable[[Drift], None]


def warn_of_drift(drift: Drift) -> None:
    """Warns, with the figures."""
    warnings.warn(DriftWarning(drift), stacklevel=2)


class DriftWatch:
    """Looks at the last lengths again and again; it speaks once.

    Args:
      plan: the one in force.
      sample: `[N]` lengths that it was made for, where they are known.
      on_drift: what is called; None to look at nothing.
      shares: whether several processes have one sequence of buckets, so that rows may
        be empty for it is no longer right. Alone, they are so for a pool too small.
      max_segments: the most examples of a packed row; None where rows are padded.
      max_batch_size: of a new plan, for all of a batch is in the pool at once.
    """

    def __init__(
        self,
        plan: BucketPlan,
        sample: np.ndarray | None,
        on_drift: OnDrift | None,
        shares: bool = False,
        max_segments: int | None = None,
        max_batch_size: int | None = None,
    ):
        self._plan = plan
        self._sample = sample
        self._on_drift = on_drift
        self._shares = shares
        self._max_segments = max_segments
        self._max_batch_size = max_batch_size
        self._lengths = np.zeros(_WINDOW, np.int32)
        self._number = 0
        self._looked = 0
        self._rows = 0
        self._empty = 0
        self._spoke = False
        # From how many lengths on it is worth planning again.
        self._due = 0

    def arrive(self, length: int) -> None:
        """Counts one more."""
        self._lengths[self._number % _WINDOW] = length
        self._number += 1

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the last lengths, `[V]` increasing, and how many are of each."""
        return np.unique(self._lengths[: self._number], return_counts=True)

    def step(self, step: int, batches: Sequence[Batch], ended: bool) -> None:
        """Counts the rows of a step, and looks whether it is time to."""
        if self._on_drift is None or self._spoke or ended:
            return
        for batch in batches:
            filled = next(iter(batch.segment_ids.values()))[:, 0] > 0
            self._rows += len(filled)
            self._empty += len(filled) - int(filled.sum())
        if self._number >= self._looked + _WINDOW:
            self._look(step, self._on_drift)
            self._looked = self._number
            self._rows = self._empty = 0

    def _look(self, step: int, on_drift: OnDrift) -> None:
        lengths = self._lengths.copy()
        padding = self._padding(self._plan, lengths)
        empty_rows = self._empty / max(self._rows, 1)
        is_off = self._shares and empty_rows > _EMPTY
        # Beyond that a new plan may gain something: packed ones take seconds to make.
        at_least = (self._promised or 0.0) * (self._max_segments is not None) + _WORTH
        if not is_off and (padding <= at_least or self._number < self._due):
            return
        renewed = self._renewed(lengths)
        drift = Drift(
            step=step,
            lengths=lengths,
            padding=padding,
            promised=self._promised,
            renewed=self._padding(renewed, lengths),
            empty_rows=empty_rows,
            plan=renewed,
        )
        gained = padding - drift.renewed
        if self._promised is not None:
            # A plan that is not the best for its own lengths has not drifted for that.
            gained -= self._promised - self._best_of_sample
        if is_off or gained > _WORTH:
            self._spoke = True
            on_drift(drift)
        elif self._max_segments is not None:
            self._due = self._number + _WINDOWS_BETWEEN_PLANS * _WINDOW

    @functools.cached_property
    def _promised(self) -> float | None:
        """Padding of the sample, in the plan that was made for it."""
        if self._sample is None:
            return None
        return self._padding(self._plan, self._sample)

    @functools.cached_property
    def _best_of_sample(self) -> float:
        """Padding of the sample, in the best plan for it within the same limits."""
        assert self._sample is not None
        return self._padding(self._renewed(self._sample), self._sample)

    def _renewed(self, lengths: np.ndarray) -> BucketPlan:
        limits = (self._max_batch_size, self._max_segments)
        return renewed_plan(self._plan, lengths, *limits)

    def _padding(self, plan: BucketPlan, lengths: np.ndarray) -> float:
        if self._max_segments is None:
            return report(plan, lengths).padding
        values, counts = value_counts(plan.kept(lengths))
        rows = best_fit(values, counts, plan.boundaries.tolist(), self._max_segments)
        return 1 - float(values @ counts) / positions(rows)


def renewed_plan(
    plan: BucketPlan,
    lengths: np.ndarray,
    max_batch_size: int | None = None,
    max_segments: int | None = None,
) -> BucketPlan:
    """Returns the best plan for other lengths, within the limits of a plan.

    As many buckets, the same budget, multiples, longest T and policy. Of packed rows
    at least two: with one T there is nothing to choose.
    """
    if max_segments is not None:
        return _renewed_packed(plan, lengths, max_batch_size, max_segments)
    return plan_buckets(
        lengths,
        max_tokens=plan.max_tokens,
        max_batch_size=max_batch_size,
        num_buckets=len(plan),
        batch_size_multiple=plan.batch_size_multiple,
        seq_len_multiple=plan.seq_len_multiple,
        max_seq_len=plan.max_seq_len,
        overlong=plan.overlong,
    )


def _renewed_packed(
    plan: BucketPlan,
    lengths: np.ndarray,
    max_batch_size: int | None,
    max_segments: int,
) -> BucketPlan:
    found = plan_packing(
        # The longest T stays.
        np.append(plan.kept(lengths), plan.max_seq_len),
        max_tokens=plan.max_tokens,
        max_seq_len=plan.max_seq_len,
        num_buckets=max(2, len(plan)),
        pack="always",
        max_segments_per_row=max_segments,
        batch_size_multiple=plan.batch_size_multiple,
        seq_len_multiple=plan.seq_len_multiple,
    ).plan
    most = plan.max_tokens if max_batch_size is None else max_batch_size
    most -= most % plan.batch_size_multiple
    buckets = tuple(Bucket(min(b.batch_size, most), b.seq_len) for b in found.buckets)
    # Of rows in other numbers nobody knows the costs.
    return dataclasses.replace(
        found,
        buckets=buckets,
        overlong=plan.overlong,
        step_costs=None,
        cost_unit="tokens",
    )
