"""Variants of a batch for which a loss must return the same results."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias, TypeVar

import jax
import numpy as np

from jaxbucket.base.batch import Batch

_T = TypeVar("_T")
# Names of the features that are padded; with several sequences also a mapping from each
# to its features. None for those of shape `[B, T, ...]`.
PaddedFeatures: TypeAlias = Collection[str] | Mapping[str, Collection[str]] | None


def is_packed(batch: Batch) -> bool:
    """Returns whether a row contains several examples."""
    return bool(batch.segments_per_row.max() > 1)


def other_order(num_rows: int) -> np.ndarray:
    """Returns an order of rows that no division into equal parts leaves as it was.

    Devices and micro-batches have such parts: consecutive rows, or every n-th one.
    """
    rng, rows = np.random.default_rng(0), np.arange(num_rows)
    known = [rows.tolist(), *_divisions(rows)]
    for _ in range(100):
        order = rng.permutation(num_rows)
        parts = [order.tolist(), *_divisions(order)]
        if all(x != y for x, y in zip(parts, known, strict=True)):
            return order
    return rows[::-1]


def _divisions(rows: np.ndarray) -> Iterator[set[frozenset[int]]]:
    """Yields the parts of at least two rows into which devices may divide them."""
    for number in range(2, len(rows) // 2 + 1):
        if len(rows) % number == 0:
            for parts in (rows.reshape(number, -1), rows.reshape(-1, number).T):
                yield {frozenset(part) for part in parts.tolist()}


def take_rows(tree: _T, rows: np.ndarray) -> _T:
    """Returns a batch, or keys of rows, with these rows only."""
    return jax.tree.map(lambda x: x[rows], tree)


def with_empty_rows(batch: Batch, count: int) -> Batch:
    """Returns the batch with `count` rows of zeros appended."""

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((count, *x.shape[1:]), x.dtype)])

    return jax.tree.map(longer, batch)


def with_other_padding(batch: Batch, sequences: PaddedFeatures) -> Batch:
    """Returns the batch with its padding replaced by real values of other positions."""
    features = {
        name: _refilled(x, _real_entries(batch, name, sequences))
        for name, x in batch.features.items()
    }
    return batch._replace(features=features)


def with_more_columns(batch: Batch, sequences: PaddedFeatures) -> Batch:
    """Returns the batch with twice as many columns, the new ones filled with zeros.

    A feature with axes of several sequences is doubled along each of them.
    """

    def longer(x: np.ndarray, num_axes: int = 1) -> np.ndarray:
        for axis in range(1, num_axes + 1):
            x = np.concatenate([x, np.zeros_like(x)], axis=axis)
        return x

    features = {
        name: longer(x, len(_find_sequences(batch, name, sequences)))
        for name, x in batch.features.items()
    }
    segment_ids, positions = jax.tree.map(longer, batch[1:])
    return Batch(features, segment_ids, positions)


def without_neighbors(batch: Batch, sequences: PaddedFeatures) -> Batch:
    """Returns the batch with every example at the start of a row of its own."""
    counts = batch.segments_per_row
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
        # Features of packed rows have the axis of one sequence.
        found = _find_sequences(batch, name, sequences)
        features[name] = move_sequence(x, found[0]) if found else move_scalar(x)
    segment_ids = {name: x.astype(np.int32) for name, x in real.items()}
    positions = {name: move_sequence(x, name) for name, x in batch.positions.items()}
    return Batch(features, segment_ids, positions)


def _real_entries(batch: Batch, name: str, sequences: PaddedFeatures) -> np.ndarray:
    """Returns a bool array of the entries of a feature that are not padding.

    It is `[B, T]` for a sequence, `[B, T, T', ...]` for a feature with axes of several
    sequences, `[B, S]` for a scalar of packed examples, and `[B]` otherwise.
    """
    num_segments, x = batch.segments_per_row, batch.features[name]
    if found := _find_sequences(batch, name, sequences):
        real = np.ones(len(x), bool)
        for key in found:
            ids = batch.segment_ids[key]
            ids = ids.reshape(len(x), *[1] * (real.ndim - 1), -1)
            real = real[..., None] & (ids > 0)
        return real
    if _is_stacked(batch, x):
        return np.arange(x.shape[1]) < num_segments[:, None]
    return num_segments > 0


def _find_sequences(
    batch: Batch, name: str, sequences: PaddedFeatures
) -> tuple[str, ...]:
    """Returns the keys in `segment_ids` of the axes of a feature after B."""
    if isinstance(sequences, Mapping):
        return tuple(key for key, names in sequences.items() if name in (key, *names))
    if name in batch.segment_ids:
        return (name,)
    if sequences is not None and name not in sequences:
        return ()
    found: list[str] = []
    for size in batch.features[name].shape[1:]:
        others = batch.segment_ids.keys() - found
        fitting = sorted(k for k in others if batch.segment_ids[k].shape[1] == size)
        if not fitting:
            break
        found.append(fitting[0])
    seq_lens = {batch.segment_ids[key].shape[1] for key in found}
    if len(seq_lens) < len(found):
        raise ValueError(
            f"The sequences {sorted(found)} have the same T in this batch, so the "
            f"order of the axes of {name!r} is not known. Pass a mapping, for example "
            f"`sequences={ {key: [name] for key in found} }`."
        )
    return tuple(found)


def _is_stacked(batch: Batch, x: np.ndarray) -> bool:
    """Returns whether a feature that is not a sequence is `[B, S, ...]`."""
    return x.ndim > 1 and is_packed(batch)


def _refilled(x: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Returns the array with its padding replaced by real values."""
    values, num_padding = x[real], np.count_nonzero(~real)
    refilled = x.copy()
    # In reverse order, so that padding does not repeat the value next to it.
    if len(values):  # No example of the batch may have the sequence.
        refilled[~real] = values[::-1][np.arange(num_padding) % len(values)]
    return refilled
