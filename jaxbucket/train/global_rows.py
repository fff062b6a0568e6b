"""Access to the rows of other devices, for losses that need them.

Under `jit` a loss is given the whole batch, under `shard_map` and `pmap` the rows of
one device. `sum_over_rows`, `gather_rows` and `row_numbers` return the same values in
all modes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jaxbucket.base.batch import Batch

_Tree = TypeVar("_Tree")


class Rows(Protocol):
    """The local rows of the global batch, and how to reach the others.

    Implementations are hashable, because they are part of the key of jax's trace cache.
    """

    def first_row(self, num_rows: int) -> Any:
        """Returns the global index of the first of the `num_rows` local rows."""
        ...

    def sum_over_rows(self, sums: Any) -> Any:
        """Returns the sums over all rows, given the sums over the local rows."""
        ...

    def max_over_rows(self, values: Any) -> Any:
        """Returns the largest values of all devices."""
        ...

    def gather(self, tree: Any) -> Any:
        """Returns all rows `[B, ...]`, given the local rows."""
        ...


@dataclasses.dataclass(frozen=True)
class WholeBatch:
    """All rows of the batch are local."""

    def first_row(self, num_rows: int) -> int:
        return 0

    def sum_over_rows(self, sums: Any) -> Any:
        return sums

    def max_over_rows(self, values: Any) -> Any:
        return values

    def gather(self, tree: Any) -> Any:
        return tree


@dataclasses.dataclass(frozen=True)
class MappedRows:
    """The rows of one device, in a function that is mapped over named axes.

    Attributes:
      axes: the axes over which rows are sharded, the slowest varying first.
    """

    axes: tuple[str, ...]

    def first_row(self, num_rows: int) -> jax.Array:
        return jax.lax.axis_index(self.axes) * num_rows

    def sum_over_rows(self, sums: Any) -> Any:
        return jax.lax.psum(sums, self.axes)

    def max_over_rows(self, values: Any) -> Any:
        return jax.lax.pmax(values, self.axes)

    def gather(self, tree: Any) -> Any:
        return jax.tree.map(in_single(self._gather), tree)

    def _gather(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, self.axes, tiled=True)


def in_single(collective: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Wraps a collective so that it runs in float32 on half precision arrays.

    Its transpose adds up over devices, which would lose bits in half precision. Also,
    XLA on CPUs aborts when it adds up bfloat16 on a mesh with a model axis.
    """

    def wide(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
            return collective(x.astype(jnp.float32)).astype(x.dtype)
        return collective(x)

    return wide


# The local rows of the loss that is being traced. This is a jax context, not a Python
# one, so that a jitted function inside a loss is traced again for different `Rows`.
rows_context: Any = jax.make_user_context(None)


def gather_rows(x: _Tree) -> _Tree:
    """Returns the rows of all devices, in the order of the global batch.

    Call it inside a loss that needs other rows, for instance for in-batch negatives.
    Gradients flow back to the device that a row came from. With accumulation, these are
    the rows of a single micro-batch. If a device has the whole batch, as under
    `mode="jit"`, `x` itself is returned.

    Example:
      >>> def loss_fn(model, batch, keys):
      ...     queries = model(batch.features["query"])
      ...     documents = gather_rows(model(batch.features["document"]))
      ...     logits = queries @ documents.T
      ...     picked = logits[jnp.arange(len(queries)), row_numbers(batch)]
      ...     nats = jax.nn.logsumexp(logits, axis=1) - picked
      ...     return jnp.sum(nats), jnp.float32(len(nats))
      >>> gather_rows(jnp.arange(3)).tolist()  # outside a step, all rows are local
      [0, 1, 2]

    Args:
      x: an array `[B / D, ...]`, or a tree of such arrays, with the local rows of this
        one of D devices.

    Returns:
      The arrays `[B, ...]` of all rows.

    Raises:
      ValueError: if an array is a scalar, or inside your own `shard_map` or `pmap`,
        whose axes are not known here.
    """
    for leaf in jax.tree.leaves(x):
        if not jnp.shape(leaf):
            raise ValueError(
                "`x` contains a scalar. Pass arrays with the rows as first axis to "
                "`gather_rows`."
            )
    return current_rows().gather(x)


def sum_over_rows(x: _Tree) -> _Tree:
    """Returns sums over the rows of all devices, given the sums over the local rows.

    Call it inside a loss that needs a statistic of the whole batch, for instance the
    mean of a feature. Gradients flow back to all rows. Do not call it on the sums that
    the loss returns, because steps add them up themselves.

    Example:
      >>> def batch_mean(x, mask):  # [B, T, F], [B, T] -> [F]
      ...     sums = jnp.sum(x * mask[..., None], axis=(0, 1)), jnp.sum(mask)
      ...     total, count = sum_over_rows(sums)
      ...     return total / jnp.maximum(count, 1)
      >>> x, mask = jnp.array([[[1.0], [3.0], [9.0]]]), jnp.array([[1, 1, 0]])
      >>> batch_mean(x, mask.astype(x.dtype)).tolist()
      [2.0]

    Args:
      x: an array, or a tree of arrays: sums over the local rows of this device.

    Returns:
      The sums over all rows, in the same dtypes. Half precision is added up in float32.

    Raises:
      ValueError: if called inside your own `shard_map` or `pmap`, whose axes are not
        known here.
    """
    return jax.tree.map(in_single(current_rows().sum_over_rows), x)


def row_numbers(batch: Batch) -> jax.Array:
    """Returns the index of each local row in the global batch and in `gather_rows`.

    Example:
      >>> ids = jnp.array([[1, 1], [1, 0]])
      >>> row_numbers(Batch({}, {"tokens": ids}, {"tokens": ids})).tolist()
      [0, 1]

    Args:
      batch: the batch that the loss was given.

    Returns:
      `[B / D]` int32 on each of D devices.

    Raises:
      ValueError: if called inside your own `shard_map` or `pmap`.
    """
    num_rows = batch.bucket.batch_size
    return current_rows().first_row(num_rows) + jnp.arange(num_rows, dtype=jnp.int32)


def current_rows() -> Rows:
    """Returns the local rows of the loss that is being traced, or `WholeBatch`."""
    local = rows_context.value
    if not (local is None or isinstance(local, WholeBatch)):
        return local
    # Manual axes are the user's own here, even inside a step of this package.
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise ValueError(
            "`gather_rows`, `row_numbers` and `sum_over_rows` cannot tell which of the "
            f"axes {sorted(axes)} of your own `shard_map` or `pmap` shard the rows. "
            "Use `jax.lax.all_gather(x, axes, tiled=True)`, `jax.lax.axis_index` and "
            "`jax.lax.psum` there."
        )
    return WholeBatch()
