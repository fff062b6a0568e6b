"""A loss of the model of a state, and what it does to the variables of the model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxbucket.base.batch import Batch
from jaxbucket.train.forwarding import are_forwarded
from jaxbucket.train.loss import LossFn, Metrics, checked_loss
from jaxbucket.train.state import TrainState, checked_state
from jaxbucket.train.variables import Values, by_path, values_after


def call_loss(
    loss_fn: LossFn, state: TrainState, batch: Batch, keys: jax.Array | None
) -> tuple[jax.Array, Metrics, Any, Values]:
    """Returns the loss sum, all sums, the variables it returned, and all new values."""
    model = checked_state(state).model
    loss_sum, sums, returned = checked_loss(loss_fn, model, batch, keys)
    return loss_sum, sums, returned, values_after(state.variables, model, returned)


def comparison(
    values_after_call: Callable[[TrainState], Values], state: TrainState
) -> Callable[[], dict[str, bool]]:
    """Returns a function that tells which variables and parameters a call leaves alone.

    Args:
      values_after_call: returns the new values of all variables of a state. It is
        traced once more, when the result is first called.
      state: the state before the call.
    """
    parameters = (state.params, state.frozen) if state.graphdef is not None else ()
    leaves, structure = jax.tree.flatten((parameters, state.variables))
    paths = [*_parameters(state), *by_path(state.variables)]

    def new_values(leaves: Sequence[Any]) -> list[Any]:
        parameters, variables = jax.tree.unflatten(structure, leaves)
        before = dataclasses.replace(state, variables=variables)
        if parameters:
            params, frozen = parameters
            before = dataclasses.replace(before, params=params, frozen=frozen)
        after = values_after_call(before)
        return [after[path] for path in paths]

    @functools.cache
    def are_same() -> dict[str, bool]:
        return dict(zip(paths, are_forwarded(new_values, leaves), strict=True))

    return are_same


def check_parameters(
    function: str,
    state: TrainState,
    new_values: Values,
    are_same: Callable[[], dict[str, bool]],
) -> None:
    """Raises a ValueError if a call has assigned parameters of an NNX model.

    Args:
      function: the name of the function that was called.
      state: the state before it was called.
      new_values: the values of all variables after it.
      are_same: from `comparison`, only called if a new value may equal the old one.
    """
    for path, old in _parameters(state).items():
        if new_values[path] is not old and not are_same()[path]:
            raise ValueError(
                f"`{function}` assigns {path}, a parameter, which only the optimizer "
                "changes. Make it a variable of another type than `nnx.Param`, and "
                "pass `variable_rules` to `make_train_step`."
            )


def _parameters(state: TrainState) -> Values:
    """Returns the parameters of an NNX model, which alone can assign them, by path."""
    if state.graphdef is None:
        return {}
    return by_path(state.params) | by_path(state.frozen)
