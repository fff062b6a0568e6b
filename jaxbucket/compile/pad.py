"""Pads batches whose shapes are not in the plan to a bucket of the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.compile.mismatch import batch_difference


class BucketPadder:
    """Pads a batch, with empty rows and `pad_value`, to a bucket that it fits in.

    Args:
      specs: bucket -> the shapes, dtypes and shardings of a batch.
      pad_value: the padding value, by feature name; 0 for features that are not named.
        A single number if there is only one sequence.

    Raises:
      ValueError: if `pad_value` is a nonzero number for several sequences, names an
        unknown feature, or does not fit a dtype.
    """

    def __init__(self, specs: Mapping[Bucket, Batch], pad_value: PadValue):
        self._specs = specs
        self._fills = pad_arrays(pad_value, _dtypes_of_sequences(specs))
        self._pads: dict[Any, Callable[[Batch], Batch]] = {}

    def __call__(self, batch: Batch, difference: str) -> Batch:
        """Returns a batch padded to the bucket with the fewest tokens that it fits in.

        Warns once for each shape.

        Args:
          batch: a batch whose shape is not in the plan.
          difference: a message on how the batch differs from the plan.

        Raises:
          ValueError: if the batch fits into no bucket, with `difference` as its
            message, or if its structure or dtypes also differ.
        """
        leaves, structure = jax.tree.flatten(batch)
        key = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._pads:
            target, self._pads[key] = self._choose(batch, difference)
            warnings.warn(
                f"{difference} It was padded to {target}, like all batches of this "
                "shape.",
                RuntimeWarning,
                stacklevel=4,
            )
        return self._pads[key](batch)

    def _choose(
        self, batch: Batch, difference: str
    ) -> tuple[Bucket, Callable[[Batch], Batch]]:
        """Returns a bucket that holds batches like this one, and pads them to it.

        Raises:
          ValueError: as `__call__`.
        """
        kinds, errors = _kinds(batch), []

        def preference(bucket: Bucket) -> tuple[bool, int, int]:
            differs = _kinds(self._specs[bucket]) != kinds
            return differs, bucket.num_tokens, bucket.seq_len

        buckets = [b for b in self._specs if b.holds(batch.bucket)]
        if batch.bucket in self._specs:
            buckets = []
        # Those of another component of a mixture may have features of other shapes.
        for target in sorted(buckets, key=preference):
            try:
                return target, self._padder(batch, self._specs[target])
            except ValueError as error:
                errors.append(error)
        raise errors[0] if errors else ValueError(difference)

    def _padder(self, batch: Batch, spec: Batch) -> Callable[[Batch], Batch]:
        """Returns a function that pads batches like this one to the shape of `spec`.

        Raises:
          ValueError: if their structure or dtypes also differ.
        """
        source = batch.bucket
        # (T of the batch, T of the program) of each sequence.
        sizes = {
            name: (batch.segment_ids.get(name, ids).shape[1], ids.shape[1])
            for name, ids in spec.segment_ids.items()
        }

        def unpadded(leaf: Any, *seq_lens: int) -> jax.ShapeDtypeStruct:
            shape = (source.batch_size, *seq_lens, *leaf.shape[1 + len(seq_lens) :])
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        def feature(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
            if name not in self._fills:
                return unpadded(leaf)
            # Two sequences may have the same T in the program.
            fitting = [a for a, b in sizes.values() if b == leaf.shape[1]]
            given = batch.features.get(name, leaf).shape[1:]
            best = [a for a in fitting if (a,) == given[:1]] or fitting
            # Further axes may be those of other sequences, as in images.
            others = (
                a if (a, b) in sizes.values() else b
                for a, b in zip(given[1:], leaf.shape[2:], strict=False)
            )
            return unpadded(leaf, best[0], *others)

        def derived(leaves: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
            return {name: unpadded(x, sizes[name][0]) for name, x in leaves.items()}

        expected = Batch(
            {name: feature(name, x) for name, x in spec.features.items()},
            derived(spec.segment_ids),
            derived(spec.positions),
        )
        difference = batch_difference(batch, {source: expected})
        if difference is not None:
            raise ValueError(difference)
        zeros = jax.tree.map(lambda _: 0, spec)
        fills = zeros._replace(
            features={name: self._fills.get(name, 0) for name in spec.features}
        )

        def pad(leaf: jax.Array, spec: Any, fill: Any) -> jax.Array:
            widths = [(0, b - a) for a, b in zip(leaf.shape, spec.shape, strict=True)]
            return jnp.pad(leaf, widths, constant_values=fill)

        return jax.jit(
            lambda batch: jax.tree.map(pad, batch, spec, fills),
            out_shardings=jax.tree.map(lambda x: x.sharding, spec),
        )


def _dtypes_of_sequences(specs: Mapping[Bucket, Batch]) -> dict[str, Any]:
    """Returns name -> dtype of the features that have a sequence axis.

    These are features whose axis has the size T in all buckets that have them.
    """

    dtypes: dict[str, Any] = {}
    others: set[str] = set()
    for batch in specs.values():
        seq_lens = {ids.shape[1] for ids in batch.segment_ids.values()}
        for name, x in batch.features.items():
            dtypes.setdefault(name, x.dtype)
            if not {*x.shape[1:2]} & seq_lens:
                others.add(name)
    return {name: dtype for name, dtype in dtypes.items() if name not in others}


def _kinds(batch: Batch) -> dict[str, tuple[Any, int]]:
    """Returns feature name -> its dtype and number of axes."""
    return {name: (x.dtype, len(x.shape)) for name, x in batch.features.items()}
