"""Attention within the segments of packed rows, without a mask of `[B, 1, T, T]`."""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from jaxbucket.attention import blockwise, splash
from jaxbucket.attention.exchange import exchange_heads
from jaxbucket.base.checks import check_choice

Implementation: TypeAlias = Literal["blockwise", "splash"]


def segment_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    is_causal: bool = False,
    scale: float | jax.Array | None = None,
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
      implementation: "blockwise" for plain jax, which runs on any platform and mesh,
        but inside a `jax.shard_map` only with `check_vma=False`; "splash" for jax's TPU
        kernel, which the compiler cannot partition. By default, the kernel is used on a
        single TPU, on several in the steps of this library (see `exchange_heads`), and
        inside a `jax.shard_map` with `check_vma=False`; "blockwise" is used elsewhere.

    Returns:
      `[B, T, N, H]` of the same dtype, 0 in padding.

    Raises:
      ValueError: if shapes or dtypes do not match, or `implementation` is unknown.
    """
    _check(query, key, value, segment_ids)
    if implementation is not None:
        check_choice("implementation", implementation, get_args(Implementation))
    if isinstance(scale, jax.Array):
        # The scale may be a tracer, but the kernels require a number.
        query, scale = query * scale.astype(query.dtype), 1.0
    attend = functools.partial(
        _attend,
        is_causal=is_causal,
        # A numpy scalar would promote the logits to float64.
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        implementation=implementation,
    )
    output = exchange_heads(attend)(query, key, value, segment_ids)
    return jnp.where(segment_ids[..., None, None] > 0, output, 0)


def _attend(
    *arrays: jax.Array,
    is_causal: bool,
    scale: float,
    implementation: Implementation | None,
) -> jax.Array:
    """Returns attention within segments, by the best implementation for the devices."""
    if implementation is None:
        implementation = "splash" if _is_for_one_tpu() else "blockwise"
    if implementation == "splash":
        return splash.attend(*arrays, is_causal=is_causal, scale=scale)
    block = blockwise.GPU_BLOCK if _is_for_gpus() else blockwise.BLOCK
    return blockwise.attend(*arrays, is_causal=is_causal, scale=scale, block=block)


def _is_for_one_tpu() -> bool:
    """Returns whether every TPU runs the traced program on its own rows."""
    # In 64-bit mode the kernel mixes integer dtypes.
    if jax.config.read("jax_enable_x64"):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.default_backend() == "tpu" and jax.device_count() == 1
    device = mesh.abstract_device
    is_tpu = device is not None and device.device_kind.startswith("TPU")
    is_manual = set(mesh.manual_axes) == set(mesh.axis_names)
    return is_tpu and (mesh.size == 1 or is_manual)


def _is_for_gpus() -> bool:
    """Returns whether the traced program is for GPUs.

    Without a mesh in context, it is assumed to be for jax's default backend. A wrong
    guess changes the time and memory, but not the result.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is None:
        return jax.default_backend() == "gpu"
    if hasattr(device, "platform"):
        return device.platform == "gpu"
    # In jax 0.9, an abstract device has no platform.
    return device.device_kind != "cpu" and not device.device_kind.startswith("TPU")


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
