"""Detects a stream whose lengths have drifted away from its plan."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.sizes import total
from jaxbucket.packing.best_fit import best_fit
from jaxbucket.packing.pattern import positions
from jaxbucket.packing.planner import plan_packing
from jaxbucket.plan.flow.dominance import is_maximal
from jaxbucket.plan.histogram import value_counts
from jaxbucket.plan.planner import plan_buckets
from jaxbucket.plan.reports.epoch import report

if TYPE_CHECKING:
    # These import grain, and `import jaxbucket` must not, though it exports `Drift`.
    from jaxbucket.stream.options import Options
    from jaxbucket.stream.overlong import ExampleLengths
    from jaxbucket.stream.phases import Phase

# The number of lengths in each comparison.
_WINDOW = 16_384
# The smallest reduction of the share of padding for which a drift is reported.
_MIN_GAIN = 0.05
# The share of empty rows above which a sequence of buckets no longer fits.
_MAX_EMPTY = 0.15
# The minimum number of windows between new plans that take seconds.
_WINDOWS_BETWEEN_PLANS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Drift:
    """A drift of the lengths from the plan, and a new plan for the recent lengths.

    Attributes:
      step: the last step before the drift was detected.
      lengths: `[N]` int32, the most recent lengths, without what was dropped or
        truncated; or a mapping from each of several sequences to its `[N]`.
      padding: the share of padding of `lengths` under the current plan, by `report`.
        For packed rows, the padding after packing only `lengths`.
      planned_padding: the share of padding of the lengths that the plan was made for;
        None if those are not known.
      new_padding: the share of padding of `lengths` under `plan`.
      empty_rows: the share of rows without an example, since the last comparison.
      plan: the best plan for `lengths` within the limits of the current plan, except
        that packed rows may have two T. If the budget was a function of T, the plan
        only has its largest value, which limits all buckets of the new plan: plan for
        `lengths` with the function instead. It has no effect until it is passed:
        `stream_batches(..., plan={0: old, step: drift.plan})`.
    """

    step: int
    lengths: np.ndarray | dict[str, np.ndarray]
    padding: float
    planned_padding: float | None
    new_padding: float
    empty_rows: float
    plan: BucketPlan

    def __str__(self) -> str:
        planned = ""
        if self.planned_padding is not None:
            planned = f" ({self.planned_padding:.1%} for the lengths it was made for)"
        lengths = self.lengths
        columns = list(lengths.values()) if isinstance(lengths, dict) else [lengths]
        return (
            f"Lengths have drifted from the plan. At step {self.step} the last "
            f"{len(columns[0])} lengths have {self.padding:.1%} padding{planned}; a "
            f"new plan would have {self.new_padding:.1%}. {self.empty_rows:.1%} of "
            "rows were empty. To use the new plan from a step on, pass "
            "`plan={0: old, step: drift.plan}`."
        )


class DriftWarning(UserWarning):
    """Warns that the lengths of a stream have drifted from its plan.

    Attributes:
      drift: the shares of padding before and after, and a new plan.
    """

    def __init__(self, drift: Drift):
        super().__init__(str(drift))
        self.drift = drift


OnDrift: TypeAlias = Callable[[Drift], None]


def warn_of_drift(drift: Drift) -> None:
    """Issues a `DriftWarning`."""
    warnings.warn(DriftWarning(drift), stacklevel=2)


class DriftMonitor:
    """Compares each window of lengths with the plan, and reports the first drift.

    Args:
      phase: the current plan, and the lengths that it was made for.
      options: the options of the stream.
      on_drift: a function that is called with the drift; None to disable comparisons.
    """

    def __init__(self, phase: Phase, options: Options, on_drift: OnDrift | None):
        self._plan = phase.plan
        self._sample = phase.sample
        self._max_segments = phase.max_segments
        # Without a sequence, empty rows only show that the pool is too small.
        self._has_sequence = phase.sequence is not None
        self._max_batch_size = options.max_batch_size
        self._on_drift = on_drift
        # Plans for packed rows and for several sequences.
        self._is_planning_slow = bool(self._max_segments or self._plan.sequences)
        num_sequences = len(self._plan.sequences)
        shape = (_WINDOW, num_sequences) if num_sequences else (_WINDOW,)
        self._lengths = np.zeros(shape, np.int32)
        self._count = self._compared_at = self._replan_at = 0
        self._rows = self._empty_rows = 0

    def add_lengths(self, lengths: ExampleLengths) -> None:
        """Records the lengths of a new example."""
        index = self._count % _WINDOW
        self._lengths[index] = lengths if self._plan.sequences else lengths[0]
        self._count += 1

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the recent lengths, `[V]` or `[V, Q]`, and their `[V]` counts."""
        recent = self._lengths[: self._count]
        return np.unique(recent, return_counts=True, axis=0)

    def add_step(self, step: int, batches: Sequence[Batch], ended: bool) -> None:
        """Counts the rows of a step, and compares once a window of lengths is full."""
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
        """Returns the drift of the recent lengths; None if it is too small."""
        lengths = self._lengths.copy()
        padding = self._padding(self._plan, lengths)
        empty_rows = self._empty_rows / max(self._rows, 1)
        is_sequence_wrong = self._has_sequence and empty_rows > _MAX_EMPTY
        # With less padding than this, no plan can gain enough.
        min_padding = _MIN_GAIN
        if self._max_segments is not None:
            min_padding += self._planned_padding or 0.0
        may_gain = padding > min_padding and self._count >= self._replan_at
        if not (is_sequence_wrong or may_gain):
            return None
        plan = self._best_plan(lengths)
        new_padding = self._padding(plan, lengths)
        gain = padding - new_padding
        if self._planned_padding is not None:
            # A plan that was not the best for its own lengths has not drifted.
            gain -= self._planned_padding - self._best_planned
        if is_sequence_wrong or gain > _MIN_GAIN:
            return Drift(
                *(
                    step,
                    self._by_sequence(lengths),
                    padding,
                    self._planned_padding,
                    new_padding,
                    empty_rows,
                    plan,
                )
            )
        if self._is_planning_slow:
            self._replan_at = self._count + _WINDOWS_BETWEEN_PLANS * _WINDOW
        return None

    @functools.cached_property
    def _planned_padding(self) -> float | None:
        """The share of padding of the sample under the current plan."""
        if self._sample is None:
            return None
        return self._padding(self._plan, self._sample)

    @functools.cached_property
    def _best_planned(self) -> float:
        """The share of padding of the sample under the best plan for it."""
        assert self._sample is not None
        return self._padding(self._best_plan(self._sample), self._sample)

    def _padding(self, plan: BucketPlan, lengths: np.ndarray) -> float:
        if self._max_segments is None:
            return report(plan, lengths).padding
        values, counts = value_counts(plan.kept_lengths(lengths))
        rows = best_fit(values, counts, plan.boundaries.tolist(), self._max_segments)
        return 1 - float(values @ counts) / positions(rows)

    def _by_sequence(self, lengths: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        """Returns `[N]` lengths, or a mapping from each sequence to its column."""
        names = self._plan.sequences
        return dict(zip(names, lengths.T, strict=True)) if names else lengths

    def _best_plan(self, lengths: np.ndarray) -> BucketPlan:
        """Returns the best plan for `lengths` within the limits of the current one.

        It has the same number of buckets, `max_tokens`, multiples, longest T and
        policy for overlong examples. With several sequences, it holds all shapes of
        the current plan.
        """
        if self._max_segments is not None:
            return self._best_packed_plan(lengths, self._max_segments)
        plan = self._plan
        if plan.sequences:
            longest = plan.seq_lens[is_maximal(plan.seq_lens)]
            lengths = np.concatenate([plan.kept_lengths(lengths), longest])
        return plan_buckets(
            self._by_sequence(lengths),
            max_tokens=plan.max_tokens,
            max_batch_size=self._max_batch_size,
            num_buckets=len(plan),
            batch_size_multiple=plan.batch_size_multiple,
            seq_len_multiple=plan.seq_len_multiple,
            max_seq_len=plan.max_seq_lens if plan.sequences else plan.max_seq_len,
            overlong=plan.overlong,
            sample=True,
        )

    def _best_packed_plan(self, lengths: np.ndarray, max_segments: int) -> BucketPlan:
        """Returns the best plan for packed rows, with at least two T.

        With one T there is nothing to choose, because the longest T is fixed.
        """
        plan = self._plan
        packed = plan_packing(
            # The added length keeps the longest T.
            np.append(plan.kept_lengths(lengths), plan.max_seq_len),
            max_tokens=total(plan.max_tokens),
            max_seq_len=plan.max_seq_len,
            num_buckets=max(2, len(plan)),
            pack="always",
            max_segments_per_row=max_segments,
            batch_size_multiple=plan.batch_size_multiple,
            seq_len_multiple=total(plan.seq_len_multiple),
            sample=True,
        ).plan
        max_batch_size = self._max_batch_size
        max_batch_size -= max_batch_size % plan.batch_size_multiple
        # Step costs are dropped because they are not known for smaller batches.
        return dataclasses.replace(
            packed,
            buckets=tuple(
                Bucket(min(bucket.batch_size, max_batch_size), bucket.seq_len)
                for bucket in packed.buckets
            ),
            overlong=plan.overlong,
            step_costs=None,
            cost_unit="tokens",
        )
