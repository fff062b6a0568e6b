"""Rows of examples -> one numpy `Batch` of the bucket's shape, and back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from jaxbucket.base import EMPTY_ROW, Batch, Bucket
from jaxbucket.checks import check_positive
from jaxbucket.example import (
    Example,
    as_arrays,
    check_numbers,
    common_length,
    matching_arrays,
    pad_array,
    sequence_names,
)
from jaxbucket.segments import row_segments


def collate_rows(
    rows: Sequence[Example | Sequence[Example] | None],
    bucket: Bucket,
    *,
    like: Example | None = None,
    sequences: Sequence[str] | None = None,
    pad_value: float = 0,
    truncate: bool = False,
    max_segments: int | None = None,
) -> Batch:
    """Returns one batch of the bucket's shape; `unbatch` is the inverse.

    An example is a dict of arrays. Its sequences, `[n, ...]` each with the same n, are
    padded to `[T, ...]`; everything else is stacked as it is. With `max_segments` a row
    has several examples, one behind the other, and what is no sequence is stacked to
    `[B, max_segments, ...]`, zeros behind the last example.

    Example:
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

    Args:
      rows: at most B examples, None for an empty row. Rows beyond are empty. With
        `max_segments`, at most so many examples for each row.
      bucket: the shape (B, T).
      like: an example to take names, dtypes and trailing shapes from; by default the
        first of `rows`. Needed where all rows are empty.
      sequences: the features that are padded, by default all that have a leading
        axis. The first of them names the entry in `segment_ids` and `positions`.
      pad_value: what fills the sequences behind their end, and in empty rows.
      truncate: cut examples longer than T instead of refusing them.
      max_segments: the most examples of a row, where rows are packed.

    Raises:
      ValueError: if an example is longer than T, or those of a row are together, or it
        has length 0, or differs from `like` in its features, dtypes or trailing shapes;
        if its sequences differ in length; if there are more than B rows, or more than
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
    if like is None:
        like = next((example for row in segments for example in row), None)
    if like is None:
        raise ValueError("All rows are empty: pass `like=`, an example of the source.")
    template = as_arrays(like)
    check_numbers(template)
    names = sequence_names(template, sequences)
    places = (bucket.batch_size,)
    if max_segments is not None:
        places = (bucket.batch_size, max_segments)
    features = _without_examples(template, names, bucket, places, pad_value)
    lengths = np.zeros((bucket.batch_size, max_segments or 1), np.int64)
    for row, examples in enumerate(segments):
        begin = 0
        for segment, example in enumerate(examples):
            arrays = matching_arrays(example, template, names, row)
            length = common_length(arrays, names, row)
            if begin + length > bucket.seq_len and not truncate:
                raise ValueError(_beyond_message(row, begin + length, bucket))
            end = min(begin + length, bucket.seq_len)
            for name, value in arrays.items():
                if name in names:
                    features[name][row, begin:end] = value[: end - begin]
                else:
                    features[name][(row, segment)[: len(places)]] = value
            lengths[row, segment] = end - begin
            begin = end
    if max_segments is None:
        return with_segments(features, names[0], row_mask(lengths[:, 0], bucket))
    ids, positions = row_segments(lengths, bucket.seq_len)
    return Batch(features, {names[0]: ids}, {names[0]: positions})


def _without_examples(
    template: dict[str, np.ndarray],
    names: list[str],
    bucket: Bucket,
    places: tuple[int, ...],
    pad_value: float,
) -> dict[str, np.ndarray]:
    """The features of a batch before an example is in it.

    Args:
      template: the features of an example.
      names: which of them are sequences, `[B, T, ...]` and padded.
      bucket: the shape (B, T).
      places: of examples, `[B]` or `[B, max_segments]`, which all others begin with.
      pad_value: what fills the sequences.
    """
    shape = (bucket.batch_size, bucket.seq_len)
    return {
        name: np.full(
            (*shape, *value.shape[1:]), pad_array(pad_value, name, value.dtype)
        )
        if name in names
        else np.zeros((*places, *value.shape), value.dtype)
        for name, value in template.items()
    }


def _segments(
    row: int, entry: Example | Sequence[Example] | None, max_segments: int | None
) -> Sequence[Example]:
    """The examples of a row."""
    if max_segments is None:
        return () if entry is None else (cast(Example, entry),)
    if entry is None:
        return ()
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


def check_rows(rows: np.ndarray, num_examples: int, bucket: Bucket) -> None:
    """Raises a ValueError if `rows` are not those of a batch of so many examples."""
    if len(rows) != bucket.batch_size:
        raise ValueError(
            f"`rows` has {len(rows)} entries, but bucket {bucket} has "
            f"{bucket.batch_size} rows. Give one for each, -1 for an empty one."
        )
    if rows.ndim not in (1, 2):
        raise ValueError(
            f"`rows` has {rows.ndim} dimensions: give [B], or [B, max_segments]."
        )
    if rows.ndim == 2 and np.any((rows[:, :-1] < 0) & (rows[:, 1:] >= 0)):
        raise ValueError(
            "`rows` has examples of a row behind an empty place: put -1 behind the "
            "last of them."
        )
    if rows.min(initial=0) < EMPTY_ROW or rows.max(initial=0) >= num_examples:
        raise ValueError(
            f"`rows` has {rows.min()} to {rows.max()}: they must be from 0 to "
            f"{num_examples - 1}, or -1 for an empty one."
        )


def fit_lengths(lengths: np.ndarray, bucket: Bucket, truncate: bool) -> np.ndarray:
    """Returns the `[B]` lengths that rows of these lengths have in a bucket.

    Raises:
      ValueError: if one is longer than T, unless it may be truncated.
    """
    if not truncate and lengths.max(initial=0) > bucket.seq_len:
        row = int(lengths.argmax())
        raise ValueError(_beyond_message(row, lengths[row], bucket))
    return np.minimum(lengths, bucket.seq_len)


def span_lengths(
    rows: np.ndarray, begins: np.ndarray, lengths: np.ndarray, whole: np.ndarray
) -> np.ndarray:
    """Returns the `[B]` lengths of parts of examples, 0 of an empty row.

    Args:
      rows: `[B]` integers, the example in each row; -1 for an empty row.
      begins: `[B]` integers, the first token of each part.
      lengths: `[B]` integers, the tokens it has.
      whole: `[B]` integers, the tokens that its example has.

    Raises:
      ValueError: if a part has no token, or one that its example has not.
    """
    filled = rows != EMPTY_ROW
    inside = (begins >= 0) & (lengths >= 1) & (begins + lengths <= whole)
    if not inside[filled].all():
        row = int(np.argmin(inside | ~filled))
        raise ValueError(
            f"Row {row}: {lengths[row]} tokens from {begins[row]} on are no part of "
            f"example {rows[row]}, which has {whole[row]}. Give at least one token, "
            "and none beyond its end."
        )
    return np.where(filled, lengths, 0)


def _beyond_message(row: int, length: int, bucket: Bucket) -> str:
    return (
        f"Row {row} has length {length}, beyond `seq_len={bucket.seq_len}`. "
        "Put it into a longer bucket, or pass `truncate=True`."
    )


def row_mask(lengths: np.ndarray, bucket: Bucket) -> np.ndarray:
    """Returns `[B, T]` bool: where rows of these `[B]` lengths have a token."""
    # Equal dtypes, of 32 bits: several times as fast.
    positions = np.arange(bucket.seq_len, dtype=np.int32)
    return positions < lengths.astype(np.int32)[:, None]


def with_segments(
    features: dict[str, np.ndarray], name: str, mask: np.ndarray
) -> Batch:
    """Returns the batch of one example in each row.

    Args:
      features: those of the batch.
      name: the entry in `segment_ids` and `positions`.
      mask: `[B, T]` bool, where a token is real.
    """
    ids = mask.astype(np.int32)
    positions = np.arange(mask.shape[1], dtype=np.int32)
    return Batch(features, {name: ids}, {name: ids * positions})


def unbatch(
    batch: Batch,
    *,
    sequences: Sequence[str] | None = None,
    max_segments: int | None = None,
) -> list[dict[str, Any]]:
    """Returns the examples of a batch without their padding, in row order.

    Args:
      batch: numpy or fully addressable `jax.Array`s.
      sequences: the features that were padded, by default all of shape `[B, T, ...]`.
        Name them where others may have that shape by chance.
      max_segments: as in `collate_rows`: None for one example in a row.

    Raises:
      ValueError: if several sequences have lengths of their own, or rows have more
        examples than that.
    """
    mask = np.asarray(batch.mask)
    ids = np.asarray(next(iter(batch.segment_ids.values())))
    most = int(ids.max(initial=0))
    if most > (max_segments or 1):
        raise ValueError(
            f"`max_segments={max_segments}`, but a row has {most} examples. Pass what "
            "they were packed with."
        )
    features = {name: np.asarray(value) for name, value in batch.features.items()}
    padded = sequences
    if padded is None:
        padded = [name for name, x in features.items() if x.shape[:2] == mask.shape]
    found = []
    for row in np.flatnonzero(mask.any(axis=1)):
        ends = np.cumsum(np.bincount(ids[row])[1:])
        for segment, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
            place = (row, ...) if max_segments is None else (row, segment, ...)
            example = {
                name: value[row, begin:end] if name in padded else value[place]
                for name, value in features.items()
            }
            found.append(example)
    return found
