"""The loss contract: a loss returns sums over rows; steps add them up and divide once.

A loss is `loss_fn(model, batch, keys) -> (loss_sum, weight)`, `(loss_sum, weight,
sums)` or `(loss_sum, weight, sums, variables)`. It returns sums over the rows it is
given, without collectives. `weight` is the divisor of the mean, usually
`batch.num_tokens`; `sums` is a dict of further sums to report. Steps differentiate
`loss_sum`, add gradients and sums over all devices and micro-batches, and divide once,
so that every token counts the same on any device. To weight examples or tasks, multiply
each loss by its weight before summing, and return the sum of these weights as `weight`.

A model may have variables that its forward pass updates, such as batch statistics. An
NNX model assigns them. For a Linen module, `model` is the dict of its collections, and
the loss returns the new ones as `variables`, for instance `{"batch_stats": ...}`.

`keys` are `[B]` random keys, one for each row, or None in evaluation. A key depends
only on the seed, the step, the micro-batch and the row's index in the global batch. Use
the keys row by row (`jax.vmap`): dropout is then the same on every mesh and after every
resume. They always use "threefry2x32", regardless of jax's default, because the bits
that "rbg" draws for a row depend on the other rows of the same call. If speed matters
more, convert them:
`jax.random.wrap_key_data(jnp.tile(jax.random.key_data(keys), 2), impl="rbg")`.

With `mode="jit"`, a loss is given the whole batch, with "shard_map" and "pmap" the rows
of one device. So a loss that reads other rows, for instance for in-batch negatives, or
updates variables, needs "jit". `jaxbucket.testing.check_loss` detects a loss that
breaks this contract.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeCollectionNotFound, TraceContextError
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxbucket.base.batch import Batch
from jaxbucket.base.checks import check_choice, check_seed
from jaxbucket.sharding import Axes, axis_names
from jaxbucket.train.pmap import Rows as PmapRows
from jaxbucket.train.rows import MappedRows, Rows, WholeBatch
from jaxbucket.train.state import checked_state

# Losses that are not evaluated may require keys.
LossFn: TypeAlias = Callable[[Any, Batch, Any], tuple]
Mode: TypeAlias = Literal["jit", "shard_map", "pmap"]
Metrics: TypeAlias = dict[str, jax.Array]
_COUNTS = ("num_tokens", "num_examples", "num_rows", "num_positions")
_STEP_METRICS = {
    *("loss", "loss_sum", "weight", *_COUNTS),
    *("padding", "grad_norm", "lr_factor", "learning_rate", "skipped"),
}
# (state, batch, keys of the batch's rows) -> (sums over these rows, values that are
# equal on all devices)
_Sums: TypeAlias = Callable[[Any, Batch, jax.Array | None], tuple[Any, Any]]


def sum_over_batch(
    sums: _Sums, mesh: Mesh, mode: Mode, batch_axes: Axes, seed: int | None
) -> Callable[..., Any]:
    """Returns `(state, batch, micro_batch=0) -> (sums over all rows, values)`.

    Args:
      sums: `(state, batch, keys) -> (sums, values)`, sums over the rows of one device,
        and values that are equal on all devices.
      mesh: the mesh on which batches are sharded.
      mode: how sums are added up over devices. The function that is returned for "pmap"
        must be called inside `jax.pmap`.
      batch_axes: the mesh axes over which rows are sharded.
      seed: the seed of the rows' keys; None to pass no keys.

    Raises:
      ValueError: if the mode or an axis is unknown.
    """
    check_choice("mode", mode, get_args(Mode))
    axes = axis_names(mesh, batch_axes)
    rows = rows_of(mode, mesh, axes)

    def on_rows(state: Any, batch: Batch, micro_batch: Any = 0) -> Any:
        keys = None
        if seed is not None:
            num_rows = batch.bucket.batch_size
            keys = row_keys(
                seed,
                checked_state(state).step,
                num_rows,
                first_row=rows.first_row(num_rows),
                micro_batch=micro_batch,
            )
        local, values = sums(state, batch, keys)
        return rows.sum_over_rows(local), values

    def on_all_rows(state: Any, batch: Batch, micro_batch: Any = 0) -> Any:
        try:
            return on_rows(state, batch, micro_batch)
        except Exception as error:
            explicit = AxisType.Explicit in mesh.axis_types
            if not explicit or isinstance(error, ValueError):
                raise
            raise ValueError(
                f"`mesh` has axis types {mesh.axis_types}, but `loss_fn` does not "
                "support Explicit axes. Build the mesh with `data_mesh()`, or with "
                "`jax.make_mesh(..., axis_types=(AxisType.Auto,) * n)`."
            ) from error

    if mode == "jit":
        return on_all_rows
    if mode == "pmap":
        return on_rows
    # `check_vma` would reject ordinary models, such as a scan that starts from zeros.
    # Gradients are taken of local sums, so the explicit psum is all they need.
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


def rows_of(mode: Mode, mesh: Mesh, axes: tuple[str, ...]) -> Rows:
    """Returns the rows that a loss is given in a mode."""
    match mode:
        case "jit":
            return WholeBatch()
        case "shard_map":
            return MappedRows(axes)
        case "pmap":
            return PmapRows.of(mesh, axes)


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


def checked_loss(
    loss_fn: LossFn, model: Any, batch: Batch, keys: jax.Array | None
) -> tuple[jax.Array, Metrics, Any]:
    """Returns the loss sum, all sums to add up over devices, and the new variables.

    The variables are None if the loss does not return any.
    """
    try:
        result = loss_fn(model, batch, keys)
    except TraceContextError as error:
        raise ValueError(
            "`loss_fn` changes variables of an NNX model that are not those of its "
            "argument: inside a jax transformation, such as `jax.vmap`, or of a model "
            "outside of the function. Change only variables of the model that the "
            "function receives, and draw dropout from `keys`, row by row (`dropout(x, "
            "rngs=key)`), instead of from the model's `nnx.Rngs`."
        ) from error
    except ScopeCollectionNotFound as error:
        missing = 'collection "params"' in str(error)
        if not missing or not isinstance(model, Mapping) or "params" in model:
            raise
        raise ValueError(
            "`loss_fn` calls a Linen module with variables that have no collection "
            f"'params': {list(model)}. The state has parameters only, so the loss "
            'receives them as they are. Call `module.apply({"params": params}, ...)`, '
            "or pass the other collections to `create_state(..., variables=)`."
        ) from error
    _check_is_not_collections(result, model)
    sums = _named_sums(result)
    loss_sum, weight = result[:2]
    # Half precision is too coarse to count the tokens of a batch or to sum over them.
    exact = jnp.float64 if loss_sum.dtype == jnp.float64 else jnp.float32
    for name, value in sums.items():
        if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4:
            sums[name] = value.astype(exact)
    sums["weight"] = weight.astype(exact)
    # Rows and positions are counted, too, because a device may hold only a part of
    # the batch.
    bucket = batch.bucket
    sizes = (batch.num_tokens, batch.num_examples, bucket.batch_size, bucket.num_tokens)
    counts = [jnp.asarray(size, jnp.int32) for size in sizes]
    sums |= dict(zip(_COUNTS, counts, strict=True))
    return loss_sum, sums, result[3] if len(result) == 4 else None


def _check_is_not_collections(result: Any, model: Any) -> None:
    """Raises a ValueError if a loss returns new variables as its third value."""
    if isinstance(result, tuple) and len(result) == 3 and isinstance(model, Mapping):
        names = result[2].keys() if isinstance(result[2], Mapping) else ()
        if collections := [x for x in names if isinstance(model.get(x), Mapping)]:
            raise ValueError(
                f"`loss_fn` returned the collections {collections} as its third value, "
                "which are sums to report. Return new variables as the fourth one: "
                "`return loss_sum, weight, {}, new`."
            )


def _named_sums(result: Any) -> Metrics:
    """Returns the sums of a loss by name, after checking them against the contract."""
    if not isinstance(result, tuple) or len(result) not in (2, 3, 4):
        kind = f"a value of type {type(result).__name__}"
        if isinstance(result, tuple):
            kind = f"a tuple of length {len(result)}"
        elif isinstance(result, jax.Array):
            kind = "a single array"
        raise ValueError(
            f"`loss_fn` returned {kind}. Return (loss_sum, weight), (loss_sum, weight, "
            "sums) or (loss_sum, weight, sums, variables), with sums over the batch, "
            "not means."
        )
    loss_sum, weight, *more = result
    extra = more[0] if more else {}
    if not isinstance(extra, Mapping):
        raise ValueError(
            f"`loss_fn` returned `sums` as {type(extra).__name__}. Return a dict."
        )
    if reserved := _STEP_METRICS & extra.keys():
        raise ValueError(
            f"`loss_fn` returned `sums` with the names {sorted(reserved)}, which are "
            "reserved for the metrics of the step. Rename them."
        )
    sums = {"loss_sum": loss_sum, "weight": weight, **extra}
    for name, value in sums.items():
        _check_sum(name, value)
    if not jnp.issubdtype(sums["loss_sum"].dtype, jnp.floating):
        raise ValueError(
            f"`loss_fn` returned 'loss_sum' as {loss_sum.dtype}. Return a float."
        )
    _warn_of_half_precision(sums)
    return sums


def _warn_of_half_precision(sums: Metrics) -> None:
    """Warns of sums that are right for small batches only."""
    names = [
        name
        for name, value in sums.items()
        if value.dtype == jnp.float16
        or (name == "weight" and value.dtype == jnp.bfloat16)
    ]
    if names:
        warnings.warn(
            f"`loss_fn` returned {names} in half precision. float16 overflows beyond "
            "65,504 and counts exactly only up to 2,048, bfloat16 up to 256. Sum in "
            "float32: `jnp.sum(x, dtype=jnp.float32)`.",
            stacklevel=2,
        )


def _check_sum(name: str, value: Any) -> None:
    if not isinstance(value, jax.Array):
        # A Python number would be counted once per device.
        raise ValueError(
            f"`loss_fn` returned {name!r} as {type(value).__name__}. Return a scalar "
            "jax.Array, a sum over the batch."
        )
    if value.dtype == jnp.bool_:
        raise ValueError(
            f"`loss_fn` returned {name!r} as bool, which cannot be summed. Convert it "
            "with `.astype(jnp.int32)`."
        )
    if value.shape:
        raise ValueError(
            f"`loss_fn` returned {name!r} with shape {list(value.shape)}. Sum it to a "
            "scalar."
        )


def mean_metrics(sums: Metrics) -> Metrics:
    """Returns the mean loss, all sums, and the share of positions that are padding."""
    weight = sums["weight"]
    loss = sums["loss_sum"].astype(weight.dtype) / jnp.where(weight == 0, 1, weight)
    # Dividing by an infinite weight would report a loss of zero.
    loss = jnp.where(jnp.isfinite(weight), loss, jnp.nan)
    positions = sums["num_positions"].astype(jnp.float32)
    padding = 1 - sums["num_tokens"].astype(jnp.float32) / positions
    # The mean over no tokens is zero, unless the loss sum is NaN.
    empty = (weight == 0) & ~jnp.isnan(loss)
    return {"loss": jnp.where(empty, 0, loss), **sums, "padding": padding}
