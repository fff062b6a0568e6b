"""Checks of states that are saved or restored, and conversion of their leaves."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.tree_util import keystr

from jaxbucket.train.model_checks import is_absent
from jaxbucket.train.state import TrainState

# The value of an argument, or the state of its schedule, in `optax.inject_hyperparams`.
_INJECTED = re.compile(r"(.*\.)hyperparams(_states)?\.([^.]+)")


def parts_to_skip(state: Any) -> tuple[str, ...]:
    """Returns the parts of a saved state that a state for evaluation does not have."""
    if not (isinstance(state, TrainState) and is_absent(state.opt_state)):
        return ()
    return ("opt_state",)


def restore_without(
    skipped: tuple[str, ...], folder: epath.Path, abstract: TrainState
) -> TrainState:
    """Reads a state without some of its parts."""
    names = {field.name for field in dataclasses.fields(abstract)} - {*skipped}
    parts = {name: getattr(abstract, name) for name in names - {"graphdef"}}
    # Orbax does not find empty parts.
    parts = {name: part for name, part in parts.items() if jax.tree.leaves(part)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(
            folder / "state",
            args=ocp.args.PyTreeRestore(
                item=parts,
                restore_args=ocp.checkpoint_utils.construct_restore_args(parts),
                partial_restore=True,
            ),
        )
    return dataclasses.replace(abstract, **restored)


def check_like(
    folder: epath.Path, metadata: Any, abstract: Any, skipped: tuple[str, ...] = ()
) -> None:
    """Raises a ValueError that names a leaf that differs from the saved one.

    Args:
      folder: the directory of the checkpoint.
      metadata: Orbax's metadata of the saved state.
      abstract: the requested shapes, dtypes and shardings.
      skipped: the parts of the saved state that are not requested.
    """
    saved, wanted = _leaves(metadata), _leaves(abstract)
    saved = {x: y for x, y in saved.items() if x.partition(".")[0] not in skipped}
    # Parameters come first, because differences in the optimizer state follow from
    # them.
    names = saved.keys() | wanted.keys()
    for name in sorted(names, key=lambda name: ("params" not in name, name)):
        was, now = saved.get(name), wanted.get(name)
        if not _same_type(was, now):
            raise _different_state(folder, name, _type_name(now), _type_name(was))
    # Leaves of lists and of dicts may have the same names. Empty nodes are kept,
    # because empty optax states count as elements of a chain.
    serialized = ocp.tree.serialize_tree(abstract, keep_empty_nodes=True)
    was, now = _paths(metadata.tree), _paths(serialized)
    for name, path in now.items():
        if path != was[name]:
            raise _different_state(
                folder, name, f"`state{path}`", f"`state{was[name]}`"
            )


def check_keys(folder: epath.Path, state: Any, restored: Any) -> None:
    """Raises a ValueError that names a random key of a different implementation.

    Orbax does not distinguish implementations, nor keys from their uint32 data.
    """
    leaves = zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(restored), strict=True
    )
    for (path, leaf), read in leaves:
        if hasattr(leaf, "dtype") and leaf.dtype != read.dtype:
            raise _different_state(folder, _name(path), leaf.dtype, read.dtype)


def warn_of_new_constants(folder: epath.Path, state: Any, restored: Any) -> None:
    """Warns of arguments of `optax.inject_hyperparams` that the restored state ignores.

    Schedules are part of the optimizer, but constants of its state.
    """
    leaves, states = jax.tree.leaves_with_path((state,)), {*_injecting((state,))}
    matches = [_INJECTED.match(_name(path)) for path, _ in leaves]
    scheduled = {match.group(1, 3) for match in matches if match and match[2]}
    for (path, new), old, match in zip(
        leaves, jax.tree.leaves(restored), matches, strict=True
    ):
        if not match or match[1] not in states or match.group(1, 3) in scheduled:
            continue
        if _has_known_value(new) and not np.array_equal(new, old, equal_nan=True):
            where = f"state{keystr(path[1:])}"
            new, old = (
                np.array2string(np.asarray(x), threshold=3, edgeitems=1)
                for x in (new, old)
            )
            warnings.warn(
                f"`{where}` is {new} in the state passed to `restore`, but {old} in "
                f"the checkpoint {folder}, which is restored. To continue with the new "
                f"value, assign it to the restored state: `{where} = "
                f"jnp.full_like({where}, {new})`.",
                stacklevel=3,
            )


def _injecting(tree: Any, start: Any = ()) -> Iterator[str]:
    """Yields names, with a final dot, of the states of `optax.inject_hyperparams`."""
    kinds = (optax.InjectStatefulHyperparamsState, optax.InjectHyperparamsState)

    def is_inside(node: Any) -> bool:
        return node is not tree and isinstance(node, (*kinds, nnx.OptArray))

    for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_inside):
        if isinstance(node, nnx.OptArray):
            # In an `nnx.Optimizer`, they are dicts.
            yield _name((*start, *path[:-2])) + "."
        elif is_inside(node):
            yield _name((*start, *path)) + "."
            yield from _injecting(node, (*start, *path))


def _has_known_value(leaf: Any) -> bool:
    """Returns whether a leaf has a value, which this process can read."""
    is_array = isinstance(leaf, jax.Array)
    return is_array and leaf.is_fully_replicated and not leaf.is_deleted()


def _different_state(folder: epath.Path, name: str, now: Any, was: Any) -> ValueError:
    return ValueError(
        f"The checkpoint {folder} is of a different model or optimizer: {name} is "
        f"{now}, but was {was}. Use the model, `wrt` and the optimizer that were "
        "saved, or your own pytree if that was saved."
    )


def check_can_be_saved(state: Any) -> None:
    """Raises a ValueError that names a leaf that cannot be saved."""
    names: dict[str, str] = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        where = f"`state{keystr(path)}`"
        _check_leaf(where, leaf)
        name = _name(path)
        if name in names:
            raise ValueError(
                f"{where} and {names[name]} are both called {name!r} in a checkpoint. "
                "Rename one of them."
            )
        names[name] = where


def _check_leaf(where: str, leaf: Any) -> None:
    # Numpy arrays of strings, objects and times are not numeric.
    is_array = isinstance(leaf, jax.Array) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "USOmM"
    )
    if is_array or isinstance(leaf, bool | float):
        if np.size(leaf) == 0:
            raise ValueError(
                f"{where} has shape {np.shape(leaf)}, but Orbax cannot save empty "
                "arrays. Remove it, or replace it with None."
            )
    elif isinstance(leaf, int):
        if not -(2**63) <= leaf < 2**63:
            raise ValueError(
                f"{where} is {leaf}, which does not fit into 64 bits. Split it into "
                "an array of smaller integers."
            )
    else:
        raise ValueError(
            f"{where} is a {type(leaf).__name__}, but a checkpoint holds only arrays, "
            "numbers and jax random keys. Put it into `extra`, or make it static."
        )


def abstract_leaf(leaf: Any) -> Any:
    """Returns the specification of a leaf that Orbax is asked to restore."""
    # Orbax restores arrays and Python numbers, but not numpy scalars.
    leaf = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    return ocp.utils.to_shape_dtype_struct(leaf)


def like_template(template: Any, leaf: Any) -> Any:
    """Returns a copy of a restored leaf, weakly typed and uncommitted as the template.

    Orbax restores neither property. Without them, a step would be compiled again, or
    would reject the leaf together with batches on several devices. A step cannot reuse
    the buffers that Orbax returns. They are freed, so only one leaf is there twice.
    """
    if not isinstance(leaf, jax.Array):
        return leaf
    uncommitted = isinstance(template, jax.Array) and not template.committed
    if getattr(template, "weak_type", False) and leaf.shape == ():
        # The type of a Python number is weak.
        return jax.device_put(leaf.item(), None if uncommitted else leaf.sharding)
    if not uncommitted:
        copy = jax.device_put(leaf, leaf.sharding, may_alias=False)
        jax.block_until_ready(copy)
        leaf.delete()
        return copy
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.array(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.array(np.asarray(leaf))


def _leaves(tree: Any) -> dict[str, Any]:
    """Returns the arrays and numbers of a tree by name."""
    leaves = ocp.tree.to_flat_dict(tree, sep=".").items()
    return {name: leaf for name, leaf in leaves if leaf is not None}


def _paths(tree: Any) -> dict[str, str]:
    """Returns the path of each leaf by its name, in Python syntax: `['a'][0]`."""
    leaves = jax.tree.leaves_with_path(tree)
    return {_name(path): keystr(path) for path, _ in leaves}


def _name(path: Any) -> str:
    """Returns Orbax's name of a leaf."""
    return keystr(path, simple=True, separator=".")


_KINDS = {bool: np.bool_, int: np.integer, float: np.floating}


def _same_type(was: Any, now: Any) -> bool:
    """Returns whether a saved leaf can be restored as the requested one, losslessly."""
    if was is None or now is None:
        return False
    if hasattr(now, "dtype"):
        return (was.dtype, tuple(was.shape)) == (now.dtype, tuple(now.shape))
    # A jitted step that is given a Python number returns an array.
    return was.shape == () and jnp.issubdtype(was.dtype, _KINDS[type(now)])


def _type_name(leaf: Any) -> str:
    if leaf is None:
        return "missing"
    if hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"a Python {type(leaf).__name__}"
