"""How long one value is: an integer, a text in some unit, bytes, a list."""

from __future__ import annotations

import array
import dataclasses
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH, check_choice

Unit: TypeAlias = Literal["bytes", "characters", "words"]
UNITS: tuple[str, ...] = get_args(Unit)

# Python reads more than these as integers, such as "1_000".
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)
_LEAVE_OUT = "Leave the example out, or mend it."
_SAY_UNIT = "by `jaxbucket measure --unit` with bytes, characters or words"
# Lengths that are handed on together.
_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Measure:
    """Takes an example to its length, which is an integer from 1 to 2**31 - 1.

    Example:
      >>> Measure().of_text("12"), Measure("characters").of_text("12")
      (12, 2)
      >>> Measure("words").of_value("to be or not"), Measure().of_value([7, 8, 9])
      (4, 3)

    Attributes:
      unit: what a text is measured in; without one, a text of a file that has nothing
        but text is an integer.
      length_fn: example -> length, in place of the rules above.
    """

    unit: Unit | None = None
    length_fn: Callable[[Any], int] | None = None

    def __post_init__(self):
        if self.unit is not None:
            check_choice("unit", self.unit, UNITS)
            if self.length_fn is not None:
                raise ValueError(
                    f"`--unit {self.unit}` and `--length-fn` both say how long an "
                    "example is. Give one of them."
                )

    def of_text(self, text: str) -> int:
        """Returns the length of a cell or a line, which may be an integer.

        Raises:
          ValueError: if it has none.
        """
        if self.length_fn is None and self.unit is None:
            return _checked(_parsed(text))
        return self.of_value(text)

    def of_value(self, value: Any) -> int:
        """Returns the length of an example, or of a field of one, of a known type.

        Raises:
          ValueError: if it has none.
        """
        if self.length_fn is not None:
            return _by_function(self.length_fn, value)
        return _checked(_length(value, self.unit))


def _checked(length: int) -> int:
    if 1 <= length <= MAX_LENGTH:
        return length
    raise ValueError(
        f"the length is {length}, and not from 1 to {MAX_LENGTH}. {_LEAVE_OUT}"
    )


def measured(
    where: str, places: Iterable[tuple[int, Any]], measure: Callable[[Any], int]
) -> Iterator[np.ndarray]:
    """Yields the lengths of many values, int32, some thousands at a time.

    Args:
      where: what a place is, such as "`data.csv`, line".
      places: numbers of places, and the values that stand there.
      measure: value -> length.

    Raises:
      ValueError: if a value has no length; it names the place.
    """
    lengths = array.array("i")
    for place, value in places:
        try:
            lengths.append(measure(value))
        except ValueError as error:
            raise ValueError(f"{where} {place}: {error}") from error
        if len(lengths) == _CHUNK:
            yield np.array(lengths, np.int32)
            lengths = array.array("i")
    yield np.array(lengths, np.int32)


def shown(value: Any) -> str:
    """Returns a value as one short line, for messages."""
    return reprlib.repr(value)


def _parsed(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(
            f"{shown(text)} is not an integer. Mend it; where these are texts, measure "
            f"them {_SAY_UNIT}."
        )
    # Python refuses thousands of digits, which are not a length anyhow.
    return int(text) if len(text) < 1000 else MAX_LENGTH + 1


def _length(value: Any, unit: Unit | None) -> int:
    if isinstance(value, str):
        return _of_text(value, unit)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, bytes):
        # Bytes need no unit; a text that is not UTF-8 says so, as a ValueError.
        return len(value) if unit in (None, "bytes") else _of_text(value.decode(), unit)
    if isinstance(value, (list, tuple)):
        return len(value)
    # Arrays of any library have a leading axis, or are one number.
    if shape := getattr(value, "shape", ()):
        return shape[0]
    raise ValueError(
        f"{shown(value)} is neither an integer nor a text nor a list. {_LEAVE_OUT}"
    )


def _of_text(value: str, unit: Unit | None) -> int:
    if unit is None:
        raise ValueError(f"{shown(value)} is a text. Measure it {_SAY_UNIT}.")
    if unit == "words":
        return len(value.split())
    if unit == "characters" or value.isascii():
        return len(value)
    return len(value.encode())


def _by_function(length_fn: Callable[[Any], int], value: Any) -> int:
    try:
        length = length_fn(value)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`--length-fn` raises {type(error).__name__}: {error}. Mend it."
        ) from error
    try:
        return _checked(operator.index(length))
    except TypeError:
        raise ValueError(
            f"`--length-fn` returns {shown(length)}, which is not an integer. Mend it."
        ) from None
