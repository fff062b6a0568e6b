"""Checks the arguments of `compile_steps`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket


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


_REMEDY = "Pass `MeshLoader.specs`, or the result of `jb.sharding.batch_specs`."


def _check_specs(specs: Any) -> None:
    if not isinstance(specs, Mapping):
        raise ValueError(f"`specs` is {short(specs)}. {_REMEDY}")
    if not specs:
        raise ValueError(f"`specs` is empty. {_REMEDY}")
    for bucket, batch in specs.items():
        if not isinstance(bucket, Bucket) or not isinstance(batch, Batch):
            raise ValueError(
                f"`specs` has {short(batch)} for {short(bucket)}, not a `Batch` of "
                f"shapes for a `Bucket`. {_REMEDY}"
            )
        if batch.bucket != Bucket(bucket.batch_size, bucket.seq_len):
            raise ValueError(
                f"`specs[{bucket}]` is a batch of shape {batch.bucket}. {_REMEDY}"
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
