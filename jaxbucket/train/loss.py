"""The loss contract: sums over rows, added up over all devices, and divided once.

A loss is `loss_fn(model, batch, keys) -> (loss_sum, weight)` or `(loss_sum, weight,
sums)`: sums over the examples it is given, without collectives. `weight` is what the
mean is taken over, usually `batch.num_tokens`; `sums` is a dict of further sums to
report. Steps differentiate `loss_sum`, add gradients and sums over all devices and
micro-batches, and divide once, so that a token counts the same wherever it is. Where
every example shall count the same, or tasks have weights of their own, `weight` is the
sum of these weights, and `loss_sum` that of the losses times them.

`keys` are `[B]` random keys, one for each row, or None in evaluation. They depend on
the seed, the step, the micro-batch and the row's place in it alone: use them row by row
(`jax.vmap`), and dropout is the same on every mesh and after every resume. They are of
"threefry2x32", whatever jax's default, because what "rbg" draws for a row depends on
the rows beside it. Where its speed counts more, make such keys of them:
`jax.random.wrap_key_data(jnp.tile(jax.random.key_data(keys), 2), impl="rbg")`.

A loss is given all rows or those of one device, as `mode` is. One that looks at other
rows, such as in-batch negatives, gets them by `gather_rows`, and the places of its own
among them by `row_numbers`; `jaxbucket.testing.check_loss` finds one that does not.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import TraceContextError
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxbucket.base.batch import Batch
from jaxbucket.base.checks import check_choice
from jaxbucket.sharding import Axes, axis_names
from jaxbucket.train.global_rows import MappedRows, WholeBatch, rows_at_hand
from jaxbucket.train.pmap import Rows as PmapRows

LossFn: TypeAlias = Callable[[Any, Batch, jax.Array | None], tuple]
Mode: TypeAlias = Literal["jit", "shard_map", "pmap"]
Metrics: TypeAlias = dict[str, jax.Array]
_COUNTS = ("num_tokens", "num_examples", "num_rows", "num_positions")
_STEP_METRICS = {
    *("loss", "loss_sum", "weight", *_COUNTS),
    *("padding", "grad_norm", "lr_factor", "learning_rate", "skipped"),
}
# (state, batch, keys of the rows given here) -> sums over these rows
_Sums: TypeAlias = Callable[[Any, Batch, jax.Array | None], Any]


def over_batch(
    sums: _Sums, mesh: Mesh, mode: Mode, batch_axes: Axes, seed: int | None
) -> Callable[..., Any]:
    """Returns `(state, batch, micro_batch=0) -> sums` over the rows of all devices.

    Args:
      sums: of the rows of one device.
      mesh: where batches are sharded.
      mode: how the devices' parts come together; "pmap" is inside of `jax.pmap`.
      batch_axes: the mesh axes that cut the rows.
      seed: what the rows' keys are derived from; None where there are none.

    Raises:
      ValueError: for an unknown mode or axis.
    """
    check_choice("mode", mode, get_args(Mode))
    axes = axis_names(mesh, batch_axes)
    rows = WholeBatch() if mode == "jit" else MappedRows(axes)
    if mode == "pmap":
        rows = PmapRows.of(mesh, axes)

    def on_rows(state: Any, batch: Batch, micro_batch: Any = 0) -> Any:
        with rows_at_hand(rows):
            keys = None
            if seed is not None:
                num_rows = batch.bucket.batch_size
                first_row = rows.first_row(num_rows)
                keys = row_keys(seed, state.step, first_row, num_rows, micro_batch)
            return rows.add_up(sums(state, batch, keys))

    def on_all_rows(state: Any, batch: Batch, micro_batch: Any = 0) -> Any:
        try:
            return on_rows(state, batch, micro_batch)
        except Exception as error:
            explicit = AxisType.Explicit in mesh.axis_types
            if not explicit or isinstance(error, ValueError):
                raise
            raise ValueError(
                f"`mesh` has axis types {mesh.axis_types}, and `loss_fn` is not "
                "written for Explicit ones. Build the mesh by `data_mesh()`, or by "
                "`jax.make_mesh(..., axis_types=(AxisType.Auto,) * n)`."
            ) from error

    if mode == "jit":
        return on_all_rows
    if mode == "pmap":
        return on_rows
    # check_vma would refuse ordinary models, such as a scan that starts from zeros;
    # gradients are of local sums, so the explicit psum is all they need.
    mapped = jax.shard_map(
        on_rows,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(axes), PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
        check_vma=False,
    )
    return lambda state, batch, micro_batch=0: mapped(
        state, batch, jnp.asarray(micro_batch, jnp.int32)
    )


def row_keys(
    seed: int, step: Any, first_row: Any, num_rows: int, micro_batch: Any = 0
) -> jax.Array:
    """Returns `[num_rows]` random keys, one for each row of a step's global batch.

    Args:
      seed: of the run.
      step: the step, static or traced.
      first_row: place of the first row in the global batch.
      num_rows: how many rows.
      micro_batch: place of the micro-batch in the step.
    """
    # jax takes 32 bits of a seed, or all of them, as it is configured: take them here.
    low, high = seed & 0xFFFFFFFF, seed >> 32
    # And not the default: "rbg" gives a row other bits where others are beside it.
    key = jax.random.key(np.uint32(low), impl="threefry2x32")
    for number in (np.uint32(high), step, micro_batch):
        key = jax.random.fold_in(key, number)
    rows = first_row + jnp.arange(num_rows, dtype=jnp.int32)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(rows)


def checked_loss(
    loss_fn: LossFn, model: Any, batch: Batch, keys: jax.Array | None
) -> tuple[jax.Array, Metrics]:
    """The loss, and every sum that is to be added up over devices."""
    try:
        result = loss_fn(model, batch, keys)
    except TraceContextError as error:
        raise ValueError(
            "`loss_fn` changes the model's own variables, which these steps hold "
            "fixed. Draw dropout from `keys` (`dropout(x, rngs=key)`, row by row) and "
            "not from the model's `nnx.Rngs`."
        ) from error
    sums = _named_sums(result)
    loss_sum, weight = result[:2]
    # Half precision cannot count the tokens of a batch, nor add up many.
    exact = jnp.float64 if loss_sum.dtype == jnp.float64 else jnp.float32
    for name, value in sums.items():
        if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4:
            sums[name] = value.astype(exact)
    sums["weight"] = weight.astype(exact)
    # Of rows and positions, too: what a device sees of a batch is not all of it.
    bucket = batch.bucket
    sizes = (batch.num_tokens, batch.num_examples, bucket.batch_size, bucket.num_tokens)
    counts = [jnp.asarray(size, jnp.int32) for size in sizes]
    return loss_sum, {**sums, **dict(zip(_COUNTS, counts, strict=True))}


def _named_sums(result: Any) -> Metrics:
    """What a loss returned, by name, if it is what the contract says."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        what = type(result).__name__
        if isinstance(result, tuple):
            what = f"a tuple of {len(result)}"
        elif isinstance(result, jax.Array):
            what = "one array"
        raise ValueError(
            f"`loss_fn` returned {what}: return (loss_sum, weight) or (loss_sum, "
            "weight, sums), sums over the batch and not means."
        )
    more = result[2] if len(result) == 3 else {}
    if not isinstance(more, Mapping):
        raise ValueError(
            f"`loss_fn` returned `sums` as {type(more).__name__}: make it a dict."
        )
    if _STEP_METRICS & more.keys():
        raise ValueError(
            f"`loss_fn`: {sorted(_STEP_METRICS & more.keys())} in `sums` are names of "
            "the step's own metrics. Rename them."
        )
    sums = {"loss_sum": result[0], "weight": result[1], **more}
    for name, value in sums.items():
        _check_sum(name, value)
    if not jnp.issubdtype(sums["loss_sum"].dtype, jnp.floating):
        raise ValueError(
            f"`loss_fn` returned 'loss_sum' as {result[0].dtype}: make it a float."
        )
    _warn_of_half_precision(sums)
    return sums


def _warn_of_half_precision(sums: Metrics) -> None:
    """Small batches are right, and larger ones infinite or miscounted."""
    names = [
        name
        for name, value in sums.items()
        if value.dtype == jnp.float16
        or (name == "weight" and value.dtype == jnp.bfloat16)
    ]
    if names:
        warnings.warn(
            f"`loss_fn` returned {names} in half precision: float16 is infinite beyond "
            "65,504 and counts to 2,048, bfloat16 to 256. Sum in float32: "
            "`jnp.sum(x, dtype=jnp.float32)`.",
            stacklevel=2,
        )


def _check_sum(name: str, value: Any) -> None:
    if not isinstance(value, jax.Array):
        # A Python number would be added once for each device.
        raise ValueError(
            f"`loss_fn` returned {name!r} as {type(value).__name__}: return a scalar "
            "jax.Array, a sum over the batch."
        )
    if value.dtype == jnp.bool_:
        raise ValueError(
            f"`loss_fn` returned {name!r} as bool, which does not add up: count, with "
            "`.astype(jnp.int32)`."
        )
    if value.shape:
        raise ValueError(
            f"`loss_fn` returned {name!r} of shape {list(value.shape)}: sum it to a "
            "scalar."
        )


def mean_metrics(sums: Metrics) -> Metrics:
    """The mean loss, every sum, and the share of positions that were padding."""
    weight = sums["weight"]
    loss = sums["loss_sum"].astype(weight.dtype) / jnp.where(weight == 0, 1, weight)
    # Divided by infinity it would be a loss of zero.
    loss = jnp.where(jnp.isfinite(weight), loss, jnp.nan)
    positions = sums["num_positions"].astype(jnp.float32)
    padding = 1 - sums["num_tokens"].astype(jnp.float32) / positions
    # Nothing has a mean of zero; what is not a number has none.
    empty = (weight == 0) & ~jnp.isnan(loss)
    return {"loss": jnp.where(empty, 0, loss), **sums, "padding": padding}
