"""Attention within the segments of packed rows, and masks and weights for such rows.

`segment` chooses between `blockwise`, in plain jax, and the kernels `splash` for TPUs
and `tokamax` for GPUs, for the pairs of queries and keys that a call describes. None of
them creates a mask of `[B, T, T]`, as `masks` does. `targets` computes targets and
weights of losses on packed rows, and `sums` adds up numbers of each example.
`left_padding` moves padding to the beginning of rows and back. `formats` returns
batches under the names of other libraries.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.attention.exchange import exchange_heads as exchange_heads
    from jaxbucket.attention.formats import FORMATS as FORMATS
    from jaxbucket.attention.formats import BatchFormat as BatchFormat
    from jaxbucket.attention.formats import convert_batch as convert_batch
    from jaxbucket.attention.left_padding import left_padded as left_padded
    from jaxbucket.attention.left_padding import right_padded as right_padded
    from jaxbucket.attention.masks import attention_mask as attention_mask
    from jaxbucket.attention.masks import sequence_lengths as sequence_lengths
    from jaxbucket.attention.segment import segment_attention as segment_attention
    from jaxbucket.attention.sums import example_sums as example_sums
    from jaxbucket.attention.targets import NextTokens as NextTokens
    from jaxbucket.attention.targets import next_tokens as next_tokens
    from jaxbucket.attention.targets import token_weights as token_weights
