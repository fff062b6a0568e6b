"""Batches as global arrays on a mesh, made of the rows of each process."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.notes import Noting
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import Example, Sequences
from jaxbucket.data.example_spec import ExampleSpec
from jaxbucket.sharding.mesh import Axes, batch_sharding, local_rows

_T = TypeVar("_T")


def prefetch_to_mesh(
    batches: Iterable[_T],
    mesh: Mesh,
    *,
    batch_axes: Axes = None,
    buckets: Iterable[Bucket] | None = None,
    size: int = 2,
) -> Iterator[_T]:
    """Yields local numpy batches as batches of global `jax.Array`s, `size` ahead.

    A tuple of micro-batches is converted to a tuple of global batches.

    Example:
      >>> import jaxbucket as jb
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> local = collate_rows([{"x": [1, 2]}, {"x": [3]}], Bucket(2, 4))
      >>> for batch in prefetch_to_mesh([local, local], mesh):
      ...     print(batch.bucket, batch.features["x"].sharding == batch_sharding(mesh))
      [2, 4] True
      [2, 4] True

    Args:
      batches: batches of the rows `local_rows(mesh)`: a dataset of `batch_dataset`, or
        any iterable.
      mesh: the mesh over which batches are sharded.
      batch_axes: the mesh axes over which batches are sharded, as for `batch_sharding`.
      buckets: the buckets of the global batches; required only if devices of several
        processes may share a row.
      size: the number of batches to transfer ahead of the current one.

    Yields:
      The global batches.

    Raises:
      ValueError: if the mesh lacks one of the axes, a batch does not have the rows of
        this process, or a number does not fit into its dtype on devices.
      TypeError: if jax does not have a dtype, with a note that names the array.
    """
    # Transfers are asynchronous, so a queue of their results is enough to overlap them.
    return prefetch(map(ToMesh(mesh, batch_axes, buckets), batches), size)


def prefetch(items: Iterator[_T], size: int) -> Iterator[_T]:
    """Yields the items, after requesting `size` further ones."""
    queue = collections.deque(itertools.islice(items, size))
    for item in items:
        queue.append(item)
        yield queue.popleft()
    yield from queue


class ToMesh:
    """Turns batches with the rows of this process into global batches, in any thread.

    Arguments as for `prefetch_to_mesh`.
    """

    def __init__(self, mesh: Mesh, batch_axes: Axes, buckets: Iterable[Bucket] | None):
        self._mesh, self._batch_axes = mesh, batch_axes
        self._shard = local_rows(mesh, batch_axes=batch_axes)
        # The bucket of a global batch, by the bucket of its rows in this process.
        self._known: dict[Bucket, Bucket] = {}
        for bucket in buckets or ():
            num_rows = len(self._shard.of(bucket).rows(bucket.batch_size))
            local = Bucket(num_rows, bucket.seq_len)
            bucket = Bucket(bucket.batch_size, bucket.seq_len)
            if self._known.setdefault(local, bucket) != bucket:
                raise ValueError(
                    f"`buckets` has {self._known[local]} and {bucket}, which have "
                    f"equally many rows in this process. Choose one B for "
                    f"T = {bucket.seq_len}, or let only the devices of a process share "
                    "a row: `data_mesh(max_row_shards=)`."
                )
        self._is_complete = buckets is not None
        # A context of jax for 64 bits is that of the thread that enters it.
        self._has_64_bits = jax.config.read("jax_enable_x64")

    def __call__(self, batch: Any) -> Any:
        """Returns the global batch of a batch, or those of micro-batches."""
        with jax.enable_x64(self._has_64_bits):
            if isinstance(batch, Batch):
                return self._to_global(batch)
            return tuple(map(self._to_global, batch))

    def _to_global(self, batch: Batch) -> Batch:
        local = batch.bucket
        if local not in self._known:
            self._known[local] = self._global_bucket(local)
        bucket = self._known[local]
        sharding = batch_sharding(self._mesh, self._batch_axes, bucket=bucket)
        shard = self._shard.of(bucket)
        part_size = shard.part_size(bucket.batch_size)
        # The position of each part of the global batch in the local batch.
        slots = {part: slot for slot, part in enumerate(shard.parts)}

        def to_global(path: Any, leaf: np.ndarray) -> jax.Array:
            name = f"batch{jax.tree_util.keystr(path)}"
            leaf = _as_on_device(name, leaf)

            def part_for_device(index: Any) -> np.ndarray:
                start = slots[(index[0].start or 0) // part_size] * part_size
                # Copied, because jax on CPU may share memory with numpy arrays, and
                # loaders reuse their arrays.
                return leaf[start : start + part_size, *index[1:]].copy()

            shape = (bucket.batch_size, *leaf.shape[1:])
            with Noting(f"This is `{name}`."):
                return jax.make_array_from_callback(
                    shape, _of_array(sharding, shape, bucket), part_for_device
                )

        return jax.tree.map_with_path(to_global, batch)

    def _global_bucket(self, local: Bucket) -> Bucket:
        """Returns the bucket of the global batch of which a batch has some rows."""
        found = []
        for cut in () if self._is_complete else self._shard.cuts:
            parts = {part // cut for part in self._shard.parts}
            rows, rest = divmod(local.batch_size, len(parts))
            num_rows = rows * (self._shard.num_parts // cut)
            bucket = Bucket(num_rows or 1, local.seq_len)
            if not rest and self._shard.find_cut(bucket) == cut:
                found.append(bucket)
        if len(found) != 1:
            candidates = f" It may belong to {found}." if found else ""
            raise ValueError(
                f"A local batch has the shape {local}, and this process parts "
                f"{self._shard.parts} of {self._shard.num_parts}.{candidates} Load the "
                "rows of `jb.sharding.local_rows(mesh)`, and pass "
                "`buckets=plan.buckets` if processes share rows."
            )
        return found[0]


def _of_array(
    sharding: NamedSharding, shape: tuple[int, ...], bucket: Bucket
) -> NamedSharding:
    """Returns the sharding of an array, which is cut if it has an axis T."""
    is_sequence = len(shape) > 1 and shape[1] in bucket.seq_lens
    if len(sharding.spec) < 2 or is_sequence:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))


def _device_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that jax uses, of 32 bits instead of 64 unless x64 is on."""
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def _as_on_device(name: str, leaf: np.ndarray) -> np.ndarray:
    """Returns the array in the dtype that jax uses for it."""
    dtype = _device_dtype(leaf.dtype)
    if dtype == leaf.dtype:
        return leaf
    with np.errstate(over="ignore"):
        converted = leaf.astype(dtype)
    if np.issubdtype(dtype, np.integer):
        lost = converted != leaf
    else:
        # Floats may be rounded, but must not become infinite.
        lost = np.isinf(converted)
        if lost.any():
            lost &= np.isfinite(leaf)
    if lost.any():
        value = leaf[lost].flat[0]
        raise ValueError(
            f"`{name}` holds {value}, which does not fit into {dtype}. Set "
            "`jax.config.update('jax_enable_x64', True)`, or use smaller numbers."
        )
    return converted


def batch_specs(
    plan: BucketPlan,
    example: Example,
    mesh: Mesh,
    *,
    batch_axes: Axes = None,
    sequences: Sequences = None,
    max_segments: int | None = None,
    component: str | None = None,
) -> dict[Bucket, Batch]:
    """Returns the shapes, dtypes and shardings of the batches of each bucket.

    Example:
      >>> plan = BucketPlan.from_shapes([(4, 8), (2, 16)])
      >>> import jaxbucket as jb
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> for bucket, spec in batch_specs(plan, {"x": [1, 2, 3]}, mesh).items():
      ...     print(bucket, spec.features["x"].dtype, spec.features["x"].shape)
      [4, 8] int32 (4, 8)
      [2, 16] int32 (2, 16)

    Args:
      plan: the plan of the batches.
      example: any example of the source, for its features and dtypes.
      mesh: the mesh over which batches are sharded.
      batch_axes: the mesh axes over which batches are sharded, as for `batch_sharding`.
      sequences: the features that are padded; by default all with a leading axis. A
        mapping from names to features if examples have several sequences, each with
        its own length, as for `collate_rows`.
      max_segments: `max_segments` of the schedule, if rows are packed.
      component: the name of the stream, if batches come from several streams with
        different features. Dicts of several components can be joined, because their
        keys, `ComponentBucket`, differ.

    Returns:
      A `Batch` of `jax.ShapeDtypeStruct` for each bucket.

    Raises:
      ValueError: if the batch axes do not divide the B of a bucket, or `max_segments`
        is missing for a packed plan whose examples have features without a sequence.
    """
    if plan.packed and max_segments is None:
        _check_sequences_only(plan, example, sequences)
    specs = {}
    for bucket in plan.buckets:
        sharding = batch_sharding(mesh, batch_axes, bucket=bucket)

        def spec(
            leaf: np.ndarray, bucket: Bucket = bucket, whole: NamedSharding = sharding
        ) -> jax.ShapeDtypeStruct:
            shape = (bucket.batch_size, *leaf.shape[1:])
            sharding = _of_array(whole, shape, bucket)
            return jax.ShapeDtypeStruct(
                shape, _device_dtype(leaf.dtype), sharding=sharding
            )

        # One row, because many may not fit into the memory of this machine.
        empty = collate_rows(
            [],
            Bucket(1, bucket.seq_len),
            like=example,
            sequences=sequences,
            max_segments=max_segments,
        )
        key = bucket if component is None else bucket.of(component)
        specs[key] = jax.tree.map(spec, empty)
    return specs


def _check_sequences_only(
    plan: BucketPlan, example: Example, sequences: Sequences
) -> None:
    """Checks that shapes of packed rows do not depend on their number of examples."""
    spec = ExampleSpec(example, sequences, plan.sequences)
    if others := sorted(spec.arrays.keys() - spec.axes.keys()):
        raise ValueError(
            f"`max_segments` is missing, but packed rows have several values of "
            f"{others}, `[B, max_segments]`. Pass `schedule.max_segments`."
        )
