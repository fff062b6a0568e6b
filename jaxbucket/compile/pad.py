"""Pads batches whose shapes are not in the plan to a bucket of the plan."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.padding import PadValue, named_pad_values, pad_arrays
from jaxbucket.compile.mismatch import padding_difference


class BucketPadder:
    """Pads a batch, with empty rows and `pad_value`, to a bucket that it fits in.

    Args:
      specs: bucket -> the shapes, dtypes and shardings of a batch.
      pad_value: the padding value, by feature name; 0 for features that are not named.
        A single number if there is only one sequence. Of components that share a
        feature name, it applies to those in which the feature is a sequence.

    Raises:
      ValueError: if `pad_value` is a nonzero number for several sequences, names an
        unknown feature, or does not fit a dtype. If the dtypes of components differ, it
        has to fit one of them.
    """

    def __init__(self, specs: Mapping[Bucket, Batch], pad_value: PadValue):
        self._specs = specs
        self._axes = _axes_by_bucket(specs)
        dtypes = collections.defaultdict(list)
        for bucket in specs:
            for name, dtype in self._dtypes_of_sequences(bucket).items():
                dtypes[name].append(dtype)
        self._pad_values = named_pad_values(pad_value, dtypes)
        for name, value in self._pad_values.items():
            _check_fits_one(value, name, dtypes[name])
        self._pads: dict[Any, Callable[[Batch], Batch]] = {}

    def __call__(self, batch: Batch, difference: str) -> Batch:
        """Returns a batch padded to the bucket with the fewest tokens that it fits in.

        Warns once for each shape.

        Args:
          batch: a batch whose shape is not in the plan.
          difference: a message on how the batch differs from the plan.

        Raises:
          ValueError: if the batch fits into no bucket, with `difference` as its
            message; if its structure or dtypes also differ; or if the dtype of one of
            its sequences cannot hold the padding value.
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
        kind, errors = _kind(batch), []

        def preference(bucket: Bucket) -> tuple[Any, ...]:
            differs = _kind(self._specs[bucket]) != kind
            return differs, bucket.num_tokens, bucket.seq_len

        buckets = [b for b in self._specs if b.holds(batch.bucket)]
        if batch.bucket in self._specs:
            buckets = []
        # Those of another component of a mixture may have features of other shapes.
        for target in sorted(buckets, key=preference):
            try:
                return target, self._padder(batch, target)
            except ValueError as error:
                errors.append(error)
        raise errors[0] if errors else ValueError(difference)

    def _padder(self, batch: Batch, target: Bucket) -> Callable[[Batch], Batch]:
        """Returns a function that pads batches like this one to the bucket `target`.

        Raises:
          ValueError: if their structure or dtypes also differ, or the dtype of a
            sequence cannot hold the padding value.
        """
        spec, batch_size = self._specs[target], batch.bucket.batch_size
        seq_lens = {
            name: batch.segment_ids.get(name, ids).shape[1]
            for name, ids in spec.segment_ids.items()
        }

        def unpadded(leaf: Any, sizes: Sequence[int]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch_size, *sizes), leaf.dtype)

        def feature(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
            given = batch.features[name].shape[1:] if name in batch.features else ()
            axes = self._axes[target][name]
            return unpadded(leaf, _unpadded(given, leaf.shape[1:], axes, seq_lens))

        def derived(leaves: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
            return {name: unpadded(x, [seq_lens[name]]) for name, x in leaves.items()}

        expected = Batch(
            {name: feature(name, x) for name, x in spec.features.items()},
            derived(spec.segment_ids),
            derived(spec.positions),
        )
        difference = padding_difference(batch, expected, target)
        if difference is not None:
            raise ValueError(difference)
        zeros = jax.tree.map(lambda _: 0, spec)
        # With only one T, the batch decides which features are sequences.
        values = {
            name: value
            for name, value in self._fills(target).items()
            if expected.features[name].shape[1] in seq_lens.values()
        }
        fills = zeros._replace(features=zeros.features | values)

        def pad(leaf: jax.Array, spec: Any, fill: Any) -> jax.Array:
            widths = [(0, b - a) for a, b in zip(leaf.shape, spec.shape, strict=True)]
            return jnp.pad(leaf, widths, constant_values=fill)

        # Not a lambda, because steps are told apart from other functions by name.
        def pad_to_bucket(batch: Batch) -> Batch:
            return jax.tree.map(pad, batch, spec, fills)

        shardings = jax.tree.map(lambda x: x.sharding, spec)
        return jax.jit(pad_to_bucket, out_shardings=shardings)

    def _fills(self, bucket: Bucket) -> dict[str, np.ndarray]:
        """Returns name -> padding value of the sequences of a bucket, in their dtypes.

        Raises:
          ValueError: if a dtype cannot hold the value.
        """
        dtypes = self._dtypes_of_sequences(bucket)
        values = {x: y for x, y in self._pad_values.items() if x in dtypes}
        return pad_arrays(values, dtypes)

    def _dtypes_of_sequences(self, bucket: Bucket) -> dict[str, np.dtype]:
        """Returns name -> dtype of the features of a bucket that have a sequence axis.

        These are features whose axis after B has the size T in all buckets.
        """
        axes = self._axes[bucket]
        features = self._specs[bucket].features.items()
        return {
            name: x.dtype
            for name, x in features
            if axes[name] and axes[name][0].sequences
        }


class _Axis(NamedTuple):
    """An axis of a feature.

    Attributes:
      sequences: the names of the sequences whose T is its size, in all buckets.
      is_constant: whether its size is the same in all buckets.
    """

    sequences: list[str]
    is_constant: bool


def _axes_by_bucket(
    specs: Mapping[Bucket, Batch],
) -> dict[Bucket, dict[str, list[_Axis]]]:
    """Returns bucket -> feature name -> its axes after B.

    They follow from all buckets of the same component and kind. In other components,
    the same name may stand for a different feature.
    """
    groups = collections.defaultdict(list)
    for bucket, batch in specs.items():
        groups[getattr(bucket, "component", None), _kind(batch)].append(bucket)
    axes = {}
    for buckets in groups.values():
        batches = [specs[bucket] for bucket in buckets]
        features = {name: _axes(name, batches) for name in batches[0].features}
        axes |= dict.fromkeys(buckets, features)
    return axes


def _axes(name: str, batches: Sequence[Batch]) -> list[_Axis]:
    """Returns the axes after B of a feature of batches of the same kind."""
    seq_lens = {
        sequence: tuple(batch.segment_ids[sequence].shape[1] for batch in batches)
        for sequence in batches[0].segment_ids
    }
    shapes = [batch.features[name].shape[1:] for batch in batches]
    return [
        _Axis([x for x, y in seq_lens.items() if y == sizes], len({*sizes}) == 1)
        for sizes in zip(*shapes, strict=True)
    ]


def _unpadded(
    given: Sequence[int],
    padded: Sequence[int],
    axes: Sequence[_Axis],
    seq_lens: Mapping[str, int],
) -> list[int]:
    """Returns the sizes that a feature must have to be padded.

    Axes of sequences come before others, and each has a sequence of its own, as in
    images. With only one T, an axis of this size is either that of the sequence or
    constant, and the batch decides.

    Args:
      given: the sizes of the axes after B in the batch; they may be invalid.
      padded: the sizes in the bucket.
      axes: the same axes.
      seq_lens: name -> T of each sequence of the batch.
    """
    sizes: list[int] = []
    unused = dict(seq_lens)
    for index, axis in enumerate(axes):
        names = [name for name in axis.sequences if name in unused]
        allowed = [unused[name] for name in names]
        if axis.is_constant or not names:
            allowed.append(padded[index])
        size = given[index] if index < len(given) else None
        sizes.append(size if size in allowed else allowed[0])
        name = next((x for x in names if unused[x] == sizes[-1]), None)
        if name is None:
            # No sequence follows an axis that is not one.
            unused.clear()
        else:
            del unused[name]
    return sizes


def _check_fits_one(value: float, name: str, dtypes: Sequence[np.dtype]) -> None:
    """Raises a ValueError if no dtype of a feature can hold a padding value."""
    errors = []
    for dtype in dtypes:
        try:
            pad_arrays({name: value}, {name: dtype})
            return
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _kind(batch: Batch) -> tuple[Any, ...]:
    """Returns the names of arrays, their dtypes and their numbers of axes."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, *((x.dtype, len(x.shape)) for x in leaves)
