"""Checks what steps are compiled for, and says how a batch differs from it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket, ComponentBucket


def check_arguments(state: Any, specs: Any) -> None:
    """Raises a ValueError for arguments of `compile_steps` that jax would accept."""
    is_valid = isinstance(specs, Mapping) and all(
        isinstance(batch, Batch)
        and batch.bucket == Bucket(bucket.batch_size, bucket.seq_len)
        for bucket, batch in specs.items()
    )
    if not is_valid or not specs:
        raise ValueError(
            f"`specs` is {short(specs)}. Pass bucket -> a `Batch` of its shape: "
            "`MeshLoader.specs`, or the result of `jb.sharding.batch_specs`."
        )
    for path, leaf in jax.tree.leaves_with_path(state):
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            raise ValueError(
                f"`state{jax.tree_util.keystr(path)}` is a shape without a sharding, "
                "on which executables depend. Pass the result of `jax.eval_shape` "
                "through `jb.sharding.replicate`, or add shardings yourself."
            )


def short(value: Any) -> str:
    """Returns a short text for any value, with its type, for a message."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"


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
