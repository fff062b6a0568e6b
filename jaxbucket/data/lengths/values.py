"""The length of one value: an integer, a string in some unit, bytes or a list."""

from __future__ import annotations

import array
import dataclasses
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH, check_choice
from jaxbucket.data.example import has_nested

Unit: TypeAlias = Literal["bytes", "characters", "words"]
UNITS: tuple[str, ...] = get_args(Unit)

# `int` also accepts other spellings, such as "1_000".
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_MISSING = {"nan", "none", "null", "na", "n/a", "inf", "-inf", "infinity", "-infinity"}
_REMOVE_OR_FIX = "Remove or fix this example."
_USE_UNIT = "with `jaxbucket measure --unit` bytes, characters or words"
# Number of rows per yielded array.
_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Measure:
    """The rule that defines the length of an example, from 1 to 2**31 - 1.

    Example:
      >>> Measure().of_text("12"), Measure("characters").of_text("12")
      (12, 2)
      >>> Measure("words").of_value("to be or not"), Measure().of_value([7, 8, 9])
      (4, 3)

    Attributes:
      unit: unit in which texts are measured. If None, the lines and cells of text files
        must be integers, which are lengths themselves.
      length_fn: function from an example to its length, which replaces the other rules.
    """

    unit: Unit | None = None
    length_fn: Callable[[Any], int] | None = None

    def __post_init__(self):
        if self.unit is not None:
            check_choice("unit", self.unit, UNITS)
            if self.length_fn is not None:
                raise ValueError(
                    f"`--unit {self.unit}` and `--length-fn` both define the length of "
                    "an example. Pass only one of them."
                )

    def of_text(self, text: str, *, in_column: bool = False) -> int:
        """Returns the length of a cell or a line of a text file.

        Args:
          text: the cell or the line.
          in_column: whether it is a cell, so that error messages suggest `--column`.

        Raises:
          ValueError: if it has no valid length.
        """
        if self.length_fn is None and self.unit is None:
            return _check_length(_parse(text, in_column))
        return self.of_value(text)

    def of_value(self, value: Any) -> int:
        """Returns the length of an example, or of one field of an example.

        Raises:
          ValueError: if it has no valid length.
        """
        if self.length_fn is not None:
            return _call_length_fn(self.length_fn, value)
        return _check_length(_length_of(value, self.unit))


def _check_length(length: int) -> int:
    if 1 <= length <= MAX_LENGTH:
        return length
    raise ValueError(
        f"the length is {length}, but it must be from 1 to {MAX_LENGTH}. "
        f"{_REMOVE_OR_FIX}"
    )


def measure_all(
    places: Sequence[str],
    rows: Iterable[tuple[int, Sequence[Any]]],
    measure: Callable[[Any], int],
) -> Iterator[np.ndarray]:
    """Yields the lengths of many rows of Q values, as int32 `[Q, n]`, n up to 4096.

    Args:
      places: the start of the error messages of each value, such as "`data.csv`, line".
      rows: pairs of a number, such as that of a line, and Q values.
      measure: function from a value to its length.

    Raises:
      ValueError: if a value has no length; the message has the number of its row.
    """
    lengths = array.array("i")
    for number, values in rows:
        try:
            for value in values:
                lengths.append(measure(value))
        except ValueError as error:
            # The lengths of the values before the invalid one have been appended.
            place = places[len(lengths) % len(places)]
            raise ValueError(f"{place} {number}: {error}") from error
        if len(lengths) == _CHUNK * len(places):
            yield np.array(lengths, np.int32).reshape(-1, len(places)).T
            lengths = array.array("i")
    yield np.array(lengths, np.int32).reshape(-1, len(places)).T


def short_repr(value: Any) -> str:
    """Returns a value as one short line for messages."""
    return reprlib.repr(value)


def _parse(text: str, in_column: bool) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(_not_an_integer(text.strip(), in_column))
    # `int` rejects strings of thousands of digits; such a length is invalid anyway.
    return int(text) if len(text) < 1000 else MAX_LENGTH + 1


def _not_an_integer(text: str, in_column: bool) -> str:
    """Returns the error message for a cell or a line that is not an integer."""
    if not text:
        if in_column:
            return "the length is missing. Fill it in, or remove the line."
        return (
            "the length is missing. Fill it in, remove the line, or measure texts "
            f"{_USE_UNIT}."
        )
    if text.lower() in _MISSING:
        return f"{text!r} is not a length. Fill in a length, or remove the line."
    choose = "choose a different column with `--column`, or " if in_column else ""
    if not _DECIMAL.fullmatch(text):
        return (
            f"{short_repr(text)} is not an integer. "
            f"{_capitalized(choose + 'measure texts')} {_USE_UNIT}."
        )
    if float(text).is_integer():
        return (
            f"{short_repr(text)} has a decimal point or an exponent. "
            f"{_capitalized(choose + 'write lengths as integers')}, in pandas with "
            '`.astype("Int64")`.'
        )
    return (
        f"{short_repr(text)} is not an integer. "
        f"{_capitalized(choose + 'convert the numbers')} to frames, tokens or bytes "
        "first."
    )


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def _length_of(value: Any, unit: Unit | None) -> int:
    if isinstance(value, str):
        return _of_text(value, unit)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, bytes):
        # Bytes need no unit. Decoding raises a ValueError if they are not UTF-8.
        return len(value) if unit in (None, "bytes") else _of_text(value.decode(), unit)
    is_list = isinstance(value, (list, tuple))
    # Arrays of any library have a shape, which is empty for a single number.
    shape = (len(value),) if is_list else getattr(value, "shape", ())
    has_objects = getattr(getattr(value, "dtype", None), "hasobject", False)
    if has_nested(np.ravel(value) if has_objects else value if is_list else ()):
        raise ValueError(
            f"{short_repr(value)} is nested, so its number of tokens is not clear. "
            "Pass `--length-fn` with a function that counts them."
        )
    if shape:
        return shape[0]
    raise ValueError(
        f"{short_repr(value)} is not an integer, a string or a list. {_REMOVE_OR_FIX}"
    )


def _of_text(value: str, unit: Unit | None) -> int:
    if unit is None:
        raise ValueError(
            f"{short_repr(value)} is text, not a length. Measure it {_USE_UNIT}."
        )
    if unit == "words":
        return len(value.split())
    if unit == "characters" or value.isascii():
        return len(value)
    return len(value.encode())


def _call_length_fn(length_fn: Callable[[Any], int], value: Any) -> int:
    try:
        length = length_fn(value)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`--length-fn` raised {type(error).__name__}: {error}. Fix the function."
        ) from error
    try:
        return _check_length(operator.index(length))
    except TypeError:
        raise ValueError(
            f"`--length-fn` returned {short_repr(length)}, which is not an integer. "
            "Fix the function."
        ) from None
