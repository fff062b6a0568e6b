"""Initial variables of a Linen module, created on a mesh."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core import meta, unfreeze
from jax.sharding import Mesh, NamedSharding

from jaxbucket.sharding import check_mesh
from jaxbucket.train.process_agreement import can_be_compared, check_same, digest


def init_linen(
    module: linen.Module, sample: Any, rngs: Any, mesh: Mesh | None
) -> dict[str, Any]:
    """Returns the variables of a Linen module, collection -> tree of arrays.

    They do not include values that the module records with `sow` or `perturb`, because
    a call would append to those of the initialization, or add to them.

    Args:
      module: the module.
      sample: the argument of the module, or a tuple of its positional arguments.
        Arrays and `jax.ShapeDtypeStruct`s stand for zeros of their shape and dtype.
      rngs: a key, or a dict of keys; None for `jax.random.key(0)`.
      mesh: the mesh on which the variables are created. They are sharded as
        `linen.with_partitioning` says, and replicated otherwise.

    Raises:
      ValueError: if the module has no parameters, or does not accept `sample`; if
        `rngs` are not keys; if an axis is sharded over axes that the mesh lacks or that
        do not divide it; or if processes have different arguments.
    """
    # A `Batch` is a tuple, too.
    args = sample if type(sample) is tuple else (sample,)
    _check_arguments(module, args)
    rngs = {"params": jax.random.key(0)} if rngs is None else _checked_rngs(rngs)

    def init() -> Any:
        with linen.intercept_methods(_without_recording):
            return unfreeze(module.init(rngs, *jax.tree.map(_zeros, args)))

    if mesh is None:
        variables = jax.jit(init)()
    else:
        check_mesh(mesh)
        if can_be_compared(mesh):
            check_same(
                mesh,
                {"rngs": digest(rngs), "sample": digest(args)},
                "Initialize the module alike in all processes.",
            )
        shardings = _shardings(jax.eval_shape(init), mesh)
        variables = jax.jit(lambda: meta.unbox(init()), out_shardings=shardings)()
    variables = dict(meta.unbox(variables))
    if not jax.tree.leaves(variables.get("params")):
        raise ValueError(f"`model`, a {type(module).__name__}, has no parameters.")
    return variables


def _without_recording(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Runs a method of a module that can neither `sow` nor `perturb`."""
    # The module is a copy that Flax makes for this call.
    object.__setattr__(context.module, "sow", lambda *args, **kwargs: False)
    object.__setattr__(context.module, "perturb", lambda name, value, *_, **__: value)
    return next_fun(*args, **kwargs)


def _check_arguments(module: linen.Module, args: tuple) -> None:
    try:
        inspect.signature(module.__call__).bind(*args)
    except TypeError as error:
        name = type(module).__name__
        raise ValueError(
            f"`sample` does not fit `{name}.__call__`: {error}. Pass a tuple of all "
            "positional arguments. If some can only be passed by name, initialize the "
            "module yourself: `variables = module.init(key, x, train=False)`, then "
            '`create_state(variables["params"], tx, mesh, variables={"batch_stats": '
            'variables["batch_stats"]})`.'
        ) from None


def _checked_rngs(rngs: Any) -> dict[str, jax.Array]:
    """Returns random keys by name."""
    keys = dict(rngs) if isinstance(rngs, Mapping) else {"params": rngs}
    if not ("params" in keys and all(map(_is_key, keys.values()))):
        found = f"a {type(rngs).__name__}"
        if isinstance(rngs, Mapping):
            found = f"a dict of {sorted(keys)}"
        raise ValueError(
            f"`rngs` is {found}, neither a random key nor a dict of keys with "
            '"params". Pass for instance `jax.random.key(0)`, or {"params": '
            'jax.random.key(0), "dropout": jax.random.key(1)}.'
        )
    # Keys of the old kind are arrays of uint32.
    return {
        name: key if _is_new_key(key) else jax.random.wrap_key_data(jnp.asarray(key))
        for name, key in keys.items()
    }


def _is_key(value: Any) -> bool:
    if _is_new_key(value):
        return value.shape == ()
    shape = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    is_array = isinstance(value, jax.Array | np.ndarray)
    return is_array and value.dtype == jnp.uint32 and value.shape == shape


def _is_new_key(value: Any) -> bool:
    is_array = isinstance(value, jax.Array)
    return is_array and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _shardings(variables: Any, mesh: Mesh) -> Any:
    """Returns the sharding of each variable over a mesh that its metadata asks for."""
    specs = linen.get_partition_spec(variables)

    def sharding(path: Any, spec: Any, variable: Any) -> NamedSharding:
        for size, axes in zip(variable.shape, spec, strict=False):
            axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
            name = f"`model` shards {jax.tree_util.keystr(path)}"
            if unknown := [axis for axis in axes if axis not in mesh.axis_names]:
                raise ValueError(
                    f"{name} over {unknown}, but the mesh has axes {mesh.axis_names}. "
                    "Pass a mesh with these axes, or name the mesh's axes in "
                    "`linen.with_partitioning`."
                )
            num_parts = math.prod(mesh.shape[axis] for axis in axes)
            if size % num_parts:
                raise ValueError(
                    f"{name}, of shape {list(variable.shape)}, into {num_parts} parts, "
                    f"which do not divide {size}. Change its size or the mesh."
                )
        return NamedSharding(mesh, spec)

    return jax.tree.map_with_path(sharding, specs, meta.unbox(variables))


def _zeros(leaf: Any) -> Any:
    if isinstance(leaf, np.bool_):
        return bool(leaf)
    # The local rows of processes differ, but all must run the same program.
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
