"""A function of the user's that changes examples at random, as they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxbucket.data.example import Example, copied
from jaxbucket.schedule.example_draws import example_rng

# (example, its random numbers) -> the example that is put into a row.
Transform: TypeAlias = Callable[[dict[str, np.ndarray], np.random.Generator], Example]


def check_transform(transform: Transform | None) -> Transform | None:
    """Returns the transform, or None.

    Raises:
      ValueError: if it cannot be called.
    """
    if transform is None or callable(transform):
        return transform
    remedy = "Give a function `(example, rng) -> example`."
    if hasattr(transform, "random_map"):
        remedy = "Give its method, `transform.random_map`."
    raise ValueError(
        f"`transform` is a {type(transform).__name__}, which cannot be called. {remedy}"
    )


def transform_name(transform: Transform) -> str:
    """Returns the name of the function, or of its class: what positions keep of it.

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
    """Returns what a transform makes of an example, of which it gets a copy.

    Raises:
      ValueError: if the transform raises or does not return a dict, or the example is
        not a dict.
    """
    # The source may keep its arrays for the next epoch.
    copy = copied(example)
    try:
        changed = transform(copy, rng)
    except Exception as error:
        raise ValueError(
            f"`transform` raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(changed, Mapping):
        kind = "None" if changed is None else f"a {type(changed).__name__}"
        raise ValueError(
            f"`transform` returned {kind}, not a dict of arrays. Return the example, "
            "even if it was changed in place."
        )
    return changed


class StreamTransform(NamedTuple):
    """A transform of the examples of one stream.

    Attributes:
      transform: the function; None for none.
      seed: of what it draws.
      part: of the rows, the first one that this process fills: others have streams of
        their own.
      worker: the first step of this worker, which has a share of the stream.
    """

    transform: Transform | None
    seed: int
    part: int = 0
    worker: int = 0

    def apply(self, example: Example, epoch: int, number: int) -> Example:
        """Returns what is made of an example, the so many-th of an epoch.

        Raises:
          ValueError: as `apply_transform`.
        """
        if self.transform is None:
            return example
        rng = example_rng(self.seed, self.part, epoch, number, self.worker)
        return apply_transform(self.transform, example, rng)
