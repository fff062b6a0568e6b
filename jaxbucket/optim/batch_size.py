"""Updates multiplied by a factor of the batch size."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxbucket.base.checks import check_number
from jaxbucket.optim.precision import single_at_least
from jaxbucket.optim.scaling_rules import BatchScaling, Rule
from jaxbucket.optim.schedules import ScaledSchedule, WorkSchedule


class ScaleByBatchSizeState(NamedTuple):
    """State of `scale_by_batch_size`.

    Attributes:
      factor: `[]` float32, by which the last update was multiplied.
      learning_rate: `[]` float32, of the last update, times the factor; None if
        `scale_by_batch_size` was not given the learning rate.
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
    rule: Rule = "sqrt",
    min_factor: float = 0.0,
    max_factor: float = math.inf,
    learning_rate: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by `rule(batch size / base)`.

    Put it last in a chain, after the learning rate. The size comes with the batch, as
    an extra argument of `update`, so the factor cannot drift from it by skipped steps
    or by resuming.

    For SGD, Adam(W), Lion and most others this equals scaling the learning rate
    (`is_linear_in_lr` says for which; `scale_schedule` is for the rest). As in optax,
    the momentum of SGD is kept apart from the learning rate, which is the reference of
    Goyal et al. (section 3): nothing has to be corrected when the factor changes. Put
    first in the chain, it gives every gradient in the momentum the factor of its own
    batch. Last in the chain, it scales weight decay with the rest; before
    `optax.add_decayed_weights`, it does not.

    Example:
      >>> tx = optax.chain(optax.sgd(1e-3), scale_by_batch_size(base_examples=2))
      >>> params = jnp.ones(1)
      >>> updates, state = tx.update(params, tx.init(params), params, num_examples=8)
      >>> print(updates)
      [-0.002]

    Args:
      base_examples: the number of examples for which the learning rate was tuned.
      base_tokens: the same in real tokens.
      base_rows: the same in rows, empty ones included, so that all batches of a bucket
        have one factor; give one of the three.
      rule: "linear" (Goyal et al., arXiv:1706.02677), "sqrt" (Krizhevsky,
        arXiv:1404.5997), "none", or a function from ratio to factor.
      min_factor: the least factor.
      max_factor: the largest factor.
      learning_rate: of the optimizer before it, a number or the same schedule; only for
        the state to report the learning rate in force.

    Returns:
      A transformation whose `update` takes `num_examples`, `num_tokens` or `num_rows`,
      of the whole global batch, static or traced; `make_train_step` passes all of them.

    Raises:
      ValueError: if not exactly one base is given, it is not positive, the rule is
        unknown, or the bounds are negative or out of order. From `update`, if the size
        is missing.
    """
    scaling = BatchScaling.by(
        base_examples=base_examples,
        base_tokens=base_tokens,
        base_rows=base_rows,
        rule=rule,
        min_factor=min_factor,
        max_factor=max_factor,
    )
    if isinstance(learning_rate, WorkSchedule | ScaledSchedule):
        raise ValueError(
            "`learning_rate` is a schedule that follows the batch only inside an "
            "optimizer: give it to `optax.inject_hyperparams`, and leave it out here."
        )
    if learning_rate is not None and not callable(learning_rate):
        learning_rate = check_number("learning_rate", learning_rate)

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
    # A factor may overflow half precision where the product does not.
    wide = single_at_least(update)
    return (wide * factor.astype(wide.dtype)).astype(update.dtype)
