"""Meshes, the rows that each process loads for them, and batches as global arrays.

The rows of a batch are sharded over the *batch axes* of a mesh and replicated over all
other axes, such as those of the model.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from jaxbucket.base.batch import Batch, RowShard
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.lazy import naming_the_extra
from jaxbucket.base.notes import Noting
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import Example, Sequences

with naming_the_extra():
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

__all__ = [
    "batch_sharding",
    "batch_specs",
    "data_mesh",
    "local_rows",
    "prefetch_to_mesh",
    "replicate",
]

Axes: TypeAlias = str | Sequence[str]
Device: TypeAlias = jax.Device  # pyright: ignore
_T = TypeVar("_T")

DATA_AXIS = "data"


def data_mesh(devices: Sequence[Device] | None = None) -> Mesh:
    """Returns a mesh with one axis, "data", which shards the rows of batches.

    Example:
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> mesh.axis_names, mesh.size
      (('data',), 1)

    Args:
      devices: the devices in mesh order; by default all devices of all processes.

    Returns:
      The mesh, with an axis of type `Auto`.
    """
    devices = jax.devices() if devices is None else devices
    # Explicit axes, the default in some releases, make a plain embedding lookup fail.
    return jax.make_mesh(
        (len(devices),), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=devices
    )


def batch_sharding(mesh: Mesh, batch_axes: Axes = DATA_AXIS) -> NamedSharding:
    """Returns the sharding of the leading axis over the batch axes.

    Args:
      mesh: the mesh.
      batch_axes: the mesh axes that shard the rows.

    Raises:
      ValueError: if the mesh lacks one of the axes.
    """
    return NamedSharding(mesh, PartitionSpec(axis_names(mesh, batch_axes)))


def axis_names(mesh: Mesh, batch_axes: Axes) -> tuple[str, ...]:
    """Returns the batch axes as a tuple.

    Raises:
      ValueError: if `mesh` is not a mesh or lacks one of the axes.
    """
    check_mesh(mesh)
    names = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    known = [name for name in names if name in mesh.axis_names]
    if not names or len(set(known)) < len(names):
        raise ValueError(
            f"`batch_axes={batch_axes!r}`, but the mesh has axes {mesh.axis_names}. "
            "Pass one or more of them, without repetition."
        )
    return names


def check_mesh(mesh: Any) -> None:
    """Raises a ValueError if `mesh` is not a mesh."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` is a {type(mesh).__name__}, not a mesh. Make one "
            "with `data_mesh()` or `jax.make_mesh`."
        )


def local_rows(mesh: Mesh, *, batch_axes: Axes = DATA_AXIS) -> RowShard:
    """Returns the rows of every global batch that the devices of this process hold.

    They are derived from the sharding of batches over the mesh. This handles
    devices in any order, and a model axis across processes, which makes several
    processes need the same rows.

    Example:
      >>> shard = local_rows(data_mesh(jax.devices()[:1]))
      >>> shard.rows(4)
      array([0, 1, 2, 3])

    Args:
      mesh: the mesh over which batches are sharded.
      batch_axes: the mesh axes that shard the rows.

    Returns:
      The rows, for `batch_dataset` and `stream_batches`.

    Raises:
      ValueError: if the mesh lacks one of the axes, or has no device of this process.
    """
    axes = axis_names(mesh, batch_axes)
    return rows_of_devices(mesh, mesh.local_devices, axes)


def rows_of_devices(
    mesh: Mesh, devices: Iterable[Device], batch_axes: Axes = DATA_AXIS
) -> RowShard:
    """Returns the rows of every global batch that some devices of the mesh hold."""
    names = axis_names(mesh, batch_axes)
    num_parts = math.prod(mesh.shape[name] for name in names)
    # In an array with one row per part, the row of a device is the index of its part.
    indices = batch_sharding(mesh, names).devices_indices_map((num_parts,))
    parts = {indices[device][0].indices(num_parts)[0] for device in devices}
    if not parts:
        raise ValueError(
            "No device of the mesh belongs to this process. Build the mesh from "
            "`jax.devices()`, the devices of all processes."
        )
    return RowShard(tuple(sorted(parts)), num_parts, names)


def prefetch_to_mesh(
    batches: Iterable[_T],
    mesh: Mesh,
    *,
    batch_axes: Axes = DATA_AXIS,
    size: int = 2,
) -> Iterator[_T]:
    """Yields local numpy batches as batches of global `jax.Array`s, `size` ahead.

    A tuple of micro-batches is converted to a tuple of global batches.

    Example:
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> local = collate_rows([{"x": [1, 2]}, {"x": [3]}], Bucket(2, 4))
      >>> for batch in prefetch_to_mesh([local, local], mesh):
      ...     print(batch.bucket, batch.features["x"].sharding == batch_sharding(mesh))
      [2, 4] True
      [2, 4] True

    Args:
      batches: batches of the rows `local_rows(mesh)`: a dataset of `batch_dataset`, or
        any iterable.
      mesh: the mesh over which batches are sharded.
      batch_axes: the mesh axes that shard the rows.
      size: the number of batches to transfer ahead of the current one.

    Yields:
      The global batches.

    Raises:
      ValueError: if the mesh lacks one of the axes, a batch does not have the rows of
        this process, or a number does not fit into its dtype on devices.
      TypeError: if jax does not have a dtype, with a note that names the array.
    """
    shard = local_rows(mesh, batch_axes=batch_axes)
    sharding = batch_sharding(mesh, batch_axes)

    # Transfers are asynchronous, so a queue of their results is enough to overlap them.
    def to_global(batch: Any) -> Any:
        if isinstance(batch, Batch):
            return _to_global(batch, shard, sharding)
        return tuple(_to_global(part, shard, sharding) for part in batch)

    return prefetch(map(to_global, batches), size)


def prefetch(items: Iterator[_T], size: int) -> Iterator[_T]:
    """Yields the items, after requesting `size` further ones."""
    queue = collections.deque(itertools.islice(items, size))
    for item in items:
        queue.append(item)
        yield queue.popleft()
    yield from queue


def _to_global(batch: Batch, shard: RowShard, sharding: NamedSharding) -> Batch:
    num_local = batch.bucket.batch_size
    if num_local % len(shard.parts):
        raise ValueError(
            f"A local batch has {num_local} rows, which is not a multiple of the "
            f"{len(shard.parts)} parts of this process. Load the rows of "
            "`jb.sharding.local_rows(mesh)`."
        )
    part_size = num_local // len(shard.parts)
    # The position of each part of the global batch in the local batch.
    slots = {part: slot for slot, part in enumerate(shard.parts)}

    def to_global(path: Any, leaf: np.ndarray) -> jax.Array:
        name = f"batch{jax.tree_util.keystr(path)}"
        leaf = _as_on_device(name, leaf)

        def rows_for_device(index: Any) -> np.ndarray:
            start = slots[(index[0].start or 0) // part_size] * part_size
            # Copied, because jax on CPU may share memory with numpy arrays, and
            # loaders reuse their arrays.
            return leaf[start : start + part_size].copy()

        shape = (part_size * shard.num_parts, *leaf.shape[1:])
        with Noting(f"This is `{name}`."):
            return jax.make_array_from_callback(shape, sharding, rows_for_device)

    return jax.tree.map_with_path(to_global, batch)


def _device_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that jax uses, of 32 bits instead of 64 unless x64 is on."""
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def _as_on_device(name: str, leaf: np.ndarray) -> np.ndarray:
    """Returns the array in the dtype that jax uses for it.

    Raises:
      ValueError: if the conversion would change an integer or overflow a float.
    """
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


def replicate(tree: _T, mesh: Mesh) -> _T:
    """Returns a copy of a state, replicated on every device of the mesh.

    The result never shares memory with the original, so the original stays valid if a
    step donates the copy.

    Example:
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> state = replicate({"w": np.ones(3)}, mesh)
      >>> state["w"].sharding == NamedSharding(mesh, PartitionSpec())
      True

    Args:
      tree: a pytree of arrays and numbers, or of `jax.ShapeDtypeStruct`, such as
        `jax.eval_shape` returns.
      mesh: the mesh.

    Returns:
      The same pytree, replicated. A `jax.ShapeDtypeStruct` gets the replicated
      sharding.

    Raises:
      ValueError: if `mesh` is not a mesh.
    """
    check_mesh(mesh)
    sharding = NamedSharding(mesh, PartitionSpec())
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )
    # Two transfers, because `may_alias` is respected only if the sharding does not
    # change. The first may still alias the original on the device of the original.
    spread = jax.device_put(tree, sharding)
    # The copy is made later. Until then, the caller must not change a numpy array.
    return jax.block_until_ready(jax.device_put(spread, sharding, may_alias=False))


def batch_specs(
    plan: BucketPlan,
    example: Example,
    mesh: Mesh,
    *,
    batch_axes: Axes = DATA_AXIS,
    sequences: Sequences = None,
    max_segments: int | None = None,
    component: str | None = None,
) -> dict[Bucket, Batch]:
    """Returns the shapes, dtypes and shardings of the batches of each bucket.

    Example:
      >>> plan = BucketPlan.from_shapes([(4, 8), (2, 16)])
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> for bucket, spec in batch_specs(plan, {"x": [1, 2, 3]}, mesh).items():
      ...     print(bucket, spec.features["x"].dtype, spec.features["x"].shape)
      [4, 8] int32 (4, 8)
      [2, 16] int32 (2, 16)

    Args:
      plan: the plan of the batches.
      example: any example of the source, for its features and dtypes.
      mesh: the mesh over which batches are sharded.
      batch_axes: the mesh axes that shard the rows.
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
      ValueError: if the batch axes do not divide the B of a bucket.
    """
    sharding = batch_sharding(mesh, batch_axes)
    shard = rows_of_devices(mesh, mesh.devices.flat, batch_axes)

    def spec(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = _device_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    specs = {}
    for bucket in plan.buckets:
        # Raises if the batch axes do not divide the batch size.
        shard.part_size(bucket.batch_size)
        empty = collate_rows(
            [],
            bucket,
            like=example,
            sequences=sequences,
            max_segments=max_segments,
        )
        key = bucket if component is None else bucket.of(component)
        specs[key] = jax.tree.map(spec, empty)
    return specs
