"""How the rows of a batch are divided over devices: "jit", "shard_map" or "pmap".

Under "jit", a function is given the whole batch, and the compiler partitions it. In the
other modes it is given the rows of one device, and results are added up explicitly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxbucket.attention.row_layout import layout_of, row_layout
from jaxbucket.base.batch import Batch
from jaxbucket.base.checks import check_choice, check_seed
from jaxbucket.base.notes import Noting
from jaxbucket.sharding.mesh import Axes, axis_names
from jaxbucket.train.pmap import DEVICES, PmapStep, check_one_axis, check_whole_rows
from jaxbucket.train.state import checked_state

Mode: TypeAlias = Literal["jit", "shard_map", "pmap"]
# (state, batch, keys of the batch's rows) -> (sums over these rows, values that are
# equal on all devices)
_Sums: TypeAlias = Callable[[Any, Batch, jax.Array | None], tuple[Any, Any]]


def checked_axes(mesh: Mesh, mode: Mode, batch_axes: Axes) -> tuple[str, ...]:
    """Returns the mesh axes that shard rows, after checking that a mode has them."""
    check_choice("mode", mode, get_args(Mode))
    axes = axis_names(mesh, batch_axes)
    if mode == "pmap":
        check_one_axis(mesh, axes)
    return axes


def jit_step(
    fn: Callable[..., Any],
    mesh: Mesh,
    mode: Mode,
    *,
    donate: tuple[int, ...] = (),
    out_shardings: Any = None,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """Returns `fn(*replicated, batch)`, jitted or pmapped.

    Args:
      fn: the function; in "pmap", of the rows of one device.
      mesh: the mesh on which batches are sharded.
      mode: how the function runs on the devices.
      donate: the indices of the arguments that are donated.
      out_shardings: the shardings of the results, by default replicated as in "pmap".
      check: called with the state before it is first used, except in "pmap".
    """
    if mode == "pmap":
        return PmapStep(fn, mesh, donate)
    return JitStep(fn, mesh, mode, donate, out_shardings, check)


class JitStep:
    """Runs `fn(*replicated, batch)`, which knows how rows are divided over devices.

    The layout of a batch cannot be seen while a function is traced, so it is read from
    the arguments of a call. This object can be used like the result of `jax.jit`. The
    arguments are those of `jit_step`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        mode: Mode,
        donate: tuple[int, ...],
        out_shardings: Any,
        check: Callable[[Any], None] | None,
    ):
        functools.update_wrapper(self, fn)
        self._check = check
        self._mode: Mode = mode
        self._signature = inspect.signature(fn)
        if out_shardings is None:
            out_shardings = NamedSharding(mesh, PartitionSpec())
        self._jitted = jax.jit(fn, donate_argnums=donate, out_shardings=out_shardings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._layout(*args, **kwargs):
            return self._jitted(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the step for arguments of these shapes."""
        with self._layout(*args, **kwargs):
            return self._jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Traces and lowers the step for arguments of these shapes."""
        return self.trace(*args, **kwargs).lower()

    def _layout(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        *states, batch = self._signature.bind(*args, **kwargs).args
        if self._check is not None:
            self._check(states[0])
            self._check = None
        layout = layout_of(batch)
        if self._mode != "jit" and layout is not None:
            if layout.mesh.size > 1:
                check_whole_rows(layout, self._mode)
                check_not_gathered("The state", states, layout.rows)
            layout = None
        return row_layout(layout)


def check_not_gathered(name: str, states: Any, axes: tuple[str, ...]) -> None:
    """Raises a ValueError if a state is sharded over the devices of different rows."""
    for path, leaf in jax.tree.leaves_with_path(states):
        sharding = getattr(leaf, "sharding", leaf)
        if isinstance(sharding, NamedSharding):
            shared = {*jax.tree.leaves(tuple(sharding.spec))} & {*axes}
            if shared:
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path[1:])} is sharded over "
                    f"{sorted(shared)}, axes that shard batches. `mode='shard_map'` "
                    "would gather the whole state on every device. Use 'jit'."
                )


def check_is_replicated(state: Any) -> None:
    """Raises a ValueError if a state is sharded, for a step that returns it whole."""
    for path, leaf in jax.tree.leaves_with_path(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
            raise ValueError(
                f"`state{jax.tree_util.keystr(path)}` is sharded ({sharding.spec}), "
                "but the step would return it replicated. Pass `state_sharding="
                "jax.tree.map(lambda x: x.sharding, state)` to `make_train_step`."
            )


def over_rows(
    fn: Callable[..., Any],
    mesh: Mesh,
    mode: Mode,
    axes: tuple[str, ...],
    *,
    gathers: bool = False,
) -> Callable[..., Any]:
    """Returns `fn(state, batch, *replicated)` over all rows, for use in `jit_step`.

    Args:
      fn: a function of the rows that it is given.
      mesh: the mesh on which batches are sharded.
      mode: how the function runs on the devices.
      axes: the mesh axes that shard the rows.
      gathers: whether results are rows, in the order of the batch. By default they are
        equal on all devices.
    """
    if mode == "jit":
        if AxisType.Explicit in mesh.axis_types:
            return functools.partial(_naming_explicit_axes, fn, mesh)
        return fn
    if mode == "pmap":
        if not gathers:
            return fn
        return lambda *args: jax.lax.all_gather(fn(*args), DEVICES, tiled=True)

    def mapped(state: Any, batch: Batch, *replicated: Any) -> Any:
        rows, whole = PartitionSpec(axes), PartitionSpec()
        # `check_vma` would reject ordinary models, such as a scan that starts from
        # zeros. Gradients are taken of local sums, so the explicit psum is all they
        # need.
        return jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=(whole, rows, *[whole] * len(replicated)),
            out_specs=rows if gathers else whole,
            axis_names=set(axes),
            check_vma=False,
        )(state, batch, *replicated)

    return mapped


def _naming_explicit_axes(fn: Callable[..., Any], mesh: Mesh, *args: Any) -> Any:
    with Noting(
        f"`mesh` has axis types {mesh.axis_types}. If the loss does not support "
        "Explicit axes, build the mesh with `data_mesh()`, or with "
        "`jax.make_mesh(..., axis_types=(AxisType.Auto,) * n)`."
    ):
        return fn(*args)


def sum_over_batch(
    sums: _Sums, mesh: Mesh, mode: Mode, axes: tuple[str, ...], seed: int | None
) -> Callable[..., Any]:
    """Returns `(state, batch, micro_batch=0) -> (sums over all rows, values)`.

    Args:
      sums: `(state, batch, keys) -> (sums, values)`, sums over the rows of one device,
        and values that are equal on all devices.
      mesh, mode, axes: as for `over_rows`.
      seed: the seed of the rows' keys; None to pass no keys.
    """
    names = {"jit": (), "shard_map": axes, "pmap": (DEVICES,)}[mode]

    def on_rows(state: Any, batch: Batch, micro_batch: jax.Array) -> Any:
        keys = None
        if seed is not None:
            num_rows = batch.bucket.batch_size
            keys = row_keys(
                seed,
                checked_state(state).step,
                num_rows,
                first_row=jax.lax.axis_index(names) * num_rows if names else 0,
                micro_batch=micro_batch,
            )
        local, values = sums(state, batch, keys)
        return (jax.lax.psum(local, names) if names else local), values

    mapped = over_rows(on_rows, mesh, mode, axes)
    return lambda state, batch, micro_batch=0: mapped(
        state, batch, jnp.asarray(micro_batch, jnp.int32)
    )


def row_keys(
    seed: int,
    step: Any,
    num_rows: int,
    *,
    first_row: Any = 0,
    micro_batch: Any = 0,
) -> jax.Array:
    """Returns `[num_rows]` random keys, one for each row, as losses receive them.

    Use them in your own step, row by row, so that its dropout depends neither on the
    mesh nor on when a run was resumed, and equals that of `make_train_step`.

    Example:
      >>> keys = row_keys(0, step=7, num_rows=4)
      >>> dropped = jax.vmap(lambda key: jax.random.bernoulli(key, 0.1))(keys)
      >>> dropped.shape
      (4,)

    Args:
      seed: the seed of the run, as for `make_train_step`.
      step: the number of steps done before this one, static or traced.
      num_rows: the number of rows, `batch.bucket.batch_size` inside of `jax.jit`.
      first_row: the index of the first row in the global batch.
      micro_batch: the index of the micro-batch in the step.
    """
    check_seed(seed)
    # Split the seed here, because jax uses 32 or 64 bits of it, depending on its
    # configuration.
    low, high = seed & 0xFFFFFFFF, seed >> 32
    # Do not use jax's default implementation, because the bits that "rbg" draws for a
    # row depend on the other rows.
    key = jax.random.key(np.uint32(low), impl="threefry2x32")
    for number in (np.uint32(high), step, micro_batch):
        key = jax.random.fold_in(key, number)
    rows = first_row + jnp.arange(num_rows, dtype=jnp.int32)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(rows)
