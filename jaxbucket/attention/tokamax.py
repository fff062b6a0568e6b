"""Attention over packed rows with Tokamax's flash attention, a kernel for GPUs.

It is the kernel in "Mosaic GPU" for Hopper and Blackwell. Tokamax's other kernel for
GPUs, in Triton, needs a mask of `[B, 1, T, T]` for the gradient.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
from jax.extend.backend import get_default_device

from jaxbucket.attention.pairs import Pairs
from jaxbucket.base.notes import Noting

_DTYPES = ("bfloat16", "float16")
# Of compute capabilities: Hopper and Blackwell.
_GENERATIONS = ("9", "10")
# Wider heads do not fit into shared memory.
_MAX_WIDTH = 256


def applies(query: jax.Array) -> bool:
    """Returns whether the kernel is installed, and runs on this process's GPUs.

    Args:
      query: `[B, T, N, H]`.
    """
    # Tokamax asks the same device.
    capability = getattr(get_default_device(), "compute_capability", "")
    return (
        str(capability).partition(".")[0] in _GENERATIONS
        and query.dtype.name in _DTYPES
        and query.shape[-1] <= _MAX_WIDTH
        and importlib.util.find_spec("tokamax") is not None
    )


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    pairs: Pairs,
) -> jax.Array:
    """Returns attention within segments, as `blockwise.attend` does.

    Args:
      query: bfloat16 or float16; it and the following as there.
    """
    mask = mask_of(segment_ids, pairs)
    from tokamax._src.ops.attention import pallas_mosaic_gpu

    kernel = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()
    return kernel(
        *(query, key, value),
        mask=mask,
        logits_scale=pairs.scale,
        logits_soft_cap=pairs.soft_cap,
    )


def mask_of(segment_ids: jax.Array, pairs: Pairs) -> Any:
    """Returns the first and the last key of each query, as Tokamax's `Mask`."""
    with Noting("pip install 'jaxbucket[gpu]' (Python 3.12)."):
        # Tokamax's public function has no such mask, so the extra pins its version.
        from tokamax._src.ops.attention import base

    first, last = (x[:, None] for x in pairs.key_span(segment_ids))
    if pairs.after == 0:
        # At less cost, the kernel skips the blocks after a query itself.
        return base.Mask(k_start=first, is_causal=True)
    return base.Mask(k_start=first, k_end=last + 1)
