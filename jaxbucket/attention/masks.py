"""Which keys the queries of packed rows attend to: as a mask, or as pairs without one.

Both are computed inside of jit. Segment ids are 0 for padding and 1, 2, ... for
examples. Positions count from 0 in each segment.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def attention_mask(
    segment_ids: jax.Array,
    positions: jax.Array | None = None,
    *,
    key_segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns a mask in which each query attends to the real keys of its own example.

    Pass it to `jax.nn.dot_product_attention(query, key, value, mask=)` or to the
    attention of Flax. The mask takes B * T * S bytes unless the compiler fuses it. A
    query attends to no key if it is padding, or if its example lacks the sequence of
    the keys. Softmax then averages all values, so set the output of such queries to 0:
    `jnp.where(mask.any(3)[:, 0, :, None, None], output, 0)` for `[B, T, N, H]`.

    Example:
      >>> print(attention_mask(jnp.array([[1, 1, 2, 0]]))[0, 0].astype(int))
      [[1 1 0 0]
       [1 1 0 0]
       [0 0 1 0]
       [0 0 0 0]]

    Args:
      segment_ids: `[B, T]` int, the segment ids of queries and keys.
      positions: `[B, T]` int, for causal attention, in which queries attend to keys up
        to their own position; None for attention in both directions.
      key_segment_ids: `[B, S]` int, the segment ids of keys from a different sequence,
        such as inputs that targets attend to; by default `segment_ids`.

    Returns:
      `[B, 1, T, S]` bool, by batch, head, query and key.

    Raises:
      ValueError: if both `positions` and `key_segment_ids` are given.
    """
    if key_segment_ids is None:
        key_segment_ids = segment_ids
    elif positions is not None:
        raise ValueError(
            "`positions` and `key_segment_ids` exclude each other, because keys of a "
            "different sequence are neither before nor after a query. Remove one of "
            "the two."
        )
    queries, keys = segment_ids[:, :, None], key_segment_ids[:, None, :]
    mask = (queries == keys) & (keys > 0)
    if positions is not None:
        mask &= positions[:, :, None] >= positions[:, None, :]
    return mask[:, None]


def sequence_lengths(segment_ids: jax.Array) -> jax.Array:
    """Returns the number of tokens in each row.

    Rows of one example need no mask. Instead, pass these numbers to
    `jax.nn.dot_product_attention` as `query_seq_lengths` and `key_value_seq_lengths`.

    Example:
      >>> sequence_lengths(jnp.array([[1, 1, 0], [0, 0, 0]])).tolist()
      [2, 0]

    Args:
      segment_ids: `[B, T]` int, 0 for padding.

    Returns:
      `[B]` int32.
    """
    return jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32)


class Pairs(NamedTuple):
    """The pairs of a query and a key within a segment, and the scale of their logits.

    Attributes:
      before: the number of keys before its own position that a query attends to; None
        for all of its segment.
      after: the same after its own position, 0 for causal attention.
      scale: the factor of the logits.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, unless it is None.
    """

    before: int | None
    after: int | None
    scale: float
    soft_cap: float | None = None

    def key_span(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the positions of the first and the last key of each query.

        Segments are contiguous, so these are all keys between the two. A query in
        padding has only its own key.

        Args:
          ids: `[B, T]` int, the segment ids.

        Returns:
          Two arrays `[B, T]` int32.
        """
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
        edge = jnp.ones((len(ids), 1), bool)
        is_new = ids[:, 1:] != ids[:, :-1]
        first = jnp.where(jnp.concatenate([edge, is_new], 1), positions, 0)
        first = lax.cummax(first, axis=1)
        last = jnp.where(jnp.concatenate([is_new, edge], 1), positions, ids.shape[1])
        last = lax.cummin(last, axis=1, reverse=True)
        if self.before is not None:
            first = jnp.maximum(first, positions - self.before)
        if self.after is not None:
            last = jnp.minimum(last, positions + self.after)
        is_real = ids > 0
        return jnp.where(is_real, first, positions), jnp.where(is_real, last, positions)
