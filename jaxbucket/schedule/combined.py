"""What mixtures and joined schedules share: their steps are those of components."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, BatchIndices
from jaxbucket.schedule.base import Schedule, check_step
from jaxbucket.schedule.example_draws import BatchDraws


class CombinedSchedule(Schedule):
    """A schedule whose steps are those of other schedules, its components.

    A subclass decides which step of which component comes at each step.

    Args:
      components: the components by name, index or first step.
      names: the names of components with sources of their own; usually empty.
    """

    def __init__(self, components: Mapping[Any, Schedule], names: tuple[str, ...] = ()):
        self._components = list(components.values())
        self.names = names
        if not components or not all(
            isinstance(x, Schedule) and not x.names for x in self._components
        ):
            raise ValueError(
                f"`schedules={components}`: pass at least one schedule without names. "
                "To change weights of a mixture, pass `weights={0: ..., 1000: ...}`."
            )
        kinds = {
            (
                x.plans[0].sequences,
                x.max_segments is None,
                f"{x.plans[0].truncates} {x.plans[0].truncates_left}",
            )
            for x in self._components
        }
        if len(kinds) > 1 and not names:
            raise ValueError(
                "`schedules` differ in their sequences, in whether rows are packed, or "
                "in which end of examples is truncated. Plan with the same `overlong`, "
                "or use a `Mixture` with names, and a source for each."
            )
        plans = [plan for x in self._components for plan in x.plans]
        self.plans = tuple({plan.fingerprint: plan for plan in plans}.values())
        segments = [x.max_segments for x in self._components if x.max_segments]
        self.max_segments = max(segments, default=None)
        self.accumulate = max(x.accumulate for x in self._components)
        # The number of the first row of each component, and the step that its random
        # numbers start from.
        self._first_rows = self._first_steps = [0] * len(components)

    @abc.abstractmethod
    def _parts_of(self, step: int) -> Iterator[tuple[int, int]]:
        """Yields the component and its own step for each part of a step."""

    def drawn_batches(self, step: int) -> Iterator[tuple[BatchIndices, BatchDraws]]:
        # Components with equal seeds draw different numbers, because their rows or
        # their first steps differ.
        for index, number in self._parts_of(check_step(step)):
            start = self._first_steps[index]
            for x, draws in self._components[index].drawn_batches(number):
                rows = self._rows(x.rows, self._first_rows[index])
                draws = draws._replace(first_step=start + draws.first_step)
                yield BatchIndices(x.bucket, rows), draws

    def _rows(self, rows: np.ndarray, first: int) -> np.ndarray:
        """Returns rows numbered over all components, padded to `max_segments`."""
        rows = np.where(rows < 0, EMPTY_ROW, rows + first)
        if self.max_segments is None or rows.ndim == 1:
            return rows
        missing = self.max_segments - rows.shape[1]
        return np.pad(rows, ((0, 0), (0, missing)), constant_values=EMPTY_ROW)

    def _component_configs(self) -> list[dict[str, Any]]:
        """Returns the options of all components, as plain Python."""
        return [x.config() | {"of": x.fingerprint} for x in self._components]
