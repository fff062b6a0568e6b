"""Scales updates by a factor that depends on the batch size."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxbucket.base.checks import check_float
from jaxbucket.optim.scaling_rules import BatchScaling, Rule, at_least_float32
from jaxbucket.optim.schedules import ScaledSchedule, WorkSchedule


class ScaleByBatchSizeState(NamedTuple):
    """State of `scale_by_batch_size`.

    Attributes:
      factor: `[]` float32, the factor of the last update.
      learning_rate: `[]` float32, the learning rate of the last update, factor
        included; None if it was not passed to `scale_by_batch_size`.
      num_updates: `[]` int32, the number of updates.
    """

    factor: jax.Array
    learning_rate: jax.Array | None
    num_updates: jax.Array


def scale_by_batch_size(
    *,
    base_examples: float | None = None,
    base_tokens: float | None = None,
    base_rows: float | None = None,
    base_weight: float | None = None,
    rule: Rule = "sqrt",
    min_factor: float = 0.0,
    max_factor: float = math.inf,
    learning_rate: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales updates by `rule(batch size / base)`.

    Put it last in a chain, after the learning rate. The batch size is an extra argument
    of `update`, so the factor always belongs to the batch, even if steps are skipped or
    a run is resumed.

    Measure the batch size in what the loss is a mean over: tokens in language modeling,
    examples if the loss has one term per example, and the weight of the loss if it
    leaves out or weighs tokens, as in supervised fine-tuning. Otherwise a batch of few
    long documents gets a small learning rate, although it has as many tokens as any
    other.

    For SGD, Adam(W), Lion and most other optimizers this equals scaling the learning
    rate, because their updates are linear in it. Use `scale_schedule` for the others.
    The momentum of SGD in optax does not include the learning rate, as in the reference
    of Goyal et al. (section 3), so it needs no correction when the factor changes.
    First in the chain, the transformation scales each gradient in the momentum by the
    factor of its own batch. Last in the chain, it also scales weight decay; before
    `optax.add_decayed_weights`, it does not.

    Example:
      >>> tx = optax.chain(optax.sgd(1e-3), scale_by_batch_size(base_tokens=1024))
      >>> params = jnp.ones(1)
      >>> updates, state = tx.update(params, tx.init(params), params, num_tokens=4096)
      >>> print(updates)
      [-0.002]

    Args:
      base_examples: the number of examples per batch for which the learning rate was
        tuned.
      base_tokens: the number of real tokens instead of examples.
      base_rows: the number of rows instead of examples, including empty rows, so that
        all batches of a bucket have the same factor.
      base_weight: the weight that the loss returns, the divisor of its mean, instead of
        examples. Pass exactly one of the four.
      rule: "linear" (Goyal et al., arXiv:1706.02677), "sqrt" (Krizhevsky,
        arXiv:1404.5997), "none", or a function from ratio to factor.
      min_factor: the smallest factor.
      max_factor: the largest factor.
      learning_rate: the learning rate of the optimizer, the same number or schedule. It
        is only used to report the scaled learning rate in the state.

    Returns:
      A transformation whose `update` requires `num_examples`, `num_tokens`, `num_rows`
      or `weight` of the whole global batch, static or traced. `make_train_step` passes
      all of them.

    Raises:
      ValueError: if not exactly one base is given, it is not positive, the rule is
        unknown, or the bounds are negative or out of order. From `update`: if the size
        is missing.
    """
    scaling = BatchScaling.from_options(
        base_examples=base_examples,
        base_tokens=base_tokens,
        base_rows=base_rows,
        base_weight=base_weight,
        rule=rule,
        min_factor=min_factor,
        max_factor=max_factor,
    )
    if isinstance(learning_rate, WorkSchedule | ScaledSchedule):
        raise ValueError(
            "`learning_rate` is a schedule that works only inside an optimizer. Pass "
            "it to `optax.inject_hyperparams`, and omit it here."
        )
    if learning_rate is not None and not callable(learning_rate):
        learning_rate = check_float("learning_rate", learning_rate)

    def init(params: optax.Params) -> Any:
        del params
        one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32)
        return ScaleByBatchSizeState(one, scaled_rate(one, zero), zero)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        del params
        factor = scaling.factor(extra)
        updates = jax.tree.map(functools.partial(_multiplied, factor), updates)
        factor, count = factor.astype(jnp.float32), state.num_updates
        return updates, ScaleByBatchSizeState(
            factor, scaled_rate(factor, count), jnp.asarray(optax.safe_increment(count))
        )

    def scaled_rate(factor: jax.Array, count: jax.Array) -> jax.Array | None:
        if learning_rate is None:
            return None
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        return jnp.asarray(rate, jnp.float32) * factor

    return optax.GradientTransformationExtraArgs(init, update)


def _multiplied(factor: jax.Array, update: jax.Array) -> jax.Array:
    # Multiplied in float32, because the factor alone may overflow half precision.
    wide = at_least_float32(update)
    return (wide * factor.astype(wide.dtype)).astype(update.dtype)
