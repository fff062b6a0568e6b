"""Functions for dtypes that are wider than half precision."""

from __future__ import annotations

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
