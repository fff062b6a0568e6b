"""Checks of what `create_state` and steps are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

_PARAMETERS = (jax.Array, np.ndarray, np.number, float, int, nnx.Param)


def check_optimizer(tx: Any) -> None:
    """Raises a ValueError if `tx` is not an optimizer."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            f"`tx` is a {type(tx).__name__}. Pass an optimizer of optax, such as "
            "`optax.adam(1e-3)`. A state without an optimizer, for evaluation, is "
            "`create_state(model, mesh=mesh)`."
        )


def check_plain(params: Any, variables: Mapping[str, Any] | None) -> None:
    """Raises a ValueError unless a model is a tree of parameters and nothing else."""
    if "params" in (variables or ()):
        raise ValueError(
            '`variables` has the collection "params". Pass the other ones, such as '
            '{"batch_stats": ...}.'
        )
    is_nnx = (nnx.Module, nnx.Variable)
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, is_nnx))
    for leaf in leaves:
        if isinstance(leaf, is_nnx) and not isinstance(leaf, nnx.Param):
            raise ValueError(
                f"`model` is a {type(params).__name__} with a {type(leaf).__name__} of "
                "NNX, all of which would be trained. Pass an NNX module; put several "
                "into `nnx.Dict(...)` or `nnx.List([...])`."
            )
    if not leaves or not all(isinstance(leaf, _PARAMETERS) for leaf in leaves):
        raise ValueError(
            f"`model` is a {type(params).__name__}. Pass an NNX module, a Linen module "
            "with `sample=`, or parameters."
        )
    if isinstance(params, Mapping):
        _check_has_no_collections(params)


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


def check_differentiable(params: Any) -> None:
    """Raises a ValueError if a parameter that is trained is not a float."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"`model` has the parameter {jax.tree_util.keystr(path)} of dtype "
                f"{leaf.dtype}, which cannot be trained. Of a state of Flax or an "
                "`nnx.Optimizer`, pass the parameters or the module. Convert others to "
                "a float, or leave them out by `wrt`."
            )


def check_variables(variables: Any) -> None:
    """Raises a ValueError if a model has variables that no step can update."""
    # A Linen module in an NNX model has a variable type of the same name.
    leaves = jax.tree.leaves_with_path(
        variables, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for path, leaf in leaves:
        if OVERWRITE_WITH_GRADIENT in (path[0].key, type(leaf).__name__):
            raise ValueError(
                f"`model` has the variable {jax.tree_util.keystr(path)}, the scale of "
                "a layer in fp8, which its gradient replaces. Write your own step for "
                "it, see `jb.compile_steps`."
            )


def check_unused(kind: str, **arguments: Any) -> None:
    """Raises a ValueError if one of the arguments was passed."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"`{name}` was passed for {kind}, which does not use it. Leave it out."
            )
