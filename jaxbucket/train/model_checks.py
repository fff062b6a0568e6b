"""Checks of what `create_state` and steps are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import unfreeze
from flax.training.train_state import TrainState as FlaxTrainState


def check_optimizer(tx: Any) -> None:
    """Raises a ValueError if `tx` is not an optimizer."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            f"`tx` is a {type(tx).__name__}. Pass an optimizer of optax, such as "
            "`optax.adam(1e-3)`. A state without an optimizer, for evaluation, is "
            "`create_state(model, mesh=mesh)`."
        )


def check_state_of(tx: Any, params: Any, opt_state: Any) -> None:
    """Raises a ValueError if a state was made with another optimizer."""
    try:
        initial = jax.eval_shape(tx.init, params)
    except Exception:
        # The initial state depends on the values or the shardings of the parameters, so
        # its structure is not known.
        return
    if is_absent(opt_state) and not is_absent(initial):
        raise ValueError(
            "`state` has no optimizer. Make it with the one of the step: "
            "`create_state(model, tx, mesh)`."
        )
    was, now = _shapes(opt_state), _shapes(initial)
    if was != now:
        name = min(name for name in was | now if was.get(name) != now.get(name))
        raise ValueError(
            "`state` was made with another optimizer than the step: `state.opt_state"
            f"{name}` is {was.get(name, 'missing')}, but {now.get(name, 'absent')} in "
            "the state of the step's `tx`. Pass the same `tx` to `create_state` and "
            "`make_train_step`."
        )


def is_absent(opt_state: Any) -> bool:
    """Returns whether a state has no optimizer."""
    # Empty states of optax are instances of subclasses.
    return type(opt_state) is tuple and not opt_state


def _shapes(tree: Any) -> dict[str, str]:
    """Returns the path of each leaf -> a phrase for its shape."""
    return {
        jax.tree_util.keystr(path): f"of shape {[*jnp.shape(leaf)]}"
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def checked_parameters(params: Any) -> Any:
    """Returns plain parameters as arrays."""
    _check_is_not_a_state(params)
    _check_has_no_modules(params)
    if isinstance(params, Mapping):
        _check_has_no_collections(params)
    leaves = jax.tree.leaves(params)
    if not leaves or not all(map(_is_array, leaves)):
        raise ValueError(
            f"`model` is a {type(params).__name__}. Pass an NNX module, a Linen module "
            "with `sample=`, or parameters."
        )
    return as_arrays(params)


def _check_is_not_a_state(params: Any) -> None:
    if isinstance(params, FlaxTrainState):
        raise ValueError(
            f"`model` is a {type(params).__name__} of Flax, all of which would be "
            "trained. Pass its parameters: `create_state(state.params, mesh=mesh, "
            'variables={"batch_stats": state.batch_stats})`, with the collections '
            "that it has."
        )
    if isinstance(params, nnx.Optimizer):
        raise ValueError(
            "`model` is an nnx.Optimizer, whose state would be trained. Pass the "
            "module that it optimizes."
        )


def _check_has_no_modules(params: Any) -> None:
    """Raises a ValueError if variables of NNX would be trained as parameters."""
    is_nnx = (nnx.Module, nnx.Variable)
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, is_nnx))
    for leaf in leaves:
        if isinstance(leaf, nnx.Module):
            raise ValueError(
                f"`model` is a {type(params).__name__} with a {type(leaf).__name__}, "
                "an NNX module, whose variables would all be trained. Put modules into "
                "`nnx.Dict(...)` or `nnx.List([...])`."
            )
        if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.Param):
            raise ValueError(
                f"`model` is a {type(params).__name__} with a {type(leaf).__name__}, "
                "which would be trained as a parameter. Pass the NNX module itself, "
                "for instance `nnx.merge(graphdef, state)`."
            )


def _check_has_no_collections(params: Mapping[str, Any]) -> None:
    """Raises a ValueError if collections of a Linen module would be trained."""
    others = [name for name in params if name != "params"]
    if "batch_stats" in params or ("params" in params and others):
        collections = ", ".join(f'"{name}": variables["{name}"]' for name in others)
        raise ValueError(
            f"`model` has the collections {others}, which would be trained as "
            "parameters. Pass the module and `sample=`, or `create_state(variables["
            f'"params"], tx, mesh, variables={{{collections}}})`. If all are '
            'parameters, rename the key "params".'
        )


def checked_collections(variables: Mapping[str, Any] | None) -> Any:
    """Returns collections of variables as arrays, or ()."""
    if variables is None:
        return ()
    if not isinstance(variables, Mapping) or "params" in variables:
        raise ValueError(
            "`variables` must be a dict of the collections beside the parameters, such "
            'as {"batch_stats": ...}, without "params".'
        )
    return as_arrays(unfreeze(dict(variables)))


def checked_predicate(wrt: Any) -> Callable[[Any, Any], bool]:
    """Returns the function of a path and a value that a filter stands for."""
    try:
        predicate = nnx.filterlib.to_predicate(wrt)
        inspect.signature(predicate).bind((), None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`wrt={wrt!r}` is not a filter of NNX. Pass for instance "
            '`nnx.PathContains("head")`, or a function of the path and the value.'
        ) from error
    return predicate


def check_unused(kind: str, **arguments: Any) -> None:
    """Raises a ValueError if one of the arguments was passed."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"`{name}` was passed for {kind}, which does not use it. Leave it out."
            )


def as_arrays(tree: Any) -> Any:
    """Returns a tree of arrays of strong dtypes."""
    # The weak dtype of a Python number would become a strong one in the first step, and
    # the second step would be compiled again.
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.number | float | int)
