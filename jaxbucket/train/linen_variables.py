"""Initial variables of a Linen module, created on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.core import meta, unfreeze
from flax.errors import FlaxError
from jax.sharding import Mesh

from jaxbucket.sharding import check_mesh


def init_linen(
    module: linen.Module, sample: Any, rngs: Any, mesh: Mesh | None
) -> dict[str, Any]:
    """Returns the variables of a Linen module, collection -> tree of arrays.

    Args:
      module: the module.
      sample: the argument of the module, or a tuple of its positional arguments.
        Arrays and `jax.ShapeDtypeStruct`s stand for zeros of their shape and dtype.
      rngs: a key, or a dict of keys.
      mesh: the mesh on which the variables are created. They are sharded as
        `linen.with_partitioning` says, and replicated otherwise.

    Raises:
      ValueError: if the module has no parameters.
    """
    # A `Batch` is a tuple, too.
    args = sample if type(sample) is tuple else (sample,)

    def init() -> Any:
        return unfreeze(module.init(rngs, *jax.tree.map(_zeros, args)))

    if mesh is None:
        variables = jax.jit(init)()
    else:
        check_mesh(mesh)
        shardings = linen.get_sharding(jax.eval_shape(init), mesh)
        variables = jax.jit(lambda: meta.unbox(init()), out_shardings=shardings)()
    variables = _without_sown(module, args, rngs, dict(meta.unbox(variables)))
    if not jax.tree.leaves(variables.get("params")):
        raise ValueError(f"`model`, a {type(module).__name__}, has no parameters.")
    return variables


def _without_sown(
    module: linen.Module, args: tuple, rngs: Any, variables: dict[str, Any]
) -> dict[str, Any]:
    """Returns the variables without the values that `module.sow` has recorded.

    A call would append to those of the initialization, or add to them. `sow` does
    nothing if its collection is missing and not mutable; other variables raise.
    """
    inputs = jax.tree.map(_zeros, args)

    def call(variables: dict[str, Any], mutable: bool) -> Any:
        return module.apply(variables, *inputs, rngs=rngs, mutable=mutable)

    def is_needed(name: str) -> bool:
        others = {key: value for key, value in variables.items() if key != name}
        try:
            jax.eval_shape(lambda: call(others, mutable=False))
        except FlaxError:
            return True
        return False

    needed = {
        name: x for name, x in variables.items() if name == "params" or is_needed(name)
    }
    paths = [path for path, _ in jax.tree.leaves_with_path(needed)]
    if not any(isinstance(key, jax.tree_util.SequenceKey) for key in sum(paths, ())):
        return needed
    _, after = jax.eval_shape(lambda: call(needed, mutable=True))
    return _without_growing(needed, unfreeze(after))


def _without_growing(before: Any, after: Any) -> Any:
    """Returns the variables without the tuples to which a call has appended."""
    return {
        name: _without_growing(x, after[name]) if isinstance(x, dict) else x
        for name, x in before.items()
        if not isinstance(x, tuple) or len(x) == len(after[name])
    }


def _zeros(leaf: Any) -> Any:
    # The local rows of processes differ, but all must run the same program.
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
