"""Which axes of the features of an example are sequences, and how long they are.

With one sequence, all of its features have shape `[n, ...]`. With several, a feature
has a leading axis for each sequence that lists it, so an image `[H, W, 3]` is a feature
of the two sequences "height" and "width".
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from jaxbucket.data.example import Example, Sequences, as_arrays, listed_names


class ExampleSpec:
    """The features of an example, and which of their axes are sequences.

    Example:
      >>> example = {"image": np.zeros((4, 5, 3)), "boxes": np.zeros((2, 4))}
      >>> sequences = {"height": ["image"], "width": ["image"], "boxes": []}
      >>> spec = ExampleSpec(example, sequences, list(sequences))
      >>> spec.axes
      {'image': ('height', 'width'), 'boxes': ('boxes',)}
      >>> spec.lengths()
      {'height': 4, 'width': 5, 'boxes': 2}

    Args:
      example: a dict of arrays; or the features of a batch, to split it.
      sequences: names of the sequence features, or for several sequences a mapping from
        each to its features. By default all features with a leading axis; for several
        sequences, each by itself.
      names: the names of several sequences; None or empty for a single sequence.

    Attributes:
      arrays: the features as arrays.
      axes: mapping from each sequence feature to the sequences of its leading axes.
    """

    def __init__(
        self,
        example: Example,
        sequences: Sequences = None,
        names: Collection[str] | None = None,
    ):
        self.arrays = as_arrays(example)
        if names:
            self._groups = features_by_sequence(sequences, names, self.arrays)
        else:
            features = _features_of_one(sequences, self.arrays)
            self._groups = {next(iter(features)): features}
        self.axes: dict[str, tuple[str, ...]] = {}
        for name, features in self._groups.items():
            _check_axes(self.arrays, features)
            for feature in features:
                self.axes[feature] = (*self.axes.get(feature, ()), name)

    @functools.cached_property
    def _expected(self) -> dict[str, Any]:
        return self._kinds(self.arrays)

    def _kinds(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns the dtype, and the shape without sequences, of each feature."""
        return {
            name: (x.dtype, x.ndim, x.shape[len(self.axes.get(name, ())) :])
            for name, x in arrays.items()
        }

    def match(self, example: Example) -> dict[str, np.ndarray]:
        """Returns the features of another example as arrays."""
        arrays = as_arrays(example)
        for name, x in arrays.items():
            # An empty list has no dtype of its own.
            if name in self.axes and name in self.arrays and not x.size:
                arrays[name] = x.astype(self.arrays[name].dtype)
        if self._kinds(arrays) != self._expected:
            kinds = [
                {name: f"{x.dtype}{list(x.shape)}" for name, x in sorted(each.items())}
                for each in (arrays, self.arrays)
            ]
            raise ValueError(
                f"The example has the features {kinds[0]}, but others have {kinds[1]}. "
                "Make them the same (also if empty: `np.array([], int)`), or name them "
                "in `sequences` (in two sequences, if two axes differ in length)."
            )
        return arrays

    def lengths(self, arrays: Mapping[str, np.ndarray] | None = None) -> dict[str, int]:
        """Returns the length of each sequence of this example.

        Args:
          arrays: the features of another example, which `match` has returned.
        """
        arrays = self.arrays if arrays is None else arrays
        lengths = {name: _length(arrays, x) for name, x in self._groups.items()}
        if not all(lengths.values()) and self._lacks_a_part(lengths):
            raise ValueError(
                f"`sequences` of the example have the lengths {lengths}. Remove the "
                "example (`jb.data.select`, or `filter` of a stream)."
            )
        return lengths

    def _lacks_a_part(self, lengths: Mapping[str, int]) -> bool:
        """Returns whether all sequences are empty, or some of those of a feature."""
        parts = [[bool(lengths[x]) for x in names] for names in self.axes.values()]
        return not any(lengths.values()) or any(any(x) > all(x) for x in parts)


def sequence_length(sequences: Sequences, name: str | None, example: Example) -> int:
    """Returns the length of a sequence of an example.

    Args:
      sequences: as for `ExampleSpec`.
      name: the sequence to measure; None if there is only one. Only the features of
        this sequence are looked at.
      example: a dict of arrays.
    """
    arrays = as_arrays(example)
    if name is None:
        features = _features_of_one(sequences, arrays)
    else:
        names = cast(Mapping[str, Any], sequences)
        features = features_by_sequence(sequences, names, arrays)[name]
    _check_axes(arrays, features)
    return _length(arrays, features)


def _features_of_one(
    sequences: Sequences, arrays: Mapping[str, np.ndarray]
) -> dict[str, int]:
    """Returns the features of a single sequence, with the axis of its length."""
    if sequences is None:
        listed = [name for name, x in arrays.items() if x.ndim]
    else:
        listed = listed_names(cast(Sequence[str], sequences))
    if not listed:
        raise ValueError(
            f"The example has no sequence feature among {sorted(arrays)}. Add one with "
            "an entry per token, `[n, ...]`, such as a tokenized text, or name one in "
            "`sequences`."
        )
    return dict.fromkeys(listed, 0)


def _check_axes(arrays: Mapping[str, np.ndarray], features: Mapping[str, int]) -> None:
    """Raises a ValueError if a feature has no axis of its sequence."""
    for name, axis in features.items():
        if name not in arrays or arrays[name].ndim <= axis:
            shapes = {x: list(value.shape) for x, value in arrays.items()}
            raise ValueError(
                f"`sequences` lists {name!r}, by default the name of its sequence, but "
                f"the features have the shapes {shapes}. Name the features of each "
                "sequence, and give them a leading axis for each that lists them, of "
                "length 0 in an example that lacks it."
            )
        entries = arrays[name].flat if arrays[name].dtype.hasobject else ()
        if any(isinstance(x, Mapping | list | tuple | np.ndarray) for x in entries):
            raise ValueError(
                f"Feature {name!r} is a list of dicts or lists. Flatten it, choose "
                "others by `sequences=[...]`, or pass a `length_fn`."
            )


def _length(arrays: Mapping[str, np.ndarray], features: Mapping[str, int]) -> int:
    """Returns the common length of features, given by the axis of each."""
    length, *others = {arrays[name].shape[axis] for name, axis in features.items()}
    if others:
        sizes = {name: arrays[name].shape[axis] for name, axis in features.items()}
        several = {name: [name] for name in sizes}
        raise ValueError(
            f"The example has sequences of the lengths {sizes}. Name those that share "
            f"a length in `sequences`, or all, as several sequences: `{several}`."
        )
    return length


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
    """
    if sequences is None:
        sequences = {name: [name] for name in names}
    if not isinstance(sequences, Mapping) or set(sequences) != set(names):
        raise ValueError(
            f"`sequences={sequences}` must be a mapping with the features of each of "
            f"{sorted(names)}."
        )
    num_axes: dict[str, int] = {}
    groups: dict[str, dict[str, int]] = {}
    for name, features in sequences.items():
        listed = listed_names(features) or [name]
        others = [feature for feature in listed if feature != name]
        main = [name] if name in listed or name in known else []
        groups[name] = {x: num_axes.get(x, 0) for x in (*main, *others)}
        num_axes |= {x: axis + 1 for x, axis in groups[name].items()}
    return groups


def axis_labels(sequences: Sequences, names: Collection[str] = ()) -> Any:
    """Returns what identifies the axes of features, as plain Python for JSON.

    Example:
      >>> axis_labels({"height": ["image"], "width": ["image"]})
      {'height': ['height', 'image'], 'width': ['width', ['image', 1]]}

    Args:
      sequences: names of the features of one sequence; a mapping from each of several
        sequences to its features; or None.
      names: the names of several sequences, if they are known.

    Returns:
      None, a list of names, or a mapping with an entry `[name, axis]` for each axis but
      the first. JSON does not keep the order of a mapping, which determines the axes.
    """
    if not names and isinstance(sequences, Mapping):
        names = sequences
    if not names:
        listed = cast(Sequence[str] | None, sequences)
        return None if listed is None else listed_names(listed)
    # A name that is not a feature does not affect the axes of others.
    groups = features_by_sequence(sequences, names, names)
    return {
        name: [[x, axis] if axis else x for x, axis in features.items()]
        for name, features in groups.items()
    }


def check_not_nested(
    examples: Any, sequences: Sequences, lengths: Mapping[str | None, np.ndarray]
) -> None:
    """Raises a ValueError if all lengths are 1, as those of batches of one example.

    Args:
      examples: the examples, of which the first may be read.
      sequences: as for `ExampleSpec`.
      lengths: the `[N]` lengths of each sequence; by None for a single one.
    """
    ones = [name for name, x in lengths.items() if x.min() == x.max() == 1]
    if not ones:
        return
    names = [name for name in lengths if name is not None]
    spec = ExampleSpec(examples[0], sequences, names)
    for name, axes in spec.axes.items():
        shape = spec.arrays[name].shape
        if len(shape) > len(axes) and all(x in ones for x in axes if names):
            raise ValueError(
                f"All lengths are 1, because feature {name!r} has the shape "
                f"{list(shape)}. Remove its first axis, or pass a `length_fn`."
            )
