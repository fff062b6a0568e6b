"""The batches of a schedule as a `grain.IterDataset` whose states name their run.

Grain's own state is the index of the next batch, which any other run would accept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import grain

from jaxbucket.base.position import DataPosition


class BatchIterDataset(grain.IterDataset[Any]):
    """The dataset that `BatchDataset.to_iter_dataset` returns."""

    def __init__(self, batches: Any, first: Callable[[], DataPosition]):
        super().__init__(batches)
        self._first = first

    def __iter__(self) -> BatchIterator:
        (batches,) = self.parents
        return BatchIterator(iter(batches), self._first)


class BatchIterator(grain.DatasetIterator[Any]):
    """Adds the position of the first batch to the states of Grain's iterator.

    A restored state is checked when the next batch is read, as by Grain's workers,
    because the position is computed from a few examples.
    """

    def __init__(self, batches: Any, first: Callable[[], DataPosition]):
        super().__init__(batches)
        self._batches = batches
        self._first = functools.cache(first)
        self._restored: dict[str, Any] | None = None

    def get_state(self) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored
        return self._batches.get_state() | {"position": self._first().to_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._restored = state

    def __next__(self) -> Any:
        if self._restored is not None:
            state = dict(self._restored)
            self._check(state.pop("position", None), state.get("next_index", 0))
            self._batches.set_state(state)
            self._restored = None
        return next(self._batches)

    def _check(self, position: Any, index: int) -> None:
        """Raises a ValueError unless a state is that of the same run."""
        saved, first = DataPosition.from_dict(position), self._first()
        dataclasses.replace(saved, step=saved.step + index).check_same(first)
        if saved.step != first.step:
            raise ValueError(
                f"`start_step={first.step}` differs from the {saved.step} of the "
                f"state, which counts from it. Pass {saved.step}."
            )
