"""Recovers the examples of a batch without padding: the inverse of `collate_rows`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.data.example import Sequences, listed_names
from jaxbucket.data.example_spec import ExampleSpec


def unbatch(
    batch: Batch,
    *,
    sequences: Sequences = None,
    max_segments: int | None = None,
) -> list[dict[str, Any]]:
    """Returns the examples of a batch without their padding, in row order.

    Example:
      >>> from jaxbucket import Bucket
      >>> from jaxbucket.data.collate import collate_rows
      >>> batch = collate_rows([{"x": [7, 3], "label": 1}, None], Bucket(2, 4))
      >>> unbatch(batch)
      [{'x': array([7, 3]), 'label': array(1)}]

    Args:
      batch: a batch of numpy arrays or fully addressable `jax.Array`s.
      sequences: names of the features that were padded. By default all features of
        shape `[B, T, ...]`; pass the names if other features happen to have that shape.
        With several sequences: a mapping, as for `collate_rows`, which may leave out
        those without a feature; `[]` if no feature was padded.
      max_segments: maximum number of examples in a packed row; None for unpacked rows.

    Returns:
      One dict of arrays per example.

    Raises:
      ValueError: if a row has more than `max_segments` examples, or if `sequences`
        names a feature that is missing or does not have shape `[B, T, ...]`.
    """
    ids = {name: np.asarray(x) for name, x in batch.segment_ids.items()}
    features = {name: np.asarray(value) for name, value in batch.features.items()}
    axes = _axes(features, sequences, ids)
    _check_shapes(features, axes, ids, max_segments)
    numbers = Batch(features, ids, {}).segments_per_row
    examples = []
    for row in np.flatnonzero(numbers):
        # The end of each segment of the row, after a leading 0. A segment that lacks a
        # sequence has length 0.
        least = numbers[row] + 1
        ends = {
            key: [0, *np.cumsum(np.bincount(x[row], minlength=least)[1:]).tolist()]
            for key, x in ids.items()
        }
        for segment in range(int(numbers[row])):
            place = (row, ...) if max_segments is None else (row, segment, ...)
            example = {}
            for name, value in features.items():
                spans = (
                    slice(*ends[x][segment : segment + 2]) for x in axes.get(name, ())
                )
                example[name] = value[(row, *spans) if name in axes else place]
            examples.append(example)
    return examples


def _axes(
    features: Mapping[str, np.ndarray],
    sequences: Sequences,
    ids: Mapping[str, np.ndarray],
) -> Mapping[str, Sequence[str]]:
    """Returns the sequences of the axes after B of each feature that was padded."""
    if isinstance(sequences, Mapping):
        # Outputs of a model, unlike examples, need not have all sequences.
        lacking = {x for x in ids if x not in features and not sequences.get(x)}
        sequences = {x: y for x, y in sequences.items() if x not in lacking}
        names = [x for x in ids if x not in lacking]
    else:
        names = list(ids)
    if sequences is not None and not sequences:
        return {}
    if len(ids) > 1 or isinstance(sequences, Mapping):
        return ExampleSpec(features, sequences, names).axes
    ((key, segment_ids),) = ids.items()
    shape = segment_ids.shape
    named = [name for name, x in features.items() if x.shape[:2] == shape]
    listed = named if sequences is None else listed_names(sequences)
    return dict.fromkeys(listed, (key,))


def _check_shapes(
    features: Mapping[str, np.ndarray],
    axes: Mapping[str, Sequence[str]],
    ids: Mapping[str, np.ndarray],
    max_segments: int | None,
) -> None:
    """Raises a ValueError unless features and rows have the shapes of their roles.

    `axes` maps each sequence feature to the sequences of its axes after B.
    """
    most = max(int(x.max(initial=0)) for x in ids.values())
    if most > (max_segments or 1):
        raise ValueError(
            f"`max_segments={max_segments}`, but a row has {most} examples."
        )
    shapes = {name: x.shape for name, x in features.items()}
    others = () if max_segments is None else (max_segments,)
    for name in {**axes, **features}:
        sizes = [ids[key].shape[1] for key in axes[name]] if name in axes else others
        expected = (len(next(iter(ids.values()))), *sizes)
        if shapes.get(name, ())[: len(expected)] != expected:
            raise ValueError(
                f"With `sequences={list(axes)}` and `max_segments={max_segments}`, "
                f"{name!r} must be a feature of shape {[*expected, '...']}. The batch "
                f"has {shapes}."
            )
