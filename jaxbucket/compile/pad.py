"""Batches of unplanned shapes, padded to a bucket of the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.compile.mismatch import batch_difference


class BucketPadder:
    """Pads a batch, with empty rows and `pad_value`, to a bucket that it fits in.

    Args:
      specs: a batch's shapes for every bucket.
      pad_value: what fills sequences: name -> number, 0 for those without one.

    Raises:
      ValueError: if `pad_value` is one number other than 0 for several sequences, names
        none of them, or is beyond a dtype.
    """

    def __init__(self, specs: Mapping[Bucket, Batch], pad_value: PadValue):
        self._specs = specs
        self._fills = pad_arrays(pad_value, _dtypes_of_sequences(specs))
        self._pads: dict[Any, Callable[[Batch], Batch]] = {}

    def __call__(self, batch: Batch, difference: str) -> Batch:
        """Returns a batch, padded to the cheapest bucket; warns once for each shape.

        Raises:
          ValueError: with this difference, if there is no such bucket; or if more than
            the bucket differs.
        """
        bucket = batch.bucket
        large_enough = [
            b
            for b in self._specs
            if b.batch_size >= bucket.batch_size and b.seq_len >= bucket.seq_len
        ]
        if bucket in self._specs or not large_enough:
            raise ValueError(difference)
        target = min(large_enough, key=lambda b: (b.num_tokens, b.seq_len))
        leaves, structure = jax.tree.flatten(batch)
        key = target, structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._pads:
            self._pads[key] = self._padder(batch, self._specs[target])
            warnings.warn(
                f"{difference} It was padded to {target}, as all of this shape are.",
                RuntimeWarning,
                stacklevel=4,
            )
        return self._pads[key](batch)

    def _padder(self, batch: Batch, spec: Batch) -> Callable[[Batch], Batch]:
        """Returns a function that pads batches like this one to a shape.

        Raises:
          ValueError: if they differ in more than the bucket.
        """
        now, then = batch.bucket, spec.bucket

        def unpadded(leaf: Any, is_sequence: bool = True) -> jax.ShapeDtypeStruct:
            shape = [now.batch_size, *leaf.shape[1:]]
            # Of several sequences in a row each has a length of its own.
            if is_sequence and leaf.shape[1] == then.seq_len:
                shape[1] = now.seq_len
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        want = Batch(
            {
                name: unpadded(x, name in self._fills)
                for name, x in spec.features.items()
            },
            *jax.tree.map(unpadded, (spec.segment_ids, spec.positions)),
        )
        difference = batch_difference(batch, {now: want})
        if difference is not None:
            raise ValueError(difference)
        zeros = jax.tree.map(lambda _: 0, spec)
        fills = zeros._replace(features=zeros.features | self._fills)

        def pad(leaf: jax.Array, want: Any, fill: Any) -> jax.Array:
            widths = [(0, b - a) for a, b in zip(leaf.shape, want.shape, strict=True)]
            return jnp.pad(leaf, widths, constant_values=fill)

        return jax.jit(
            lambda batch: jax.tree.map(pad, batch, spec, fills),
            out_shardings=jax.tree.map(lambda x: x.sharding, spec),
        )


def _dtypes_of_sequences(specs: Mapping[Bucket, Batch]) -> dict[str, Any]:
    """Name -> dtype of the features that are as long as a sequence in every bucket."""

    def are_sequences(batch: Batch) -> set[str]:
        seq_lens = {ids.shape[1] for ids in batch.segment_ids.values()}
        features = batch.features.items()
        return {name for name, x in features if {*x.shape[1:2]} & seq_lens}

    first = next(iter(specs.values())).features
    names = set.intersection(*map(are_sequences, specs.values()))
    return {name: first[name].dtype for name in first if name in names}
