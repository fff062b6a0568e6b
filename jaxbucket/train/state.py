"""What a train step changes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxbucket.sharding import replicate


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "variables", "opt_state"],
    meta_fields=["graphdef"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
      step: `[]` int32, steps done, skipped updates counted.
      params: what is differentiated.
      variables: the other variables of an NNX model, held fixed; else ().
      opt_state: state of the optimizer.
      graphdef: the structure of an NNX model; None for plain parameters.
    """

    step: jax.Array
    params: Any
    variables: Any
    opt_state: Any
    graphdef: Any = None

    @property
    def model(self) -> Any:
        """The NNX model with the current parameters, or the plain parameters."""
        if self.graphdef is None:
            return self.params
        return nnx.merge(self.graphdef, self.params, self.variables)


def create_state(
    model: Any, tx: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """Returns the state before the first step.

    Example:
      >>> import jaxbucket as jb
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> state = create_state({"w": np.ones(3)}, optax.sgd(0.1, momentum=0.9), mesh)
      >>> print(state.step, state.params["w"], state.params["w"].sharding.mesh == mesh)
      0 [1. 1. 1.] True

    Args:
      model: a Flax NNX module, or any pytree of parameters (Linen, plain functions).
      tx: the optimizer.
      mesh: where every device is to hold a copy of the state; by default it is left
        where the parameters are.

    Raises:
      ValueError: if an NNX model has batch statistics, which these steps would not
        update: they differ from device to device; if `model` is neither a module nor
        parameters.
    """
    graphdef, params, variables = None, model, ()
    if isinstance(model, nnx.Module):
        if jax.tree.leaves(nnx.state(model, nnx.BatchStat)):
            raise ValueError(
                "The model has batch statistics (`nnx.BatchStat`), which these steps "
                "do not update. Use LayerNorm, RMSNorm or GroupNorm, or write your own "
                "step: `compile_steps` takes any."
            )
        graphdef, params, variables = nnx.split(model, nnx.Param, ...)
    elif isinstance(model, Mapping) and "batch_stats" in model:
        raise ValueError(
            "`model` has batch statistics, which would be trained as parameters: pass "
            '`variables["params"]`, and use LayerNorm, RMSNorm or GroupNorm, or write '
            "your own step: `compile_steps` takes any."
        )
    elif not all(map(_is_array, jax.tree.leaves(model))):
        raise ValueError(
            f"`model` is a {type(model).__name__}: pass an NNX module, or parameters "
            'such as `module.init(key, x)["params"]` of a Linen module.'
        )
    # A Python number's weak dtype would change, and recompile, after the first step.
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), params)
    step = jnp.zeros((), jnp.int32)
    state = TrainState(step, params, variables, tx.init(params), graphdef)
    return state if mesh is None else replicate(state, mesh)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.number | float | int)
