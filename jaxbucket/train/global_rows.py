"""Rows of other devices, for losses that look at more than the rows they are given.

Under `jit` a loss is given the whole batch, under `shard_map` and `pmap` the rows of
one device. `gather_rows` and `row_numbers` mean the same in all of them.
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
    """Which rows of the global batch are at hand, and how to reach the others.

    Hashable, because what jax has traced for one is not reused for another.
    """

    def first_row(self, num_rows: int) -> Any:
        """The place in the global batch of the first of the `num_rows` at hand."""
        ...

    def add_up(self, sums: Any) -> Any:
        """The sums over all rows, from those over the rows at hand."""
        ...

    def gather(self, tree: Any) -> Any:
        """All rows `[B, ...]`, from those at hand."""
        ...


@dataclasses.dataclass(frozen=True)
class WholeBatch:
    """All rows are at hand."""

    def first_row(self, num_rows: int) -> int:
        return 0

    def add_up(self, sums: Any) -> Any:
        return sums

    def gather(self, tree: Any) -> Any:
        return tree


@dataclasses.dataclass(frozen=True)
class MappedRows:
    """The rows of one device, inside of a function mapped over named axes.

    Attributes:
      axes: the axes that cut the rows, the slowest first.
    """

    axes: tuple[str, ...]

    def first_row(self, num_rows: int) -> jax.Array:
        return jax.lax.axis_index(self.axes) * num_rows

    def add_up(self, sums: Any) -> Any:
        return jax.lax.psum(sums, self.axes)

    def gather(self, tree: Any) -> Any:
        return jax.tree.map(in_single(self._gather), tree)

    def _gather(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, self.axes, tiled=True)


def in_single(collective: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Returns the collective such that half precision goes through it in float32.

    Its transpose adds up over devices, in which half precision loses bits; and XLA on
    CPUs aborts where it adds up bfloat16 on a mesh with an axis for the model.
    """

    def wide(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
            return collective(x.astype(jnp.float32)).astype(x.dtype)
        return collective(x)

    return wide


# The rows that the loss being traced is given. A context of jax and not of Python: a
# jitted function inside of a loss is traced anew where the rows are others.
rows_at_hand: Any = jax.make_user_context(None)


def gather_rows(x: _Tree) -> _Tree:
    """Returns the rows of all devices, in the order of the global batch.

    For losses that look at other rows, such as in-batch negatives; call it inside of
    the loss. Gradients flow back to the device that a row came from. Of several
    micro-batches, those are the rows of one. Where a device has the whole batch, as
    under `mode="jit"`, it returns `x` itself.

    Example:
      >>> def loss_fn(model, batch, keys):
      ...     queries = model(batch.features["query"])
      ...     documents = gather_rows(model(batch.features["document"]))
      ...     logits = queries @ documents.T
      ...     picked = logits[jnp.arange(len(queries)), row_numbers(batch)]
      ...     nats = jax.nn.logsumexp(logits, axis=1) - picked
      ...     return jnp.sum(nats), jnp.float32(len(nats))
      >>> gather_rows(jnp.arange(3)).tolist()  # outside of a step there are no others
      [0, 1, 2]

    Args:
      x: an array `[B / D, ...]`, or a tree of them, of the rows that this one of D
        devices was given.

    Returns:
      The same of all rows, `[B, ...]`.

    Raises:
      ValueError: for an array without rows, or inside of your own `shard_map` or
        `pmap`, whose axes it does not know.
    """
    for leaf in jax.tree.leaves(x):
        if not jnp.shape(leaf):
            raise ValueError(
                "`gather_rows` was given a scalar: give it arrays whose first axis is "
                "the rows."
            )
    return rows().gather(x)


def row_numbers(batch: Batch) -> jax.Array:
    """Returns the place of each row in the global batch, and in `gather_rows`.

    Example:
      >>> ids = jnp.array([[1, 1], [1, 0]])
      >>> row_numbers(Batch({}, {"tokens": ids}, {"tokens": ids})).tolist()
      [0, 1]

    Args:
      batch: the rows that the loss was given.

    Returns:
      `[B / D]` int32 on each of D devices.

    Raises:
      ValueError: inside of your own `shard_map` or `pmap`.
    """
    num_rows = batch.bucket.batch_size
    return rows().first_row(num_rows) + jnp.arange(num_rows, dtype=jnp.int32)


def rows() -> Rows:
    """Those that the loss being traced is given; all, where no step says otherwise."""
    at_hand = rows_at_hand.value
    if not (at_hand is None or isinstance(at_hand, WholeBatch)):
        return at_hand
    # What cuts them is the user's own, in a step of ours, too.
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise ValueError(
            f"`gather_rows` and `row_numbers` do not know which of the axes "
            f"{sorted(axes)} of your own `shard_map` or `pmap` cut the rows. There, "
            "use `jax.lax.all_gather(x, axes, tiled=True)` and `jax.lax.axis_index`."
        )
    return WholeBatch()
