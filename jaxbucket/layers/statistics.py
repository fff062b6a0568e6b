"""The mean and the variance of features over the real positions of all devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxbucket.optim.precision import widest
from jaxbucket.train.global_rows import sum_over_rows


class Statistics(NamedTuple):
    """Statistics of features, in float32 or wider.

    Attributes:
      mean: `[F]`, the mean; 0 if there are no real positions.
      var: `[F]`, the variance around this mean, without Bessel's correction.
      num_real: `[]`, the number of real positions.
    """

    mean: jax.Array
    var: jax.Array
    num_real: jax.Array


def masked_statistics(
    x: jax.Array, mask: jax.Array | None = None, *, axis: int = -1
) -> Statistics:
    """Returns the mean and the variance over the real positions of all devices.

    In a loss, the results are the same for `mode="jit"`, "shard_map" and "pmap", and
    gradients flow back to all rows.

    Example:
      >>> x = jnp.array([[[1.0], [3.0], [9.0]]])
      >>> mean, var, num_real = masked_statistics(x, jnp.array([[True, True, False]]))
      >>> print(mean, var, num_real)
      [2.] [1.] 2.0

    Args:
      x: `[B, ..., F]`, the features of the local rows.
      mask: whether a position is real, for the leading axes of `x`, such as `[B, T]`;
        by default, all are. Further axes of `x` are included.
      axis: the axis of the features.

    Returns:
      The statistics over all axes but that of the features.

    Raises:
      ValueError: if the shape of the mask is not that of the leading axes.
    """
    x = jnp.moveaxis(x, axis, -1).astype(widest(jnp.float32, x.dtype))
    real = _real(x, mask)
    axes = tuple(range(x.ndim - 1))
    # Two passes, because the difference of two large numbers would not be exact.
    total, count = sum_over_rows(
        (jnp.sum(x, axes, where=real), jnp.sum(real, dtype=x.dtype))
    )
    divisor = jnp.maximum(count, 1)
    mean = total / divisor
    squares = jnp.square(jnp.where(real, x - mean, 0))
    var = sum_over_rows(jnp.sum(squares, axes)) / divisor
    return Statistics(mean, var, count)


def _real(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns whether positions are real, `[B, ..., 1]`."""
    shape = (*x.shape[:-1], 1)
    if mask is None:
        return jnp.ones(shape, bool)
    if mask.ndim >= x.ndim or mask.shape != shape[: mask.ndim]:
        raise ValueError(
            f"`mask` has shape {list(mask.shape)}, but `x` has {list(x.shape[:-1])} "
            "positions. Pass a mask for its leading axes, such as `batch.mask` [B, T]."
        )
    mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
    return jnp.broadcast_to(mask.astype(bool), shape)


def normalized(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: float,
    axis: int,
    dtype: Any,
) -> jax.Array:
    """Returns `(x - mean) / sqrt(var + epsilon) * scale + bias`.

    Computes in float32 or wider, and returns `dtype`, by default that of `x`,
    promoted with those of `scale` and `bias`.
    """
    if dtype is None:
        dtype = widest(*(y.dtype for y in (x, scale, bias) if y is not None))
    wide = widest(mean.dtype, x.dtype)
    y = jnp.moveaxis(x, axis, -1).astype(wide) - mean.astype(wide)
    factor = jax.lax.rsqrt(var.astype(wide) + epsilon)
    if scale is not None:
        factor = factor * scale.astype(wide)
    y = y * factor
    if bias is not None:
        y = y + bias.astype(wide)
    return jnp.moveaxis(y, -1, axis).astype(dtype)


def moving_averages(
    mean: jax.Array, var: jax.Array, statistics: Statistics, momentum: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the running mean and variance after a batch.

    They are unchanged if the batch has no real positions.
    """

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        average = momentum * old + (1 - momentum) * new.astype(old.dtype)
        return jax.lax.stop_gradient(jnp.where(statistics.num_real > 0, average, old))

    return moved(mean, statistics.mean), moved(var, statistics.var)


def check_axes(axis: Any, axis_name: Any, axis_index_groups: Any) -> None:
    """Raises a ValueError for several feature axes, or if devices are selected."""
    if not isinstance(axis, int):
        raise ValueError(
            f"`axis={axis!r}` is not supported: features must have one axis. Reshape "
            "them, and pass its number."
        )
    if axis_name is not None or axis_index_groups is not None:
        raise ValueError(
            f"`axis_name={axis_name!r}` is not supported: statistics are always those "
            "of all devices. Leave out `axis_name` and `axis_index_groups`."
        )
