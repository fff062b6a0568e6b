"""The gradients of a loss sum, in any precision."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxbucket.base.batch import Batch
from jaxbucket.optim.batch_size import multiplied
from jaxbucket.train.loss import LossFn, Metrics, call_loss
from jaxbucket.train.state import TrainState
from jaxbucket.train.variables import Values, by_path, call_model, warn_if_not_returned

_PARAMETER_REMEDY = (
    "It is a parameter, which only the optimizer changes. Make it a variable of "
    "another type than `nnx.Param`."
)
_NEEDS_JIT = (
    "With `mode='shard_map'` and 'pmap', a loss is given the rows of one device only. "
    "Use `mode='jit'`, where it is given the whole batch. If it is an `nnx.RngCount`, "
    "draw dropout with `nnx.Rngs(dropout=key)` for each row (see 'Dropout' in the "
    "documentation of models)."
)
# The loss sum is differentiated unscaled if it is 2**0 to 2**7 times the mean.
# Otherwise it is scaled to the nearer of these multiples of the mean, up to a factor of
# two. float16 overflows beyond 65,504 and loses bits below 2**-14. Gradients of a sum
# over a batch may exceed the upper limit, and a token's share of the mean (1 / weight)
# may fall below the lower one. With this range, a token's share keeps all its bits down
# to 2**-21, and mean gradients may be as large as 2**8.
_LEAST, _MOST = 0, 7


def gradient_sums(
    loss_fn: LossFn, *, updates_variables: bool
) -> Callable[..., tuple[tuple[Any, Metrics], Values]]:
    """Returns `(state, batch, keys) -> ((gradients, sums), variables)`.

    The gradients are those of the loss sum. In half precision they are returned in
    float32, so that adding them up over micro-batches and devices does not lose
    precision.

    Args:
      loss_fn: the loss.
      updates_variables: whether the new values of variables are returned. Otherwise,
        none may change.
    """

    def sums(state: TrainState, batch: Batch, keys: jax.Array | None) -> Any:
        def call(model: Any) -> tuple[tuple[jax.Array, Metrics], Any]:
            loss_sum, sums, returned = call_loss(loss_fn, model, batch, keys)
            warn_if_not_returned(state.variables, returned)
            return (loss_sum, sums), returned

        def loss(params: Any) -> tuple[jax.Array, tuple[Metrics, Values]]:
            given = dataclasses.replace(state, params=params)
            if not updates_variables:
                (loss_sum, sums), _ = call_model(call, given, _NEEDS_JIT)
                return loss_sum, (sums, {})
            (loss_sum, sums), new = call_model(
                call, given, _PARAMETER_REMEDY, fixed=("params", "frozen")
            )
            new = {path: new[path] for path in by_path(state.variables)}
            return loss_sum, (sums, new)

        loss_sum, pull_back, (sums, variables) = jax.vjp(
            loss, state.params, has_aux=True
        )
        exponent = _cotangent_exponent(sums["weight"], loss_sum.dtype)
        (grads,) = pull_back(_power_of_two(exponent).astype(loss_sum.dtype))
        undo = _power_of_two(-exponent)
        grads = jax.tree.map(functools.partial(multiplied, undo), grads)
        if variables:
            # Statistics of a batch without examples are not finite.
            is_empty, old = batch.num_tokens == 0, by_path(state.variables)
            variables = {
                path: jnp.where(is_empty, old[path], new)
                for path, new in variables.items()
            }
            grads = jax.tree.map(lambda x: jnp.where(is_empty, 0, x), grads)
        return (grads, sums), variables

    return sums


def _cotangent_exponent(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the exponent of the power of two that is the cotangent of `loss_sum`.

    A cotangent of 1 gives the gradient of the sum, and 1 / weight the gradient of the
    mean. Scaling by a power of two is exact.
    """
    # Logarithms may be inexact.
    floor_log2 = jnp.frexp(weight.astype(jnp.float32))[1] - 1
    exponent = jnp.clip(floor_log2, _LEAST, _MOST) - floor_log2
    usable = (weight > 0) & jnp.isfinite(weight)
    # Neither the factor nor its inverse may be subnormal: devices flush those to zero.
    normal = min(126, -jnp.finfo(dtype).minexp)
    return jnp.clip(jnp.where(usable, exponent, 0), -normal, normal)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent as float32, which must be a normal number."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
