"""Attention within the segments of packed rows, without a mask of `[B, 1, T, T]`."""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from jaxbucket.attention import blockwise, splash, tokamax
from jaxbucket.attention.exchange import exchange_heads
from jaxbucket.attention.masks import Pairs
from jaxbucket.base.checks import check_choice, check_float, check_integer

Implementation: TypeAlias = Literal["blockwise", "splash", "tokamax"]


def segment_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    is_causal: bool = False,
    scale: float | jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns dot-product attention within segments, without a mask of `[B, 1, T, T]`.

    The result equals `jax.nn.dot_product_attention` with an `attention_mask`. In rows
    of several blocks (of up to 128 tokens, on GPUs of up to 512), memory grows linearly
    with T, both forward and backward. Rows of a single block need one to two times the
    memory that they need with a mask. A block of keys is skipped if no row of the batch
    needs it for a block of queries.

    Example:
      >>> ids = jnp.array([[1, 1, 2, 0]])
      >>> x = jnp.arange(4.0).reshape(1, 4, 1, 1)
      >>> segment_attention(x * 0, x, x, ids)[0, :, 0, 0].tolist()
      [0.5, 0.5, 2.0, 0.0]

    Args:
      query: `[B, T, N, H]` floating point: batch, tokens, heads, width.
      key: `[B, T, K, H]` of the same dtype. K divides N, and each key head serves N / K
        query heads.
      value: `[B, T, K, H]` of the same dtype.
      segment_ids: `[B, T]` int, 0 for padding; each segment is contiguous.
      is_causal: whether queries attend only to keys up to their own position.
      scale: the factor of the logits, a number or a scalar array; by default
        1 / sqrt(H).
      local_window_size: the largest distance of a key before and after a query, or one
        for both, as in `jax.nn.dot_product_attention`; by default the whole segment.
      logits_soft_cap: if given, logits become `cap * tanh(logits / cap)`.
      implementation: "blockwise" for plain jax, which runs on any platform and mesh,
        but inside a `jax.shard_map` only with `check_vma=False`; "splash" for jax's
        kernel for TPUs; "tokamax" for Tokamax's for GPUs (`jaxbucket[gpu]`), in 16 bits
        on Hopper and Blackwell. The compiler cannot partition kernels. By default, one
        that applies is used on a single device, on several in the steps of this library
        (see `exchange_heads`), and inside a `jax.shard_map` with `check_vma=False`;
        "blockwise" is used elsewhere.

    Returns:
      `[B, T, N, H]` of the same dtype, 0 in padding.

    Raises:
      ValueError: if shapes or dtypes do not match, a window or cap is out of range, or
        `implementation` is unknown.
      ModuleNotFoundError: if `implementation="tokamax"` is not installed.
    """
    _check(query, key, value, segment_ids)
    if implementation is not None:
        check_choice("implementation", implementation, get_args(Implementation))
    before, after = _window(local_window_size)
    if logits_soft_cap is not None:
        logits_soft_cap = check_float(
            "logits_soft_cap", logits_soft_cap, least=1e-30, most=1e30
        )
    if isinstance(scale, jax.Array):
        # The scale may be a tracer, but the kernels require a number.
        query, scale = query * scale.astype(query.dtype), 1.0
    pairs = Pairs(
        before,
        0 if is_causal else after,
        # A numpy scalar would promote the logits to float64.
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        logits_soft_cap,
    )
    attend = functools.partial(_attend, pairs=pairs, implementation=implementation)
    output = exchange_heads(attend)(query, key, value, segment_ids)
    return jnp.where(segment_ids[..., None, None] > 0, output, 0)


def _attend(
    *arrays: jax.Array, pairs: Pairs, implementation: Implementation | None
) -> jax.Array:
    """Returns attention within segments, by the best implementation for the devices."""
    implementation = implementation or _choose(arrays[0])
    if implementation == "splash":
        return splash.attend(*arrays, pairs=pairs)
    if implementation == "tokamax":
        return tokamax.attend(*arrays, pairs=pairs)
    is_gpu = _traced_platform() == "gpu"
    block = blockwise.GPU_BLOCK if is_gpu else blockwise.BLOCK
    return blockwise.attend(*arrays, pairs=pairs, block=block)


def _choose(query: jax.Array) -> Implementation:
    """Returns the kernel of the devices of the traced program, if it applies."""
    mesh = jax.sharding.get_abstract_mesh()
    is_manual = set(mesh.manual_axes) == set(mesh.axis_names)
    num_devices = jax.device_count() if mesh.empty else mesh.size
    # A kernel runs where every device has its own rows.
    if num_devices > 1 and (mesh.empty or not is_manual):
        return "blockwise"
    # In 64-bit mode the kernels mix integer dtypes.
    if jax.config.read("jax_enable_x64"):
        return "blockwise"
    platform = _traced_platform()
    if platform == "gpu" and tokamax.applies(query):
        return "tokamax"
    return "splash" if platform == "tpu" else "blockwise"


def _traced_platform() -> str:
    """Returns the platform of the traced program: "cpu", "gpu" or "tpu".

    Without a mesh in context, it is assumed to be that of jax's default backend.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is None:
        return jax.default_backend()
    # In jax 0.9, an abstract device has no platform.
    if device.device_kind.startswith("TPU"):
        return "tpu"
    return "cpu" if device.device_kind == "cpu" else "gpu"


def _window(
    local_window_size: int | tuple[int, int] | None,
) -> tuple[int | None, int | None]:
    """Returns the number of keys before and after a query, None for all."""
    if local_window_size is None:
        return None, None
    sizes = local_window_size
    pair = sizes if isinstance(sizes, tuple | list) else (sizes, sizes)
    try:
        before, after = (
            check_integer("local_window_size", x, least=0, most=2**31 - 1) for x in pair
        )
    except ValueError:
        raise ValueError(
            f"`local_window_size={sizes!r}`: pass an int from 0 to 2**31 - 1, or two, "
            "for the keys before and after a query."
        ) from None
    return before, after


def _check(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array
) -> None:
    arrays = {"query": query, "key": key, "value": value, "segment_ids": segment_ids}
    # Four axes each, so that the following may name them.
    is_valid = query.ndim == key.ndim == 4 and key.shape == value.shape
    if is_valid:
        size, seq_len, heads, width = query.shape
        is_valid = (
            key.shape == (size, seq_len, key.shape[2], width)
            and heads % key.shape[2] == 0
            and segment_ids.shape == (size, seq_len)
        )
    is_valid &= query.dtype == key.dtype == value.dtype
    is_valid &= jnp.issubdtype(query.dtype, jnp.floating)
    if not is_valid or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        given = ", ".join(
            f"`{name}` is {x.dtype}{list(x.shape)}" for name, x in arrays.items()
        )
        raise ValueError(
            f"{given}. Pass floating point numbers of one dtype, [B, T, N, H], and "
            "twice [B, T, K, H], where K divides N, and integers [B, T]."
        )
