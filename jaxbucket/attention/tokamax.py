"""Attention over packed rows with Tokamax's flash attention, a kernel for GPUs.

It is the kernel in "Mosaic GPU" for Hopper and Blackwell. Tokamax's other kernel for
GPUs, in Triton, needs a mask of `[B, 1, T, T]` for the gradient.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import jax
from jax.extend.backend import get_default_device

from jaxbucket.attention.masks import Pairs
from jaxbucket.base.notes import Noting

# Only a module that Tokamax keeps private has its mask, so the extra pins the version.
_VERSION = "0.0.17"
_DTYPES = ("bfloat16", "float16")
# Of compute capabilities, Hopper and Blackwell, the widest heads whose gradients fit
# into shared memory.
_MAX_WIDTHS = {"9": 256, "10": 192}


def applies(query: jax.Array) -> bool:
    """Returns whether the kernel is installed, and runs on this process's GPUs.

    Args:
      query: `[B, T, N, H]`.
    """
    # Tokamax asks the same device.
    capability = getattr(get_default_device(), "compute_capability", "")
    most = _MAX_WIDTHS.get(str(capability).partition(".")[0], 0)
    return (
        query.dtype.name in _DTYPES
        and query.shape[-1] <= most
        and _installed_version() == _VERSION
    )


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        return None


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
    kernel = _module("pallas_mosaic_gpu").PallasMosaicGpuFlashAttention()
    return kernel(
        *(query, key, value),
        mask=mask_of(segment_ids, pairs),
        logits_scale=pairs.scale,
        logits_soft_cap=pairs.soft_cap,
    )


def mask_of(segment_ids: jax.Array, pairs: Pairs) -> Any:
    """Returns the first and the last key of each query, as Tokamax's `Mask`."""
    first, last = (x[:, None] for x in pairs.key_span(segment_ids))
    mask = _module("base").Mask
    if pairs.after == 0:
        # At less cost, the kernel skips the blocks after a query itself.
        return mask(k_start=first, is_causal=True)
    return mask(k_start=first, k_end=last + 1)


def _module(name: str) -> Any:
    with Noting("pip install 'jaxbucket[gpu]', in Python 3.12 or newer."):
        return importlib.import_module(f"tokamax._src.ops.attention.{name}")
