"""The training state: step, parameters and optimizer state."""

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
    """The state of training, which a train step updates.

    Attributes:
      step: `[]` int32, the number of steps done, including skipped updates.
      params: the parameters that are trained.
      variables: the other variables of an NNX model, which are held fixed; () for plain
        parameters.
      opt_state: the state of the optimizer.
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
      mesh: the mesh on which the state is replicated; by default it stays on the
        devices of the parameters.

    Raises:
      ValueError: if `model` has batch statistics, which these steps do not update,
        because they would differ between devices; or if `model` is neither an NNX
        module nor parameters.
    """
    graphdef, params, variables = None, model, ()
    if isinstance(model, nnx.Module):
        if jax.tree.leaves(nnx.state(model, nnx.BatchStat)):
            raise ValueError(
                "`model` has batch statistics (`nnx.BatchStat`), which these steps do "
                "not update. Use LayerNorm, RMSNorm or GroupNorm, or write your own "
                "step: `compile_steps` accepts any."
            )
        graphdef, params, variables = nnx.split(model, nnx.Param, ...)
    elif isinstance(model, Mapping) and "batch_stats" in model:
        raise ValueError(
            "`model` has batch statistics, which would be trained as parameters. Pass "
            '`variables["params"]` and use LayerNorm, RMSNorm or GroupNorm, or write '
            "your own step: `compile_steps` accepts any."
        )
    elif not all(map(_is_array, jax.tree.leaves(model))):
        raise ValueError(
            f"`model` is a {type(model).__name__}. Pass an NNX module, or parameters "
            'such as `module.init(key, x)["params"]` of a Linen module.'
        )
    # The weak dtype of a Python number would become a strong one in the first step, and
    # the second step would be compiled again.
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), params)
    step = jnp.zeros((), jnp.int32)
    state = TrainState(step, params, variables, tx.init(params), graphdef)
    return state if mesh is None else replicate(state, mesh)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.number | float | int)
