"""Variables of a model that its forward pass updates, such as batch statistics.

Gradients do not update these variables. The loss computes their new values: an NNX
model assigns them, and a loss of a Linen module returns them. Only under `mode="jit"`
is a loss given all rows of the batch, so only there may it change variables.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbucket.train.forwarding import are_forwarded
from jaxbucket.train.state import TrainState

_Result = TypeVar("_Result")
# Path of a variable, in Python syntax -> its value.
Values: TypeAlias = dict[str, jax.Array]

_BATCH_STATS = "batch_stats"
EVALUATION_REMEDY = (
    "Models are fixed in evaluation and prediction. Use the running averages of "
    "batch statistics and no dropout there (in a loss, if `keys is None`): call "
    "`model.eval()` on an NNX model, or `BatchNorm(use_running_average=True)`."
)


def values_after(variables: Any, model: Any, returned: Any) -> Values:
    """Returns the values of all variables after a loss was called, by path.

    Those of an NNX model include its parameters.

    Args:
      variables: the variables before it was called.
      model: the model it was called with.
      returned: the collections it returned; None if it did not return any.
    """
    old = by_path(variables)
    if isinstance(model, nnx.Module):
        if returned:
            raise ValueError(
                "`loss_fn` returned variables of an NNX model. Assign them instead."
            )
        new = by_path(nnx.state(model))
        changed = {path: new[path] for path in old}
    else:
        new = changed = by_path(dict(returned or {}))
    for path, value in changed.items():
        was, now = _type_name(old.get(path)), _type_name(value)
        if was != now:
            raise ValueError(
                f"`loss_fn` changes the variable {path} from {was} to {now}. Keep the "
                "shapes and dtypes of variables, for which steps are compiled. To add "
                "a collection, pass `variables=` to `create_state`."
            )
    return old | new


def _type_name(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{jnp.result_type(value)}{list(jnp.shape(value))}"


def call_model(
    fn: Callable[[Any], tuple[_Result, Any]],
    state: TrainState,
    remedy: str,
    *,
    fixed: tuple[str, ...] = ("params", "frozen", "variables"),
) -> tuple[_Result, Values]:
    """Returns the result of a function of a model, and the variables after it, by path.

    Args:
      fn: `model -> (result, returned variables)`. It is traced again if a value may
        have been passed on, as by `nnx.remat`.
      state: the state of the model.
      remedy: the end of the message.
      fixed: the parts of the state that may not change.
    """

    def call(state: TrainState) -> tuple[_Result, Values]:
        model = state.model
        result, returned = fn(model)
        return result, values_after(state.variables, model, returned)

    result, new = call(state)
    if state.graphdef is None:
        # Only an NNX model can assign its parameters.
        fixed = tuple(name for name in fixed if name == "variables")
    trees = [getattr(state, name) for name in fixed]
    old = [pair for tree in trees for pair in by_path(tree).items()]
    if all(new[path] is value for path, value in old):
        return result, new
    leaves, structure = jax.tree.flatten(trees)

    def values(leaves: Sequence[Any]) -> list[Any]:
        given = zip(fixed, jax.tree.unflatten(structure, leaves), strict=True)
        _, after = call(dataclasses.replace(state, **dict(given)))
        return [after[path] for path, _ in old]

    for (path, _), is_same in zip(old, are_forwarded(values, leaves), strict=True):
        if not is_same:
            raise ValueError(f"The model changes {path}. {remedy}")
    return result, new


def warn_if_not_returned(variables: Any, returned: Any) -> None:
    """Warns if a loss that is trained does not return new batch statistics."""
    if returned is None and isinstance(variables, dict) and _BATCH_STATS in variables:
        warnings.warn(
            "`loss_fn` does not return the batch statistics, which therefore stay as "
            "they are. Return `(loss_sum, weight, sums, variables)`, which needs "
            "`mode='jit'` if they change, or {} as variables if this is intended.",
            stacklevel=2,
        )


def with_values(variables: Any, values: Mapping[str, Any]) -> Any:
    """Returns the variables with other values for some of them."""
    return jax.tree.map_with_path(
        lambda path, old: values.get(jax.tree_util.keystr(path), old), variables
    )


def by_path(tree: Any) -> Values:
    """Returns the leaves of a tree by their path."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
