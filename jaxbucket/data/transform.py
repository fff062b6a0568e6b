"""Random augmentation: a user function that is applied to examples as they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from jaxbucket.data.example import Example, copy_features

# (example, random generator) -> transformed example.
Transform: TypeAlias = Callable[[dict[str, np.ndarray], np.random.Generator], Example]


def check_transform(transform: Transform | None) -> None:
    """Raises a ValueError if a transform is neither callable nor None."""
    if transform is not None and not callable(transform):
        raise ValueError(
            f"`transform` is a {type(transform).__name__}, which is not callable. Pass "
            "a function `(example, rng) -> example`, such as the method `random_map`."
        )


def transform_name(transform: Transform) -> str:
    """Returns the name of the function or of its class, as stored in positions.

    Example:
      >>> transform_name(functools.partial(check_transform, None))
      'check_transform'
    """
    while isinstance(transform, functools.partial):
        transform = transform.func
    return getattr(transform, "__qualname__", type(transform).__qualname__)


def apply_transform(
    transform: Transform, example: Example, rng: np.random.Generator
) -> Example:
    """Applies a transform to a copy, as a source may reuse its arrays."""
    return transform(copy_features(example), rng)
