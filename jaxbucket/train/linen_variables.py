"""Initial variables of a Linen module, created on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.core import meta, unfreeze
from jax.sharding import Mesh

from jaxbucket.compile.absent import is_absent
from jaxbucket.sharding.mesh import put, replicate


def init_linen(
    module: linen.Module, sample: Any, rngs: Any, mesh: Mesh | None
) -> dict[str, Any]:
    """Returns the variables of a Linen module, collection -> tree of arrays.

    They do not include values that the module records with `sow` or `perturb`, because
    a call would append to those of the initialization, or add to them. On a mesh, they
    are sharded as `linen.with_partitioning` says, and replicated otherwise.
    `create_state` describes the arguments.
    """
    if sample is None:
        raise ValueError(
            f"`sample` is needed to initialize {type(module).__name__}, a Linen "
            'module. Pass `batches.specs[bucket].features["tokens"]`, for instance.'
        )
    rngs = jax.random.key(0) if rngs is None else rngs
    # A `Batch` is a tuple, too.
    args = sample if type(sample) is tuple else (sample,)

    def init(rngs: Any) -> Any:
        with linen.intercept_methods(_without_recording):
            return unfreeze(module.init(rngs, *jax.tree.map(_zeros, args)))

    shardings = None
    if mesh is not None:
        shardings = linen.get_sharding(jax.eval_shape(init, rngs), mesh)
        # With several processes, jax checks that their keys are the same.
        replicate(rngs, mesh)
    unboxed = jax.jit(lambda x: meta.unbox(init(x)), out_shardings=shardings)
    if mesh is not None and is_absent(mesh.devices.flat[0]):
        variables = jax.tree.map(put, jax.eval_shape(unboxed, rngs), shardings)
    else:
        variables = unboxed(rngs)
    if not jax.tree.leaves(variables.get("params")):
        raise ValueError(f"`model`, a {type(module).__name__}, has no parameters.")
    return dict(variables)


def _without_recording(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Runs a method of a module that can neither `sow` nor `perturb`."""
    # The module is a copy that Flax makes for this call.
    object.__setattr__(context.module, "sow", lambda *args, **kwargs: False)
    object.__setattr__(context.module, "perturb", lambda name, value, *_, **__: value)
    return next_fun(*args, **kwargs)


def _zeros(leaf: Any) -> Any:
    # The local rows of processes differ, but all must run the same program.
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
