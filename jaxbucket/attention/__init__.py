"""Attention within the segments of packed rows, and masks and weights for such rows.

`segment` chooses between `blockwise`, in plain jax, and `splash`, a TPU kernel. Neither
of them creates a mask of `[B, T, T]`. `masks` computes such a mask, and the weights and
targets of losses on packed rows, and `sums` adds up numbers of each example.
`left_padding` moves padding to the beginning of rows and back.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.attention.left_padding import left_padded, right_padded
    from jaxbucket.attention.masks import (
        NextTokens,
        attention_mask,
        next_tokens,
        sequence_lengths,
        token_weights,
    )
    from jaxbucket.attention.segment import segment_attention
    from jaxbucket.attention.sums import example_sums
