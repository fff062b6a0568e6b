"""Meshes, how batches and states lie on them, and the rows that each process loads.

The rows of a batch are sharded over the *batch axes* of a mesh and replicated over all
other axes, such as those of the model. Buckets with fewer rows than devices have their
rows cut into equal parts over the last batch axes, the *row axes*.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_type
from jaxbucket.base.row_shard import RowShard, cuts_of, row_axes, spec_names
from jaxbucket.compile.absent import Device, default_devices, is_absent

Axes: TypeAlias = str | Sequence[str] | PartitionSpec | None
_T = TypeVar("_T")

_DATA_AXIS = "data"
_ROW_AXIS = "row"


def data_mesh(
    devices: Sequence[Device] | None = None, *, max_row_shards: int = 1
) -> Mesh:
    """Returns a mesh whose axes all shard batches.

    Example:
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> mesh.axis_names, mesh.size
      (('data',), 1)

    Args:
      devices: the devices in mesh order; by default all devices of all processes, or
        those of `jb.compile.absent_devices`.
      max_row_shards: the largest number of devices that may share a row. Above 1, the
        mesh gets an axis "row1", "row2", ... for each prime factor of this number, over
        the same devices in the same order. A bucket uses as few of them as its B and T
        allow, the last ones first.

    Returns:
      The mesh, with axes of type `Auto`: "data" and the row axes.

    Raises:
      ValueError: if `max_row_shards` does not divide the number of devices.
    """
    devices = default_devices() if devices is None else devices
    factors = row_axes(max_row_shards, len(devices))
    names = (_DATA_AXIS, *(f"{_ROW_AXIS}{i + 1}" for i in range(len(factors))))
    # Explicit axes, the default in some releases, make a plain embedding lookup fail.
    types = (AxisType.Auto,) * len(names)
    flat = jax.make_mesh(
        (len(devices),), names[:1], axis_types=types[:1], devices=devices
    )
    # `jax.make_mesh` cannot lay out many small axes on a torus.
    shape = (len(devices) // max_row_shards, *factors)
    return Mesh(flat.devices.reshape(shape), names, axis_types=types)


def batch_sharding(
    mesh: Mesh, batch_axes: Axes = None, *, bucket: Bucket | None = None
) -> NamedSharding:
    """Returns the sharding of an array `[B, T, ...]` over the batch axes.

    Args:
      mesh: the mesh.
      batch_axes: the mesh axes over which batches are sharded. In a `PartitionSpec`,
        the second entry names row axes: `PartitionSpec("data", "row1")`. By default
        "data", and "row1", "row2", ... as row axes if the mesh has them.
      bucket: the bucket of the batch, which says into how many parts rows are cut; by
        default they are whole.

    Raises:
      ValueError: if the mesh lacks one of the axes, or its devices cannot divide the
        bucket.
    """
    shard = _row_shard(mesh, batch_axes)
    names, cut = shard.axes, 1 if bucket is None else shard.cut(bucket)
    first = len(names)
    while cut > 1:
        first -= 1
        cut //= mesh.shape[names[first]]
    spec = [names[:first], names[first:]] if first < len(names) else [names]
    return NamedSharding(mesh, PartitionSpec(*spec))


def axis_names(mesh: Mesh, batch_axes: Axes) -> tuple[str, ...]:
    """Returns the batch axes, including row axes, as a tuple."""
    return _row_shard(mesh, batch_axes).axes


def _row_shard(mesh: Mesh, batch_axes: Axes) -> RowShard:
    """Returns how a mesh shards rows, with the first of their parts."""
    check_mesh(mesh)
    entries: Any = (batch_axes,)
    if batch_axes is None:
        entries = (
            _DATA_AXIS,
            [
                name
                for name in mesh.axis_names
                if name.startswith(_ROW_AXIS) and name[len(_ROW_AXIS) :].isdigit()
            ],
        )
    elif isinstance(batch_axes, PartitionSpec):
        entries = batch_axes
    rows, columns, *others = map(spec_names, (*entries, None, None))
    names = rows + columns
    known = [name for name in names if name in mesh.axis_names]
    if not names or len(set(known)) < len(names) or any(others):
        raise ValueError(
            f"`batch_axes={batch_axes!r}`, but the mesh has axes {mesh.axis_names}. "
            "Pass one or more of them, without repetition; with row axes, "
            "`PartitionSpec(rows, (row_axis, row_axis))`."
        )
    num_parts = math.prod(mesh.shape[name] for name in names)
    cuts = cuts_of([mesh.shape[name] for name in columns])
    return RowShard((0,), num_parts, names, cuts)


def check_mesh(mesh: Any) -> None:
    """Raises a ValueError if `mesh` is not a mesh."""
    check_type("mesh", mesh, Mesh, "Make it with `data_mesh()` or `jax.make_mesh`.")


def local_rows(mesh: Mesh, *, batch_axes: Axes = None) -> RowShard:
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
      batch_axes: the mesh axes over which batches are sharded, as for `batch_sharding`.

    Returns:
      The rows, for `batch_dataset` and `stream_batches`.

    Raises:
      ValueError: if the mesh lacks one of the axes, or has no device of this process.
    """
    check_mesh(mesh)
    return rows_of_devices(mesh, mesh.local_devices, batch_axes)


def rows_of_devices(
    mesh: Mesh, devices: Iterable[Device], batch_axes: Axes = None
) -> RowShard:
    """Returns the rows of every global batch that some devices of the mesh hold."""
    shard = _row_shard(mesh, batch_axes)
    # In an array with one row per part, the row of a device is the index of its part.
    sharding = NamedSharding(mesh, PartitionSpec(shard.axes))
    indices = sharding.devices_indices_map((shard.num_parts,))
    parts = {indices[device][0].indices(shard.num_parts)[0] for device in devices}
    if not parts:
        raise ValueError(
            "No device of the mesh belongs to this process. Build the mesh from "
            "`jax.devices()`, the devices of all processes."
        )
    return dataclasses.replace(shard, parts=tuple(sorted(parts)))


def replicate(tree: _T, mesh: Mesh) -> _T:
    """Returns a copy of a state, replicated on every device of the mesh.

    The result never shares memory with the original, so the original stays valid if a
    step donates the copy.

    Example:
      >>> mesh = data_mesh(jax.devices()[:1])
      >>> state = replicate({"w": jax.numpy.ones(3)}, mesh)
      >>> state["w"].sharding == NamedSharding(mesh, PartitionSpec())
      True

    Args:
      tree: a pytree of arrays and numbers, or of `jax.ShapeDtypeStruct`, such as
        `jax.eval_shape` returns.
      mesh: the mesh.

    Returns:
      The same pytree, replicated. A `jax.ShapeDtypeStruct` gets the replicated
      sharding, and so does the shape of an array if the devices are absent.

    Raises:
      ValueError: if `mesh` is not a mesh.
    """
    check_mesh(mesh)
    return put(tree, NamedSharding(mesh, PartitionSpec()))


def put(tree: _T, sharding: NamedSharding) -> _T:
    """Returns a copy of a pytree with the given sharding, as `replicate` does."""
    device = sharding.mesh.devices.flat[0]  # pyright: ignore
    if has_shapes(tree) or is_absent(device):
        return jax.tree.map(lambda x: _shape(x, sharding), tree)
    # Random keys of `jax.random.key` cannot be placed on devices of other processes.
    numbers = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)
    # Two transfers, because `may_alias` is respected only if the sharding does not
    # change. The first may still alias the original on the device of the original.
    spread = jax.device_put(numbers, sharding)
    # The copy is made later. Until then, the caller must not change a numpy array.
    spread = jax.block_until_ready(jax.device_put(spread, sharding, may_alias=False))

    def as_key(x: Any, placed: jax.Array) -> jax.Array:
        if not _is_key(x):
            return placed
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(x))

    return jax.tree.map(as_key, tree, spread)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def has_shapes(tree: Any) -> bool:
    """Whether a pytree contains shapes instead of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def _shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def fully_sharded(mesh: Mesh) -> Callable[[tuple[Any, ...], Any], PartitionSpec]:
    """Returns a function that shards each array of a state over all devices.

    `create_state` takes it, to spread parameters and optimizer states over devices as
    FSDP and ZeRO-3 do. The largest dimension that the number of devices divides is
    sharded; an array without such a dimension is replicated. The compiler decides
    whether a step gathers parameters or exchanges activations.

    Example:
      >>> spec_of = fully_sharded(data_mesh(jax.devices()[:1]))
      >>> tuple(spec_of(("kernel",), jax.ShapeDtypeStruct((4, 6), "float32")))
      (None, 'data')
    """
    check_mesh(mesh)

    def spec_of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        sizes = [size if size % mesh.size == 0 else 0 for size in leaf.shape]
        if not any(sizes):
            return PartitionSpec()
        largest = sizes.index(max(sizes))
        return PartitionSpec(*[None] * largest, mesh.axis_names)

    return spec_of
