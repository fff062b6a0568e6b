"""Moves the padding of rows to the beginning, and back to the end, inside of jit."""

from __future__ import annotations

from collections.abc import Collection

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
    places, ids = _places_and_ids(batch)
    # The index after the last token of each row.
    end = jnp.max(jnp.where(ids > 0, places + 1, 0), axis=1, keepdims=True)
    # The padding of the end comes first.
    return _moved(batch, places + end, sequences)


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
    places, ids = _places_and_ids(batch)
    # The index of the first token of each row; 0 if it has none.
    first = jnp.argmax(ids > 0, axis=1, keepdims=True).astype(jnp.int32)
    return _moved(batch, places + first, sequences)


def _places_and_ids(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the places `[T]` of a row, and the segment ids `[B, T]`."""
    if len(batch.segment_ids) != 1:
        raise ValueError(
            f"`batch` has the sequences {sorted(batch.segment_ids)}, each with its own "
            "lengths. Make a batch of each, and move their padding separately."
        )
    (ids,) = batch.segment_ids.values()
    return jnp.arange(ids.shape[1], dtype=jnp.int32), ids


def _moved(batch: Batch, places: jax.Array, sequences: str | Collection[str]) -> Batch:
    """Returns the batch with other places for tokens.

    Args:
      batch: the batch.
      places: `[B, T]` the place that each token comes from, modulo T.
      sequences: the features to move.
    """
    ((name, ids),) = batch.segment_ids.items()
    names = _names(batch, ids.shape, sequences)
    places = places % ids.shape[1]

    def moved(x: jax.Array) -> jax.Array:
        index = places.reshape(*places.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    features = {
        n: moved(jnp.asarray(x)) if n in names else x for n, x in batch.features.items()
    }
    positions = batch.positions[name]
    return Batch(features, {name: moved(ids)}, {name: moved(positions)})


def _names(
    batch: Batch, shape: tuple[int, int], sequences: str | Collection[str]
) -> list[str]:
    """Returns the names of the features to move."""
    known = [name for name, x in batch.features.items() if x.shape[:2] == shape]
    names = [sequences] if isinstance(sequences, str) else list(sequences)
    if not names or not set(known).issuperset(map(str, names)):
        raise ValueError(
            f"`sequences={names}` must name features of shape [B, T, ...]. Choose from "
            f"{sorted(known)}."
        )
    return names
