"""Updates multiplied by a factor that comes from the batch."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxbucket.base.checks import check_number
from jaxbucket.optim.precision import single_at_least
from jaxbucket.optim.rules import BatchScaling, Rule
from jaxbucket.optim.schedules import ScaledSchedule, WorkSchedule


class ScaleByBatchSizeState(NamedTuple):
    """State of `scale_by_batch_size`.

    Attributes:
      factor: `[]` float32, what the last update was multiplied by.
      learning_rate: `[]` float32, the one in force at the last update, the factor in
        it; None where `scale_by_batch_size` was not told what it scales.
      num_updates: `[]` int32, how many there were.
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
    """Multiplies updates by `rule(batch size / base)`, the batch's own size.

    Put it last in a chain, behind the learning rate. Because the size comes with the
    batch, as an extra argument of `update`, the factor cannot drift from it: not by
    skipped steps, nor by resuming.

    For SGD, Adam(W), Lion and most others this equals scaling the learning rate
    (`is_linear_in_lr` says for which; `scale_schedule` is for the rest). As in optax,
    the momentum of SGD is kept apart from the learning rate, which is the reference of
    Goyal et al. (section 3): nothing has to be corrected when the factor changes. To
    have every gradient keep the factor of its own batch, as where the learning rate is
    in the momentum, put it first instead. Where it is last, weight decay is scaled with
    the rest; where it stands before `optax.add_decayed_weights`, it is not.

    Example:
      >>> tx = optax.chain(optax.sgd(1e-3), scale_by_batch_size(base_examples=2))
      >>> params = jnp.ones(1)
      >>> updates, state = tx.update(params, tx.init(params), params, num_examples=8)
      >>> print(updates)
      [-0.002]

    Args:
      base_examples: the number of examples for which the learning rate was tuned.
      base_tokens: the number of real tokens for which it was.
      base_rows: the number of rows for which it was, empty ones counted, so that all
        batches of a bucket have one factor; give one of the three.
      rule: "linear" (Goyal et al., arXiv:1706.02677), "sqrt" (Krizhevsky,
        arXiv:1404.5997), "none", or a function from ratio to factor.
      min_factor: no factor is smaller.
      max_factor: nor larger.
      learning_rate: the one that stands before it, a number or the same schedule. It is
        used for nothing but to say in the state which one is in force.

    Returns:
      A transformation whose `update` takes `num_examples`, `num_tokens` or `num_rows`,
      of the whole global batch, static or traced; `make_train_step` passes all of them.

    Raises:
      ValueError: if not exactly one base is given, it is not positive, the rule is
        unknown, or the bounds are no bounds. From `update`, if the size is missing.
    """
    scaling = BatchScaling.of(
        base_examples=base_examples,
        base_tokens=base_tokens,
        base_rows=base_rows,
        rule=rule,
        min_factor=min_factor,
        max_factor=max_factor,
    )
    if isinstance(learning_rate, WorkSchedule | ScaledSchedule):
        raise ValueError(
            "`learning_rate` is a schedule that is told what was seen inside an "
            "optimizer only: give it to `optax.inject_hyperparams`, and leave it out "
            "here."
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
        own = learning_rate(count) if callable(learning_rate) else learning_rate
        return jnp.asarray(own, jnp.float32) * factor

    return optax.GradientTransformationExtraArgs(init, update)


def _multiplied(factor: jax.Array, update: jax.Array) -> jax.Array:
    # In half precision a factor may be more than there is, where the product is not.
    wide = single_at_least(update)
    return (wide * factor.astype(wide.dtype)).astype(update.dtype)
