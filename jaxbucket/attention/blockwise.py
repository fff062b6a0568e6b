"""Attention over packed rows, block by block in plain jax, forward and backward.

Segments are in one piece each, so a block of queries sees a span of keys: no other
block is computed, and no more than one block of weights is ever held. Softmax is put
together over the blocks of keys (Milakov and Gimelshein, arXiv:1805.02867), and weights
are computed anew for the backward pass (Dao et al., arXiv:2205.14135).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Of queries and of keys: fast where it was measured, by benchmarks/attention.py.
_BLOCK = 128
_MULTIPLE = 8
# Finite, so that rows without a key give no NaN.
_NOTHING = 0.5 * float(jnp.finfo(jnp.float32).min)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    is_causal: bool,
    scale: float,
    block: int = _BLOCK,
) -> jax.Array:
    """Returns what each query has of the values of its segment.

    Args:
      query: `[B, T, N, H]` floating point.
      key: `[B, T, K, H]`, K a divisor of N.
      value: `[B, T, K, H]`.
      segment_ids: `[B, T]` int; what padding gets is of no meaning, but finite.
      is_causal: whether later keys are hidden.
      scale: of the logits.
      block: the most queries at a time, and the most keys.

    Returns:
      `[B, T, N, H]` in the dtype of the values.
    """
    size, seq_len, heads, width = query.shape
    count = -(-seq_len // block)
    # As even as they can be: less is added behind the last.
    block = -(-seq_len // count // _MULTIPLE) * _MULTIPLE
    added = count * block - seq_len

    def to_heads(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, added), (0, 0), (0, 0)))
        return x.transpose(0, 2, 1, 3)

    grouped = (size, key.shape[2], -1, count * block, width)
    found: jax.Array = _attend(
        *(to_heads(query).reshape(grouped), to_heads(key), to_heads(value)),
        jnp.pad(segment_ids, ((0, 0), (0, added))),
        *(block, is_causal, scale),
    )
    found = found.reshape(size, heads, count * block, width)
    return found.transpose(0, 2, 1, 3)[:, :seq_len]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array,
    block: int,
    is_causal: bool,
    scale: float,
) -> jax.Array:
    """The same for `[B, K, G, T, H]` and `[B, K, T, H]`, T a multiple of the block."""
    return _forward(query, key, value, ids, block, is_causal, scale)[0]


class _Saved(NamedTuple):
    """What the backward pass needs.

    Attributes:
      normalizer: `[B, K, G, T]` float32, the logarithm of the sum of the weights.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    ids: jax.Array
    found: jax.Array
    normalizer: jax.Array


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array,
    block: int,
    is_causal: bool,
    scale: float,
) -> tuple[jax.Array, _Saved]:
    first, last = _spans(ids, block, is_causal)
    logits = _Logits(query, key, ids, block, is_causal, scale)
    exact = _exact(query.dtype)

    def of_queries(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        def with_keys(j: jax.Array, carry: tuple[jax.Array, ...]):
            total, weight, largest = carry
            own = logits(i, j)
            most = jnp.maximum(largest, own.max(-1))
            weights = jnp.exp(own - most[..., None])
            before = jnp.exp(largest - most)
            part = _product(
                "bkgqs,bksh->bkgqh",
                *(weights.astype(value.dtype), _cut(value, j, block)),
            )
            total = total * before[..., None] + part
            return total, weight * before + weights.sum(-1), most

        shape = (*query.shape[:3], block)
        start = (
            jnp.zeros((*shape, value.shape[-1]), exact),
            jnp.zeros(shape, exact),
            jnp.full(shape, _NOTHING, exact),
        )
        total, weight, largest = lax.fori_loop(first[i], last[i], with_keys, start)
        # Only padding has none.
        weight = jnp.where(weight > 0, weight, 1)
        found = (total / weight[..., None]).astype(value.dtype)
        return found, largest + jnp.log(weight)

    found, normalizer = lax.map(of_queries, jnp.arange(len(first)))
    found, normalizer = _joined(found), _joined(normalizer)
    return found, _Saved(query, key, value, ids, found, normalizer)


def _backward(
    block: int, is_causal: bool, scale: float, saved: _Saved, change: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, ids, found, normalizer = saved
    first, last = _spans(ids, block, is_causal)
    logits = _Logits(query, key, ids, block, is_causal, scale)
    exact = _exact(query.dtype)
    # What all weights of a query have in common: their sum is 1.
    common = _product("bkgqh,bkgqh->bkgq", found, change)

    def of_queries(carry: tuple[jax.Array, jax.Array], i: jax.Array):
        own = _cut(query, i, block)
        own_change = _cut(change, i, block)
        own_common = _cut(common[..., None], i, block)
        own_normalizer = _cut(normalizer[..., None], i, block)

        def with_keys(j: jax.Array, carry: tuple[jax.Array, ...]):
            to_query, to_key, to_value = carry
            keys, values = _cut(key, j, block), _cut(value, j, block)
            weights = jnp.exp(logits(i, j) - own_normalizer)
            to_weights = _product("bkgqh,bksh->bkgqs", own_change, values)
            to_logits = scale * weights * (to_weights - own_common)
            to_logits = to_logits.astype(query.dtype)
            weights = weights.astype(value.dtype)
            to_query += _product("bkgqs,bksh->bkgqh", to_logits, keys)
            to_key = _add(to_key, j, _product("bkgqs,bkgqh->bksh", to_logits, own))
            to_value = _add(
                to_value, j, _product("bkgqs,bkgqh->bksh", weights, own_change)
            )
            return to_query, to_key, to_value

        to_query, to_key, to_value = lax.fori_loop(
            first[i], last[i], with_keys, (jnp.zeros(own.shape, exact), *carry)
        )
        return (to_key, to_value), to_query.astype(query.dtype)

    start = jnp.zeros(key.shape, exact), jnp.zeros(value.shape, exact)
    (to_key, to_value), to_query = lax.scan(of_queries, start, jnp.arange(len(first)))
    return (
        _joined(to_query),
        to_key.astype(key.dtype),
        to_value.astype(value.dtype),
        None,
    )


_attend.defvjp(_forward, _backward)


class _Logits(NamedTuple):
    """Those of a block of queries and one of keys, where they are of one segment."""

    query: jax.Array
    key: jax.Array
    ids: jax.Array
    block: int
    is_causal: bool
    scale: float

    def __call__(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """`[B, K, G, block, block]`."""
        found = _product(
            "bkgqh,bksh->bkgqs",
            *(_cut(self.query, i, self.block), _cut(self.key, j, self.block)),
        )
        ids = self.ids[..., None]
        queries, keys = (_cut(ids, x, self.block)[..., 0] for x in (i, j))
        is_seen = queries[:, :, None] == keys[:, None, :]
        if self.is_causal:
            place = jnp.arange(self.block)
            is_seen &= (i * self.block + place)[:, None] >= j * self.block + place
        return jnp.where(is_seen[:, None, None], self.scale * found, _NOTHING)


def _spans(ids: jax.Array, block: int, is_causal: bool) -> tuple[jax.Array, jax.Array]:
    """The blocks of keys that any row needs for each block of queries.

    Returns:
      `[count]` int32, the first, and `[count]` int32, the one behind the last.
    """
    size, seq_len = ids.shape
    place = jnp.arange(seq_len, dtype=jnp.int32)
    edge = jnp.ones((size, 1), bool)
    is_new = ids[:, 1:] != ids[:, :-1]
    first = jnp.where(jnp.concatenate([edge, is_new], 1), place, 0)
    first = lax.cummax(first, axis=1)
    if is_causal:
        last = jnp.broadcast_to(place, ids.shape)
    else:
        last = jnp.where(jnp.concatenate([is_new, edge], 1), place, seq_len)
        last = lax.cummin(last, axis=1, reverse=True)
    # Padding sees nothing.
    first = jnp.where(ids > 0, first // block, seq_len // block)
    last = jnp.where(ids > 0, last // block + 1, 0)
    first = first.reshape(size, -1, block).min((0, 2))
    return first, last.reshape(size, -1, block).max((0, 2))


def _exact(dtype: jnp.dtype) -> jnp.dtype:
    """What sums are kept in."""
    return max(dtype, jnp.dtype(jnp.float32), key=lambda x: x.itemsize)


def _product(how: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(how, a, b, preferred_element_type=_exact(a.dtype))


def _cut(x: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """A block of `[..., T, H]`."""
    return lax.dynamic_slice_in_dim(x, i * block, block, axis=-2)


def _add(x: jax.Array, i: jax.Array, part: jax.Array) -> jax.Array:
    """`[..., T, H]` with something added to a block."""
    block = part.shape[-2]
    part += _cut(x, i, block)
    return lax.dynamic_update_slice_in_dim(x, part, i * block, axis=-2)


def _joined(blocks: jax.Array) -> jax.Array:
    """`[count, B, K, G, block, ...]` -> `[B, K, G, T, ...]`."""
    blocks = jnp.moveaxis(blocks, 0, 3)
    return blocks.reshape(*blocks.shape[:3], -1, *blocks.shape[5:])
