"""One batch in other forms, of which a loss is to be the same."""

from __future__ import annotations

from collections.abc import Collection

import jax
import numpy as np

from jaxbucket.base.batch import Batch


def filled_rows(batch: Batch) -> np.ndarray:
    """`[B]` bool: rows that hold an example."""
    return _segments_of_rows(batch) > 0


def is_packed(batch: Batch) -> bool:
    """Whether a row holds several examples."""
    return bool(_segments_of_rows(batch).max() > 1)


def take_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """The batch of these rows."""
    return jax.tree.map(lambda x: x[rows], batch)


def with_empty_rows(batch: Batch, count: int) -> Batch:
    """The batch with so many rows of zeros behind its own."""

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((count, *x.shape[1:]), x.dtype)])

    return jax.tree.map(longer, batch)


def with_other_padding(batch: Batch, sequences: Collection[str] | None) -> Batch:
    """The batch with real values of other places wherever none is real."""
    features = {}
    for name, x in batch.features.items():
        features[name] = _refilled(x, _real_places(batch, name, sequences))
    return batch._replace(features=features)


def with_more_columns(batch: Batch, sequences: Collection[str] | None) -> Batch:
    """The batch with as many columns again, of zeros."""

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros_like(x)], axis=1)

    features = {
        name: longer(x) if _sequence_of(batch, name, sequences) else x
        for name, x in batch.features.items()
    }
    segment_ids, positions = jax.tree.map(longer, batch[1:])
    return Batch(features, segment_ids, positions)


def without_neighbours(batch: Batch, sequences: Collection[str] | None) -> Batch:
    """The batch with every example in a row of its own, in the first place."""
    counts = _segments_of_rows(batch)
    rows, segments = np.nonzero(np.arange(counts.max()) < counts[:, None])
    columns, real = {}, {}
    for name, ids in batch.segment_ids.items():
        is_segment = ids[rows] == segments[:, None] + 1
        columns[name] = np.argsort(~is_segment, axis=1, kind="stable")
        real[name] = np.take_along_axis(is_segment, columns[name], axis=1)

    def alone(x: np.ndarray, sequence: str) -> np.ndarray:
        moved = x[rows[:, None], columns[sequence]]
        moved[~real[sequence]] = 0
        return moved

    def of_example(x: np.ndarray) -> np.ndarray:
        if not _is_stacked(batch, x):
            return x[rows]
        first = np.zeros_like(x[rows])
        first[:, 0] = x[rows, segments]
        return first

    features = {}
    for name, x in batch.features.items():
        sequence = _sequence_of(batch, name, sequences)
        features[name] = alone(x, sequence) if sequence else of_example(x)
    segment_ids = {name: x.astype(np.int32) for name, x in real.items()}
    positions = {name: alone(x, name) for name, x in batch.positions.items()}
    return Batch(features, segment_ids, positions)


def _segments_of_rows(batch: Batch) -> np.ndarray:
    """`[B]`: how many examples each row holds."""
    return next(iter(batch.segment_ids.values())).max(axis=1)


def _real_places(
    batch: Batch, name: str, sequences: Collection[str] | None
) -> np.ndarray:
    """`[B]`, or `[B, T]` of sequences, or `[B, S]` of packed examples: where one is."""
    sequence = _sequence_of(batch, name, sequences)
    if sequence is not None:
        return batch.segment_ids[sequence] > 0
    segments, x = _segments_of_rows(batch), batch.features[name]
    if _is_stacked(batch, x):
        return np.arange(x.shape[1]) < segments[:, None]
    return segments > 0


def _sequence_of(
    batch: Batch, name: str, sequences: Collection[str] | None
) -> str | None:
    """The entry in `segment_ids` of a feature `[B, T, ...]`; None of others."""
    if name in batch.segment_ids:
        return name
    if sequences is not None and name not in sequences:
        return None
    shape = batch.features[name].shape[:2]
    same = (key for key, ids in batch.segment_ids.items() if ids.shape == shape)
    return next(same, None)


def _is_stacked(batch: Batch, x: np.ndarray) -> bool:
    """Whether what is no sequence is `[B, S, ...]`, of packed examples."""
    return x.ndim > 1 and is_packed(batch)


def _refilled(x: np.ndarray, real: np.ndarray) -> np.ndarray:
    values, places = x[real], np.flatnonzero(~real)
    refilled = x.copy()
    # Backwards, so that a place next to a real one does not repeat it.
    refilled[~real] = values[::-1][np.arange(len(places)) % len(values)]
    return refilled
