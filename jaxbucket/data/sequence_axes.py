"""Which axes of the features of an example are sequences, and how long they are.

With one sequence, all of its features have shape `[n, ...]`. With several, a feature
has a leading axis for each sequence that lists it, so an image `[H, W, 3]` is a feature
of the two sequences "height" and "width".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from jaxbucket.data.example import (
    Example,
    Sequences,
    as_arrays,
    listed_names,
)

# Mapping from each sequence feature to the sequences of its leading axes.
SequenceAxes: TypeAlias = Mapping[str, Sequence[str]]


def listed_by_sequence(
    sequences: Sequences, names: Collection[str]
) -> dict[str, list[str]]:
    """Returns the features that are listed for each of several sequences.

    Example:
      >>> listed_by_sequence({"x": [], "y": ["weights"]}, ["x", "y"])
      {'x': ['x'], 'y': ['weights']}

    Args:
      sequences: a mapping from each sequence to the features that share its length; by
        default, and for an empty list, itself.
      names: the names of the sequences.

    Raises:
      ValueError: if the sequences are not those of `names`, or a list is not one or
        repeats a feature.
    """
    if sequences is None:
        sequences = {name: [name] for name in names}
    if not isinstance(sequences, Mapping) or set(sequences) != set(names):
        raise ValueError(
            f"`sequences={sequences}` must be a mapping with the features of each of "
            f"{sorted(names)}."
        )
    for name, features in sequences.items():
        if not isinstance(features, Sequence):
            raise ValueError(
                f"`sequences[{name!r}]={features!r}` must be a list with the "
                "features that are as long as this sequence, or an empty one."
            )
    return {name: listed_names(x) or [name] for name, x in sequences.items()}


def features_by_sequence(
    sequences: Sequences, names: Collection[str], known: Collection[str]
) -> dict[str, dict[str, int]]:
    """Returns the features of each of several sequences, with the axis of its length.

    A feature that several sequences list has an axis for each, in the order of the
    mapping. A sequence with the name of a feature includes this feature.

    Example:
      >>> sequences = {"height": ["image"], "width": ["image", "columns"]}
      >>> features_by_sequence(sequences, ["height", "width"], ["image", "columns"])
      {'height': {'image': 0}, 'width': {'image': 1, 'columns': 0}}
      >>> features_by_sequence({"x": [], "y": ["weights"]}, ["x", "y"], ["x", "y"])
      {'x': {'x': 0}, 'y': {'y': 0, 'weights': 0}}

    Args:
      sequences: a mapping from each sequence to the features that share its length; by
        default, and for an empty list, itself.
      names: the names of the sequences.
      known: the names of the features of an example.

    Raises:
      ValueError: as `listed_by_sequence`.
    """
    num_axes: dict[str, int] = {}
    groups: dict[str, dict[str, int]] = {}
    for name, listed in listed_by_sequence(sequences, names).items():
        others = [feature for feature in listed if feature != name]
        main = [name] if name in listed or name in known else []
        groups[name] = {x: num_axes.get(x, 0) for x in (*main, *others)}
        num_axes |= {x: axis + 1 for x, axis in groups[name].items()}
    return groups


def axis_labels(sequences: Sequences) -> Any:
    """Returns what identifies the axes of features, as plain Python for JSON.

    Example:
      >>> axis_labels({"height": ["image"], "width": ["image"]})
      {'height': ['height', 'image'], 'width': ['width', ['image', 1]]}

    Args:
      sequences: names of the features of one sequence; a mapping from each of several
        sequences to its features; or None.

    Returns:
      None, a list of names, or a mapping with an entry `[name, axis]` for each axis but
      the first. JSON does not keep the order of a mapping, which determines the axes.

    Raises:
      ValueError: as `listed_by_sequence`.
    """
    if sequences is None:
        return None
    if not isinstance(sequences, Mapping):
        return listed_names(sequences)
    # A name that is not a feature does not affect the axes of others.
    groups = features_by_sequence(sequences, sequences, sequences)
    return {
        name: [[x, axis] if axis else x for x, axis in features.items()]
        for name, features in groups.items()
    }


def sequence_axes(
    arrays: Mapping[str, np.ndarray],
    sequences: Sequences,
    names: Collection[str] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Returns the sequences of the leading axes of each feature that has some.

    Example:
      >>> arrays = {"image": np.zeros((4, 5, 3)), "boxes": np.zeros((2, 4))}
      >>> sequences = {"height": ["image"], "width": ["image"], "boxes": []}
      >>> sequence_axes(arrays, sequences, list(sequences))
      {'image': ('height', 'width'), 'boxes': ('boxes',)}

    Args:
      arrays: the features of an example, or of a batch of examples.
      sequences: names of the sequence features, or for several sequences a mapping from
        each to its features. By default all features with a leading axis; for several
        sequences, each by itself.
      names: the names of several sequences; None or empty for a single sequence.

    Raises:
      ValueError: if a listed feature is missing or lacks an axis, or if the sequences
        are not those of `names`.
    """
    if names:
        groups = features_by_sequence(sequences, names, arrays)
    else:
        listed = cast(Sequence[str] | None, sequences)
        if listed is None:
            listed = [name for name, value in arrays.items() if value.ndim]
        listed = listed_names(listed)
        groups = {x: dict.fromkeys(listed, 0) for x in listed[:1]}
    if not groups:
        raise ValueError(
            f"The example has no sequence feature among {sorted(arrays)}. Add one with "
            "an entry per token, `[n, ...]`, or name one in `sequences`."
        )
    axes: dict[str, tuple[str, ...]] = {}
    for name, features in groups.items():
        _check_axes(arrays, features)
        axes |= {feature: (*axes.get(feature, ()), name) for feature in features}
    return axes


def _check_axes(arrays: Mapping[str, np.ndarray], features: Mapping[str, int]) -> None:
    """Raises a ValueError if a feature has no axis of its sequence."""
    for name, axis in features.items():
        if name not in arrays or arrays[name].ndim <= axis:
            shapes = {x: list(value.shape) for x, value in arrays.items()}
            raise ValueError(
                f"`sequences` lists {name!r}, but the features have the shapes "
                f"{shapes}. List features of the shape [n, ...], with a leading axis "
                "for each sequence that lists them."
            )
        entries = arrays[name].flat if arrays[name].dtype.hasobject else ()
        if any(isinstance(x, Mapping | list | tuple | np.ndarray) for x in entries):
            raise ValueError(
                f"Feature {name!r} is a list of dicts or lists, so its length is not "
                "that of its tokens. Flatten it, choose the features that have the "
                "length by `sequences=[...]`, or pass a `length_fn`."
            )


def sequence_lengths(
    arrays: Mapping[str, np.ndarray], axes: SequenceAxes, row: int | None = None
) -> dict[str, int]:
    """Returns the length of each sequence.

    Args:
      arrays: the features of an example.
      axes: mapping from each sequence feature to the sequences of its leading axes.
      row: index of the example in its batch or file, for messages.

    Raises:
      ValueError: if the features of a sequence differ in length, or one has length 0.
    """
    lengths: dict[str, int] = {}
    for feature, names in axes.items():
        for axis, name in enumerate(names):
            size = arrays[feature].shape[axis]
            if not size or lengths.setdefault(name, size) != size:
                _common_size(_sizes(arrays, axes, name), row)
    return lengths


def _sizes(
    arrays: Mapping[str, np.ndarray], axes: SequenceAxes, sequence: str
) -> dict[str, int]:
    """Returns the length of each feature of a sequence."""
    return {
        feature: arrays[feature].shape[list(names).index(sequence)]
        for feature, names in axes.items()
        if sequence in names
    }


def _common_size(sizes: Mapping[str, int], row: int | None = None) -> int:
    """Returns the only value of `sizes`, or raises a ValueError that lists them."""
    size, *others = set(sizes.values())
    if others or not size:
        where = "The example" if row is None else f"Row {row}"
        raise ValueError(
            f"{where} has sequences of the lengths {dict(sizes)}. Remove it if it is "
            "empty, for example with `jb.data.select`; else name the features that "
            "share a length in `sequences`."
        )
    return size


def example_length(example: Example, sequences: Sequence[str] | None = None) -> int:
    """Returns the common length of an example's sequence features.

    Raises:
      ValueError: as `example_lengths`.
    """
    (length,) = example_lengths(example, sequences, None).values()
    return length


def example_lengths(
    example: Example, sequences: Sequences, names: Collection[str] | None
) -> dict[str, int]:
    """Returns the length of each sequence.

    Args:
      example: a dict of arrays.
      sequences: mapping from each sequence to its features, which share its length.
      names: the names of several sequences; None or empty for a single sequence.

    Raises:
      ValueError: if there are no sequences, if the features of one differ in length, or
        if the example is not a dict.
    """
    arrays = as_arrays(example)
    return sequence_lengths(arrays, sequence_axes(arrays, sequences, names))


def check_not_nested(
    examples: Any, sequences: Sequences, lengths: Mapping[str | None, np.ndarray]
) -> None:
    """Raises a ValueError if all lengths are 1, as those of batches of one example.

    Args:
      examples: the examples, of which the first may be read.
      sequences: as for `sequence_axes`.
      lengths: `[N]` lengths of all examples by sequence; by None for a single one.
    """
    ones = [name for name, values in lengths.items() if values.max() == 1]
    names = [name for name in lengths if name is not None]
    arrays = as_arrays(examples[0]) if ones else {}
    for name, axes in (sequence_axes(arrays, sequences, names) if ones else {}).items():
        shape = arrays[name].shape
        if len(shape) > len(axes) and all(x in ones for x in axes if names):
            raise ValueError(
                f"All lengths are 1, because feature {name!r} has the shape "
                f"{list(shape)}. Remove its first axis, or pass a `length_fn`."
            )


def length_functions(
    sequences: Mapping[str, Sequence[str]],
) -> dict[str, Callable[[Example], int]]:
    """Returns functions from an example to the length of each sequence.

    Each reads the features of its sequence only, and can be pickled.

    Raises:
      ValueError: as `listed_by_sequence`.
    """
    measure = functools.partial(_sequence_length, sequences)
    names = listed_by_sequence(sequences, sequences)
    return {name: functools.partial(measure, name) for name in names}


def _sequence_length(
    sequences: Mapping[str, Sequence[str]], name: str, example: Example
) -> int:
    arrays = as_arrays(example)
    features = features_by_sequence(sequences, sequences, arrays)[name]
    _check_axes(arrays, features)
    return _common_size({x: arrays[x].shape[axis] for x, axis in features.items()})
