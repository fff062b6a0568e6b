"""A step that `jax.pmap` runs on every device, called as a jitted one is.

`jax.pmap` has one axis, over all devices, and wants it in front of every array it maps:
`[D, B / D, T]`. Batches are `[B, T]` and cut by the mesh, so each device first puts an
axis in front of the rows it has. Between processes nothing moves for it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, PartitionSpec

from jaxbucket.base.batch import Batch
from jaxbucket.compile.events import compiling_as, record_call
from jaxbucket.compile.jax_settings import following_prng, trace_key
from jaxbucket.train.global_rows import in_single

_DEVICES = "devices"


class PmapStep:
    """`fn(*replicated, batch)` on the rows of every device, with one result for all.

    Called, lowered and compiled as what `jax.jit` returns.

    Args:
      fn: what each device runs.
      mesh: where batches are sharded.
      axes: the mesh axes that cut the rows.
      donate: which of the arguments are donated.
      num_replicated: how many arguments stand before the batch, whole on every device.

    Attributes:
      mesh: where batches are sharded.
      axes: the mesh axes that cut the rows.

    Raises:
      ValueError: if the mesh has devices of another process between those of one.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        axes: tuple[str, ...],
        *,
        donate: tuple[int, ...] = (),
        num_replicated: int = 1,
    ):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._name = getattr(fn, "__name__", "step")
        self.mesh = mesh
        self.axes = axes
        _check_neighbours(mesh)
        self._mapped = jax.pmap(
            fn,
            _DEVICES,
            in_axes=(None,) * num_replicated + (0,),
            out_axes=None,  # pyright: ignore
            devices=list(mesh.devices.flat),
            donate_argnums=donate,
        )
        self._put_axis = jax.jit(
            jax.shard_map(
                _put_axis,
                mesh=mesh,
                in_specs=PartitionSpec(axes),
                out_specs=PartitionSpec(mesh.axis_names),
                check_vma=False,
            )
        )
        self._compiled: dict[Any, PmapCompiled] = {}

    def lower(self, *args: Any) -> PmapLowered:
        """Traces the step for these shapes."""
        *replicated, batch = args
        with_axis = jax.eval_shape(self._put_axis, batch)
        with following_prng():
            lowered = PmapLowered(
                self._name,
                self._put_axis.lower(batch),
                # Of a `ShapeDtypeStruct` pmap would make an array, where processes are
                # several; this it leaves alone.
                self._mapped.lower(*jax.tree.map(_abstract, (*replicated, with_axis))),
            )
        # Not what one device is given of them.
        record_call(self._fn, args)
        return lowered

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = structure, shapes, trace_key()
        if key not in self._compiled:
            self._compiled[key] = self.lower(*args).compile()
        return self._compiled[key](*args)


def _check_neighbours(mesh: Mesh) -> None:
    """`jax.pmap` takes the devices of a process for one piece of its axis."""
    owners = [device.process_index for device in mesh.devices.flat]
    pieces = [owner for owner, _ in itertools.groupby(owners)]
    if len(set(pieces)) < len(pieces):
        raise ValueError(
            "`mode='pmap'` needs the devices of each process side by side in the mesh, "
            f"but they are those of processes {owners}. Order them by process, or "
            "choose 'jit' or 'shard_map'."
        )


def _put_axis(batch: Batch) -> Batch:
    return jax.tree.map(lambda leaf: leaf[None], batch)


def _abstract(leaf: Any) -> Any:
    return ShapedArray(leaf.shape, leaf.dtype)


@dataclasses.dataclass(frozen=True)
class PmapLowered:
    """What `PmapStep.lower` returns."""

    name: str
    put_axis: jax.stages.Lowered
    mapped: jax.stages.Lowered

    def compile(self) -> PmapCompiled:
        put_axis = self.put_axis.compile()
        # Whatever it is given, jax calls it `_fun`.
        with compiling_as(self.name):
            return PmapCompiled(put_axis, self.mapped.compile())

    @property
    def out_tree(self) -> Any:
        return self.mapped.out_tree

    def as_text(self) -> str:
        return f"{self.put_axis.as_text()}\n{self.mapped.as_text()}"


@dataclasses.dataclass(frozen=True)
class PmapCompiled:
    """Two executables; what is asked about them is answered by the step's own."""

    put_axis: jax.stages.Compiled
    mapped: jax.stages.Compiled

    def __call__(self, *args: Any) -> Any:
        *replicated, batch = args
        return self.mapped(*replicated, self.put_axis(batch))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Of a copy that has no `mapped` yet, too.
            raise AttributeError(name)
        return getattr(self.mapped, name)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows each device has; to be asked inside the mapped function.

    Attributes:
      replicas: for every copy of the batch, the devices that have it, by their place in
        the mesh and in the order of its rows.
    """

    replicas: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[str, ...]) -> Rows:
        devices = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
        order = [mesh.axis_names.index(axis) for axis in axes]
        devices = np.moveaxis(devices, order, range(len(order)))
        num_parts = math.prod(mesh.shape[axis] for axis in axes)
        return cls(tuple(map(tuple, devices.reshape(num_parts, -1).T.tolist())))

    def first_row(self, num_rows: int) -> jax.Array:
        """The place in the global batch of this device's first row."""
        places = np.empty(np.size(self.replicas), np.int32)
        places[np.array(self.replicas)] = np.arange(len(self.replicas[0]))
        return jnp.asarray(places)[_device()] * num_rows

    def add_up(self, sums: Any) -> Any:
        """The sums of all devices, every row counted once."""
        first, *others = self.replicas
        if others:
            counts = jnp.isin(_device(), np.array(first))
            sums = jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), sums)
        return jax.lax.psum(sums, _DEVICES)

    def gather(self, tree: Any) -> Any:
        """The rows of all devices `[B, ...]`, every row once, in order."""
        # Within a replica, so that its gradients stay there: `add_up` takes one.
        return jax.tree.map(in_single(self._gather), tree)

    def _gather(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(
            x, _DEVICES, axis_index_groups=self.replicas, tiled=True
        )


def _device() -> jax.Array:
    return jax.lax.axis_index(_DEVICES)
