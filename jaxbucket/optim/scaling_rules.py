"""Rules from the size of a batch to the factor of its learning rate, in wide floats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxbucket.base.checks import check_float

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
        if not callable(rule) and (not isinstance(rule, str) or rule not in _RULES):
            raise ValueError(
                f"`rule={rule!r}` is unknown. Choose one of {sorted(_RULES)}, or pass "
                "a function from ratio to factor."
            )
        min_factor = check_float("min_factor", min_factor, least=0)
        return cls(
            size=_SIZES[name],
            base=check_float(name, bases[name]),
            rule=rule if callable(rule) else _RULES[rule],
            min_factor=min_factor,
            max_factor=check_float(
                "max_factor", max_factor, least=min_factor, most=math.inf
            ),
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
        if np.shape(factor) or factor is None:
            raise ValueError(f"`rule` returned {factor!r}. Return one number.")
        factor = jnp.asarray(factor)
        if self.min_factor > 0 or self.max_factor < math.inf:
            factor = jnp.clip(factor, self.min_factor, self.max_factor)
        return factor


def check_size(name: str, size: Any) -> jax.Array | np.ndarray:
    """Returns an extra argument of `update` as an array, a numpy array if static.

    Raises:
      ValueError: if it is not one number, or is known not to be a valid size.
    """
    if jnp.shape(size):
        raise ValueError(
            f"`{name}` has shape {list(jnp.shape(size))}. Pass one number for the "
            "whole global batch."
        )
    # Values on a device are not checked, because reading them would block the step.
    if isinstance(size, jax.Array):
        if size.dtype == jnp.bool_:
            raise ValueError(f"`{name}` is a bool. Pass `batch.{name}`.")
        return size
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
