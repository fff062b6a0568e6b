"""Warns of a stream whose lengths have drifted away from its plan."""

from __future__ import annotations

import collections
import warnings

from jaxbucket.stream.overlong import ExampleLengths
from jaxbucket.stream.run import Phase

# The number of recent lengths, and of examples whose padding is compared.
_WINDOW = 16_384
# The rise of the share of padding that is a drift.
_MAX_RISE = 0.05


class DriftWarning(UserWarning):
    """Warns that a stream has more padding than its plan had for its lengths."""


class DriftMonitor:
    """Compares the padding of each window of examples with that of the plan.

    The plan has the padding of the lengths that it was made for. If these are not
    known, or rows are packed, it has the padding of the first window.

    Args:
      is_packed: whether rows hold several examples.
    """

    def __init__(self, is_packed: bool):
        self._is_packed = is_packed
        self.lengths = collections.deque[ExampleLengths](maxlen=_WINDOW)

    def start(self, phase: Phase) -> None:
        """Starts to compare with another plan."""
        self._phase = phase
        self._planned: float | None = None
        self._is_over = False
        self._examples = self._tokens = self._positions = 0

    def add_step(self, step: int, examples: int, tokens: int, positions: int) -> None:
        """Counts the examples of a step; warns at the end of a window, at most once.

        `tokens` are real ones, and `positions` include padding.
        """
        self._examples += examples
        self._tokens += tokens
        self._positions += positions
        if self._is_over or self._examples < _WINDOW:
            return
        padding = 1 - self._tokens / self._positions
        self._examples = self._tokens = self._positions = 0
        if self._planned is None:
            self._planned = padding
            plan, sample = self._phase.plan, self._phase.sample
            if sample is not None and not self._is_packed:
                lengths = plan.kept_lengths(sample)
                planned = plan.tokens_per_row[plan.assign(lengths)]
                self._planned = 1 - float(lengths.sum() / planned.sum())
        if padding > self._planned + _MAX_RISE:
            self._is_over = True
            warnings.warn(
                f"The stream has {padding:.1%} padding up to step {step}, in the rows "
                f"of this process, and its plan had {self._planned:.1%}. If its "
                "lengths have changed, plan for `iterator.recent_lengths()`, and pass "
                "`plan={0: old, step: new}` to use the new plan from a step on. If "
                "they have not, raise `pool_size`.",
                DriftWarning,
                stacklevel=2,
            )
