"""A checksum of arrays on devices, which does not depend on how they are sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def checksum(tree: Any) -> int:
    """Returns a checksum of all bits of a tree of arrays, in [0, 2**32).

    All processes that hold parts of the arrays must call this function.

    Example:
      >>> x = jnp.arange(3.0)
      >>> checksum({"x": x}) == checksum({"x": x + 0}) != checksum({"x": x[::-1]})
      True

    Args:
      tree: a tree of arrays.
    """
    return int(_checksum(jax.tree.leaves(tree)))


@jax.jit
def _checksum(leaves: list[jax.Array]) -> jax.Array:
    total = jnp.zeros((), jnp.uint32)
    for leaf in leaves:
        data = _bytes(leaf)
        places = jax.lax.broadcasted_iota(jnp.uint32, data.shape, data.ndim - 1)
        for axis in range(data.ndim - 1):
            axis_places = jax.lax.broadcasted_iota(jnp.uint32, data.shape, axis)
            places = places * jnp.uint32(0x9E3779B1) + axis_places
        mixed = _mixed(places + data.astype(jnp.uint32) * jnp.uint32(0xC2B2AE35))
        total = _mixed(total) + jnp.sum(mixed, dtype=jnp.uint32)
    return total


def _mixed(x: jax.Array) -> jax.Array:
    """Returns a permutation of 32-bit numbers, the last step of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _bytes(leaf: jax.Array) -> jax.Array:
    """Returns the bytes of an array of any dtype, with at least one axis."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype.itemsize == 1:
        # bool and float8, too, and integers of 4 bits.
        leaf = leaf.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(leaf, jnp.uint8)
