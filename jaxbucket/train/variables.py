"""Variables of a model that its forward pass updates, such as batch statistics.

Gradients do not update these variables. The loss computes their new values: an NNX
model assigns them, and a loss of a Linen module returns them. Only under `mode="jit"`
is a loss given all rows of the batch, so only there may it change variables.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxbucket.train.forwarding import are_forwarded
from jaxbucket.train.state import TrainState

# Path of a variable, in Python syntax -> its value.
Values: TypeAlias = dict[str, jax.Array]

_BATCH_STATS = "batch_stats"
# Remedies for what a model must not change.
_PARAMETER_REMEDY = (
    "It is a parameter, which only the optimizer changes. Make it a variable of "
    "another type than `nnx.Param`."
)
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

    Raises:
      ValueError: if the loss returned something other than collections of the model, or
        changes the shape or the dtype of a variable.
    """
    old = by_path(variables)
    if isinstance(model, nnx.Module):
        if returned:
            raise ValueError(
                "`loss_fn` returned variables of an NNX model. Assign them in the "
                "model instead; steps take their new values from there."
            )
        new = by_path(nnx.state(model))
    else:
        new = old | _of_collections(returned, old)
    for path, value in old.items():
        shape, dtype = jnp.shape(new[path]), jnp.result_type(new[path])
        if (shape, dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"`loss_fn` changes {path} from {value.dtype}{list(value.shape)} to "
                f"{dtype}{list(shape)}. Keep its shape and dtype, because steps are "
                "compiled for them."
            )
    return new


def _of_collections(returned: Any, old: Values) -> Values:
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise ValueError(
            f"`loss_fn` returned variables as {type(returned).__name__}. Return a dict "
            'of collections, such as {"batch_stats": ...}.'
        )
    new = by_path(dict(returned))
    if unknown := sorted(new.keys() - old.keys()):
        raise ValueError(
            f"`loss_fn` returned the variable {unknown[0]}, which is not in the "
            "collections of the state. Return only those that change, such as "
            '`{"batch_stats": new["batch_stats"]}`. To add a collection to the state, '
            "pass `variables=` to `create_state`, or `sample=` with a Linen module "
            "that initializes it."
        )
    return new


def check_parameters(
    state: TrainState, new: Values, call: Callable[[TrainState], Values]
) -> None:
    """Raises a ValueError if a call has assigned parameters of an NNX model.

    Args:
      state: the state before the call.
      new: the values after it, from `values_after`.
      call: returns them for another state. It is only traced again if a value may have
        been passed on, as by `nnx.remat`.
    """
    if state.graphdef is not None:
        _check_unchanged(state, ("params", "frozen"), new, call, _PARAMETER_REMEDY)


def check_variables(
    state: TrainState, new: Values, call: Callable[[TrainState], Values], remedy: str
) -> None:
    """Raises a ValueError that ends with a remedy, if a call has changed variables."""
    _check_unchanged(state, ("variables",), new, call, remedy)


def _check_unchanged(
    state: TrainState,
    names: Sequence[str],
    new: Values,
    call: Callable[[TrainState], Values],
    remedy: str,
) -> None:
    parts = {name: getattr(state, name) for name in names}
    old = [pair for part in parts.values() for pair in by_path(part).items()]
    if all(new[path] is value for path, value in old):
        return
    leaves, structure = jax.tree.flatten(list(parts.values()))

    def values(leaves: Sequence[Any]) -> list[Any]:
        given = zip(names, jax.tree.unflatten(structure, leaves), strict=True)
        after = call(dataclasses.replace(state, **dict(given)))
        return [after[path] for path, _ in old]

    for (path, _), is_same in zip(old, are_forwarded(values, leaves), strict=True):
        if not is_same:
            raise ValueError(f"The model changes {path}. {remedy}")


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


def kept_if(keeps: Any, old: Values, new: Values) -> Values:
    """Returns the old values if a condition on the devices holds, else the new ones."""
    return {path: jnp.where(keeps, old[path], value) for path, value in new.items()}


def overwritten_values(variables: Any) -> Values:
    """Returns the variables whose gradients are their new values, by path.

    They are the scales of layers in fp8. Some depend on the gradients of activations,
    which the forward pass does not know, so Flax keeps them in a collection of their
    own and replaces them by their gradients.
    """
    # A Linen module in an NNX model has a variable type of the same name.
    return {
        jax.tree_util.keystr((*path, *inner)): leaf
        for path, variable in jax.tree.leaves_with_path(
            variables, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        if OVERWRITE_WITH_GRADIENT in (path[0].key, type(variable).__name__)
        for inner, leaf in jax.tree.leaves_with_path(variable)
    }


def by_path(tree: Any) -> Values:
    """Returns the leaves of a tree by their path."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
