"""Collates rows of examples into one numpy `Batch`, with segment ids and positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import cast

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.notes import Noting
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.base.sizes import Sizes
from jaxbucket.data.example import Example, Sequences
from jaxbucket.data.example_spec import ExampleSpec


def collate_rows(
    rows: Sequence[Example | Sequence[Example] | None],
    bucket: Bucket,
    *,
    like: Example | None = None,
    sequences: Sequences = None,
    pad_value: PadValue = 0,
    truncate: bool | Collection[str] = False,
    truncate_left: bool | Collection[str] = False,
    max_segments: int | None = None,
) -> Batch:
    """Returns one batch of the bucket's shape; `unbatch` is the inverse.

    An example is a dict of arrays. Its sequence features, which have shape `[n, ...]`
    with a common length n, are padded to `[T, ...]`; all other features are stacked.
    With `max_segments`, each row holds several examples one after another, and features
    that are not sequences are stacked to `[B, max_segments, ...]`, with zeros after the
    last example of a row.

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

    Examples may have several sequences with different lengths. Each sequence then has
    its own T, and its own segment ids:

      >>> pair = {"inputs": [7, 3, 5], "targets": [9]}
      >>> batch = collate_rows([pair], Bucket(1, {"inputs": 4, "targets": 2}))
      >>> batch.features["inputs"], batch.features["targets"]
      (array([[7, 3, 5, 0]]), array([[9, 0]]))

    A feature may have an axis for each of several sequences, such as an image:

      >>> image = {"image": np.array([[1, 2, 3]])}
      >>> sequences = {"height": ["image"], "width": ["image"]}
      >>> bucket = Bucket(1, {"height": 2, "width": 4})
      >>> collate_rows([image], bucket, sequences=sequences).features["image"]
      array([[[1, 2, 3, 0],
              [0, 0, 0, 0]]])

    Args:
      rows: up to B examples; None for an empty row, and missing rows are empty. With
        `max_segments`, each entry is a list of up to `max_segments` examples.
      bucket: the shape (B, T).
      like: an example that determines names, dtypes and trailing shapes. By default the
        first example of `rows`. Required if all rows are empty.
      sequences: names of the features that are padded. By default all features with a
        leading axis. The first one names the entry in `segment_ids` and `positions`.
        With several sequences: a mapping from each to the features that share its
        length, by default only itself. A feature in several of them has an axis for
        each, in the order of the mapping; in packed rows, examples of such a feature
        are blocks on a diagonal.
      pad_value: number that fills padded positions and empty rows, or a mapping from
        sequence feature to number (0 for features not named). A single nonzero number
        is allowed only if there is one sequence feature.
      truncate: whether to truncate examples longer than T instead of raising; or the
        names of the sequences to truncate. The first T tokens are kept.
      truncate_left: like `truncate`, but the last T tokens are kept.
      max_segments: maximum number of examples in a packed row; None for unpacked rows.

    Returns:
      The batch, with new numpy arrays.

    Raises:
      ValueError: if an example, or the examples of a row together, are longer than T;
        if an example is empty, or differs from `like` in its features, dtypes or
        trailing shapes; if its sequences differ in length or are ragged; if `pad_value`
        is one nonzero number for several features, names an unknown feature, or does
        not fit a dtype; if there are more than B rows, or more than `max_segments`
        examples in a row; if all rows are empty and `like` is missing; or if `truncate`
        or `truncate_left` names an unknown sequence, or both name the same one. A note
        names the row.
    """
    if len(rows) > bucket.batch_size:
        raise ValueError(
            f"`rows` has {len(rows)} entries. Pass at most {bucket.batch_size}, the "
            f"rows of {bucket}."
        )
    segments = [_segments(entry, max_segments) for entry in rows]
    several = bucket.seq_len if isinstance(bucket.seq_len, Sizes) else None
    spec = _spec(segments, like, sequences, several)
    # With one sequence, the first feature names it.
    seq_lens = several or {next(iter(spec.axes)): bucket.tokens_per_row}
    right = _chosen("truncate", truncate, seq_lens)
    left = _chosen("truncate_left", truncate_left, seq_lens)
    if both := right & left:
        raise ValueError(
            f"`truncate` and `truncate_left` both apply to {sorted(both)}. Choose one."
        )
    # The leading axes of all features that are not sequences.
    leading = (bucket.batch_size, *(() if max_segments is None else (max_segments,)))
    features = _padding(spec, seq_lens, leading, pad_value)
    lengths_shape = (bucket.batch_size, max_segments or 1)
    lengths = {key: np.zeros(lengths_shape, np.int64) for key in seq_lens}
    for row, examples in enumerate(segments):
        with Noting(f"This is row {row} of the batch."):
            for segment, example in enumerate(examples):
                arrays = spec.match(example)
                spans: dict[str, tuple[slice, slice]] = {}
                for key, length in spec.lengths(arrays).items():
                    start, seq_len = int(lengths[key][row].sum()), seq_lens[key]
                    kept = min(length, seq_len) if key in right | left else length
                    which = f" of {key!r}" if several else ""
                    check_row_length(start + kept, seq_len, which)
                    begin = length - kept if key in left else 0
                    spans[key] = slice(begin, begin + kept), slice(start, start + kept)
                    lengths[key][row, segment] = kept
                place = (row, segment)[: len(leading)]
                _copy(arrays, spec.axes, spans, place, features)
    if max_segments is None and not several:
        (key,) = seq_lens
        return with_segments(features, key, token_mask(lengths[key][:, 0], bucket))
    segment_arrays = {key: row_segments(lengths[key], t) for key, t in seq_lens.items()}
    return Batch(
        features,
        {key: ids for key, (ids, _) in segment_arrays.items()},
        {key: positions for key, (_, positions) in segment_arrays.items()},
    )


def _copy(
    arrays: Mapping[str, np.ndarray],
    axes: Mapping[str, Sequence[str]],
    spans: Mapping[str, tuple[slice, slice]],
    place: tuple[int, ...],
    features: Mapping[str, np.ndarray],
) -> None:
    """Copies an example into the features of a batch.

    Args:
      arrays, axes: the features of the example, and the axes of `ExampleSpec`.
      spans: the positions of each sequence in the example, and those in the row.
      place: `(row,)`; or, for packed rows, `(row, segment)`.
      features: the features of the batch.
    """
    for name, value in arrays.items():
        if name not in axes:
            features[name][place] = value
            continue
        # Lists, because generators are slow next to the copy of a short row.
        pairs = [spans[key] for key in axes[name]]
        target = (place[0], *[inside for _, inside in pairs])
        features[name][target] = value[(*[kept for kept, _ in pairs],)]


def _chosen(
    argument: str, chosen: bool | Collection[str], names: Collection[str]
) -> set[str]:
    """Returns the names of the sequences to truncate."""
    if isinstance(chosen, bool | np.bool_):
        return set(names) if chosen else set()
    chosen = {chosen} if isinstance(chosen, str) else set(chosen)
    if unknown := chosen - set(names):
        raise ValueError(
            f"`{argument}` names {sorted(unknown)}, but the sequences are "
            f"{sorted(names)}. Name some of these, or pass True."
        )
    return chosen


def _segments(
    entry: Example | Sequence[Example] | None, max_segments: int | None
) -> Sequence[Example]:
    """Returns the examples of a row, of which there may be none."""
    if entry is None:
        return ()
    if max_segments is None:
        if isinstance(entry, list) and entry and isinstance(entry[0], Mapping):
            raise ValueError(
                f"A row is a list of {len(entry)} examples. Pass `max_segments=` to "
                "pack several examples into a row."
            )
        return (cast(Example, entry),)
    if isinstance(entry, Mapping) or len(entry) > max_segments:
        raise ValueError(
            f"`max_segments={max_segments}`, but a row has {len(entry)} entries. Pass "
            "a list of examples for each row, or increase `max_segments`."
        )
    return cast(Sequence[Example], entry)


def _spec(
    segments: Sequence[Sequence[Example]],
    like: Example | None,
    sequences: Sequences,
    names: Collection[str] | None,
) -> ExampleSpec:
    """Returns the features of `like`, by default of the first example."""
    first = next((examples[0] for examples in segments if examples), like)
    like = first if like is None else like
    if like is None:
        raise ValueError("All rows are empty. Pass `like=`, an example of the source.")
    spec = ExampleSpec(like, sequences, names)
    for name, value in spec.arrays.items():
        if value.dtype.kind not in "biufcV":
            raise ValueError(
                f"Feature {name!r} is {value.dtype}, but a batch contains only "
                "numbers. Remove it, or encode it as numbers."
            )
    return spec


def _padding(
    spec: ExampleSpec,
    seq_lens: Mapping[str, int],
    leading: tuple[int, ...],
    pad_value: PadValue,
) -> dict[str, np.ndarray]:
    """Returns the features of a batch without examples.

    Features that are no sequences have the `leading` axes, `[B]` or `[B, S]`.
    """
    pads = pad_arrays(pad_value, {name: spec.arrays[name].dtype for name in spec.axes})

    def padding(name: str, value: np.ndarray) -> np.ndarray:
        if name not in spec.axes:
            return np.zeros((*leading, *value.shape), value.dtype)
        shape = [seq_lens[key] for key in spec.axes[name]]
        return np.full((leading[0], *shape, *value.shape[len(shape) :]), pads[name])

    return {name: padding(name, value) for name, value in spec.arrays.items()}


def row_segments(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the segment ids and positions of packed rows.

    Example:
      >>> ids, positions = row_segments(np.array([[2, 1], [3, 0]]), seq_len=4)
      >>> print(ids, positions, sep="\\n")
      [[1 1 2 0]
       [1 1 1 0]]
      [[0 1 0 0]
       [0 1 2 0]]

    Args:
      lengths: `[B, S]` integers, the lengths of the examples in each row, 0 after the
        last one and for one that lacks the sequence. The lengths of a row add up to at
        most `seq_len`.
      seq_len: T.

    Returns:
      `(segment_ids, positions)`, both `[B, T]` int32 with 0 in padding.
    """
    rows, segments = np.nonzero(lengths)
    starts = (np.cumsum(lengths, axis=1) - lengths)[rows, segments]
    # The number and the start of the example of each token: both only rise in a row.
    ids, first = np.zeros((2, len(lengths), seq_len), np.int32)
    ids[rows, starts] = segments + 1
    first[rows, starts] = starts
    places = np.arange(seq_len, dtype=np.int32)
    mask = places < lengths.sum(axis=1)[:, None]
    ids = np.maximum.accumulate(ids, axis=1) * mask
    positions = (places - np.maximum.accumulate(first, axis=1)) * mask
    return ids, positions


def token_mask(lengths: np.ndarray, bucket: Bucket) -> np.ndarray:
    """Returns `[B, T]` bool, True at the tokens of rows with these `[B]` lengths."""
    # Comparing two int32 arrays is several times as fast as mixing dtypes.
    positions = np.arange(bucket.tokens_per_row, dtype=np.int32)
    return positions < lengths.astype(np.int32)[:, None]


def with_segments(
    features: dict[str, np.ndarray], name: str, mask: np.ndarray
) -> Batch:
    """Returns a batch with one example in each row, of the tokens in `mask`, `[B, T]`.

    `name` is the entry in `segment_ids` and `positions`.
    """
    ids = mask.astype(np.int32)
    positions = np.arange(mask.shape[1], dtype=np.int32)
    return Batch(features, {name: ids}, {name: ids * positions})


def check_row_length(length: int, seq_len: int, which: str = "") -> None:
    """Raises a ValueError if a row is longer than T. `which` names the sequence."""
    if length > seq_len:
        raise ValueError(
            f"The row has length {length}{which}, beyond `seq_len={seq_len}`. Use a "
            "longer bucket, put fewer examples into the row, or pass `truncate=True`."
        )
