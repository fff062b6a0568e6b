"""Functions for dtypes that are wider than half precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


def wide_float() -> Any:
    """Returns float64 if jax is configured for it, or else float32."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def at_least_float32(value: jax.Array) -> jax.Array:
    """Casts to float32 unless the dtype is wider.

    Half precision is too coarse to sum 1,000 gradients.
    """
    return value.astype(jnp.float32) if value.dtype.itemsize < 4 else value


def computes_in(dtype: Any, pull_back: Any, cotangent: jax.Array) -> bool:
    """Returns whether a function that `jax.vjp` returned computes in a dtype.

    Args:
      dtype: the dtype to look for.
      pull_back: the function.
      cotangent: an argument of the function.
    """
    # Traced only if this version of jax does not expose the linear program.
    program = getattr(pull_back, "jaxpr", None)
    return _has(dtype, program or jax.make_jaxpr(pull_back)(cotangent))


def _has(dtype: Any, program: Any) -> bool:
    # Unwraps a ClosedJaxpr.
    program = getattr(program, "jaxpr", program)
    outputs = (x for equation in program.eqns for x in equation.outvars)
    return any(
        getattr(x.aval, "dtype", None) == dtype
        for x in (*program.constvars, *program.invars, *outputs)
    ) or any(_any_has(dtype, equation.params.values()) for equation in program.eqns)


def _any_has(dtype: Any, values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, tuple | list):
            if _any_has(dtype, value):
                return True
        elif (hasattr(value, "eqns") or hasattr(value, "jaxpr")) and _has(dtype, value):
            return True
    return False
