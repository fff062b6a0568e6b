"""One example of a source: a dict of arrays, of which some are sequences.

Its sequences, `[n, ...]` each with the same n, are what is padded and cut; everything
else is one for the whole example.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike

Example: TypeAlias = Mapping[str, ArrayLike]
# Names of features, or those of each of several sequences.
Sequences: TypeAlias = Sequence[str] | Mapping[str, Sequence[str]] | None
# Name -> (dtype, shape).
Features: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]


def as_arrays(example: Example, row: int | None = None) -> dict[str, np.ndarray]:
    """Returns the features as arrays.

    Args:
      example: a dict of arrays.
      row: where it stands in a batch or a file, for messages.

    Raises:
      ValueError: if the example is not a dict, or a feature is ragged or has values
        that are masked.
    """
    if not isinstance(example, Mapping):
        where = "The example" if row is None else f"Row {row}"
        raise ValueError(
            f"{where} is a {type(example).__name__}, not a dict of arrays. Name "
            'what it holds, for example {"tokens": array}.'
        )
    return {name: _as_array(name, value, row) for name, value in example.items()}


def _as_array(name: str, value: ArrayLike, row: int | None) -> np.ndarray:
    feature = "Feature" if row is None else f"Row {row}: feature"
    if np.ma.is_masked(value):
        raise ValueError(
            f"{feature} {name!r} is a masked array, and a batch has no room for its "
            "mask. Fill it by `.filled(0)`, and make the mask a feature of its own."
        )
    try:
        array = np.asarray(value)
        if array.dtype.kind == "S" and not isinstance(value, np.ndarray):
            # Arrays of bytes forget zeros at the end.
            array = np.asarray(value, object)
        return array
    except ValueError:
        raise ValueError(
            f"{feature} {name!r} is ragged, so that it is not an array. Give "
            "all of its positions the same number of values, as in [n, 3], or flatten "
            "it to [n]."
        ) from None


def copied(example: Example) -> dict[str, np.ndarray]:
    """Returns the features as new arrays, with copies of the objects that they hold.

    Raises:
      ValueError: if the example is not a dict, or an object cannot be copied.
    """
    return {name: _copied(name, x) for name, x in as_arrays(example).items()}


def _copied(name: str, array: np.ndarray) -> np.ndarray:
    if not array.dtype.hasobject:
        return np.array(array)
    try:
        return copy.deepcopy(array)
    except Exception as error:
        raise ValueError(
            f"Feature {name!r} holds an object that cannot be copied: "
            f"{type(error).__name__}: {error}. Leave it out, or give what it is made "
            "of, such as a path or bytes."
        ) from error


def features_of(example: Example | None) -> Features:
    """Returns the dtype and the shape of each feature; nothing without an example.

    Example:
      >>> features_of({"x": [1.0, 2.0]})
      {'x': ('float64', [2])}
    """
    arrays = {} if example is None else as_arrays(example)
    return {name: (str(x.dtype), list(x.shape)) for name, x in arrays.items()}


def example_of(features: Features) -> Example | None:
    """Returns an example that has such features; None where there are none."""
    if not features:
        return None
    return {name: np.zeros(shape, dtype) for name, (dtype, shape) in features.items()}


def sequence_names(
    arrays: Mapping[str, np.ndarray], sequences: Sequence[str] | None
) -> list[str]:
    """Returns the features that have a position for each token, `[n, ...]`.

    Args:
      arrays: the features of an example.
      sequences: their names, by default those of all with a leading axis.

    Raises:
      ValueError: if there are none, or one that is named has no leading axis.
    """
    if sequences is None:
        names = [name for name, value in arrays.items() if value.ndim]
        remedy = "Give it an array with a leading axis of positions."
    else:
        names = listed_names(sequences)
        missing = [n for n in names if n not in arrays or not arrays[n].ndim]
        if missing:
            raise ValueError(
                f"`sequences={names}`: {missing} are not arrays with a leading axis "
                f"in an example with features {sorted(arrays)}."
            )
        remedy = "Name at least one in `sequences`."
    if not names:
        raise ValueError(f"The example {sorted(arrays)} has no sequence. {remedy}")
    return names


def listed_names(sequences: Sequence[str]) -> list[str]:
    """Returns the names of sequences, of which one may be given alone.

    Example:
      >>> listed_names("tokens")
      ['tokens']

    Raises:
      ValueError: if one is there twice, or they are of several sequences.
    """
    if isinstance(sequences, Mapping):
        raise ValueError(
            f"`sequences={dict(sequences)}` is of several sequences, which only packed "
            "rows hold, by `jb.packing.pack` with a capacity for each. Name "
            "those of one by a list."
        )
    names = [sequences] if isinstance(sequences, str) else list(sequences)
    if len(set(names)) < len(names):
        raise ValueError(f"`sequences={names}` has a feature twice. Name each once.")
    return names


def sequence_groups(
    arrays: Mapping[str, np.ndarray],
    sequences: Sequences,
    capacities: Mapping[str, int] | None = None,
) -> dict[str, list[str]]:
    """Returns the features that share the lengths of each sequence, by its name.

    Args:
      arrays: the features of an example.
      sequences: their names, or for several sequences name -> names; by default all
        with a leading axis, or of several each alone.
      capacities: what a row holds of each sequence; None if an example has one.

    Raises:
      ValueError: if one has no leading axis, or is in two groups, or in that of
        another name than `capacities` have.
    """
    if capacities is None:
        names = sequence_names(arrays, cast(Sequence[str] | None, sequences))
        return {names[0]: names}
    if sequences is None:
        sequences = {name: [name] for name in capacities}
    if not isinstance(sequences, Mapping) or sequences.keys() != capacities.keys():
        raise ValueError(
            f"`sequences={sequences}` must name the features of each of "
            f"{sorted(capacities)}."
        )
    groups = {
        name: sequence_names(
            arrays, [name, *(x for x in listed_names(sequences[name]) if x != name)]
        )
        for name in capacities
    }
    features = [name for names in groups.values() for name in names]
    if len(set(features)) < len(features):
        raise ValueError(f"`sequences={dict(sequences)}` has a feature twice.")
    return groups


def check_numbers(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises a ValueError if a feature is text, an object or a time."""
    for name, value in arrays.items():
        if value.dtype.kind in "USO":
            raise ValueError(
                f"Feature {name!r} is text or an object, {value.dtype}: a batch is "
                "made of numbers, so leave it out."
            )
        if value.dtype.kind in "mM":
            raise ValueError(
                f"Feature {name!r} is a time, {value.dtype}, which jax does not have: "
                'give the number, `x.astype("int64")`, or leave it out.'
            )


def matching_arrays(
    example: Example, template: dict[str, np.ndarray], names: list[str], row: int
) -> dict[str, np.ndarray]:
    """Returns the features as arrays, which are as those of another example.

    Args:
      example: a dict of arrays.
      template: the features of the other example, as arrays.
      names: which of them are sequences; only their lengths may differ.
      row: where the example stands in a batch or a file, for messages.

    Raises:
      ValueError: if names, dtypes or shapes differ.
    """
    arrays = as_arrays(example, row)
    if arrays.keys() != template.keys():
        raise ValueError(
            f"Row {row} has features {sorted(example)}, others have "
            f"{sorted(template)}. Give every example the same features."
        )
    for name, value in arrays.items():
        drop = 1 if name in names else 0
        is_as = (value.dtype, value.ndim, value.shape[drop:])
        expected = template[name]
        if is_as != (expected.dtype, expected.ndim, expected.shape[drop:]):
            if value.dtype.kind in "USO":
                raise ValueError(
                    f"Row {row}: feature {name!r} is text or an object, "
                    f"{value.dtype}: a batch is made of numbers, so leave it out."
                )
            raise ValueError(
                f"Row {row}: feature {name!r} is {value.dtype}{list(value.shape)}, in "
                f"the first example {expected.dtype}{list(expected.shape)}. Give all "
                "examples one dtype and one shape behind the sequence axis, or name "
                "the features with a sequence axis in `sequences`."
            )
    return arrays


def example_length(example: Example, sequences: Sequence[str] | None = None) -> int:
    """Returns the common length of an example's sequences.

    Raises:
      ValueError: if there is none, or they differ, or the example is not a dict.
    """
    arrays = as_arrays(example)
    return common_length(arrays, sequence_names(arrays, sequences))


def example_lengths(
    example: Example, sequences: Sequences, capacities: Mapping[str, int] | None
) -> dict[str, int]:
    """Returns the length of each sequence, by its name.

    Args:
      example: a dict of arrays.
      sequences: the features that share the lengths of each sequence, name -> names.
      capacities: what a row holds of each sequence; None if an example has one.

    Raises:
      ValueError: if there is none, or those of one differ, or the example is not a
        dict.
    """
    arrays = as_arrays(example)
    groups = sequence_groups(arrays, sequences, capacities)
    return {name: common_length(arrays, names) for name, names in groups.items()}


def common_length(
    arrays: Mapping[str, np.ndarray], names: list[str], row: int | None = None
) -> int:
    """Returns n, the length that all sequences of an example have.

    Args:
      arrays: the features of the example.
      names: which of them are sequences.
      row: where it stands in a batch or a file, for messages.

    Raises:
      ValueError: if they differ, or it is 0.
    """
    where = "The example" if row is None else f"Row {row}"
    lengths = {name: len(arrays[name]) for name in names}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"{where} has sequences of different lengths, {lengths}. Name those that "
            "share one in `sequences`."
        )
    length = lengths[names[0]]
    if length == 0:
        raise ValueError(
            f"{where} has length 0. Leave empty examples out of the source."
        )
    return length
