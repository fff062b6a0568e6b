"""One example of a source: a dict of arrays, some of which are sequences.

The sequence features have shape `[n, ...]` with a common length n, and are padded,
truncated or split. All other features have one value for the whole example.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_type
from jaxbucket.base.notes import Noting

Example: TypeAlias = Mapping[str, ArrayLike]
# Random augmentation: (example, random generator) -> transformed example.
Transform: TypeAlias = Callable[[dict[str, np.ndarray], np.random.Generator], Example]
# Names of features; with several sequences, a mapping from each to its features.
Sequences: TypeAlias = Sequence[str] | Mapping[str, Sequence[str]] | None
# Mapping from feature name to (dtype, shape).
Features: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]


def as_arrays(example: Example) -> dict[str, np.ndarray]:
    """Returns the features as arrays."""
    remedy = 'Pass a dict of arrays, such as {"tokens": array}.'
    check_type("example", example, Mapping, remedy)
    return {name: _as_array(name, value) for name, value in example.items()}


def _as_array(name: str, value: ArrayLike) -> np.ndarray:
    if type(value) is np.ndarray:
        return value
    if np.ma.is_masked(value):
        raise ValueError(
            f"Feature {name!r} is a masked array, and a batch cannot store its mask. "
            "Fill it with `.filled(0)`, and pass the mask as a separate feature."
        )
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    with Noting(f"This is the feature {name!r}."):
        array = np.asarray(value)
    # Arrays of bytes drop trailing zero bytes.
    return np.asarray(value, object) if array.dtype.kind == "S" else array


def copy_features(example: Example) -> dict[str, np.ndarray]:
    """Returns the features as new arrays, including copies of contained objects."""
    return {
        name: copy.deepcopy(x) if x.dtype.hasobject else np.array(x)
        for name, x in as_arrays(example).items()
    }


def feature_specs(example: Example | None) -> Features:
    """Returns the dtype and shape of each feature, empty if `example` is None.

    Example:
      >>> feature_specs({"x": [1.0, 2.0]})
      {'x': ('float64', [2])}
    """
    arrays = {} if example is None else as_arrays(example)
    return {name: (str(x.dtype), list(x.shape)) for name, x in arrays.items()}


def example_from_specs(features: Features) -> Example | None:
    """Returns an example of zeros with these features, or None if there are none."""
    if not features:
        return None
    return {name: np.zeros(shape, dtype) for name, (dtype, shape) in features.items()}


def listed_names(sequences: Sequence[str]) -> list[str]:
    """Returns the names of sequence features as a list; a string is a single name.

    Example:
      >>> listed_names("tokens")
      ['tokens']
    """
    if isinstance(sequences, Mapping):
        raise ValueError(
            f"`sequences={dict(sequences)}` names several sequences, which need a T "
            "for each. Pass a list of names for a single one."
        )
    return [sequences] if isinstance(sequences, str) else list(sequences)


def transform_name(transform: Transform) -> str:
    """Returns the name of the function or of its class, as stored in positions.

    Example:
      >>> transform_name(functools.partial(copy_features, {}))
      'copy_features'
    """
    while isinstance(transform, functools.partial):
        transform = transform.func
    return getattr(transform, "__qualname__", type(transform).__qualname__)
