"""Blockwise attention over packed rows in plain jax, forward and backward.

Segments are contiguous, so a block of queries attends to a contiguous span of blocks of
keys. Only these blocks are computed, and only one block of weights is in memory at a
time. Softmax is accumulated over the blocks of keys (Milakov and Gimelshein,
arXiv:1805.02867), and weights are recomputed in the backward pass (Dao et al.,
arXiv:2205.14135).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxbucket.attention.masks import Pairs

# The maximum sizes of blocks of queries and keys. 128 is the fastest on CPUs in
# benchmarks/attention.py. On GPUs, small kernels take less time than their launch.
# Blocks of 1,024 are faster still, but need at least 2.5 times the memory.
BLOCK = 128
GPU_BLOCK = 512
_MULTIPLE = 8
# Finite, so that queries without a key do not yield NaN.
_MASKED = 0.5 * float(jnp.finfo(jnp.float32).min)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    pairs: Pairs,
    block: int = BLOCK,
) -> jax.Array:
    """Returns attention within segments, for checked arguments of `segment_attention`.

    The output in padding is finite but arbitrary.

    Args:
      query: `[B, T, N, H]`; it and the following arrays as there.
      pairs: the keys of each query, and the scale of the logits.
      block: the maximum size of a block of queries or keys.
    """
    size, seq_len, heads, width = query.shape
    count = -(-seq_len // block)
    # All blocks have the same size, chosen for little padding after the last one.
    block = -(-seq_len // count // _MULTIPLE) * _MULTIPLE
    padding = count * block - seq_len

    def to_heads(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
        return x.transpose(0, 2, 1, 3)

    grouped = (size, key.shape[2], -1, count * block, width)
    output: jax.Array = _attend(
        *(to_heads(query).reshape(grouped), to_heads(key), to_heads(value)),
        jnp.pad(segment_ids, ((0, 0), (0, padding))),
        *(block, pairs),
    )
    output = output.reshape(size, heads, count * block, width)
    return output.transpose(0, 2, 1, 3)[:, :seq_len]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array,
    block: int,
    pairs: Pairs,
) -> jax.Array:
    """Computes `attend` for `[B, K, G, T, H]` queries and `[B, K, T, H]` keys.

    T is a multiple of the block size.
    """
    return _forward(query, key, value, ids, block, pairs)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array,
    block: int,
    pairs: Pairs,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the output, and what the backward pass needs.

    That is the arguments, the output, and `[B, K, G, T]` float32, the logarithm of the
    sum of the weights.
    """
    first, end = _spans(ids, block, pairs)
    logits = _Logits(query, key, ids, block, pairs)
    sum_dtype = _sum_dtype(query.dtype)

    def attend_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        def add_keys(j: jax.Array, carry: tuple[jax.Array, ...]):
            total, weight, maximum = carry
            block_logits = logits(i, j)
            new_maximum = jnp.maximum(maximum, block_logits.max(-1))
            weights = jnp.exp(block_logits - new_maximum[..., None])
            rescale = jnp.exp(maximum - new_maximum)
            block_total = _einsum(
                "bkgqs,bksh->bkgqh",
                *(weights.astype(value.dtype), _take(value, j, block)),
            )
            total = total * rescale[..., None] + block_total
            return total, weight * rescale + weights.sum(-1), new_maximum

        shape = (*query.shape[:3], block)
        start = (
            jnp.zeros((*shape, value.shape[-1]), sum_dtype),
            jnp.zeros(shape, sum_dtype),
            jnp.full(shape, _MASKED, sum_dtype),
        )
        total, weight, maximum = lax.fori_loop(first[i], end[i], add_keys, start)
        # Only queries that are padding have no weight.
        weight = jnp.where(weight > 0, weight, 1)
        output = (total / weight[..., None]).astype(value.dtype)
        return output, maximum + jnp.log(weight)

    output, normalizer = map(_join, lax.map(attend_block, _numbers(first)))
    return output, (query, key, value, ids, output, normalizer)


def _backward(
    block: int,
    pairs: Pairs,
    residuals: tuple[jax.Array, ...],
    output_grad: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, ids, output, normalizer = residuals
    first, end = _spans(ids, block, pairs)
    logits = _Logits(query, key, ids, block, pairs)
    sum_dtype = _sum_dtype(query.dtype)
    # In the gradient of softmax: the mean gradient over the weights of each query.
    mean = _einsum("bkgqh,bkgqh->bkgq", output, output_grad)

    def backward_block(carry: tuple[jax.Array, jax.Array], i: jax.Array):
        queries, grads = _take(query, i, block), _take(output_grad, i, block)
        means = _take(mean[..., None], i, block)
        normalizers = _take(normalizer[..., None], i, block)

        def add_keys(j: jax.Array, carry: tuple[jax.Array, ...]):
            dquery, dkey, dvalue = carry
            keys, values = _take(key, j, block), _take(value, j, block)
            block_logits = logits(i, j)
            weights = jnp.exp(block_logits - normalizers)
            dweights = _einsum("bkgqh,bksh->bkgqs", grads, values)
            dlogits = weights * (dweights - means) * logits.slope(block_logits)
            dlogits = dlogits.astype(query.dtype)
            weights = weights.astype(value.dtype)
            dquery += _einsum("bkgqs,bksh->bkgqh", dlogits, keys)
            dkey = _add(dkey, j, _einsum("bkgqs,bkgqh->bksh", dlogits, queries))
            dvalue = _add(dvalue, j, _einsum("bkgqs,bkgqh->bksh", weights, grads))
            return dquery, dkey, dvalue

        dquery, dkey, dvalue = lax.fori_loop(
            first[i], end[i], add_keys, (jnp.zeros(queries.shape, sum_dtype), *carry)
        )
        return (dkey, dvalue), dquery.astype(query.dtype)

    start = jnp.zeros(key.shape, sum_dtype), jnp.zeros(value.shape, sum_dtype)
    (dkey, dvalue), dquery = lax.scan(backward_block, start, _numbers(first))
    return _join(dquery), dkey.astype(key.dtype), dvalue.astype(value.dtype), None


_attend.defvjp(_forward, _backward)


class _Logits(NamedTuple):
    """Computes the logits of a block of queries and a block of keys, with masking."""

    query: jax.Array
    key: jax.Array
    ids: jax.Array
    block: int
    pairs: Pairs

    def __call__(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Returns `[B, K, G, block, block]` logits of query block i and key block j."""
        logits = self.pairs.scale * _einsum(
            "bkgqh,bksh->bkgqs",
            *(_take(self.query, i, self.block), _take(self.key, j, self.block)),
        )
        if self.pairs.soft_cap is not None:
            logits = self.pairs.soft_cap * jnp.tanh(logits / self.pairs.soft_cap)
        ids = self.ids[..., None]
        query_ids, key_ids = (_take(ids, x, self.block)[..., 0] for x in (i, j))
        is_seen = query_ids[:, :, None] == key_ids[:, None, :]
        offsets = jnp.arange(self.block, dtype=jnp.int32)
        distance = (i * self.block + offsets)[:, None] - (j * self.block + offsets)
        if self.pairs.before is not None:
            is_seen &= distance <= self.pairs.before
        if self.pairs.after is not None:
            is_seen &= distance >= -self.pairs.after
        return jnp.where(is_seen[:, None, None], logits, _MASKED)

    def slope(self, logits: jax.Array) -> jax.Array | float:
        """Returns the derivative of logits by the products of queries and keys."""
        if self.pairs.soft_cap is None:
            return self.pairs.scale
        # Masked logits are below the cap, and have no derivative.
        ratio = jnp.maximum(logits / self.pairs.soft_cap, -1)
        return self.pairs.scale * (1 - jnp.square(ratio))


def _spans(ids: jax.Array, block: int, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """Returns the span of key blocks that any row needs for each block of queries.

    Returns:
      `[count]` int32, the first block, and `[count]` int32, the end of the span.
    """
    size, seq_len = ids.shape
    first, last = pairs.key_span(ids)
    # Padding needs no keys.
    first = jnp.where(ids > 0, first // block, seq_len // block)
    end = jnp.where(ids > 0, last // block + 1, 0)
    first = first.reshape(size, -1, block).min((0, 2))
    return first, end.reshape(size, -1, block).max((0, 2))


def _numbers(blocks: jax.Array) -> jax.Array:
    return jnp.arange(len(blocks), dtype=jnp.int32)


def _sum_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of sums: float32, or the given dtype if it is wider."""
    return max(dtype, jnp.dtype(jnp.float32), key=lambda x: x.itemsize)


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=_sum_dtype(a.dtype))


def _take(x: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """Returns block i of `[..., T, H]`."""
    return lax.dynamic_slice_in_dim(x, i * block, block, axis=-2)


def _add(x: jax.Array, i: jax.Array, update: jax.Array) -> jax.Array:
    """Returns `[..., T, H]` with an update added to block i."""
    block = update.shape[-2]
    update += _take(x, i, block)
    return lax.dynamic_update_slice_in_dim(x, update, i * block, axis=-2)


def _join(blocks: jax.Array) -> jax.Array:
    """Joins blocks `[count, B, K, G, block, ...]` to `[B, K, G, T, ...]`."""
    blocks = jnp.moveaxis(blocks, 0, 3)
    return blocks.reshape(*blocks.shape[:3], -1, *blocks.shape[5:])
