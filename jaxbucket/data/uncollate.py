"""Recovers the examples of a batch without padding: the inverse of `collate_rows`."""

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
      batch: a batch of numpy arrays or fully addressable `jax.Array`s.
      sequences: names of the features that were padded. By default all features of
        shape `[B, T, ...]`; pass the names if other features happen to have that shape.
        If examples have several sequences, each with its own length: a mapping from
        each sequence to the features that share its length, by default only itself.
      max_segments: maximum number of examples in a packed row; None for unpacked rows.

    Returns:
      One dict of arrays per example.

    Raises:
      ValueError: if a row has more than `max_segments` examples, or if `sequences`
        names a feature that is missing or does not have shape `[B, T, ...]`.
    """
    ids = {name: np.asarray(x) for name, x in batch.segment_ids.items()}
    features = {name: np.asarray(value) for name, value in batch.features.items()}
    if len(ids) > 1 or isinstance(sequences, Mapping):
        groups = sequence_groups(features, sequences, dict.fromkeys(ids, 0))
    elif sequences is None:
        (shape,) = (x.shape for x in ids.values())
        named = [name for name, x in features.items() if x.shape[:2] == shape]
        groups = dict.fromkeys(ids, named)
    else:
        groups = dict.fromkeys(ids, listed_names(sequences))
    keys = {name: key for key, names in groups.items() for name in names}
    return split_examples(batch, keys, max_segments)


def split_examples(
    batch: Batch, keys: Mapping[str, str], max_segments: int | None
) -> list[dict[str, Any]]:
    """Returns the examples of a batch, some of whose features are sequences.

    Args:
      batch: as for `unbatch`.
      keys: mapping from each sequence feature to the sequence whose length it shares.
      max_segments: maximum number of examples in a packed row; None for unpacked rows.

    Raises:
      ValueError: as `unbatch`.
    """
    ids = {name: np.asarray(x) for name, x in batch.segment_ids.items()}
    features = {name: np.asarray(value) for name, value in batch.features.items()}
    first = next(iter(ids.values()))
    most = int(first.max(initial=0))
    if most > (max_segments or 1):
        raise ValueError(
            f"`max_segments={max_segments}`, but a row has {most} examples. Pass the "
            "`max_segments` that the rows were packed with."
        )
    _check_shapes(features, keys, ids, max_segments)
    examples = []
    for row in np.flatnonzero(first.any(axis=1)):
        # The end of each segment of the row, after a leading 0.
        ends = {
            key: [0, *np.cumsum(np.bincount(x[row])[1:]).tolist()]
            for key, x in ids.items()
        }
        for segment in range(int(first[row].max())):
            index = (row, ...) if max_segments is None else (row, segment, ...)
            example = {}
            for name, value in features.items():
                if name in keys:
                    start, end = ends[keys[name]][segment : segment + 2]
                    example[name] = value[row, start:end]
                else:
                    example[name] = value[index]
            examples.append(example)
    return examples


def _check_shapes(
    features: Mapping[str, np.ndarray],
    keys: Mapping[str, str],
    ids: Mapping[str, np.ndarray],
    max_segments: int | None,
) -> None:
    """Raises a ValueError if the shape of a feature does not match its role.

    Args:
      features: features of the batch.
      keys: mapping from each sequence feature to the sequence whose length it shares.
      ids: segment ids of each sequence.
      max_segments: maximum number of examples in a packed row; None for unpacked rows.
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
                f"Feature {name!r} is {list(shape)}, but with `max_segments` a feature "
                f"that is not a sequence is [B, {max_segments}, ...]. Name it in "
                "`sequences` if it is a sequence."
            )
