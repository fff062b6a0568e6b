"""Adam for batches that change: all of its constants follow the batch."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxbucket.optim.precision import single_at_least, wide_float
from jaxbucket.optim.scaling_rules import BatchScaling


class ScaleByAdamSdeState(NamedTuple):
    """State of `scale_by_adam_sde`.

    Attributes:
      mu: average of gradients, like the parameters, in float32 at least.
      nu: average of their squares, real, likewise.
      mu_seen: `[]` float, the total weight of gradients in the first average, 1 minus
        the product of all b1; the rest is that of the initial zero.
      nu_seen: `[]` float, the same for the second average and b2.
      factor: `[]` float32, by which the last update was multiplied.
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
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Adam by the square root rule of Malladi et al., 2022 (arXiv:2205.10287).

    In place of `optax.scale_by_adam`, before the learning rate. With a batch k times
    the base the updates are those of Adam with a learning rate multiplied by sqrt(k),
    1 - b1 and 1 - b2 multiplied by k, and eps divided by sqrt(k), so that averages span
    the same examples, and the noise of the stochastic differential equation that Adam
    follows is the same. Its derivation takes k (1 - b1) to be small; beyond 1 the
    averages are the last gradient's own.

    Batches may differ from step to step: the bias of an average is corrected by the
    product of all its b, which for one size is Adam's power of b.

    Example:
      >>> tx = optax.chain(
      ...     scale_by_adam_sde(base_examples=32), optax.scale_by_learning_rate(1e-3)
      ... )
      >>> params = jnp.ones(1)
      >>> updates, state = tx.update(params, tx.init(params), params, num_examples=128)
      >>> print(updates)
      [-0.002]

    Args:
      base_examples: the number of examples for which all constants were tuned.
      base_tokens: the same in real tokens.
      base_rows: the same in rows; give one of the three.
      b1: decay of the average of gradients, at the base.
      b2: decay of the average of their squares, at the base.
      eps: added to the root of the latter, at the base.

    Returns:
      A transformation whose `update` takes `num_examples`, `num_tokens` or `num_rows`,
      of the whole global batch, static or traced.

    Raises:
      ValueError: if not exactly one base is given, or it is not positive; if b1 or b2
        is not from 0 to below 1, or eps is negative. From `update`, if the size is
        missing.
    """
    scaling = BatchScaling.by(
        base_examples=base_examples, base_tokens=base_tokens, base_rows=base_rows
    )
    for name, value in {"b1": b1, "b2": b2}.items():
        if not isinstance(value, numbers.Real) or not 0 <= value < 1:
            raise ValueError(f"`{name}={value!r}` must be from 0 to below 1.")
    if not isinstance(eps, numbers.Real) or not 0 <= eps < float("inf"):
        raise ValueError(f"`eps={eps!r}` must be a number that is not negative.")

    def init(params: optax.Params) -> ScaleByAdamSdeState:
        # Arrays of their own each, for a step that donates its state.
        return ScaleByAdamSdeState(
            mu=jax.tree.map(lambda p: jnp.zeros_like(single_at_least(p)), params),
            nu=jax.tree.map(lambda p: jnp.zeros_like(single_at_least(p).real), params),
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
        # Not as 1 minus a decay, which would round a small gain away.
        gains = [jnp.minimum(1, ratio * (1 - b)) for b in (b1, b2)]
        grads = jax.tree.map(single_at_least, updates)
        mu = _average(gains[0], state.mu, grads)
        nu = _average(gains[1], state.nu, jax.tree.map(_square, grads))
        mu_seen = state.mu_seen + gains[0] * (1 - state.mu_seen)
        nu_seen = state.nu_seen + gains[1] * (1 - state.nu_seen)

        def scaled(mu: jax.Array, nu: jax.Array, update: jax.Array) -> jax.Array:
            # root * mean / (root of squares + eps / root), without dividing by zero
            # where a batch is empty.
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


def _average(gain: jax.Array, old: optax.Updates, new: optax.Updates) -> Any:
    def average(old: jax.Array, new: jax.Array) -> jax.Array:
        return old + gain.astype(old.dtype) * (new - old)

    return jax.tree.map(average, old, new)


def _corrected(average: jax.Array, seen: jax.Array) -> jax.Array:
    """The average without the bias of its initial zero; zero before any gradient."""
    return average / jnp.where(seen > 0, seen, 1).astype(average.dtype)


def _at_least_tiny(eps: float, like: jax.Array) -> jax.Array:
    """eps, or the least number of the dtype if that is more: 0 / 0 is no update."""
    return jnp.maximum(eps, jnp.finfo(like.dtype).tiny).astype(like.dtype)
