"""A batch -> the examples in it, without padding: the inverse of `collate_rows`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.data.example import Sequences, listed_names, sequence_groups


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
      batch: numpy or fully addressable `jax.Array`s.
      sequences: the features that were padded, by default all of shape `[B, T, ...]`.
        Name them where others may have that shape by chance. Of several sequences with
        lengths of their own, name -> the features that are as long as this sequence; by
        default none but itself.
      max_segments: the most examples of a row, where rows are packed; None for one
        example in a row.

    Raises:
      ValueError: if rows have more examples than that, or `sequences` names a feature
        that is missing or not `[B, T, ...]`.
    """
    ids = {name: np.asarray(x) for name, x in batch.segment_ids.items()}
    features = {name: np.asarray(value) for name, value in batch.features.items()}
    first = next(iter(ids.values()))
    most = int(first.max(initial=0))
    if most > (max_segments or 1):
        raise ValueError(
            f"`max_segments={max_segments}`, but a row has {most} examples. Pass what "
            "they were packed with."
        )
    if len(ids) > 1 or isinstance(sequences, Mapping):
        groups = sequence_groups(features, sequences, dict.fromkeys(ids, 0))
    elif sequences is None:
        named = [name for name, x in features.items() if x.shape[:2] == first.shape]
        groups = dict.fromkeys(ids, named)
    else:
        groups = dict.fromkeys(ids, listed_names(sequences))
    keys = {name: key for key, names in groups.items() for name in names}
    _check_shapes(features, keys, ids, max_segments)
    examples = []
    for row in np.flatnonzero(first.any(axis=1)):
        # Where each segment of the row ends.
        ends = {
            key: [0, *np.cumsum(np.bincount(x[row])[1:]).tolist()]
            for key, x in ids.items()
        }
        for segment in range(int(first[row].max())):
            place = (row, ...) if max_segments is None else (row, segment, ...)
            example = {}
            for name, value in features.items():
                if name in keys:
                    begin, end = ends[keys[name]][segment : segment + 2]
                    example[name] = value[row, begin:end]
                else:
                    example[name] = value[place]
            examples.append(example)
    return examples


def _check_shapes(
    features: Mapping[str, np.ndarray],
    keys: Mapping[str, str],
    ids: Mapping[str, np.ndarray],
    max_segments: int | None,
) -> None:
    """Raises a ValueError if a feature has not the shape that its place demands.

    Args:
      features: those of the batch.
      keys: the feature -> the sequence whose lengths it has, for those which have some.
      ids: the segment ids of each sequence.
      max_segments: the most examples of a row, where rows are packed.
    """
    for name, key in keys.items():
        expected = ids[key].shape
        if name not in features or features[name].shape[:2] != expected:
            shapes = {n: list(x.shape) for n, x in features.items()}
            raise ValueError(
                f"`sequences` names {name!r}, which must be a feature of shape "
                f"{[*expected, '...']}. The batch has {shapes}."
            )
    for name in features.keys() - keys.keys() if max_segments is not None else ():
        shape = features[name].shape
        if shape[1:2] != (max_segments,):
            raise ValueError(
                f"Feature {name!r} is {list(shape)}, and of packed rows what is not a "
                f"sequence is [B, {max_segments}, ...], by `max_segments`. Name it in "
                "`sequences` if it is one."
            )
