"""Checks what steps are compiled for, and says how a batch differs from it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket, ComponentBucket


def check_step(step_fn: Any, state: Any, specs: Any) -> None:
    """Raises a ValueError if the arguments of `compile_steps` are invalid."""
    if not callable(step_fn) and not hasattr(step_fn, "compile_steps"):
        raise ValueError(
            f"`step_fn` is {short(step_fn)}, which is not callable. Pass a function of "
            "(state, batch)."
        )
    _check_specs(specs)
    for path, leaf in jax.tree.leaves_with_path(state):
        _check_leaf(f"`state{jax.tree_util.keystr(path)}`", leaf)


def _check_specs(specs: Any) -> None:
    remedy = "Pass `MeshLoader.specs`, or the result of `jb.sharding.batch_specs`."
    if not isinstance(specs, Mapping) or not specs:
        raise ValueError(f"`specs` is {short(specs)}. {remedy}")
    for key, batch in specs.items():
        if not isinstance(batch, Batch):
            raise ValueError(f"`specs` has {short(batch)}, not a `Batch`. {remedy}")
        if batch.bucket != Bucket(key.batch_size, key.seq_len):
            raise ValueError(
                f"`specs[{key}]` is a batch of shape {batch.bucket}. {remedy}"
            )


def _check_leaf(name: str, leaf: Any) -> None:
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if not is_array and not isinstance(leaf, bool | int | float | complex):
        raise ValueError(
            f"{name} is {short(leaf)}, not an array. Pass a pytree of arrays, or of "
            "their shapes, dtypes and shardings."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        raise ValueError(
            f"{name} is a shape without a sharding, on which executables depend. Pass "
            "the result of `jax.eval_shape` through `jb.sharding.replicate`, or add "
            "shardings yourself."
        )


def short(value: Any) -> str:
    """Returns a short text for any value, with its type, for a message."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def check_is_batch(name: str, batch: Any) -> None:
    """Raises a ValueError if a value is not a batch."""
    if not isinstance(batch, Batch):
        raise ValueError(
            f"`{name}` is a {type(batch).__name__}, not a `jaxbucket.Batch`. Pass a "
            "batch from `prefetch_to_mesh`."
        )


def batch_difference(batch: Batch, specs: Mapping[Bucket, Batch]) -> str | None:
    """Returns how a batch differs from the plan, or None."""
    bucket = spec_bucket(batch, specs)
    if bucket not in specs:
        planned = ", ".join(map(str, specs))
        return (
            f"A batch of shape {bucket} is outside the plan, which has {planned}. Pass "
            "global batches of this plan, or compile for a plan with this shape."
        )
    actual, expected = _avals(batch), _avals(specs[bucket])
    if actual == expected:
        return None
    names = actual | expected
    name = min(name for name in names if actual.get(name) != expected.get(name))
    if name in expected:
        has = actual.get(name, "missing")
        changed = f"is {has}, but {bucket} was compiled for {expected[name]}"
    else:
        changed = f"did not exist when {bucket} was compiled"
    return (
        f"`batch{name}` {changed}. Convert the batch, or call `batch_specs` with an "
        "example like it."
    )


def spec_bucket(batch: Batch, specs: Mapping[Bucket, Batch]) -> Bucket:
    """Returns the key of a batch in `specs`.

    This is its bucket, unless components of a mixture have keys of their own. Then it
    is the key of the features that the batch has.
    """
    bucket = batch.bucket
    components = [x for x in specs if isinstance(x, ComponentBucket)]
    if not components:
        return bucket
    arrays = _avals(batch)
    return next((x for x in components if _avals(specs[x]) == arrays), bucket)


def _avals(tree: Any) -> dict[str, str]:
    """Returns the path of each leaf -> its dtype and shape."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): _aval(leaf) for path, leaf in leaves}


def _aval(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    return f"{leaf.dtype}{list(leaf.shape)}"
