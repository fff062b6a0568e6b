"""The gradients of a loss sum, in any precision."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxbucket.base.batch import Batch
from jaxbucket.optim.precision import at_least_float32, computes_in
from jaxbucket.train.loss import LossFn, Metrics, checked_loss
from jaxbucket.train.state import TrainState, checked_state
from jaxbucket.train.variables import (
    Values,
    by_path,
    check_parameters,
    check_variables,
    kept_if,
    overwritten_values,
    values_after,
    warn_if_not_returned,
    with_values,
)

_NEEDS_JIT = (
    "With `mode='shard_map'` and 'pmap', a loss is given the rows of one device only. "
    "Use `mode='jit'`, where it is given the whole batch. Draw dropout from `keys` "
    "(`dropout(x, rngs=key)`, row by row) instead of from the model's `nnx.Rngs`."
)


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
        def call(state: TrainState) -> tuple[Any, Metrics, Values]:
            model = state.model
            loss_sum, sums, returned = checked_loss(loss_fn, model, batch, keys)
            warn_if_not_returned(state.variables, returned)
            return loss_sum, sums, values_after(state.variables, model, returned)

        def loss(
            params: Any, overwritten: Values
        ) -> tuple[jax.Array, tuple[Metrics, Values]]:
            variables = with_values(state.variables, overwritten)
            before = dataclasses.replace(state, params=params, variables=variables)
            loss_sum, sums, new = call(before)
            check_parameters(before, new, lambda x: call(x)[-1])
            if not updates_variables:
                check_variables(before, new, lambda x: call(x)[-1], _NEEDS_JIT)
                return loss_sum, (sums, {})
            return loss_sum, (sums, {path: new[path] for path in by_path(variables)})

        _check_differentiable(checked_state(state).params)
        overwritten = overwritten_values(state.variables)
        if overwritten and not updates_variables:
            raise ValueError(f"The model has layers in fp8. {_NEEDS_JIT}")
        loss_sum, pull_back, (sums, variables) = jax.vjp(
            loss, state.params, overwritten, has_aux=True
        )
        weight = sums["weight"]

        def gradients(least: int, most: int) -> Any:
            exponent = _cotangent_exponent(weight, loss_sum.dtype, least, most)
            cotangent, undo = _power_of_two(exponent), _power_of_two(-exponent)
            if overwritten:
                # Scales in fp8 are learned from the gradients of the mean itself.
                usable = (weight > 0) & jnp.isfinite(weight)
                undo = jnp.where(usable, weight, 1).astype(jnp.float32)
                cotangent = 1 / undo
            grads, new = pull_back(cotangent.astype(loss_sum.dtype))
            return jax.tree.map(functools.partial(_times, undo), grads), new

        grads, new = gradients(*_MEAN_EXPONENTS)
        if computes_in(jnp.float16, pull_back, loss_sum):
            first = grads, new
            grads, new = jax.lax.cond(
                all_finite(grads, (), ()),
                lambda: first,
                functools.partial(gradients, -1, -1),
            )
        if updates_variables and variables:
            variables |= {
                # If a layer was not called, the gradients of its scales are zero.
                path: jnp.where(jnp.any(value != 0), value, overwritten[path])
                for path, value in new.items()
            }
            # Statistics of a batch without examples are not finite.
            is_empty = batch.num_tokens == 0
            variables = kept_if(is_empty, by_path(state.variables), variables)
            grads = jax.tree.map(lambda x: jnp.where(is_empty, 0, x), grads)
        return (grads, sums), variables

    return sums


def _check_differentiable(params: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"`model` has the parameter {jax.tree_util.keystr(path)} of dtype "
                f"{leaf.dtype}, which cannot be differentiated. Convert it to a float, "
                "or keep it out of the parameters: close over it in `loss_fn`, or use "
                "a variable other than `nnx.Param` in an NNX model."
            )


# The loss sum is differentiated unscaled if it is 2**0 to 2**7 times the mean.
# Otherwise it is scaled to the nearer of these multiples of the mean, up to a factor of
# two. float16 overflows beyond 65,504 and loses bits below 2**-14. Gradients of a sum
# over a batch may exceed the upper limit, and a token's share of the mean (1 / weight)
# may fall below the lower one. With this range, a token's share keeps all its bits down
# to 2**-21. Mean gradients beyond 2**8 overflow. They are computed again from a loss
# that is scaled below the mean.
_MEAN_EXPONENTS = (0, 7)


def _cotangent_exponent(
    weight: jax.Array, dtype: jnp.dtype, least: int, most: int
) -> jax.Array:
    """Returns the exponent of the power of two that is the cotangent of `loss_sum`.

    A cotangent of 1 gives the gradient of the sum, and 1 / weight the gradient of the
    mean. The exponent is 0 if the weight is between 2**least and 2**most, up to a
    factor of two. Otherwise, it scales the gradient to the nearer of these multiples of
    the mean gradient. Scaling by a power of two is exact.
    """
    # Read the exponent from the bits of float32, because logarithms may be inexact.
    bits = jax.lax.bitcast_convert_type(weight.astype(jnp.float32), jnp.int32)
    floor_log2 = ((bits >> 23) & 0xFF) - 127
    exponent = jnp.clip(floor_log2, least, most) - floor_log2
    usable = (weight > 0) & jnp.isfinite(weight)
    # Neither the factor nor its inverse may be subnormal: devices flush those to zero.
    normal = min(126, -jnp.finfo(dtype).minexp)
    return jnp.clip(jnp.where(usable, exponent, 0), -normal, normal)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent as float32, which must be a normal number."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _times(factor: jax.Array, grad: jax.Array) -> jax.Array:
    """Returns the product in float32 or wider."""
    grad = at_least_float32(grad)
    return grad * factor.astype(grad.dtype)


def all_finite(tree: Any, new: Any, old: Any) -> jax.Array:
    """Returns whether a tree is finite, and a new state wherever the old one was.

    The state is checked because an average that has overflowed yields updates of zero
    from then on.
    """
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    finite += [
        (jnp.isfinite(x) | ~jnp.isfinite(y)).all()
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.array(finite))
