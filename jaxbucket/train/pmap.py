"""Steps that `jax.pmap` runs on every device, with the interface of `jax.jit`.

`jax.pmap` has a single axis over all devices, which must be the first axis of every
mapped array: `[D, B / D, T]`. Batches are `[B, T]`, sharded over a mesh. Each device
therefore adds a leading axis to its rows first, which moves no data between devices.
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

_DEVICES = "devices"
# The options of jax that change what a step computes.
_SETTINGS = (
    *("jax_default_prng_impl", "jax_threefry_partitionable", "jax_enable_x64"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion"),
)


class PmapStep:
    """Runs `fn(*replicated, batch)` on the rows of every device.

    `fn` returns the same result on all devices. This object can be called, lowered and
    compiled like the result of `jax.jit`.

    Args:
      fn: the function that each device runs.
      mesh: the mesh on which batches are sharded.
      axes: the mesh axes over which rows are sharded.
      donate: the indices of the arguments that are donated.
      num_replicated: the number of arguments before the batch, which are replicated.

    Attributes:
      mesh: the mesh on which batches are sharded.
      axes: the mesh axes over which rows are sharded.

    Raises:
      ValueError: if the devices of a process are not adjacent in the mesh.
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
        self.mesh = mesh
        self.axes = axes
        _check_adjacent(mesh)
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
        """Traces the step for arguments of these shapes."""
        *replicated, batch = args
        _check_replicated(replicated)
        with_axis = jax.eval_shape(self._put_axis, batch)
        return PmapLowered(
            self._put_axis.lower(batch),
            # With several processes, pmap would turn a `ShapeDtypeStruct` into an
            # array. It leaves a `ShapedArray` unchanged.
            self._mapped.lower(*jax.tree.map(_abstract, (*replicated, with_axis))),
        )

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
        key = structure, shapes, settings
        if key not in self._compiled:
            self._compiled[key] = self.lower(*args).compile()
        return self._compiled[key](*args)


def _check_adjacent(mesh: Mesh) -> None:
    """Raises a ValueError unless the devices of each process are adjacent in the mesh.

    `jax.pmap` assumes that they form a contiguous part of its axis.
    """
    owners = [device.process_index for device in mesh.devices.flat]
    groups = [owner for owner, _ in itertools.groupby(owners)]
    if len(set(groups)) < len(groups):
        raise ValueError(
            "`mode='pmap'` needs the devices of each process next to each other in "
            f"`mesh`, but they belong to processes {owners}. Order them by process, or "
            "use 'jit' or 'shard_map'."
        )


def _check_replicated(state: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(state):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and not sharding.is_fully_replicated:
            name = jax.tree_util.keystr(path[1:])
            raise ValueError(
                f"`state{name}` is sharded, but with `mode='pmap'` every device holds "
                "the whole state. Use 'jit' or 'shard_map', with `state_sharding=`."
            )


def _put_axis(batch: Batch) -> Batch:
    return jax.tree.map(lambda leaf: leaf[None], batch)


def _abstract(leaf: Any) -> Any:
    return ShapedArray(leaf.shape, leaf.dtype)


@dataclasses.dataclass(frozen=True)
class PmapLowered:
    """The result of `PmapStep.lower`, similar to `jax.stages.Lowered`."""

    put_axis: jax.stages.Lowered
    mapped: jax.stages.Lowered

    def compile(self) -> PmapCompiled:
        return self.join(self.put_axis.compile(), self.mapped.compile())

    @property
    def stages(self) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """Both programs, which are compiled one by one."""
        return self.put_axis, self.mapped

    def join(self, *stages: jax.stages.Compiled) -> PmapCompiled:
        """Returns the step that consists of both executables."""
        return PmapCompiled(*stages)


@dataclasses.dataclass(frozen=True)
class PmapCompiled:
    """A compiled step, whose attributes are those of the mapped executable."""

    put_axis: jax.stages.Compiled
    mapped: jax.stages.Compiled

    @property
    def stages(self) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        """Both executables."""
        return self.put_axis, self.mapped

    def __call__(self, *args: Any) -> Any:
        *replicated, batch = args
        return self.mapped(*replicated, self.put_axis(batch))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # While an instance is copied, it has no `mapped` yet.
            raise AttributeError(name)
        return getattr(self.mapped, name)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of each device, for use inside the mapped function.

    Collectives run within a replica, so that values and gradients stay in it.

    Attributes:
      replicas: the devices of each replica of the batch, as indices into the flattened
        mesh, in the order of the rows.
    """

    replicas: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[str, ...]) -> Rows:
        """Returns the rows of a batch that is sharded over these axes of a mesh."""
        devices = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
        order = [mesh.axis_names.index(axis) for axis in axes]
        devices = np.moveaxis(devices, order, range(len(order)))
        num_parts = math.prod(mesh.shape[axis] for axis in axes)
        return cls(tuple(map(tuple, devices.reshape(num_parts, -1).T.tolist())))

    def first_row(self, num_rows: int) -> jax.Array:
        """Returns the index of this device's first row in the global batch."""
        parts = np.empty(np.size(self.replicas), np.int32)
        parts[np.array(self.replicas)] = np.arange(len(self.replicas[0]))
        return jnp.asarray(parts)[_device()] * num_rows

    def sum_over_rows(self, sums: Any) -> Any:
        """Returns the sums over all devices, counting every row once."""
        return jax.lax.psum(sums, _DEVICES, axis_index_groups=self.replicas)

    def gather(self, tree: Any) -> Any:
        """Returns the rows of all devices `[B, ...]`, every row once, in order."""
        return jax.tree.map(self._gather, tree)

    def _gather(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(
            x, _DEVICES, axis_index_groups=self.replicas, tiled=True
        )


def _device() -> jax.Array:
    return jax.lax.axis_index(_DEVICES)
