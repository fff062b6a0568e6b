"""The two kinds of values that are measured: lengths and difficulties."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A kind of value that each example has.

    Attributes:
      noun: its name in messages.
      argument: the argument with the user's functions, which return such values.
      part: what has such a value, if an example has several.
      dtype: dtype of the measured values.
      parse: function from an object to a valid number, or None if it is invalid.
      valid: the valid numbers, for messages.
      title: title of the progress bar.
    """

    noun: str
    argument: str
    part: str
    dtype: np.dtype
    parse: Callable[[Any], float | None]
    valid: str
    title: str

    def where(self, index: int, name: str | None) -> str:
        """Returns the place of a value in the source, for messages."""
        place = f"`source[{index}]`"
        return place if name is None else f"{place}, {self.part} {name!r}"

    def checked(self, value: Any, index: int, name: str | None) -> float:
        """Returns the number that a function returned for an example.

        Raises:
          ValueError: if it is invalid.
        """
        number = self.parse(value)
        if number is not None:
            return number
        comma, key = ("", "") if name is None else (",", f"[{name!r}]")
        raise ValueError(
            f"{self.where(index, name)}{comma} has {self.noun} {value!r}, which is not "
            f"{self.valid}. Remove the example, or fix `{self.argument}{key}`."
        )


def _parse_length(value: Any) -> int | None:
    try:
        length = operator.index(value)
    except TypeError:
        return None
    if isinstance(value, bool):
        return None
    return length if 1 <= length <= MAX_LENGTH else None


def _parse_difficulty(value: Any) -> float | None:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= _MAX_FLOAT32 else None


LENGTH = Quantity(
    noun="length",
    argument="length_fn",
    part="sequence",
    dtype=np.dtype(np.int32),
    parse=_parse_length,
    valid=f"an integer from 1 to {MAX_LENGTH}",
    title="Measuring lengths",
)
DIFFICULTY = Quantity(
    noun="difficulty",
    argument="difficulty_fn",
    part="metric",
    dtype=np.dtype(np.float32),
    parse=_parse_difficulty,
    valid="a finite 32-bit number",
    title="Measuring difficulty",
)
