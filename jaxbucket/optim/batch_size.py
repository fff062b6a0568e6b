"""Scales updates by a factor that depends on the batch size, and the rules for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxbucket.base.checks import check_choice, check_float

Rule: TypeAlias = Literal["linear", "sqrt", "none"] | Callable[[jax.Array], jax.Array]

# Option -> the extra argument of `update` with the batch size.
_SIZES = {
    "base_examples": "num_examples",
    "base_tokens": "num_tokens",
    "base_rows": "num_rows",
    "base_weight": "weight",
}
# How to pass a size to `update`.
_REMEDIES = {
    "num_examples": "num_examples=batch.num_examples",
    "num_tokens": "num_tokens=batch.num_tokens",
    "num_rows": "num_rows=batch.bucket.batch_size",
    "weight": "weight=weight",
}

_RULES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda ratio: ratio,
    "sqrt": jnp.sqrt,
    "none": jnp.ones_like,
}


def batch_factor(
    rule: Rule, **bases: float | None
) -> Callable[[Mapping[str, Any]], jax.Array]:
    """Returns a function from the extra arguments of `update` to the factor, `[]`.

    Args:
      rule, bases: the options of `scale_by_batch_size`.
    """
    names = [name for name, base in bases.items() if base is not None]
    if len(names) != 1:
        listed = ", ".join(f"`{name}={base}`" for name, base in bases.items())
        raise ValueError(f"{listed}: pass exactly one of them.")
    (name,) = names
    base = check_float(name, bases[name])
    if not callable(rule):
        check_choice("rule", rule, list(_RULES))
    of_ratio = rule if callable(rule) else _RULES[rule]

    def factor(extra: Mapping[str, Any]) -> jax.Array:
        size = jnp.asarray(size_in(extra, _SIZES[name]), wide_float())
        value = of_ratio(size / base)
        if np.shape(value) or value is None:
            raise ValueError(f"`rule` returned {value!r}. Return one number.")
        return jnp.asarray(value)

    return factor


def size_in(extra: Mapping[str, Any], name: str) -> jax.Array | np.ndarray:
    """Returns an extra argument of `update` as an array, a numpy array if static."""
    size = extra.get(name)
    # Values on a device are not checked, because reading them would block the step.
    if isinstance(size, jax.Array) and not size.shape and size.dtype != jnp.bool_:
        return size
    if size is None or np.shape(size) or isinstance(size, jax.Array):
        raise ValueError(
            f"`{name}` is needed, one number for all micro-batches of a global batch. "
            f"Call `tx.update(grads, state, params, {_REMEDIES[name]})`. Wrappers must "
            "forward extra arguments, as `optax.chain` does."
        )
    check_float(name, size, least=0)
    return np.asarray(size)


def wide_float() -> Any:
    """Returns float64 if jax is configured for it, or else float32."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def at_least_float32(value: jax.Array) -> jax.Array:
    """Casts to float32 unless the dtype is wider.

    Half precision is too coarse to sum 1,000 gradients.
    """
    return value.astype(jnp.float32) if value.dtype.itemsize < 4 else value


class ScaleByBatchSizeState(NamedTuple):
    """State of `scale_by_batch_size`.

    Attributes:
      factor: `[]` float32, the factor of the last update.
    """

    factor: jax.Array


def scale_by_batch_size(
    *,
    base_examples: float | None = None,
    base_tokens: float | None = None,
    base_rows: float | None = None,
    base_weight: float | None = None,
    rule: Rule = "sqrt",
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
        arXiv:1404.5997), "none", or a function from ratio to factor, such as
        `lambda ratio: jnp.clip(ratio, 0.5, 2)`.

    Returns:
      A transformation whose `update` requires `num_examples`, `num_tokens`, `num_rows`
      or `weight` of the whole global batch, static or traced. `make_train_step` passes
      all of them.

    Raises:
      ValueError: if not exactly one base is given, it is not positive, the rule is
        unknown. From `update`: if the size is missing.
    """
    factor_of = batch_factor(
        rule,
        base_examples=base_examples,
        base_tokens=base_tokens,
        base_rows=base_rows,
        base_weight=base_weight,
    )

    def init(params: optax.Params) -> Any:
        del params
        return ScaleByBatchSizeState(jnp.ones((), jnp.float32))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        del state, params
        factor = factor_of(extra)
        updates = jax.tree.map(lambda x: multiplied(factor, x).astype(x.dtype), updates)
        return updates, ScaleByBatchSizeState(factor.astype(jnp.float32))

    return optax.GradientTransformationExtraArgs(init, update)


def multiplied(factor: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the product in float32 or wider: either may overflow half precision."""
    x = at_least_float32(x)
    return x * factor.astype(x.dtype)
