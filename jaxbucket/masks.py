"""What attention and losses need of packed rows, inside of jit.

All of it is derived from segment ids (0 is padding, then 1, 2, ...) and positions,
which count from 0 in each segment.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from jaxbucket.base import Batch
from jaxbucket.checks import check_choice

Per: TypeAlias = Literal["token", "sequence"]


def attention_mask(
    segment_ids: jax.Array,
    positions: jax.Array | None = None,
    *,
    key_segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns which keys a query may see: real ones of its own example.

    For `jax.nn.dot_product_attention(query, key, value, mask=)`, or Flax's. It takes
    B * T * T bytes, unless the compiler fuses it; a query that is padding sees nothing.

    Example:
      >>> print(attention_mask(jnp.array([[1, 1, 2, 0]]))[0, 0].astype(int))
      [[1 1 0 0]
       [1 1 0 0]
       [0 0 1 0]
       [0 0 0 0]]

    Args:
      segment_ids: `[B, T]` int, of queries and keys.
      positions: `[B, T]` int, for causal attention: keys up to the query's position.
        None for attention in both directions.
      key_segment_ids: `[B, S]` int, those of keys where they are another sequence, such
        as inputs that targets look at; by default `segment_ids`.

    Returns:
      `[B, 1, T, S]` bool: batch, heads, queries, keys.

    Raises:
      ValueError: for positions where queries and keys are different sequences.
    """
    if key_segment_ids is None:
        key_segment_ids = segment_ids
    elif positions is not None:
        raise ValueError(
            "`positions` are of one sequence, and `key_segment_ids` of another: keys "
            "of another sequence come neither before a query nor after it. Leave "
            "either out."
        )
    queries, keys = segment_ids[:, :, None], key_segment_ids[:, None, :]
    mask = (queries == keys) & (keys > 0)
    if positions is not None:
        mask &= positions[:, :, None] >= positions[:, None, :]
    return mask[:, None]


def sequence_lengths(segment_ids: jax.Array) -> jax.Array:
    """Returns how many tokens each row has.

    For rows of one example no mask is needed: give these to
    `jax.nn.dot_product_attention` as `query_seq_lengths` and `key_value_seq_lengths`.

    Example:
      >>> sequence_lengths(jnp.array([[1, 1, 0], [0, 0, 0]])).tolist()
      [2, 0]

    Args:
      segment_ids: `[B, T]` int.

    Returns:
      `[B]` int32.
    """
    return jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32)


def token_weights(
    batch: Batch,
    per: Per = "token",
    *,
    sequence: str | None = None,
    where: jax.Array | None = None,
) -> jax.Array:
    """Returns what each token counts for in a loss, packed or not.

    Their sum is the number of tokens, or of sequences. A loss is then
    `(jnp.sum(nats * weights), jnp.sum(weights))`.

    Example:
      >>> ids = {"tokens": jnp.array([[1, 1, 2, 0]])}
      >>> batch = Batch({}, ids, {"tokens": jnp.array([[0, 1, 0, 0]])})
      >>> print(token_weights(batch, "sequence"))
      [[0.5 0.5 1.  0. ]]

    Args:
      batch: packed or not.
      per: "token" for the mean over all tokens; "sequence" for the mean over sequences
        of the mean over the tokens of each.
      sequence: whose tokens they are, where several have lengths of their own.
      where: `[B, T]` bool, the tokens that count, such as those that are predicted; by
        default all that are real. A sequence without any counts for nothing.

    Returns:
      `[B, T]` float32.

    Raises:
      ValueError: if several sequences have lengths of their own and none of them is
        named, or for an unknown `per`.
    """
    check_choice("per", per, get_args(Per))
    if sequence is None and len(batch.segment_ids) == 1:
        (sequence,) = batch.segment_ids
    if sequence not in batch.segment_ids:
        raise ValueError(
            f"`sequence={sequence!r}`: choose one of {sorted(batch.segment_ids)}, "
            "which have lengths of their own."
        )
    ids = batch.segment_ids[sequence]
    mask = ids > 0 if where is None else (ids > 0) & where
    if per == "token":
        return mask.astype(jnp.float32)

    def of_row(ids: jax.Array, mask: jax.Array) -> jax.Array:
        # No more segments than tokens, and 0 for padding.
        counts = jnp.zeros(ids.shape[0] + 1, jnp.float32).at[ids].add(mask)
        return mask / jnp.maximum(counts[ids], 1)

    return jax.vmap(of_row)(ids, mask.astype(jnp.float32))
