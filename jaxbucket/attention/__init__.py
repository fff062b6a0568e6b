"""Attention within the segments of packed rows, and masks.

`segment` chooses between `blockwise`, in plain jax, and `splash`, a TPU kernel; neither
makes a mask `[B, T, T]`. `masks` has that, and what losses of packed rows need.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.attention.masks import (
        NextTokens,
        attention_mask,
        next_tokens,
        sequence_lengths,
        token_weights,
    )
    from jaxbucket.attention.segment import segment_attention
