"""Sums over the tokens of each example, for padded and packed rows, inside of jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxbucket.attention.targets import row_ids
from jaxbucket.base.batch import Batch


def example_sums(
    x: jax.Array,
    batch: Batch,
    max_segments: int | None,
    *,
    sequence: str | None = None,
) -> jax.Array:
    """Returns the sum of a number over the tokens of each example.

    The result has the shape that `predict` expects of an output without a T axis, so
    the same function predicts from padded and from packed rows.

    Example:
      >>> ids = {"tokens": jnp.array([[1, 1, 2, 0]])}
      >>> batch = Batch({}, ids, {"tokens": jnp.array([[0, 1, 0, 0]])})
      >>> x = jnp.array([[1.0, 2.0, 3.0, jnp.nan]])
      >>> example_sums(x, batch, max_segments=3).tolist()
      [[3.0, 3.0, 0.0]]

    Args:
      x: `[B, T, ...]` numbers. Those in padding do not count.
      batch: the batch that the numbers belong to.
      max_segments: `schedule.max_segments`, the number S of examples that a packed row
        may hold; None for rows of one example.
      sequence: the name of the sequence; required if the batch has several sequences
        with their own lengths.

    Returns:
      `[B, S, ...]`, 0 for missing examples; `[B, ...]` if `max_segments` is None. The
      dtype is that of `x.sum()`.

    Raises:
      ValueError: if `x` does not have shape `[B, T, ...]`, or `sequence` is missing
        although there are several sequences.
    """
    ids = row_ids(batch, sequence)
    if x.shape[:2] != ids.shape:
        raise ValueError(
            f"`x` has shape {list(x.shape)}, but must be [B, T, ...], here "
            f"{[*ids.shape, '...']}. Pass a number for every token."
        )
    is_real = (ids > 0).reshape(*ids.shape, *[1] * (x.ndim - 2))
    x = jnp.where(is_real, x, jnp.zeros((), x.dtype))
    if max_segments is None:
        return x.sum(axis=1)
    # As `sum` does: integers do not overflow, and half precision is added in float32.
    dtype = jax.eval_shape(jnp.sum, x).dtype
    is_half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4

    def of_row(x: jax.Array, ids: jax.Array) -> jax.Array:
        # Padding has id 0.
        return jax.ops.segment_sum(x, ids, max_segments + 1)[1:].astype(dtype)

    return jax.vmap(of_row)(x.astype(jnp.float32 if is_half else dtype), ids)
