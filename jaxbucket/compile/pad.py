"""Batches of unplanned shapes, padded to a bucket of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbucket.base.types import Batch, Bucket
from jaxbucket.compile.mismatch import batch_difference


def dtypes_of_sequences(specs: Mapping[Bucket, Batch]) -> dict[str, Any]:
    """Name -> dtype of the features that are as long as a sequence in every bucket."""

    def are_sequences(batch: Batch) -> set[str]:
        seq_lens = {ids.shape[1] for ids in batch.segment_ids.values()}
        features = batch.features.items()
        return {name for name, x in features if {*x.shape[1:2]} & seq_lens}

    first = next(iter(specs.values())).features
    names = set.intersection(*map(are_sequences, specs.values()))
    return {name: first[name].dtype for name in first if name in names}


def padder(
    batch: Batch, spec: Batch, fills: Mapping[str, np.ndarray]
) -> Callable[[Batch], Batch]:
    """Returns a function that pads batches to a shape.

    Features are filled with `fills`, and with zeros where it has none.

    Raises:
      ValueError: if they differ in more than that.
    """

    def widths(leaf: Any, want: Any) -> list[tuple[int, int]]:
        return [(0, b - a) for a, b in zip(leaf.shape, want.shape, strict=True)]

    def fits(leaf: Any, want: Any) -> bool:
        if leaf.dtype != want.dtype or len(leaf.shape) != len(want.shape):
            return False
        grown = [axis for axis, (_, more) in enumerate(widths(leaf, want)) if more]
        of_bucket = [(now.batch_size, then.batch_size), (now.seq_len, then.seq_len)]
        return all(
            axis < 2 and (leaf.shape[axis], want.shape[axis]) == of_bucket[axis]
            for axis in grown
        )

    now, then = batch.bucket, spec.bucket
    alike = jax.tree.structure(batch) == jax.tree.structure(spec)
    if not alike or not all(jax.tree.leaves(jax.tree.map(fits, batch, spec))):
        # What else is other than planned, the shape apart.
        cut = jax.tree.map(lambda x: _cut(x, now, then), spec)
        raise ValueError(batch_difference(batch, {now: cut}))

    zeros = jax.tree.map(lambda _: 0, spec)
    values = zeros._replace(features=zeros.features | dict(fills))

    def pad_batch(batch: Batch) -> Batch:
        return jax.tree.map(
            lambda leaf, want, value: jnp.pad(
                leaf, widths(leaf, want), constant_values=value
            ),
            *(batch, spec, values),
        )

    return jax.jit(pad_batch, out_shardings=jax.tree.map(lambda x: x.sharding, spec))


def _cut(leaf: jax.ShapeDtypeStruct, now: Bucket, then: Bucket) -> jax.ShapeDtypeStruct:
    """The shape that one of a batch's arrays has in another bucket."""
    shape = (now.batch_size, *leaf.shape[1:])
    if leaf.shape[1:2] == (then.seq_len,):
        shape = (*shape[:1], now.seq_len, *shape[2:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype)
