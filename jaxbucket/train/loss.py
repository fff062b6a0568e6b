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

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxbucket.base.batch import Batch

# Losses that are not evaluated may require keys.
LossFn: TypeAlias = Callable[[Any, Batch, Any], tuple]
Metrics: TypeAlias = dict[str, jax.Array]
_COUNTS = ("num_tokens", "num_examples", "num_rows", "num_positions")
_STEP_METRICS = {
    *("loss", "loss_sum", "weight", *_COUNTS),
    *("padding", "grad_norm", "lr_factor", "learning_rate", "skipped"),
}


def call_loss(
    loss_fn: LossFn, model: Any, batch: Batch, keys: jax.Array | None
) -> tuple[jax.Array, Metrics, Any]:
    """Returns the loss sum, all sums to add up over devices, and the new variables.

    The variables are None if the loss does not return any.
    """
    result = loss_fn(model, batch, keys)
    sums = _named_sums(result)
    loss_sum = sums["loss_sum"]
    # Half precision is too coarse to count the tokens of a batch or to sum over them.
    exact = jnp.float64 if loss_sum.dtype == jnp.float64 else jnp.float32
    for name, value in sums.items():
        if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4:
            sums[name] = value.astype(exact)
    sums["weight"] = sums["weight"].astype(exact)
    # Rows and positions are counted, too, because a device may hold only a part of
    # the batch.
    bucket = batch.bucket
    sizes = (batch.num_tokens, batch.num_examples, bucket.batch_size, bucket.num_tokens)
    counts = [jnp.asarray(size, jnp.int32) for size in sizes]
    sums |= dict(zip(_COUNTS, counts, strict=True))
    return loss_sum, sums, result[3] if len(result) == 4 else None


def _named_sums(result: Any) -> Metrics:
    """Returns the sums of a loss by name, after checking them against the contract."""
    if not isinstance(result, tuple) or len(result) not in (2, 3, 4):
        raise ValueError(
            f"`loss_fn` returned a {type(result).__name__}. Return a tuple (loss_sum, "
            "weight), (loss_sum, weight, sums) or (loss_sum, weight, sums, variables), "
            "with sums over the batch, not means."
        )
    loss_sum, weight, *more = result
    extra = more[0] if more else {}
    if not isinstance(extra, Mapping) or _STEP_METRICS & extra.keys():
        raise ValueError(
            f"`loss_fn` returned {extra!r} as `sums`. Return a dict, with other names "
            f"than those of the metrics of the step, {sorted(_STEP_METRICS)}."
        )
    sums = {"loss_sum": loss_sum, "weight": weight, **extra}
    for name, value in sums.items():
        kind = jnp.floating if name == "loss_sum" else jnp.number
        # A Python number would be counted once per device.
        is_array = isinstance(value, jax.Array) and not value.shape
        if not is_array or not jnp.issubdtype(value.dtype, kind):
            raise ValueError(
                f"`loss_fn` returned {name!r} as {getattr(value, 'aval', value)!r}. "
                "Return a scalar `jax.Array`, a sum over the batch, and the loss as a "
                "float."
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
