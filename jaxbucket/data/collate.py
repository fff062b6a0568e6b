"""Rows of examples -> one numpy `Batch` of the bucket's shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_positive
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.data.example import (
    Example,
    Sequences,
    as_arrays,
    check_numbers,
    common_length,
    matching_arrays,
    sequence_groups,
)
from jaxbucket.data.row_checks import beyond
from jaxbucket.data.segments import row_mask, row_segments, with_segments
from jaxbucket.packing.sequences import check_capacities


def collate_rows(
    rows: Sequence[Example | Sequence[Example] | None],
    bucket: Bucket,
    *,
    like: Example | None = None,
    sequences: Sequences = None,
    pad_value: PadValue = 0,
    truncate: bool = False,
    max_segments: int | None = None,
    capacities: Mapping[str, int] | None = None,
) -> Batch:
    """Returns one batch of the bucket's shape; `unbatch` is the inverse.

    An example is a dict of arrays. Its sequences, `[n, ...]` each with the same n, are
    padded to `[T, ...]`; everything else is stacked as it is. With `max_segments` a row
    has several examples, one after another, and what is not a sequence is stacked to
    `[B, max_segments, ...]`, zeros after the last example.

    Example:
      >>> from jaxbucket.data.uncollate import unbatch
      >>> rows = [{"tokens": [7, 3], "label": 1}, {"tokens": [5], "label": 0}, None]
      >>> batch = collate_rows(rows, Bucket(batch_size=3, seq_len=4))
      >>> batch.features["tokens"]
      array([[7, 3, 0, 0],
             [5, 0, 0, 0],
             [0, 0, 0, 0]])
      >>> batch.segment_ids["tokens"].sum(axis=1), batch.features["label"]
      (array([2, 1, 0]), array([1, 0, 0]))
      >>> unbatch(batch)[1]
      {'tokens': array([5]), 'label': array(0)}
      >>> packed = collate_rows([rows[:2]], Bucket(1, 4), max_segments=2)
      >>> packed.features["tokens"], packed.features["label"]
      (array([[7, 3, 5, 0]]), array([[1, 0]]))
      >>> packed.segment_ids["tokens"], packed.positions["tokens"]
      (array([[1, 1, 2, 0]], dtype=int32), array([[0, 1, 0, 0]], dtype=int32))
      >>> unbatch(packed, max_segments=2)[1]
      {'tokens': array([5]), 'label': array(0)}

    Several sequences with lengths of their own have a capacity each, T together, and
    segment ids each:

      >>> pair = {"inputs": [7, 3, 5], "targets": [9]}
      >>> capacities = {"inputs": 4, "targets": 2}
      >>> batch = collate_rows([pair], Bucket(1, 6), capacities=capacities)
      >>> batch.features["inputs"], batch.features["targets"]
      (array([[7, 3, 5, 0]]), array([[9, 0]]))

    Args:
      rows: at most B examples, None for an empty row. Rows beyond are empty. With
        `max_segments`, at most so many examples for each row.
      bucket: the shape (B, T).
      like: an example to take names, dtypes and trailing shapes from; by default the
        first of `rows`. Needed where all rows are empty.
      sequences: the features that are padded, by default all that have a leading
        axis. The first of them names the entry in `segment_ids` and `positions`. With
        `capacities`, name -> the features that are as long as this sequence; by default
        none but itself.
      pad_value: what fills the sequences after their end, and in empty rows: name ->
        number, 0 for those without one. A number alone is of the only one there is.
      truncate: cut examples longer than T instead of refusing them.
      max_segments: the most examples of a row, where rows are packed.
      capacities: what a row holds of each of several sequences; T is their sum.

    Raises:
      ValueError: if an example is longer than T, or those of a row are together, or it
        has length 0, or differs from `like` in its features, dtypes or trailing shapes;
        if its sequences differ in length, or one is ragged; if `pad_value` is one
        number other than 0 for several, names no sequence, or is beyond a dtype; if
        capacities are not T together; if there are more than B rows, or more than
        `max_segments` in one of them, or only empty ones and no `like`; if packed ones
        are to be truncated.
    """
    if len(rows) > bucket.batch_size:
        raise ValueError(
            f"`rows` has {len(rows)} entries, more than the {bucket.batch_size} of "
            f"bucket {bucket}."
        )
    if max_segments is not None:
        check_positive("max_segments", max_segments)
    segments = [_segments(row, x, max_segments) for row, x in enumerate(rows)]
    if max_segments is not None and truncate:
        raise ValueError(
            f"`truncate=True` and `max_segments={max_segments}`: what does not fit is "
            "put into another row. Leave out either."
        )
    template = _template(segments, like)
    groups = sequence_groups(template, sequences, capacities)
    seq_lens = _seq_lens(bucket, groups, capacities)
    widths = {name: seq_lens[key] for key, names in groups.items() for name in names}
    # Of examples, which all features that are not sequences begin with.
    places = (bucket.batch_size, *(() if max_segments is None else (max_segments,)))
    features = _padding(template, widths, places, pad_value)
    size = (bucket.batch_size, max_segments or 1)
    lengths = {key: np.zeros(size, np.int64) for key in groups}
    for row, examples in enumerate(segments):
        for segment, example in enumerate(examples):
            arrays = matching_arrays(example, template, list(widths), row)
            for key, names in groups.items():
                begin, seq_len = int(lengths[key][row].sum()), seq_lens[key]
                end = begin + common_length(arrays, names, row)
                if end > seq_len and not truncate:
                    of = "" if capacities is None else f" of {key!r}"
                    raise beyond(row, end, seq_len, of, max_segments is not None)
                end = min(end, seq_len)
                for name in names:
                    features[name][row, begin:end] = arrays[name][: end - begin]
                lengths[key][row, segment] = end - begin
            for name in arrays.keys() - widths.keys():
                features[name][(row, segment)[: len(places)]] = arrays[name]
    if max_segments is None and capacities is None:
        (key,) = groups
        return with_segments(features, key, row_mask(lengths[key][:, 0], bucket))
    made = {key: row_segments(lengths[key], seq_lens[key]) for key in groups}
    return Batch(
        features,
        {key: ids for key, (ids, _) in made.items()},
        {key: positions for key, (_, positions) in made.items()},
    )


def _segments(
    row: int, entry: Example | Sequence[Example] | None, max_segments: int | None
) -> Sequence[Example]:
    """The examples of a row."""
    if entry is None:
        return ()
    if max_segments is None:
        return (cast(Example, entry),)
    if isinstance(entry, Mapping) or not isinstance(entry, Sequence):
        raise ValueError(
            f"Row {row} is a {type(entry).__name__}: with `max_segments` give a list "
            "of its examples."
        )
    if len(entry) > max_segments:
        raise ValueError(
            f"Row {row} has {len(entry)} examples, more than `max_segments="
            f"{max_segments}`. Put them into another row, or raise it."
        )
    return entry


def _template(
    segments: Sequence[Sequence[Example]], like: Example | None
) -> dict[str, np.ndarray]:
    """An example that says which features all have, by default the first one."""
    row = None
    if like is None:
        filled = (
            (row, examples[0]) for row, examples in enumerate(segments) if examples
        )
        row, like = next(filled, (None, None))
    if like is None:
        raise ValueError("All rows are empty: pass `like=`, an example of the source.")
    template = as_arrays(like, row)
    check_numbers(template)
    return template


def _seq_lens(
    bucket: Bucket, groups: Iterable[str], capacities: Mapping[str, int] | None
) -> dict[str, int]:
    """T of each sequence."""
    if capacities is None:
        return dict.fromkeys(groups, bucket.seq_len)
    capacities = check_capacities(capacities)
    if sum(capacities.values()) != bucket.seq_len:
        raise ValueError(
            f"`capacities={capacities}` are {sum(capacities.values())} together, and "
            f"bucket {bucket} has `seq_len={bucket.seq_len}`: it must be their sum."
        )
    return capacities


def _padding(
    template: dict[str, np.ndarray],
    widths: dict[str, int],
    places: tuple[int, ...],
    pad_value: PadValue,
) -> dict[str, np.ndarray]:
    """The features of a batch before an example is in it.

    Args:
      template: the features of an example.
      widths: T of those which are sequences, `[B, T, ...]` and padded.
      places: of examples, `[B]` or `[B, max_segments]`, which all others begin with.
      pad_value: what fills the sequences.
    """
    pads = pad_arrays(pad_value, {name: template[name].dtype for name in widths})
    return {
        name: np.full((places[0], widths[name], *value.shape[1:]), pads[name])
        if name in widths
        else np.zeros((*places, *value.shape), value.dtype)
        for name, value in template.items()
    }
