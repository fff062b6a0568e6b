"""The two kinds of values that are measured: lengths and difficulties."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH

# Dtypes of difficulties, which are those of a difficulty index.
DIFFICULTY_DTYPES = ("float32", "float64", "int32", "int64")


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A kind of value that each example has.

    Attributes:
      noun: its name in messages.
      argument: the argument with the user's functions, which return such values.
      part: what has such a value, if an example has several.
      dtype: dtype of the measured values.
      missing: the value of examples that are not measured yet. It is never valid.
      parse: function from an object to a valid number, or None if it is invalid.
      valid: the valid numbers, for messages.
      title: title of the progress bar.
    """

    noun: str
    argument: str
    part: str
    dtype: np.dtype
    missing: float
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


def _parse_float(largest: float, value: Any) -> float | None:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= largest else None


def _parse_integer(largest: int, value: Any) -> int | None:
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if abs(number) <= largest else None


LENGTH = Quantity(
    noun="length",
    argument="length_fn",
    part="sequence",
    dtype=np.dtype(np.int32),
    missing=0,
    parse=_parse_length,
    valid=f"an integer from 1 to {MAX_LENGTH}",
    title="Measuring lengths",
)


def difficulty(dtype: np.dtype) -> Quantity:
    """Returns the difficulty that is stored in one of the `DIFFICULTY_DTYPES`."""
    if dtype.kind == "f":
        missing, parse = math.nan, _parse_float
        largest: float = float(np.finfo(dtype).max)
        valid = f"a finite {8 * dtype.itemsize}-bit number"
    else:
        missing, parse = int(np.iinfo(dtype).min), _parse_integer
        largest = int(np.iinfo(dtype).max)
        valid = f"an integer from -{largest} to {largest}, as `dtype={dtype}` requires"
    return Quantity(
        noun="difficulty",
        argument="difficulty_fn",
        part="metric",
        dtype=dtype,
        missing=missing,
        parse=functools.partial(parse, largest),
        valid=valid,
        title="Measuring difficulty",
    )
