"""Numbers that half precision cannot hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def wide_float() -> Any:
    """The widest float that jax is configured to have."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def single_at_least(value: jax.Array) -> jax.Array:
    """In float32, or what is wider: half precision cannot add up 1,000 gradients."""
    single = jnp.dtype(jnp.float32)
    return value.astype(max(single, value.dtype, key=lambda dtype: dtype.itemsize))
