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

    def __init__(self, batches: Any, position: Callable[[], DataPosition]):
        super().__init__(batches)
        self._position = position

    def __iter__(self) -> BatchIterator:
        (batches,) = self.parents
        return BatchIterator(iter(batches), self._position)


class BatchIterator(grain.DatasetIterator[Any]):
    """Adds the position of the first batch to the states of Grain's iterator.

    A state is checked before the next batch is read, because that may read examples.
    """

    def __init__(self, batches: Any, position: Callable[[], DataPosition]):
        super().__init__(batches)
        self._batches = batches
        self._new_position = position
        self._restored: dict[str, Any] | None = None

    @functools.cached_property
    def _position(self) -> dict[str, Any]:
        return self._new_position().to_dict()

    def get_state(self) -> dict[str, Any]:
        """Returns the state, which is JSON serializable."""
        if self._restored is not None:
            return self._restored
        return self._batches.get_state() | {"position": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a state that `get_state` has returned."""
        self._restored = state

    def __next__(self) -> Any:
        """Returns the next batch.

        Raises:
          ValueError: if the restored state is of another plan, schedule or dataset, or
            of another first step.
        """
        if self._restored is not None:
            position, state = _split(self._restored)
            first = DataPosition.from_dict(self._position)
            step = position.step + state.get("next_index", 0)
            dataclasses.replace(position, step=step).check_same(first)
            if position.step != first.step:
                raise ValueError(
                    f"`start_step={first.step}` differs from the {position.step} of "
                    f"the state, which counts from it. Pass {position.step}."
                )
            self._batches.set_state(state)
            self._restored = None
        return next(self._batches)


def _split(state: dict[str, Any]) -> tuple[DataPosition, dict[str, Any]]:
    """Returns the position in a state, and the state of Grain's iterator."""
    if "position" not in state:
        raise ValueError(
            f"`state={state}` has no position: it is of another dataset, or of an "
            "earlier version. Pass `start_step` to `batch_dataset` instead."
        )
    rest = {name: value for name, value in state.items() if name != "position"}
    return DataPosition.from_dict(state["position"]), rest
