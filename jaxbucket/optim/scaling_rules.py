"""Rules from the size of a batch to the factor of its learning rate."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxbucket.optim.precision import wide_float

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


@dataclasses.dataclass(frozen=True)
class BatchScaling:
    """Computes the factor of a batch from its size.

    Attributes:
      size: the name of the extra argument of `update` with the batch size.
      base: the size for which the learning rate was tuned.
      rule: a function from ratio to factor.
      min_factor: the smallest factor.
      max_factor: the largest factor.
    """

    size: str
    base: float
    rule: Callable[[jax.Array], jax.Array] = jnp.sqrt
    min_factor: float = 0.0
    max_factor: float = math.inf

    @classmethod
    def from_options(
        cls,
        *,
        base_examples: float | None,
        base_tokens: float | None,
        base_rows: float | None,
        base_weight: float | None,
        rule: Rule = "sqrt",
        min_factor: float = 0.0,
        max_factor: float = math.inf,
    ) -> BatchScaling:
        """Returns the scaling for checked options of `scale_by_batch_size`."""
        bases = {
            "base_examples": base_examples,
            "base_tokens": base_tokens,
            "base_rows": base_rows,
            "base_weight": base_weight,
        }
        names = [name for name, base in bases.items() if base is not None]
        if len(names) != 1:
            listed = ", ".join(f"`{name}={base}`" for name, base in bases.items())
            raise ValueError(f"{listed}: pass exactly one of them.")
        (name,) = names
        base = bases[name]
        if not _is_number(base) or not 0 < base < math.inf:  # pyright: ignore
            raise ValueError(f"`{name}={base!r}` must be a positive number.")
        if not callable(rule) and (not isinstance(rule, str) or rule not in _RULES):
            raise ValueError(
                f"`rule={rule!r}` is unknown. Choose one of {sorted(_RULES)}, or pass "
                "a function from ratio to factor."
            )
        bounds = (min_factor, max_factor)
        in_order = all(map(_is_number, bounds)) and 0 <= min_factor <= max_factor
        if not in_order or min_factor == math.inf:
            raise ValueError(
                f"`min_factor={min_factor!r}`, `max_factor={max_factor!r}`: pass "
                "numbers with 0 <= `min_factor` <= `max_factor`."
            )
        return cls(
            size=_SIZES[name],
            base=float(base),  # pyright: ignore
            rule=rule if callable(rule) else _RULES[rule],
            min_factor=float(min_factor),
            max_factor=float(max_factor),
        )

    def ratio(self, extra: Mapping[str, Any]) -> jax.Array:
        """Returns `[]`, the batch size divided by the base.

        Raises:
          ValueError: if the size is missing from the extra arguments of `update`, or is
            not a valid size.
        """
        size = extra.get(self.size)
        if size is None:
            raise ValueError(
                f"Scaling by the batch size requires `{self.size}`. Call "
                f"`tx.update(grads, state, params, {_REMEDIES[self.size]})`, summed "
                "over all micro-batches. Wrappers must forward extra arguments, as "
                "`optax.chain` does."
            )
        return jnp.asarray(check_size(self.size, size), wide_float()) / self.base

    def factor(self, extra: Mapping[str, Any]) -> jax.Array:
        """Returns `[]`, the factor of the learning rate for this batch."""
        factor = self.rule(self.ratio(extra))
        if not isinstance(factor, jax.Array | numbers.Real | np.ndarray):
            raise ValueError(
                f"`rule` returned a {type(factor).__name__}. Return one number."
            )
        factor = jnp.asarray(factor)
        if factor.shape:
            raise ValueError(
                f"`rule` returned a factor of shape {list(factor.shape)}. Return one "
                "number."
            )
        if self.min_factor > 0 or self.max_factor < math.inf:
            factor = jnp.clip(factor, self.min_factor, self.max_factor)
        return factor


def check_size(name: str, size: Any) -> jax.Array | np.ndarray:
    """Returns an extra argument of `update` as an array, a numpy array if static.

    Raises:
      ValueError: if it is not one number, or is known not to be a valid size.
    """
    # Values on a device are not checked, because reading them would block the step.
    if isinstance(size, jax.Array):
        is_size = size.dtype != jnp.bool_
    else:
        is_size = _is_number(size) and 0 <= size < math.inf
    if not is_size:
        raise ValueError(
            f"`{name}={size!r}` must be a finite, non-negative number, such as "
            f"`batch.{name}`."
        )
    if jnp.shape(size):
        raise ValueError(
            f"`{name}` has shape {list(jnp.shape(size))}. Pass one number for the "
            "whole global batch."
        )
    return size if isinstance(size, jax.Array) else np.asarray(size)


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray | jax.Array) and not value.shape:
        value = value.item()
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and not math.isnan(value)
