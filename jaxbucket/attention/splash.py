"""Attention over packed rows with "splash attention", jax's TPU kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxbucket.attention.masks import Pairs

# The largest block that divides the padded T is used. The kernel requires multiples of
# 128.
_BLOCKS = (512, 256, 128)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    pairs: Pairs,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention within segments, as `blockwise.attend` does.

    Args:
      query: float32 or bfloat16; it and the following as there.
      interpret: whether to run the kernel in interpret mode, for tests on any platform.
    """
    # Imported here because it is slow and needed only on TPUs.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    seq_len, heads = query.shape[1:3]
    padding = -seq_len % _BLOCKS[-1]
    padded = seq_len + padding
    block = next(x for x in _BLOCKS if padded % x == 0)

    def to_heads(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
        return x.transpose(0, 2, 1, 3)

    # A mask by position in the row suffices, because segments are contiguous.
    shape, window = (padded, padded), (pairs.before, pairs.after)
    is_full = window == (None, None)
    mask = splash.FullMask(shape) if is_full else splash.LocalMask(shape, window, 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            *(block, block),
            **dict.fromkeys(
                ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block
            ),
        ),
        attn_logits_soft_cap=pairs.soft_cap,
        interpret=interpret,
    )
    # Padding attends to padding here, so that every query has a key.
    ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    output: jax.Array = jax.vmap(kernel)(
        *(
            to_heads(query * jnp.asarray(pairs.scale, query.dtype)),
            to_heads(key),
            to_heads(value),
        ),
        splash.SegmentIds(q=ids, kv=ids),
    )  # pyright: ignore[reportAssignmentType]
    return output.transpose(0, 2, 1, 3)[:, :seq_len]
