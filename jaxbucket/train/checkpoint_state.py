"""Which states a checkpoint can hold, and whether one is of the same kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.tree_util import keystr


def check_like(folder: epath.Path, metadata: Any, abstract: Any) -> None:
    """Raises a ValueError that names a leaf that is another than was saved.

    Args:
      folder: of the checkpoint.
      metadata: what Orbax says of the state in it.
      abstract: the shapes, dtypes and shardings that are asked for.
    """
    saved, wanted = _leaves(metadata), _leaves(abstract)
    # What was chosen is named before what follows from it.
    names = saved.keys() | wanted.keys()
    for name in sorted(names, key=lambda name: ("params" not in name, name)):
        was, now = saved.get(name), wanted.get(name)
        if not _same_type(was, now):
            raise _another_state(folder, name, _type_name(now), _type_name(was))
    # Lists and dicts may have the same names. Empty nodes, because states of optax
    # without numbers keep their places in a chain.
    serialized = ocp.tree.serialize_tree(abstract, keep_empty_nodes=True)
    was, now = _paths(metadata.tree), _paths(serialized)
    for name, path in now.items():
        if path != was[name]:
            raise _another_state(folder, name, f"`state{path}`", f"`state{was[name]}`")


def check_keys(folder: epath.Path, state: Any, restored: Any) -> None:
    """What Orbax takes for the same: keys of any kind, and their words."""
    leaves = zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(restored), strict=True
    )
    for (path, leaf), read in leaves:
        if hasattr(leaf, "dtype") and leaf.dtype != read.dtype:
            raise _another_state(folder, _name(path), leaf.dtype, read.dtype)


def _another_state(folder: epath.Path, name: str, now: Any, was: Any) -> ValueError:
    return ValueError(
        f"The checkpoint {folder} is of another model or optimizer, because {name} is "
        f"{now}, but was {was}: build what was saved."
    )


def check_can_be_saved(state: Any) -> None:
    """Raises a ValueError that names the leaf that is not an array or a number."""
    names: dict[str, str] = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        where = f"`state{keystr(path)}`"
        _check_leaf(where, leaf)
        name = _name(path)
        if name in names:
            raise ValueError(
                f"{where} and {names[name]} are both called {name!r} in a checkpoint: "
                "rename one of them."
            )
        names[name] = where


def _check_leaf(where: str, leaf: Any) -> None:
    # Words, objects and times of numpy are not numbers.
    is_array = isinstance(leaf, jax.Array) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "USOmM"
    )
    if is_array or isinstance(leaf, bool | float):
        if np.size(leaf) == 0:
            raise ValueError(
                f"{where} has shape {np.shape(leaf)}, and Orbax saves no empty arrays: "
                "leave it out, or put None in its place."
            )
    elif isinstance(leaf, int):
        if not -(2**63) <= leaf < 2**63:
            raise ValueError(
                f"{where} is {leaf}, and an integer must fit into 64 bits: make it "
                "an array of several."
            )
    else:
        raise ValueError(
            f"{where} is a {type(leaf).__name__}, and a checkpoint holds arrays, "
            "numbers and keys of jax: put it into `extra`, or make it static."
        )


def abstract_leaf(leaf: Any) -> Any:
    """What Orbax is asked for in place of a leaf."""
    # It restores arrays and Python's numbers, and not numpy's.
    leaf = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    return ocp.utils.to_shape_dtype_struct(leaf)


def like_template(template: Any, leaf: Any) -> Any:
    """A leaf that was read, as free to move and as weakly typed as was asked for.

    Orbax knows neither: a step would be compiled again for it, or refuse it beside
    batches on several devices.
    """
    free = isinstance(template, jax.Array) and not template.committed
    if getattr(template, "weak_type", False) and leaf.shape == ():
        # The type of a Python number is weak.
        return jax.device_put(leaf.item(), None if free else leaf.sharding)
    if not free:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.array(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.array(np.asarray(leaf))


def _leaves(tree: Any) -> dict[str, Any]:
    """The arrays and numbers of a tree by name."""
    leaves = ocp.tree.to_flat_dict(tree, sep=".").items()
    return {name: leaf for name, leaf in leaves if leaf is not None}


def _paths(tree: Any) -> dict[str, str]:
    """Name -> where it is, as Python writes it: `['a'][0]`."""
    leaves = jax.tree.leaves_with_path(tree)
    return {_name(path): keystr(path) for path, _ in leaves}


def _name(path: Any) -> str:
    """What Orbax calls a leaf."""
    return keystr(path, simple=True, separator=".")


_KINDS = {bool: np.bool_, int: np.integer, float: np.floating}


def _same_type(was: Any, now: Any) -> bool:
    """Whether a leaf can be restored as what is asked for, without a loss."""
    if was is None or now is None:
        return False
    if hasattr(now, "dtype"):
        return (was.dtype, tuple(was.shape)) == (now.dtype, tuple(now.shape))
    # A jitted step returns an array where it was given a Python number.
    return was.shape == () and jnp.issubdtype(was.dtype, _KINDS[type(now)])


def _type_name(leaf: Any) -> str:
    if leaf is None:
        return "not there"
    if hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"a Python {type(leaf).__name__}"
