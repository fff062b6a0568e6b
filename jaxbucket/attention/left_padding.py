"""Moves the padding of rows to the beginning, and back to the end, inside of jit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxbucket.base.batch import Batch


def left_padded(batch: Batch, *, sequences: str | Collection[str]) -> Batch:
    """Returns the batch with padding at the beginning of rows, for decoding.

    All rows then end with a real token, so that a model which generates tokens
    continues every row at the same index. Positions still count from 0 at the first
    token of each example. A row that ends with a real token already is left unchanged.
    `right_padded` is the inverse, which outputs for `predict` need.

    Example:
      >>> ids = jnp.array([[1, 1, 0], [1, 1, 1]])
      >>> x = jnp.array([[7, 3, 0], [5, 9, 4]])
      >>> batch = Batch({"x": x}, {"x": ids}, {"x": ids - 1})
      >>> left = left_padded(batch, sequences="x")
      >>> left.features["x"].tolist(), left.mask[0].tolist()
      ([[0, 7, 3], [5, 9, 4]], [False, True, True])

    Args:
      batch: a batch with padding at the end of rows, as loaders yield it.
      sequences: the features to move, of shape `[B, T, ...]`, or the name of one. They
        are not known from shapes: class scores `[B, 8]` look like a sequence where T is
        8. Segment ids and positions are always moved.

    Raises:
      ValueError: if examples have several sequences, each with its own lengths; or if
        `sequences` is empty or names anything but features of shape `[B, T, ...]`.
    """
    # The place of the last token is moved to the last place.
    return _moved(batch, sequences, lambda is_real: jnp.argmax(is_real[::-1]))


def right_padded(batch: Batch, *, sequences: str | Collection[str]) -> Batch:
    """Returns the batch with padding at the end of rows: the inverse of `left_padded`.

    `predict` removes padding at the end of rows, so outputs `[B, T, ...]` of a
    left-padded batch must be moved back. Put them into the batch as features.

    Example:
      >>> ids = jnp.array([[1, 1, 0], [1, 1, 1]])
      >>> x = jnp.array([[7, 3, 0], [5, 9, 4]])
      >>> batch = Batch({"x": x}, {"x": ids}, {"x": ids - 1})
      >>> left = left_padded(batch, sequences="x")
      >>> outputs = {"y": 10 * left.features["x"]}
      >>> left = left._replace(features=outputs)
      >>> right_padded(left, sequences="y").features["y"].tolist()
      [[70, 30, 0], [50, 90, 40]]

    Args:
      batch: a batch with padding at the beginning of rows.
      sequences: the features to move, as for `left_padded`.

    Raises:
      ValueError: as `left_padded`.
    """
    return _moved(batch, sequences, lambda is_real: -jnp.argmax(is_real))


def _moved(
    batch: Batch,
    sequences: str | Collection[str],
    places: Callable[[jax.Array], jax.Array],
) -> Batch:
    """Returns the batch with the tokens of each row moved to the right, cyclically.

    Args:
      batch: the batch.
      sequences: the features to move.
      places: `[T]` bool, the places of tokens in a row -> by how many places to move
        them.
    """
    (name, ids), *others = batch.segment_ids.items()
    known = [name for name, x in batch.features.items() if x.shape[:2] == ids.shape]
    names = {sequences} if isinstance(sequences, str) else {*sequences}
    if others or not names or not names.issubset(known):
        raise ValueError(
            f"`sequences={sequences!r}` must name features of shape [B, T, ...] of a "
            f"batch with one sequence. The batch has {sorted(batch.segment_ids)}, and "
            f"the features {sorted(known)} have this shape."
        )

    @jax.vmap
    def moved(x: jax.Array, is_real: jax.Array) -> jax.Array:
        return jnp.roll(x, places(is_real), axis=0)

    def of_rows(x: Any) -> jax.Array:
        return moved(jnp.asarray(x), jnp.asarray(ids > 0))

    features = {n: of_rows(x) if n in names else x for n, x in batch.features.items()}
    positions = of_rows(batch.positions[name])
    return Batch(features, {name: of_rows(ids)}, {name: positions})
