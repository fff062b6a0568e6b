"""Attention over packed rows by "splash attention", jax's kernel for TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The largest that divides T is taken; the kernel takes multiples of 128.
_BLOCKS = (512, 256, 128)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    is_causal: bool,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """Returns what each query has of the values of its segment, as `blockwise` does.

    Args:
      query: `[B, T, N, H]` float32 or bfloat16.
      key: `[B, T, K, H]`, K a divisor of N.
      value: `[B, T, K, H]`.
      segment_ids: `[B, T]` int; what padding gets is of no meaning, but finite.
      is_causal: whether later keys are hidden.
      scale: of the logits.
      interpret: whether it is run by jax, anywhere, to test it.

    Returns:
      `[B, T, N, H]` in the dtype of the queries.
    """
    # It takes long to load, and is needed on TPUs alone.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    seq_len, heads = query.shape[1:3]
    added = -seq_len % _BLOCKS[-1]
    padded = seq_len + added
    block = next(x for x in _BLOCKS if padded % x == 0)

    def to_heads(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, added), (0, 0), (0, 0)))
        return x.transpose(0, 2, 1, 3)

    # Places are enough for causal attention, for segments are in one piece each.
    mask = (splash.CausalMask if is_causal else splash.FullMask)((padded, padded))
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )
    # Padding sees padding here, so that no row is without a key.
    ids = jnp.pad(segment_ids, ((0, 0), (0, added)))
    found: jax.Array = jax.vmap(kernel)(
        *(
            to_heads(query * jnp.asarray(scale, query.dtype)),
            to_heads(key),
            to_heads(value),
        ),
        splash.SegmentIds(q=ids, kv=ids),
    )  # pyright: ignore[reportAssignmentType]
    return found.transpose(0, 2, 1, 3)[:, :seq_len]
