"""Rows of examples -> one numpy `Batch` of the bucket's shape, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_positive
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.data.example import (
    Example,
    Sequences,
    as_arrays,
    check_numbers,
    common_length,
    listed_names,
    matching_arrays,
    sequence_groups,
)
from jaxbucket.data.segments import row_segments
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
      pad_value: what fills the sequences behind their end, and in empty rows: name ->
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
    first = None
    if like is None:
        filled = ((row, x[0]) for row, x in enumerate(segments) if len(x))
        first, like = next(filled, (None, None))
    if like is None:
        raise ValueError("All rows are empty: pass `like=`, an example of the source.")
    template = as_arrays(like, first)
    check_numbers(template)
    groups = sequence_groups(template, sequences, capacities)
    names = [name for group in groups.values() for name in group]
    seq_lens = _seq_lens(bucket, groups, capacities)
    places = (bucket.batch_size,)
    if max_segments is not None:
        places = (bucket.batch_size, max_segments)
    widths = {n: seq_lens[key] for key, group in groups.items() for n in group}
    features = _without_examples(template, widths, places, pad_value)
    size = (bucket.batch_size, max_segments or 1)
    lengths = {key: np.zeros(size, np.int64) for key in groups}
    for row, examples in enumerate(segments):
        for segment, example in enumerate(examples):
            arrays = matching_arrays(example, template, names, row)
            for key, group in groups.items():
                begin = int(lengths[key][row].sum())
                length = common_length(arrays, group, row)
                if begin + length > seq_lens[key] and not truncate:
                    of = "" if capacities is None else f" of {key!r}"
                    packed = max_segments is not None
                    raise ValueError(
                        _beyond_message(row, begin + length, seq_lens[key], of, packed)
                    )
                end = min(begin + length, seq_lens[key])
                for name in group:
                    features[name][row, begin:end] = arrays[name][: end - begin]
                lengths[key][row, segment] = end - begin
            for name in arrays.keys() - set(names):
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


def _without_examples(
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


def check_rows(rows: ArrayLike, num_examples: int, bucket: Bucket) -> np.ndarray:
    """Returns the rows of a batch as int64, so that one can be added to them.

    Args:
      rows: `[B]` or `[B, max_segments]` integers, -1 where there is no example.
      num_examples: how many there are.
      bucket: the shape (B, T).

    Raises:
      ValueError: if they are not integers, or not those of such a batch.
    """
    rows = np.asarray(rows)
    if rows.dtype.kind not in "iu":
        raise ValueError(f"`rows` has dtype {rows.dtype}: give integers.")
    if rows.ndim not in (1, 2):
        raise ValueError(
            f"`rows` has {rows.ndim} dimensions: give [B], or [B, max_segments]."
        )
    if len(rows) != bucket.batch_size:
        raise ValueError(
            f"`rows` has {len(rows)} entries, but bucket {bucket} has "
            f"{bucket.batch_size} rows. Give one for each, -1 for an empty one."
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
    return rows.astype(np.int64, copy=False)


def fit_lengths(lengths: np.ndarray, bucket: Bucket, truncate: bool) -> np.ndarray:
    """Returns the `[B]` lengths that rows of these lengths have in a bucket.

    Raises:
      ValueError: if one is longer than T, unless it may be truncated.
    """
    if not truncate and lengths.max(initial=0) > bucket.seq_len:
        row = int(lengths.argmax())
        raise ValueError(_beyond_message(row, lengths[row], bucket.seq_len))
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
    inside = (begins >= 0) & (lengths >= 1) & (lengths <= whole - begins)
    if not inside[filled].all():
        row = int(np.argmin(inside | ~filled))
        raise ValueError(
            f"Row {row}: {lengths[row]} tokens from {begins[row]} on are no part of "
            f"example {rows[row]}, which has {whole[row]}. Give at least one token, "
            "and none beyond its end."
        )
    return np.where(filled, lengths, 0)


def _beyond_message(
    row: int, length: int, seq_len: int, of: str = "", packed: bool = False
) -> str:
    remedy = "Put it into a longer bucket, or pass `truncate=True`."
    if packed or of:
        remedy = "Give it fewer examples, or rows that hold more."
    return f"Row {row} has length {length}{of}, beyond `seq_len={seq_len}`. {remedy}"


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
