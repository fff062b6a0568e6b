"""Adam whose constants follow the batch size."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxbucket.optim.precision import at_least_float32, moved_toward, wide_float
from jaxbucket.optim.scaling_rules import BatchScaling


class ScaleByAdamSdeState(NamedTuple):
    """State of `scale_by_adam_sde`.

    Attributes:
      mu: average of the gradients, with the shapes of the parameters, in float32 or
        wider.
      nu: average of the squared gradients, real, with the same shapes and precision
        as `mu`.
      mu_seen: `[]` float, the total weight of the gradients in `mu`: 1 minus the
        product of all b1. The rest is the weight of the initial zero.
      nu_seen: `[]` float, the same for `nu` and b2.
      factor: `[]` float32, the factor of the last update.
    """

    mu: optax.Updates
    nu: optax.Updates
    mu_seen: jax.Array
    nu_seen: jax.Array
    factor: jax.Array


def scale_by_adam_sde(
    *,
    base_examples: float | None = None,
    base_tokens: float | None = None,
    base_rows: float | None = None,
    base_weight: float | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by Adam with the square root rule of Malladi et al., 2022.

    Use it in place of `optax.scale_by_adam`, before the learning rate. For a batch k
    times the base, the updates are those of Adam with the learning rate multiplied by
    sqrt(k), 1 - b1 and 1 - b2 multiplied by k, and eps divided by sqrt(k). So the
    averages span the same number of examples, and the stochastic differential equation
    that approximates Adam has the same noise (arXiv:2205.10287). The derivation assumes
    that k (1 - b1) is small. If it exceeds 1, the averages equal the last gradient.

    Batch sizes may differ from step to step: the bias of an average is corrected by
    the product of all its b, which for a constant size is the power of b of Adam.

    Example:
      >>> tx = optax.chain(
      ...     scale_by_adam_sde(base_examples=32), optax.scale_by_learning_rate(1e-3)
      ... )
      >>> params = jnp.ones(1)
      >>> updates, state = tx.update(params, tx.init(params), params, num_examples=128)
      >>> print(updates)
      [-0.002]

    Args:
      base_examples: the number of examples per batch for which all constants were
        tuned.
      base_tokens: the number of real tokens instead of examples.
      base_rows: the number of rows instead of examples.
      base_weight: the weight that the loss returns, instead of examples. Pass exactly
        one of the four.
      b1: decay of the average of gradients, at the base size.
      b2: decay of the average of squared gradients, at the base size.
      eps: added to the square root of the latter average, at the base size.

    Returns:
      A transformation whose `update` requires `num_examples`, `num_tokens`, `num_rows`
      or `weight` of the whole global batch, static or traced.

    Raises:
      ValueError: if not exactly one base is given, or it is not positive; if b1 or b2
        is not in [0, 1), or eps is negative. From `update`: if the size is missing.
    """
    scaling = BatchScaling.from_options(
        base_examples=base_examples,
        base_tokens=base_tokens,
        base_rows=base_rows,
        base_weight=base_weight,
    )
    for name, value in {"b1": b1, "b2": b2}.items():
        if not isinstance(value, numbers.Real) or not 0 <= value < 1:
            raise ValueError(f"`{name}={value!r}` must be in [0, 1).")
    if not isinstance(eps, numbers.Real) or not 0 <= eps < float("inf"):
        raise ValueError(f"`eps={eps!r}` must be a finite, non-negative number.")

    def init(params: optax.Params) -> ScaleByAdamSdeState:
        # The zeros are separate arrays, so that a step can donate the state.
        return ScaleByAdamSdeState(
            mu=jax.tree.map(lambda p: jnp.zeros_like(at_least_float32(p)), params),
            nu=jax.tree.map(lambda p: jnp.zeros_like(at_least_float32(p).real), params),
            mu_seen=jnp.zeros((), wide_float()),
            nu_seen=jnp.zeros((), wide_float()),
            factor=jnp.ones((), jnp.float32),
        )

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, ScaleByAdamSdeState]:
        del params
        ratio, root = scaling.ratio(extra), scaling.factor(extra)
        # Computed without the scaled decay, because 1 - decay would round small gains.
        gains = [jnp.minimum(1, ratio * (1 - b)) for b in (b1, b2)]
        grads = jax.tree.map(at_least_float32, updates)
        squares = jax.tree.map(_square, grads)
        one = jnp.ones((), wide_float())
        mu, mu_seen = _average(gains[0], (state.mu, state.mu_seen), (grads, one))
        nu, nu_seen = _average(gains[1], (state.nu, state.nu_seen), (squares, one))

        def scaled(mu: jax.Array, nu: jax.Array, update: jax.Array) -> jax.Array:
            # root * mean / (sqrt(squares) + eps / root), without a division by zero if
            # the batch is empty.
            mean, squares = _corrected(mu, mu_seen), _corrected(nu, nu_seen)
            factor = root.astype(nu.dtype)
            denominator = factor * jnp.sqrt(squares) + _at_least_tiny(eps, nu)
            scaled = mean * (factor**2 / denominator).astype(mean.dtype)
            return scaled.astype(update.dtype)

        updates = jax.tree.map(scaled, mu, nu, updates)
        factor = root.astype(jnp.float32)
        return updates, ScaleByAdamSdeState(mu, nu, mu_seen, nu_seen, factor)

    return optax.GradientTransformationExtraArgs(init, update)


def _square(value: jax.Array) -> jax.Array:
    return (value * value.conj()).real


def _average(gain: jax.Array, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda old, new: moved_toward(old, new, gain), old, new)


def _corrected(average: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the bias-corrected average; zero before the first gradient."""
    return average / jnp.where(seen > 0, seen, 1).astype(average.dtype)


def _at_least_tiny(eps: float, like: jax.Array) -> jax.Array:
    """Returns eps, or the smallest number of the dtype if larger, to avoid 0 / 0."""
    return jnp.maximum(eps, jnp.finfo(like.dtype).tiny).astype(like.dtype)
