"""The gradients of a loss sum, in any precision."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxbucket.base.batch import Batch
from jaxbucket.optim.precision import computes_in, single_at_least
from jaxbucket.train.global_rows import rows
from jaxbucket.train.loss import LossFn, Metrics, checked_loss
from jaxbucket.train.state import TrainState


def gradient_sums(loss_fn: LossFn) -> Callable[..., tuple[Any, Metrics]]:
    """Returns `(state, batch, keys) -> (gradients of the loss sum, sums)`.

    Gradients in half precision come in float32, which holds the sum of many, and in
    which devices can add them up.
    """

    def sums(state: TrainState, batch: Batch, keys: jax.Array | None) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Metrics]:
            model = dataclasses.replace(state, params=params).model
            return checked_loss(loss_fn, model, batch, keys)

        _check_differentiable(state.params)
        loss_sum, pull_back, sums = jax.vjp(loss, state.params, has_aux=True)
        # Of all devices, because a gradient may come from another one's loss.
        weight = rows().add_up(sums["weight"])

        def gradients(least: int, most: int) -> Any:
            exponent = _cotangent_exponent(weight, loss_sum.dtype, least, most)
            (grads,) = pull_back(_power_of_two(exponent).astype(loss_sum.dtype))
            undo = _power_of_two(-exponent)
            return jax.tree.map(functools.partial(_times, undo), grads)

        grads = gradients(*_MEAN_EXPONENTS)
        if computes_in(jnp.float16, pull_back, loss_sum):
            overflows = (~all_finite(grads, (), ())).astype(jnp.int32)
            grads = jax.lax.cond(
                # The same on all devices, which may gather rows of each other.
                rows().add_up(overflows) > 0,
                functools.partial(gradients, -1, -1),
                lambda: grads,
            )
        return grads, sums

    return sums


def _check_differentiable(params: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"`model`: parameter {jax.tree_util.keystr(path)} is of {leaf.dtype}, "
                "which has no gradient here. Make it a float, or let `loss_fn` close "
                "over what is not trained (in an NNX model: any other variable than "
                "`nnx.Param`)."
            )


# What is differentiated is the sum if it is from 2**0 to 2**7 times the mean, and else
# that many times the mean, up to a factor of two. float16 ends at 65,504 and loses bits
# below 2**-14: gradients of a sum over a batch are beyond the one, a token's share of
# the mean (1 / weight) below the other. So a token's share keeps all its bits down to
# 2**-21. Means beyond 2**8 overflow; they are differentiated again, as less than the
# mean itself.
_MEAN_EXPONENTS = (0, 7)


def _cotangent_exponent(
    weight: jax.Array, dtype: jnp.dtype, least: int, most: int
) -> jax.Array:
    """The power of two by which `loss_sum` of this dtype is differentiated.

    A cotangent of 1 gives the gradient of the sum, 1 / weight that of the mean: this is
    the sum's where it is 2**least to 2**most times the mean's, up to a factor of two,
    and else what is nearest. A power of two is exact.
    """
    # From the bits of float32: there and back through logarithms may be inexact.
    bits = jax.lax.bitcast_convert_type(weight.astype(jnp.float32), jnp.int32)
    floor_log2 = ((bits >> 23) & 0xFF) - 127
    exponent = jnp.clip(floor_log2, least, most) - floor_log2
    usable = (weight > 0) & jnp.isfinite(weight)
    # No subnormals, which devices flush to zero, in either direction.
    normal = min(126, -jnp.finfo(dtype).minexp)
    return jnp.clip(jnp.where(usable, exponent, 0), -normal, normal)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """float32, for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _times(factor: jax.Array, grad: jax.Array) -> jax.Array:
    """The product, in float32 at least."""
    grad = single_at_least(grad)
    return grad * factor.astype(grad.dtype)


def all_finite(tree: Any, new: Any, old: Any) -> jax.Array:
    """Whether everything is, and all of a new state that was so in the old one.

    An average that has overflown gives updates of zero from then on.
    """
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    finite += [
        (jnp.isfinite(x) | ~jnp.isfinite(y)).all()
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.array(finite))
