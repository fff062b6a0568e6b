"""Steps that `jax.pmap` runs on every device, with the interface of `jax.jit`.

`jax.pmap` has a single axis over all devices, which must be the first axis of every
mapped array: `[D, B / D, T]`. Batches are `[B, T]`, sharded over a mesh. Each device
therefore adds a leading axis to its rows first, which moves no data between devices.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import Mesh, PartitionSpec

from jaxbucket.attention.row_layout import RowLayout, layout_of

DEVICES = "devices"


def check_one_axis(mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Raises a ValueError unless the rows of a batch are sharded over one pmap axis."""
    wide = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    if [name for name in axes if mesh.shape[name] > 1] != wide:
        raise ValueError(
            f"`batch_axes={axes}` must be all axes of the mesh, {mesh.axis_names}, in "
            "its order, for `mode='pmap'`. Use 'jit' or 'shard_map'."
        )
    # `jax.pmap` assumes that the devices of a process form a contiguous part.
    owners = [device.process_index for device in mesh.devices.flat]
    groups = [owner for owner, _ in itertools.groupby(owners)]
    if len(set(groups)) < len(groups):
        raise ValueError(
            f"`mesh` has devices of the processes {owners}. For `mode='pmap'`, order "
            "them by process, or use 'jit' or 'shard_map'."
        )


def check_whole_rows(layout: RowLayout | None, mode: str) -> None:
    """Raises a ValueError if a batch has rows that several devices share."""
    if layout is not None and layout.columns:
        raise ValueError(
            f"`mode={mode!r}` runs the loss on the rows of one device, but "
            f"{layout.num_cuts} devices share each row of this batch. Use 'jit', or a "
            "`data_mesh()` without `max_row_shards`."
        )


class PmapStep:
    """Runs `fn(*replicated, batch)` on the rows of every device.

    `fn` returns the same result on all devices. This object can be called, lowered and
    compiled like the result of `jax.jit`.

    Args:
      fn: the function that each device runs.
      mesh: the mesh on which batches are sharded, over all of its axes.
      donate: the indices of the arguments that are donated.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh, donate: tuple[int, ...] = ()
    ):
        functools.update_wrapper(self, fn)
        num_replicated = len(inspect.signature(fn).parameters) - 1
        # `jax.pmap` itself would return arrays of this process only.
        self._mapped = jax.pmap(
            fn,
            DEVICES,
            in_axes=(None,) * num_replicated + (0,),
            out_axes=None,  # pyright: ignore
            devices=list(mesh.devices.flat),
            donate_argnums=donate,
        )
        rows = PartitionSpec(mesh.axis_names)
        self._put_axis = jax.jit(
            jax.shard_map(
                functools.partial(jax.tree.map, lambda leaf: leaf[None]),
                mesh=mesh,
                in_specs=rows,
                out_specs=rows,
                check_vma=False,
            )
        )
        self._compiled: dict[Any, PmapStages] = {}

    def lower(self, *args: Any) -> PmapStages:
        """Traces the step for arguments of these shapes."""
        *replicated, batch = args
        check_whole_rows(layout_of(batch), "pmap")
        with_axis = jax.eval_shape(self._put_axis, batch)
        # With several processes, pmap would turn a `ShapeDtypeStruct` into an array. It
        # leaves a `ShapedArray` unchanged.
        abstract = jax.tree.map(
            lambda x: ShapedArray(x.shape, x.dtype), (*replicated, with_axis)
        )
        return PmapStages((self._put_axis.lower(batch), self._mapped.lower(*abstract)))

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._compiled:
            self._compiled[key] = self.lower(*args).compile()
        return self._compiled[key](*args)


@dataclasses.dataclass(frozen=True)
class PmapStages:
    """A lowered or a compiled step, like `jax.stages.Lowered` and `Compiled`.

    Its other attributes are those of the mapped program.

    Attributes:
      stages: both programs: the one that adds the leading axis, and the mapped one.
    """

    stages: tuple[Any, ...]

    def compile(self) -> PmapStages:
        return self.join(*(stage.compile() for stage in self.stages))

    def join(self, *stages: jax.stages.Compiled) -> PmapStages:
        """Returns the step that consists of both executables."""
        return PmapStages(stages)

    def __call__(self, *args: Any) -> Any:
        *replicated, batch = args
        put_axis, mapped = self.stages
        return mapped(*replicated, put_axis(batch))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "stages":
            # While an instance is copied, it has no `stages` yet.
            raise AttributeError(name)
        return getattr(self.stages[-1], name)
