"""Learning rates that follow the batch size, as optax transformations."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

Rule: TypeAlias = Literal["linear", "sqrt"] | Callable[[jax.Array], jax.Array]

_RULES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda ratio: ratio,
    "sqrt": jnp.sqrt,
}


class ScaleByBatchSizeState(NamedTuple):
    """State of `scale_by_batch_size`.

    Attributes:
      factor: `[]` float32, what the last update was multiplied by.
    """

    factor: jax.Array


def scale_by_batch_size(
    *,
    base_examples: float | None = None,
    base_tokens: float | None = None,
    rule: Rule = "sqrt",
) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by `rule(batch size / base)`, the batch's own size.

    Put it last in a chain, behind the learning rate. Because the size comes with the
    batch, as an extra argument of `update`, the factor cannot drift from it: not by
    skipped steps, nor by resuming.

    For SGD, Adam(W) and Lion this equals scaling the learning rate. Where weight decay
    or momentum come after the learning rate, as in Adafactor, it does not.

    Example:
      >>> tx = optax.chain(optax.sgd(1e-3), scale_by_batch_size(base_examples=2))
      >>> params = jnp.ones(1)
      >>> updates, state = tx.update(params, tx.init(params), params, num_examples=8)
      >>> print(updates)
      [-0.002]

    Args:
      base_examples: the number of examples for which the learning rate was tuned.
      base_tokens: the number of real tokens for which it was; give one of the two.
      rule: "linear" (Goyal et al., arXiv:1706.02677), "sqrt" (Krizhevsky,
        arXiv:1404.5997), or a function from ratio to factor.

    Returns:
      A transformation whose `update` takes `num_examples` or `num_tokens`, of the
      whole global batch, static or traced; `data_parallel` passes both.

    Raises:
      ValueError: if not exactly one base is given, it is not positive, or the rule is
        unknown. From `update`, if the size is missing.
    """
    if (base_examples is None) == (base_tokens is None):
        raise ValueError(
            f"`base_examples={base_examples}`, `base_tokens={base_tokens}`: give one "
            "of the two."
        )
    name = "num_examples" if base_tokens is None else "num_tokens"
    base = base_examples if base_tokens is None else base_tokens
    if not isinstance(base, numbers.Real) or not 0 < base < math.inf:
        raise ValueError(f"`base_{name[4:]}={base!r}` must be a positive number.")
    if not callable(rule) and (not isinstance(rule, str) or rule not in _RULES):
        raise ValueError(
            f"`rule={rule!r}`: choose one of {sorted(_RULES)}, or pass a function from "
            "ratio to factor."
        )
    to_factor = rule if callable(rule) else _RULES[rule]

    def init(params: optax.Params) -> ScaleByBatchSizeState:
        del params
        return ScaleByBatchSizeState(factor=jnp.ones((), jnp.float32))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, ScaleByBatchSizeState]:
        del state, params
        size = extra.get(name)
        if size is None:
            raise ValueError(
                f"`scale_by_batch_size` needs the batch size: call "
                f"`tx.update(grads, state, params, {name}=batch.{name})`. What is "
                "around it must hand extra arguments on, as `optax.chain` does and "
                "`optax.MultiSteps` does not."
            )
        factor = jnp.asarray(to_factor(jnp.asarray(size / base)))
        if factor.shape:
            raise ValueError(
                f"`rule` returned a factor of shape {list(factor.shape)}: return one "
                "number."
            )
        updates = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
        return updates, ScaleByBatchSizeState(factor.astype(jnp.float32))

    return optax.GradientTransformationExtraArgs(init, update)
