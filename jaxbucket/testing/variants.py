"""Variants of a batch for which a loss must return the same results."""

from __future__ import annotations

from collections.abc import Collection

import jax
import numpy as np

from jaxbucket.base.batch import Batch


def filled_rows(batch: Batch) -> np.ndarray:
    """Returns `[B]` bool, whether each row contains an example."""
    return _num_segments(batch) > 0


def is_packed(batch: Batch) -> bool:
    """Returns whether a row contains several examples."""
    return bool(_num_segments(batch).max() > 1)


def take_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """Returns the batch of these rows."""
    return jax.tree.map(lambda x: x[rows], batch)


def with_empty_rows(batch: Batch, count: int) -> Batch:
    """Returns the batch with `count` rows of zeros appended."""

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((count, *x.shape[1:]), x.dtype)])

    return jax.tree.map(longer, batch)


def with_other_padding(batch: Batch, sequences: Collection[str] | None) -> Batch:
    """Returns the batch with its padding replaced by real values of other positions."""
    features = {}
    for name, x in batch.features.items():
        features[name] = _refilled(x, _real_entries(batch, name, sequences))
    return batch._replace(features=features)


def with_more_columns(batch: Batch, sequences: Collection[str] | None) -> Batch:
    """Returns the batch with twice as many columns, the new ones filled with zeros."""

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros_like(x)], axis=1)

    features = {
        name: longer(x) if _find_sequence(batch, name, sequences) else x
        for name, x in batch.features.items()
    }
    segment_ids, positions = jax.tree.map(longer, batch[1:])
    return Batch(features, segment_ids, positions)


def without_neighbors(batch: Batch, sequences: Collection[str] | None) -> Batch:
    """Returns the batch with every example at the start of a row of its own."""
    counts = _num_segments(batch)
    rows, segments = np.nonzero(np.arange(counts.max()) < counts[:, None])
    columns, real = {}, {}
    for name, ids in batch.segment_ids.items():
        is_segment = ids[rows] == segments[:, None] + 1
        columns[name] = np.argsort(~is_segment, axis=1, kind="stable")
        real[name] = np.take_along_axis(is_segment, columns[name], axis=1)

    def move_sequence(x: np.ndarray, sequence: str) -> np.ndarray:
        moved = x[rows[:, None], columns[sequence]]
        moved[~real[sequence]] = 0
        return moved

    def move_scalar(x: np.ndarray) -> np.ndarray:
        if not _is_stacked(batch, x):
            return x[rows]
        first = np.zeros_like(x[rows])
        first[:, 0] = x[rows, segments]
        return first

    features = {}
    for name, x in batch.features.items():
        sequence = _find_sequence(batch, name, sequences)
        features[name] = move_sequence(x, sequence) if sequence else move_scalar(x)
    segment_ids = {name: x.astype(np.int32) for name, x in real.items()}
    positions = {name: move_sequence(x, name) for name, x in batch.positions.items()}
    return Batch(features, segment_ids, positions)


def _num_segments(batch: Batch) -> np.ndarray:
    """Returns `[B]`, the number of examples in each row."""
    return next(iter(batch.segment_ids.values())).max(axis=1)


def _real_entries(
    batch: Batch, name: str, sequences: Collection[str] | None
) -> np.ndarray:
    """Returns a bool array of the entries of a feature that are not padding.

    It is `[B, T]` for a sequence, `[B, S]` for a scalar of packed examples, and `[B]`
    otherwise.
    """
    sequence = _find_sequence(batch, name, sequences)
    if sequence is not None:
        return batch.segment_ids[sequence] > 0
    num_segments, x = _num_segments(batch), batch.features[name]
    if _is_stacked(batch, x):
        return np.arange(x.shape[1]) < num_segments[:, None]
    return num_segments > 0


def _find_sequence(
    batch: Batch, name: str, sequences: Collection[str] | None
) -> str | None:
    """Returns the key in `segment_ids` of a feature `[B, T, ...]`, or None."""
    if name in batch.segment_ids:
        return name
    if sequences is not None and name not in sequences:
        return None
    shape = batch.features[name].shape[:2]
    same = (key for key, ids in batch.segment_ids.items() if ids.shape == shape)
    return next(same, None)


def _is_stacked(batch: Batch, x: np.ndarray) -> bool:
    """Returns whether a feature that is not a sequence is `[B, S, ...]`."""
    return x.ndim > 1 and is_packed(batch)


def _refilled(x: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Returns the array with its padding replaced by real values."""
    values, num_padding = x[real], np.count_nonzero(~real)
    refilled = x.copy()
    # In reverse order, so that padding does not repeat the value next to it.
    refilled[~real] = values[::-1][np.arange(num_padding) % len(values)]
    return refilled
