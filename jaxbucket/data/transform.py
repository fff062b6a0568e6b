"""Random augmentation: a user function that is applied to examples as they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from jaxbucket.data.example import Example, copy_features

# (example, random generator) -> transformed example.
Transform: TypeAlias = Callable[[dict[str, np.ndarray], np.random.Generator], Example]


def check_transform(transform: Transform | None) -> Transform | None:
    """Returns the transform after checking it.

    Raises:
      ValueError: if it is neither callable nor None.
    """
    if transform is None or callable(transform):
        return transform
    remedy = "Pass a function `(example, rng) -> example`."
    if hasattr(transform, "random_map"):
        remedy = "Pass its method, `transform.random_map`."
    raise ValueError(
        f"`transform` is a {type(transform).__name__}, which is not callable. {remedy}"
    )


def transform_name(transform: Transform) -> str:
    """Returns the name of the function or of its class, as stored in positions.

    Example:
      >>> transform_name(functools.partial(check_transform, 1))
      'check_transform'
    """
    while isinstance(transform, functools.partial):
        transform = transform.func
    return getattr(transform, "__qualname__", type(transform).__qualname__)


def apply_transform(
    transform: Transform, example: Example, rng: np.random.Generator
) -> Example:
    """Applies a transform to a copy of an example.

    Raises:
      ValueError: if the transform does not return a dict, or the example is not one.
    """
    # The source may reuse its arrays in the next epoch.
    transformed = transform(copy_features(example), rng)
    if not isinstance(transformed, Mapping):
        kind = "None" if transformed is None else f"a {type(transformed).__name__}"
        raise ValueError(
            f"`transform` returned {kind}, not a dict of arrays. Return the "
            "example, even if it is modified in place."
        )
    return transformed
