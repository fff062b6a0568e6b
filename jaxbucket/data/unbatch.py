"""A batch -> the examples in it, without padding: the inverse of `collate_rows`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.types import Batch
from jaxbucket.data.example import Sequences, listed_names, sequence_groups


def unbatch(
    batch: Batch,
    *,
    sequences: Sequences = None,
    max_segments: int | None = None,
) -> list[dict[str, Any]]:
    """Returns the examples of a batch without their padding, in row order.

    Args:
      batch: numpy or fully addressable `jax.Array`s.
      sequences: the features that were padded, by default all of shape `[B, T, ...]`.
        Name them where others may have that shape by chance. Of several sequences with
        lengths of their own, as in `collate_rows`.
      max_segments: as in `collate_rows`: None for one example in a row.

    Raises:
      ValueError: if rows have more examples than that, or `sequences` names a feature
        that is missing or not `[B, T, ...]`.
    """
    every = {name: np.asarray(ids) for name, ids in batch.segment_ids.items()}
    ids = next(iter(every.values()))
    most = int(ids.max(initial=0))
    if most > (max_segments or 1):
        raise ValueError(
            f"`max_segments={max_segments}`, but a row has {most} examples. Pass what "
            "they were packed with."
        )
    features = {name: np.asarray(value) for name, value in batch.features.items()}
    if len(every) > 1 or isinstance(sequences, Mapping):
        groups = sequence_groups(features, sequences, dict.fromkeys(every, 0))
    elif sequences is None:
        named = [name for name, x in features.items() if x.shape[:2] == ids.shape]
        groups = dict.fromkeys(every, named)
    else:
        named = listed_names(sequences)
        groups = dict.fromkeys(every, named)
    _check_padded(features, groups, every)
    if max_segments is not None:
        _check_stacked(features, groups, max_segments)
    key_of = {name: key for key, names in groups.items() for name in names}
    found = []
    for row in np.flatnonzero(ids.any(axis=1)):
        ends = {key: [0, *_ends(own[row])] for key, own in every.items()}
        for segment in range(int(ids[row].max())):
            place = (row, ...) if max_segments is None else (row, segment, ...)
            example = {}
            for name, value in features.items():
                if name in key_of:
                    begin, end = ends[key_of[name]][segment : segment + 2]
                    example[name] = value[row, begin:end]
                else:
                    example[name] = value[place]
            found.append(example)
    return found


def _check_padded(
    features: Mapping[str, np.ndarray],
    groups: Mapping[str, Sequence[str]],
    segment_ids: Mapping[str, np.ndarray],
) -> None:
    for key, names in groups.items():
        expected = segment_ids[key].shape
        for name in names:
            if name not in features or features[name].shape[:2] != expected:
                shapes = {n: list(x.shape) for n, x in features.items()}
                raise ValueError(
                    f"`sequences` names {name!r}, which must be a feature of shape "
                    f"{[*expected, '...']}. The batch has {shapes}."
                )


def _check_stacked(
    features: Mapping[str, np.ndarray],
    groups: Mapping[str, Sequence[str]],
    max_segments: int,
) -> None:
    named = {name for names in groups.values() for name in names}
    for name, value in features.items():
        if name not in named and value.shape[1:2] != (max_segments,):
            raise ValueError(
                f"Feature {name!r} is {list(value.shape)}, and of packed rows what is "
                f"no sequence is [B, {max_segments}, ...], by `max_segments`. Name it "
                "in `sequences` if it is one."
            )


def _ends(ids: np.ndarray) -> list[int]:
    """Where each segment of a row ends."""
    return np.cumsum(np.bincount(ids)[1:]).tolist()
