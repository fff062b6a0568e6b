"""The files of a checkpoint, and its leaves by the names that Orbax gives them.

A seal reveals files that were deleted, truncated or changed. Orbax restores a tree into
any dtype, drops the weak types of scalars, and commits all arrays to devices, so leaves
are compared before they are read, and converted after.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from jax.tree_util import keystr

from jaxbucket.base.digest import file_digest
from jaxbucket.train.state import TrainState

_State = TypeVar("_State")
_SEAL = "seal.json"
# Orbax writes the time of publication to the first file after the checkpoint is sealed,
# and may create the second.
_UNSEALED = {"_CHECKPOINT_METADATA", "commit_success.txt", _SEAL}
_KINDS = {bool: np.bool_, int: np.integer, float: np.floating}


def check_can_be_saved(state: Any) -> None:
    """Raises a ValueError that names a leaf that cannot be saved."""
    names: set[str] = set()
    for path, leaf in jax.tree.leaves_with_path(state):
        name = _name(path)
        if not _can_be_saved(leaf) or name in names:
            raise ValueError(
                f"`state{keystr(path)}`, called {name!r} in a checkpoint, is a "
                f"{type(leaf).__name__} of shape {np.shape(leaf)}. A checkpoint holds "
                "arrays that are not empty and numbers of up to 64 bits, under "
                "different names. Put others into `extra`, or make them static."
            )
        names.add(name)


def _can_be_saved(leaf: Any) -> bool:
    # Numpy arrays of strings, objects and times are not numeric.
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "USOmM":
        return False
    if isinstance(leaf, int):
        return -(2**63) <= leaf < 2**63
    is_numeric = isinstance(leaf, jax.Array | np.ndarray | np.generic | float)
    return is_numeric and np.size(leaf) > 0


def restore_args(state: Any) -> ocp.args.PyTreeRestore:
    """Returns what to ask Orbax for: the parts of a state that have leaves."""
    tree = ocp.tree.serialize_tree(_abstract(state), keep_empty_nodes=True)
    tree = _with_leaves_only(tree)
    return ocp.args.PyTreeRestore(
        item=tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=True,
    )


def _with_leaves_only(tree: Any) -> Any:
    """Returns nested dicts and lists without the parts of dicts that have no leaves.

    Lists keep theirs, because empty optax states count as elements of a chain.
    """
    if isinstance(tree, dict):
        parts = {name: part for name, part in tree.items() if jax.tree.leaves(part)}
        return {name: _with_leaves_only(part) for name, part in parts.items()}
    if isinstance(tree, list):
        return [_with_leaves_only(x) if jax.tree.leaves(x) else x for x in tree]
    return tree


def find_difference(metadata: Any, state: Any) -> str | None:
    """Returns how the leaves of a state differ from the saved ones; None if not at all.

    Args:
      metadata: Orbax's metadata of the saved state.
      state: a state like the saved one. If it has no optimizer, that of the saved state
        is not compared.
    """
    saved, wanted = _by_name(metadata), _by_name(_abstract(state))
    if isinstance(state, TrainState) and not state.has_optimizer:
        saved = {x: y for x, y in saved.items() if not x.startswith("opt_state.")}
    # Parameters come first, because differences in the optimizer state follow from
    # them.
    names = saved.keys() | wanted.keys()
    for name in sorted(names, key=lambda name: ("params" not in name, name)):
        was, now = saved.get(name), wanted.get(name)
        if was is None or now is None or not _is_same_type(was, now):
            return f"{name} is {_type_name(now)}, but was {_type_name(was)}"
    return None


def find_other_key(restored: Any, state: Any) -> str | None:
    """Returns how a random key of a restored state differs from that of a state.

    Orbax does not distinguish implementations, nor keys from their uint32 data.
    """
    pairs = zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(restored), strict=True
    )
    for (path, leaf), read in pairs:
        if (
            isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
            and leaf.dtype != read.dtype
        ):
            return f"{_name(path)} is {leaf.dtype}, but was {read.dtype}"
    return None


def warn_of_new_constants(state: Any, restored: Any) -> None:
    """Warns of constants of `optax.inject_hyperparams` that a restored state ignores.

    Schedules are part of the optimizer, but constants of its state.
    """
    for new, old in zip(_injected(state), _injected(restored), strict=True):
        for name in sorted(new.hyperparams.keys() - new.hyperparams_states.keys()):
            now: Any = new.hyperparams[name]
            was = old.hyperparams[name]
            # This process can read its value.
            is_known = isinstance(now, jax.Array) and now.is_fully_replicated
            if not is_known or now.is_deleted():
                continue
            if not np.array_equal(now, was, equal_nan=True):
                warnings.warn(
                    f"`hyperparams[{name!r}]` of `optax.inject_hyperparams` is {now} "
                    f"in the state passed to `restore`, but {was} in the checkpoint, "
                    "which is restored. To continue with the new value, assign it to "
                    "`hyperparams` of the restored state.",
                    stacklevel=3,
                )


def _injected(tree: Any) -> Iterator[optax.InjectStatefulHyperparamsState]:
    """Yields the states of `optax.inject_hyperparams`, also those inside of others."""
    kind = optax.InjectStatefulHyperparamsState
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)):
        if isinstance(node, kind):
            yield node
            yield from _injected(node.inner_state)


def with_leaves(state: _State, restored: Any) -> _State:
    """Returns a state with the leaves of the tree that Orbax has restored."""
    leaves = _by_name(restored)
    return jax.tree.map_with_path(lambda path, _: leaves[_name(path)], state)


def like_template(template: Any, leaf: Any) -> Any:
    """Returns a copy of a restored leaf, weakly typed and uncommitted as the template.

    Orbax restores neither property. Without them, a step would be compiled again, or
    would reject the leaf together with batches on several devices. A step cannot reuse
    the buffers that Orbax returns. They are freed, so only one leaf is there twice.
    """
    if isinstance(template, np.generic):
        # Some versions of Orbax return a Python number.
        return np.asarray(leaf, template.dtype)[()]
    if not isinstance(leaf, jax.Array):
        return leaf
    uncommitted = isinstance(template, jax.Array) and not template.committed
    if getattr(template, "weak_type", False) and leaf.shape == ():
        # The type of a Python number is weak.
        return jax.device_put(leaf.item(), None if uncommitted else leaf.sharding)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if not uncommitted and is_key:
        return leaf.copy()  # jax places keys on the devices of one process only.
    if not uncommitted:
        copy = jax.device_put(leaf, leaf.sharding, may_alias=False)
        jax.block_until_ready(copy)
        leaf.delete()
        return copy
    if is_key:
        data = jnp.array(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.array(np.asarray(leaf))


def _abstract(state: Any) -> Any:
    """Returns the specification of each leaf that Orbax is asked to restore."""
    # Orbax restores arrays and Python numbers, but not numpy scalars.
    return jax.tree.map(
        lambda x: ocp.utils.to_shape_dtype_struct(
            np.asarray(x) if isinstance(x, np.generic) else x
        ),
        state,
    )


def _by_name(tree: Any) -> dict[str, Any]:
    """Returns the arrays and numbers of a tree by name."""
    leaves = ocp.tree.to_flat_dict(tree, sep=".").items()
    return {name: leaf for name, leaf in leaves if leaf is not None}


def _name(path: Any) -> str:
    """Returns Orbax's name of a leaf."""
    return keystr(path, simple=True, separator=".")


def _is_same_type(was: Any, now: Any) -> bool:
    """Returns whether a saved leaf can be restored as the requested one, losslessly."""
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


def write_seal(folder: epath.Path) -> None:
    """Writes the digests of all files of a checkpoint to its seal."""
    (folder / _SEAL).write_text(json.dumps(_digests(folder)))


def find_damage(folder: epath.Path) -> str | None:
    """Returns a description of the first damaged file, or None if all are intact."""
    try:
        sealed: dict[str, Any] = dict(json.loads((folder / _SEAL).read_text()))
    except (OSError, ValueError, TypeError):
        return f"{_SEAL} is missing or truncated"
    present = _digests(folder)
    for name in sorted(sealed.keys() | present.keys()):
        if name not in present:
            return f"{name} is missing"
        if sealed.get(name) != present[name]:
            return f"{name} was changed"
    return None


def _digests(folder: epath.Path) -> dict[str, str]:
    """Returns the digest of each file below a directory by its relative path."""
    digests = {}
    for parent, _, names in folder.walk():
        for name in {*names} - _UNSEALED:
            path = str((parent / name).relative_to(folder))
            digests[path] = file_digest(parent / name)
    return digests
