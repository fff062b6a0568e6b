"""One example of a source: a dict of arrays, of which some are sequences.

Its sequences, `[n, ...]` each with the same n, are what is padded and cut; everything
else is one for the whole example.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike

Example: TypeAlias = Mapping[str, ArrayLike]
# Names of features, or those of each of several sequences.
Sequences: TypeAlias = Sequence[str] | Mapping[str, Sequence[str]] | None
# What fills padding: one number, or name -> number and 0 for features not named.
PadValue: TypeAlias = float | Mapping[str, float]
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
    """Returns the features as arrays in memory of their own.

    Whoever gave them may use the old ones again, and whoever gets these may write, also
    into the objects that they hold.

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
    """Returns the dtype and the shape of each feature; nothing of no example.

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
                f"`sequences={names}`: {missing} are no arrays with a leading axis in "
                f"an example with features {sorted(arrays)}."
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
            "rows hold, by `pack(lengths, max_seq_len)` with a capacity for each. Name "
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
    every = [name for names in groups.values() for name in names]
    if len(set(every)) < len(every):
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
      ValueError: if there is none, or they differ, or the example is no dict.
    """
    arrays = as_arrays(example)
    return common_length(arrays, sequence_names(arrays, sequences))


def example_lengths(
    example: Example, sequences: Sequences, capacities: Mapping[str, int] | None
) -> dict[str, int]:
    """Returns the length of each sequence, by its name.

    Args:
      example: a dict of arrays.
      sequences: as in `sequence_groups`, and so is the other one.
      capacities: what a row holds of each sequence; None if an example has one.

    Raises:
      ValueError: if there is none, or those of one differ, or the example is no dict.
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


def check_pad_value(pad_value: PadValue) -> float | dict[str, float]:
    """Returns it as plain Python, the names sorted.

    Raises:
      ValueError: if it is neither a number nor a mapping of numbers.
    """
    if not isinstance(pad_value, Mapping):
        return _number("pad_value", pad_value)
    other = [name for name in pad_value if not isinstance(name, str)]
    if other:
        raise ValueError(
            f"`pad_value` names {other}, which are not strings: features are named by "
            "these."
        )
    names = sorted(pad_value)
    return {name: _number(f"pad_value[{name!r}]", pad_value[name]) for name in names}


def _number(name: str, value: float) -> float:
    array = np.asarray(value)
    # Integers beyond 64 bits are objects.
    if array.ndim == 0 and (array.dtype.kind in "biuf" or isinstance(value, int)):
        return array.item()
    raise ValueError(
        f"`{name}={value!r}` is not a number. Give one, or a dict with one for each "
        "feature that 0 does not fill."
    )


def pad_arrays(
    pad_value: PadValue, dtypes: Mapping[str, np.dtype]
) -> dict[str, np.ndarray]:
    """Returns what fills each padded feature, `[]` of its dtype.

    Example:
      >>> dtypes = {"tokens": np.dtype("u1"), "labels": np.dtype("i4")}
      >>> pad_arrays({"labels": -100}, dtypes)
      {'tokens': array(0, dtype=uint8), 'labels': array(-100, dtype=int32)}

    Args:
      pad_value: name -> number, 0 for those without one; or a number for all, which is
        0 unless there is one feature only.
      dtypes: name -> dtype, of the features that are padded.

    Raises:
      ValueError: if it names another feature, or is one number for several features,
        or one that a dtype cannot hold.
    """
    pad_value = check_pad_value(pad_value)
    if not isinstance(pad_value, dict):
        # Not a number is not 0 either.
        if len(dtypes) > 1 and not pad_value == 0:
            each = dict.fromkeys(dtypes, pad_value)
            raise ValueError(
                f"`pad_value={pad_value}` would fill {len(dtypes)} features. Say which "
                f"of them: `pad_value={each}`, without those that 0 fills."
            )
        pad_value = dict.fromkeys(dtypes, pad_value)
    unknown = [name for name in pad_value if name not in dtypes]
    if unknown:
        raise ValueError(
            f"`pad_value` names {unknown}, and the padded features are "
            f"{sorted(dtypes)}. Choose from these."
        )
    return {
        name: _pad_array(pad_value.get(name, 0), name, dtype)
        for name, dtype in dtypes.items()
    }


def _pad_array(value: float, name: str, dtype: np.dtype) -> np.ndarray:
    try:
        with np.errstate(all="ignore"):
            # Integers beyond 64 bits are objects, which are not cast to every float.
            exact = value if _is_integral(dtype) else float(value)
            pad = np.asarray(exact).astype(dtype)
    except (OverflowError, TypeError):
        pad = None
    if pad is None or not _is_held(value, pad):
        raise ValueError(
            f"`pad_value={value}`: feature {name!r} is {dtype}, which cannot hold it. "
            "Pad with another value, or give the source another dtype."
        )
    return pad


def _is_held(value: float, pad: np.ndarray) -> bool:
    """Integers exactly; of floats, what is finite stays so."""
    if _is_integral(pad.dtype):
        return int(pad) == value
    if issubclass(pad.dtype.type, np.void):
        return True
    if math.isnan(value):
        return bool(np.isnan(pad))
    if math.isinf(value):
        return bool(np.isinf(pad))
    return bool(np.isfinite(pad)) and abs(value) <= _largest(pad.dtype)


def _is_integral(dtype: np.dtype) -> bool:
    # Those of ml_dtypes, such as int4, are known by their names alone.
    return dtype.kind in "biu" or dtype.name.startswith(("int", "uint"))


def _largest(dtype: np.dtype) -> float:
    if dtype.type.__module__ == "numpy":
        # What is beyond it becomes infinite, in the narrow ones of ml_dtypes 6.0.
        return math.inf
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)
