"""A stream whose lengths are no longer those that its plan was made for."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.packing.best_fit import best_fit
from jaxbucket.packing.packed_plan import plan_packing
from jaxbucket.packing.pattern import positions
from jaxbucket.plan.histogram import value_counts
from jaxbucket.plan.planner import plan_buckets
from jaxbucket.plan.reports.epoch import report

if TYPE_CHECKING:
    # They import grain, and `Drift` is at the door, which does not.
    from jaxbucket.stream.options import Options
    from jaxbucket.stream.phases import Phase

# Lengths that are compared together.
_WINDOW = 16_384
# The share of padding that a new plan has to save.
_MIN_GAIN = 0.05
# The share of rows without an example at which a sequence of buckets is wrong.
_MAX_EMPTY = 0.15
# Windows from one new plan of packed rows, which takes seconds, to the next.
_WINDOWS_BETWEEN_PLANS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Drift:
    """Lengths that have drifted from the plan, and a plan for them.

    Attributes:
      step: the last step before the drift was seen.
      lengths: `[N]` int32, the last lengths that arrived.
      padding: the share of padding of these under the plan in force, by `report`; of
        packed rows, if they are packed alone.
      promised: the same of the lengths that the plan was made for; None if not known.
      renewed: the same of the last lengths under `plan`.
      empty_rows: the share of rows that had no example meanwhile.
      plan: the best for the last lengths within the same limits, except that packed
        rows may have two T. It is in force from a step on only if it is passed:
        `stream_batches(..., plan={0: old, step: drift.plan})`.
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
    """Says that the lengths of a stream have drifted.

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


class DriftMonitor:
    """Compares the last lengths with the plan, again and again; reports a drift once.

    Args:
      phase: the plan in force, and the lengths that it was made for.
      options: how batches are cut.
      on_drift: called with the drift; None to compare nothing.
    """

    def __init__(self, phase: Phase, options: Options, on_drift: OnDrift | None):
        self._plan = phase.plan
        self._sample = phase.sample
        self._max_segments = phase.max_segments
        # SingleProcess, a process has empty rows only because its pool is too small.
        self._has_sequence = phase.sequence is not None
        self._max_batch_size = options.max_batch_size
        self._on_drift = on_drift
        self._lengths = np.zeros(_WINDOW, np.int32)
        self._count = self._compared_at = self._replan_at = 0
        self._rows = self._empty_rows = 0

    def add_length(self, length: int) -> None:
        """Counts an example that arrived."""
        self._lengths[self._count % _WINDOW] = length
        self._count += 1

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the last lengths, `[V]` increasing, and how many are of each."""
        return np.unique(self._lengths[: self._count], return_counts=True)

    def add_step(self, step: int, batches: Sequence[Batch], ended: bool) -> None:
        """Counts the rows of a step, and compares if a window of lengths is full."""
        if self._on_drift is None or ended:
            return
        for batch in batches:
            filled = next(iter(batch.segment_ids.values()))[:, 0] > 0
            self._rows += len(filled)
            self._empty_rows += len(filled) - int(filled.sum())
        if self._count < self._compared_at + _WINDOW:
            return
        drift = self._drift(step)
        self._compared_at = self._count
        self._rows = self._empty_rows = 0
        if drift is not None:
            on_drift, self._on_drift = self._on_drift, None
            on_drift(drift)

    def _drift(self, step: int) -> Drift | None:
        """Returns the drift of the last lengths; None if there is too little."""
        lengths = self._lengths.copy()
        padding = self._padding(self._plan, lengths)
        empty_rows = self._empty_rows / max(self._rows, 1)
        is_sequence_wrong = self._has_sequence and empty_rows > _MAX_EMPTY
        # With less padding a new plan cannot gain enough.
        least = _MIN_GAIN
        if self._max_segments is not None:
            least += self._promised or 0.0
        may_gain = padding > least and self._count >= self._replan_at
        if not (is_sequence_wrong or may_gain):
            return None
        plan = self._best_plan(lengths)
        renewed = self._padding(plan, lengths)
        gain = padding - renewed
        if self._promised is not None:
            # What the plan lacked for its own lengths is not drift.
            gain -= self._promised - self._least_promised
        if is_sequence_wrong or gain > _MIN_GAIN:
            return Drift(
                *(step, lengths, padding, self._promised, renewed, empty_rows, plan)
            )
        if self._max_segments is not None:
            self._replan_at = self._count + _WINDOWS_BETWEEN_PLANS * _WINDOW
        return None

    @functools.cached_property
    def _promised(self) -> float | None:
        """The padding of the sample, in the plan that was made for it."""
        if self._sample is None:
            return None
        return self._padding(self._plan, self._sample)

    @functools.cached_property
    def _least_promised(self) -> float:
        """The padding of the sample, in the best plan for it within the same limits."""
        assert self._sample is not None
        return self._padding(self._best_plan(self._sample), self._sample)

    def _padding(self, plan: BucketPlan, lengths: np.ndarray) -> float:
        if self._max_segments is None:
            return report(plan, lengths).padding
        values, counts = value_counts(plan.kept(lengths))
        rows = best_fit(values, counts, plan.boundaries.tolist(), self._max_segments)
        return 1 - float(values @ counts) / positions(rows)

    def _best_plan(self, lengths: np.ndarray) -> BucketPlan:
        """Returns the best plan for other lengths, within the limits of this one.

        It has as many buckets, the same budget, multiples, longest T and policy.
        """
        if self._max_segments is not None:
            return self._best_packed_plan(lengths, self._max_segments)
        plan = self._plan
        return plan_buckets(
            lengths,
            max_tokens=plan.max_tokens,
            max_batch_size=self._max_batch_size,
            num_buckets=len(plan),
            batch_size_multiple=plan.batch_size_multiple,
            seq_len_multiple=plan.seq_len_multiple,
            max_seq_len=plan.max_seq_len,
            overlong=plan.overlong,
        )

    def _best_packed_plan(self, lengths: np.ndarray, max_segments: int) -> BucketPlan:
        """The same of packed rows, with two T at least: of one there is no choice."""
        plan = self._plan
        packed = plan_packing(
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
        most = self._max_batch_size
        most -= most % plan.batch_size_multiple
        # The costs of batches of other sizes are not known.
        return dataclasses.replace(
            packed,
            buckets=tuple(
                Bucket(min(bucket.batch_size, most), bucket.seq_len)
                for bucket in packed.buckets
            ),
            overlong=plan.overlong,
            step_costs=None,
            cost_unit="tokens",
        )
