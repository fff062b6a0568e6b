"""Meshes, the rows that each process loads for them, and batches as global arrays.

The rows of a batch are sharded over the *batch axes* of a mesh and replicated over all
other axes, such as those of the model. Buckets with fewer rows than devices have their
rows cut into equal parts over the last batch axes, the *row axes*.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from jaxbucket.base.batch import Batch, RowShard, cuts_of, prime_factors
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_positive
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

Axes: TypeAlias = str | Sequence[str] | PartitionSpec | None
Device: TypeAlias = jax.Device  # pyright: ignore
_T = TypeVar("_T")

DATA_AXIS = "data"
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
      devices: the devices in mesh order; by default all devices of all processes.
      max_row_shards: the largest number of devices that may share a row. Above 1, the
        mesh gets an axis "row1", "row2", ... for each prime factor of this number, over
        the same devices in the same order. A bucket uses as few of them as its B and T
        allow, the last ones first.

    Returns:
      The mesh, with axes of type `Auto`: "data" and the row axes.

    Raises:
      ValueError: if `max_row_shards` does not divide the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    factors = prime_factors(check_positive("max_row_shards", max_row_shards))
    if len(devices) % max_row_shards:
        raise ValueError(
            f"`max_row_shards={max_row_shards}` must divide the number of devices, "
            f"{len(devices)}."
        )
    names = (DATA_AXIS, *(f"{_ROW_AXIS}{i + 1}" for i in range(len(factors))))
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
    rows, columns = _divided_axes(mesh, batch_axes)
    names = rows + columns
    cut = 1
    if bucket is not None:
        cut = _shard_of(mesh, batch_axes, (0,)).cut(bucket)
    first = len(names)
    while cut > 1:
        first -= 1
        cut //= mesh.shape[names[first]]
    spec = [names[:first], names[first:]] if first < len(names) else [names]
    return NamedSharding(mesh, PartitionSpec(*spec))


def axis_names(mesh: Mesh, batch_axes: Axes) -> tuple[str, ...]:
    """Returns the batch axes, including row axes, as a tuple.

    Raises:
      ValueError: if `mesh` is not a mesh or lacks one of the axes.
    """
    rows, columns = _divided_axes(mesh, batch_axes)
    return rows + columns


def _divided_axes(
    mesh: Mesh, batch_axes: Axes
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes that only shard rows, and the row axes."""
    check_mesh(mesh)
    columns: Any = ()
    if batch_axes is None:
        rows: Any = DATA_AXIS
        columns = tuple(
            name
            for name in mesh.axis_names
            if name.startswith(_ROW_AXIS) and name[len(_ROW_AXIS) :].isdigit()
        )
    elif isinstance(batch_axes, PartitionSpec):
        if len(batch_axes) > 2:
            raise ValueError(
                f"`batch_axes={batch_axes}` has more entries than one for rows and one "
                "for row axes. Pass `PartitionSpec(rows, (row_axis, row_axis))`."
            )
        rows, columns = (*batch_axes, None, None)[:2]
    else:
        rows = batch_axes
    rows, columns = (
        (axes,) if isinstance(axes, str) else tuple(axes or ())
        for axes in (rows, columns)
    )
    names = rows + columns
    known = [name for name in names if name in mesh.axis_names]
    if not names or len(set(known)) < len(names):
        raise ValueError(
            f"`batch_axes={batch_axes!r}`, but the mesh has axes {mesh.axis_names}. "
            "Pass one or more of them, without repetition."
        )
    return rows, columns


def check_mesh(mesh: Any) -> None:
    """Raises a ValueError if `mesh` is not a mesh."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` is a {type(mesh).__name__}, not a mesh. Make one "
            "with `data_mesh()` or `jax.make_mesh`."
        )


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
    names = axis_names(mesh, batch_axes)
    num_parts = math.prod(mesh.shape[name] for name in names)
    # In an array with one row per part, the row of a device is the index of its part.
    sharding = NamedSharding(mesh, PartitionSpec(names))
    indices = sharding.devices_indices_map((num_parts,))
    parts = {indices[device][0].indices(num_parts)[0] for device in devices}
    if not parts:
        raise ValueError(
            "No device of the mesh belongs to this process. Build the mesh from "
            "`jax.devices()`, the devices of all processes."
        )
    return _shard_of(mesh, batch_axes, tuple(sorted(parts)))


def _shard_of(mesh: Mesh, batch_axes: Axes, parts: tuple[int, ...]) -> RowShard:
    """Returns some of the parts of the rows that a mesh shards."""
    rows, columns = _divided_axes(mesh, batch_axes)
    num_parts = math.prod(mesh.shape[name] for name in rows + columns)
    cuts = cuts_of([mesh.shape[name] for name in columns])
    return RowShard(parts, num_parts, rows + columns, cuts)


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
    to_mesh = _ToMesh(mesh, batch_axes, buckets)

    # Transfers are asynchronous, so a queue of their results is enough to overlap them.
    def to_global(batch: Any) -> Any:
        if isinstance(batch, Batch):
            return to_mesh(batch)
        return tuple(map(to_mesh, batch))

    return prefetch(map(to_global, batches), size)


def prefetch(items: Iterator[_T], size: int) -> Iterator[_T]:
    """Yields the items, after requesting `size` further ones."""
    queue = collections.deque(itertools.islice(items, size))
    for item in items:
        queue.append(item)
        yield queue.popleft()
    yield from queue


class _ToMesh:
    """Turns batches with the rows of this process into global batches."""

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

    def __call__(self, batch: Batch) -> Batch:
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
            if not rest and self._shard.can_cut(bucket) == cut:
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
    batch_axes: Axes = None,
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
      ValueError: if the batch axes do not divide the B of a bucket.
    """
    specs = {}
    for bucket in plan.buckets:
        sharding = batch_sharding(mesh, batch_axes, bucket=bucket)

        def spec(
            leaf: np.ndarray, bucket: Bucket = bucket, whole: NamedSharding = sharding
        ) -> jax.ShapeDtypeStruct:
            dtype, sharding = (
                _device_dtype(leaf.dtype),
                _of_array(whole, leaf.shape, bucket),
            )
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

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
