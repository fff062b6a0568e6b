"""Meshes, the rows a process loads for them, and batches as global arrays.

The rows of a batch are cut over the *batch axes* of a mesh; over all other axes (the
model's own) they are repeated.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxbucket.base.batch import Batch, RowShard
from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.base.checks import check_integer
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import Example, Sequences

Axes: TypeAlias = str | Sequence[str]
Device: TypeAlias = jax.Device  # pyright: ignore
_T = TypeVar("_T")

DATA_AXIS = "data"
# Of what numpy calls numbers, and bytes; text and objects are in no batch.
_NOT_IN_JAX: tuple[type, ...] = (
    *(np.longdouble, np.clongdouble, np.datetime64, np.timedelta64, np.void),
    *(np.character, np.object_),
)


def data_mesh(devices: Sequence[Device] | None = None) -> Mesh:
    """Returns a mesh of one axis, "data", which cuts the rows of batches.

    Example:
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> mesh.axis_names, mesh.size
      (('data',), 1)

    Args:
      devices: those of the mesh, in its order; by default all, of all processes.

    Raises:
      ValueError: if `devices` is empty.
    """
    devices = jax.devices() if devices is None else devices
    if not len(devices):
        raise ValueError("`devices` is empty: a mesh needs at least one.")
    # Explicit axes, a default in some releases, make a plain embedding lookup fail.
    return jax.make_mesh(
        (len(devices),), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=devices
    )


def batch_sharding(mesh: Mesh, batch_axes: Axes = DATA_AXIS) -> NamedSharding:
    """Returns the sharding that cuts the leading axis over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(axis_names(mesh, batch_axes)))


def axis_names(mesh: Mesh, batch_axes: Axes) -> tuple[str, ...]:
    """Returns the batch axes as a tuple, or raises a ValueError if it cannot."""
    check_mesh(mesh)
    names = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    known = [name for name in names if name in mesh.axis_names]
    if not names or len(set(known)) < len(names):
        raise ValueError(
            f"`batch_axes={batch_axes!r}`: the mesh has axes {mesh.axis_names}. Name "
            "one or several of them, each once."
        )
    return names


def check_mesh(mesh: Any) -> None:
    """Raises a ValueError for anything else."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` is a {type(mesh).__name__}: make one by `data_mesh()`, or by "
            "`jax.make_mesh`."
        )


def local_rows(mesh: Mesh, *, batch_axes: Axes = DATA_AXIS) -> RowShard:
    """Returns which rows of every global batch the devices of this process hold.

    It is read off the mesh's own sharding, so a model axis across processes (several
    of them need the same rows) and devices in any order are right.

    Example:
      >>> shard = local_rows(data_mesh(jax.devices()[:1]))
      >>> shard.rows(4)
      array([0, 1, 2, 3])

    Args:
      mesh: where batches are cut.
      batch_axes: the mesh axes that cut the rows.

    Returns:
      The rows, for `batch_dataset` and `stream_batches`.

    Raises:
      ValueError: if the mesh lacks one of the axes, or has no device here.
    """
    axes = axis_names(mesh, batch_axes)
    return rows_of_devices(mesh, mesh.local_devices, axes)


def rows_of_devices(
    mesh: Mesh, devices: Iterable[Device], batch_axes: Axes = DATA_AXIS
) -> RowShard:
    """Returns which rows of every global batch these devices of the mesh hold."""
    names = axis_names(mesh, batch_axes)
    num_parts = math.prod(mesh.shape[name] for name in names)
    # In an array of one row per part, the row a device holds is its part.
    held = batch_sharding(mesh, names).devices_indices_map((num_parts,))
    parts = {held[device][0].indices(num_parts)[0] for device in devices}
    if not parts:
        raise ValueError(
            "No device of the mesh belongs to this process: build the mesh from "
            "`jax.devices()`, those of all processes."
        )
    return RowShard(tuple(sorted(parts)), num_parts, names)


def prefetch_to_mesh(
    batches: Iterable[_T],
    mesh: Mesh,
    *,
    batch_axes: Axes = DATA_AXIS,
    size: int = 2,
) -> Iterator[_T]:
    """Yields each local numpy batch as one of global `jax.Array`s, `size` ahead.

    A tuple of batches, as a step with accumulation has it, is given as such a tuple.

    Example:
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> local = collate_rows([{"x": [1, 2]}, {"x": [3]}], Bucket(2, 4))
      >>> for batch in prefetch_to_mesh([local, local], mesh):
      ...     print(batch.bucket, batch.features["x"].sharding == batch_sharding(mesh))
      [2, 4] True
      [2, 4] True

    Args:
      batches: what this process loaded for `local_rows(mesh)`: a dataset of
        `batch_dataset`, or any iterable.
      mesh: where the rows go.
      batch_axes: the mesh axes that cut the rows.
      size: how many batches to keep in transfer beside the one in use.

    Raises:
      ValueError: if the mesh lacks one of the axes, or a batch does not have the rows
        of this process, or a number that its dtype on devices cannot hold, or a dtype
        that jax does not have.
    """
    if check_integer("size", size) < 0:
        raise ValueError(f"`size={size}` must not be negative.")
    shard = local_rows(mesh, batch_axes=batch_axes)
    sharding = batch_sharding(mesh, batch_axes)

    # device_put returns before the copy is done, so a queue of its results suffices.
    def to_global(batch: Any) -> Any:
        if isinstance(batch, Batch):
            return _to_global(batch, shard, sharding)
        return tuple(_to_global(part, shard, sharding) for part in batch)

    return ahead(map(to_global, batches), size)


def ahead(items: Iterator[_T], size: int) -> Iterator[_T]:
    """Yields the items, `size` of them asked for beside the one in use."""
    queue = collections.deque(itertools.islice(items, size))
    for item in items:
        queue.append(item)
        yield queue.popleft()
    yield from queue


def _to_global(batch: Batch, shard: RowShard, sharding: NamedSharding) -> Batch:
    num_local = batch.bucket.batch_size
    if num_local % len(shard.parts):
        raise ValueError(
            f"A local batch has {num_local} rows, which is no multiple of the "
            f"{len(shard.parts)} parts this process holds. Load the rows of "
            "`jb.sharding.local_rows(mesh)`."
        )
    part_size = num_local // len(shard.parts)
    # Part p of the batch is the slot-th part that was loaded.
    slots = {part: slot for slot, part in enumerate(shard.parts)}

    def to_global(path: Any, leaf: np.ndarray) -> jax.Array:
        leaf = _as_on_device(jax.tree_util.keystr(path), leaf)

        def rows_for_device(index: Any) -> np.ndarray:
            start = slots[(index[0].start or 0) // part_size] * part_size
            # jax on CPU uses a numpy array as it is, and loaders reuse their arrays.
            return leaf[start : start + part_size].copy()

        shape = (part_size * shard.num_parts, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, sharding, rows_for_device)

    return jax.tree.map_with_path(to_global, batch)


def _device_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """What jax has for a dtype: its 32 bits, unless told otherwise, in native order."""
    if issubclass(dtype.type, _NOT_IN_JAX):
        raise ValueError(
            f"`batch{name}` is {dtype}, and jax has no such arrays. Convert it in the "
            "source, or leave it out."
        )
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def _as_on_device(name: str, leaf: np.ndarray) -> np.ndarray:
    """The array in the dtype that jax has for it: 32 bits, unless told otherwise."""
    dtype = _device_dtype(name, leaf.dtype)
    if dtype == leaf.dtype:
        return leaf
    with np.errstate(over="ignore"):
        converted = leaf.astype(dtype)
    if np.issubdtype(dtype, np.integer):
        lost = converted != leaf
    else:
        # Rounding is expected of floats, and infinity only where it was before.
        lost = np.isinf(converted)
        if lost.any():
            lost &= np.isfinite(leaf)
    if lost.any():
        value = leaf[lost].flat[0]
        raise ValueError(
            f"`batch{name}` holds {value}, which {dtype} cannot hold. Set "
            "`jax.config.update('jax_enable_x64', True)`, or map it to smaller numbers."
        )
    return converted


def replicate(tree: _T, mesh: Mesh) -> _T:
    """Returns a copy of a state on every device of the mesh.

    Always a copy: the original survives a step that donates its state.

    Example:
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> state = replicate({"w": np.ones(3)}, mesh)
      >>> state["w"].sharding == NamedSharding(mesh, PartitionSpec())
      True

    Args:
      tree: arrays and numbers; or shapes, such as `jax.eval_shape` returns, of which
        the same with that sharding are returned.
      mesh: the devices.

    Raises:
      ValueError: if `mesh` is not a mesh.
    """
    check_mesh(mesh)
    sharding = NamedSharding(mesh, PartitionSpec())
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )
    # Where the sharding changes, the copy on the original's own device may still be
    # the original, whatever `may_alias` says; where it does not change, it is obeyed.
    spread = jax.device_put(tree, sharding)
    return jax.device_put(spread, sharding, may_alias=False)


def batch_specs(
    plan: BucketPlan,
    example: Example,
    mesh: Mesh,
    *,
    batch_axes: Axes = DATA_AXIS,
    sequences: Sequences = None,
    max_segments: int | None = None,
    capacities: Mapping[str, int] | None = None,
) -> dict[Bucket, Batch]:
    """Returns the shape, dtype and sharding of every batch the plan can give.

    Example:
      >>> plan = BucketPlan.from_shapes([(4, 8), (2, 16)])
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> for bucket, spec in batch_specs(plan, {"x": [1, 2, 3]}, mesh).items():
      ...     print(bucket, spec.features["x"].dtype, spec.features["x"].shape)
      [4, 8] int32 (4, 8)
      [2, 16] int32 (2, 16)

    Args:
      plan: the buckets.
      example: any example of the source, for its features and dtypes.
      mesh: where the rows go.
      batch_axes: the mesh axes that cut the rows.
      sequences: the features that are padded, by default all with a leading axis. A
        mapping, name -> features, of several sequences with lengths of their own.
      max_segments: that of the schedule, where rows are packed.
      capacities: those of the schedule, where examples have several sequences.

    Returns:
      For each bucket a `Batch` of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: if the batch axes do not divide a bucket's B, or jax has no arrays of
        a feature's dtype.
    """
    sharding = batch_sharding(mesh, batch_axes)
    cut = rows_of_devices(mesh, mesh.devices.flat, batch_axes)

    def spec(path: Any, leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = _device_dtype(jax.tree_util.keystr(path), leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    specs = {}
    for bucket in plan.buckets:
        cut.part_size(bucket.batch_size)
        empty = collate_rows(
            [],
            bucket,
            like=example,
            sequences=sequences,
            max_segments=max_segments,
            capacities=capacities,
        )
        specs[bucket] = jax.tree.map_with_path(spec, empty)
    return specs
