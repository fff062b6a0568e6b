"""Argument checks: each returns a valid value or raises a ValueError with a remedy."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

MAX_LENGTH = 2**31 - 1
MAX_ACCUMULATE = 2**16
MAX_FLOAT = sys.float_info.max
# The tokens of a batch are fewer, and those of an accumulated step fit in 64 bits.
MAX_TOKENS = 2**40

_T = TypeVar("_T")


def check_lengths(
    lengths: ArrayLike, name: str = "lengths", least: int = 1, keep: bool = False
) -> np.ndarray:
    """Returns `lengths` as an int32 or int64 array `[N]`, after checking it.

    An array of one of these dtypes is returned without a copy.

    Args:
      lengths: `[N]` integers, one per example.
      name: the name of the argument, for messages.
      least: the least length, 0 if an example may lack this sequence.
      keep: whether to keep a narrow or unsigned dtype, such as that of a memory map.
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(
            f"`{name}` is a {type(lengths).__name__} of the shape {array.shape}. Pass "
            "one length per example, [N]; counts are not enough here. For several "
            "sequences, plan buckets with a T for each."
        )
    # By kind, because numpy also treats timedelta64 as an integer dtype.
    if array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(
            f"`{name}` is {array}: pass at least one length, and integers, for "
            "example `np.asarray(lengths, np.int32)`."
        )
    low, high = int(array.min()), int(array.max())
    if low < least or high > MAX_LENGTH:
        bad = int(np.argmax((array < least) | (array > MAX_LENGTH)))
        raise ValueError(
            f"`{name}[{bad}]={array[bad]}`: a length must be between {least} and "
            f"{MAX_LENGTH}. Remove the example or measure it again."
        )
    # Narrow and unsigned dtypes cannot represent every T.
    is_known = array.dtype in (np.int32, np.int64)
    keep = is_known or keep and array.dtype != np.uint64
    return array if keep else array.astype(np.int32)


def check_longest(
    lengths: np.ndarray,
    max_seq_len: int,
    sequence: str | None = None,
    is_split: bool = False,
) -> None:
    """Raises a ValueError if an example is longer than the last bucket.

    Args:
      lengths: `[N]` integers.
      max_seq_len: the longest T.
      sequence: the name of one of several sequences.
      is_split: whether the lengths should be those of chunks.
    """
    if lengths.max() <= max_seq_len:
        return
    example = int(np.argmax(lengths > max_seq_len))
    name = "" if sequence is None else f"[{sequence!r}]"
    remedy = (
        "Plan with a larger `max_seq_len`, or with `overlong=` 'drop', 'truncate', "
        "'truncate_left' or, with one length, 'split'."
    )
    if is_split:
        line = f"jb.data.split_source(source, {max_seq_len}, lengths=lengths)"
        remedy = f"Split the source, `source = {line}`, and pass `source.lengths`."
    raise ValueError(
        f"`lengths{name}[{example}]={lengths[example]}` is beyond the longest T, "
        f"{max_seq_len}. {remedy}"
    )


def check_integer(
    name: str, value: Any, *, least: int = -(2**63), most: int = 2**63 - 1
) -> int:
    """Returns `value` as an int from `least` to `most`, or raises a ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(
            f"`{name}={value!r}` is not an integer. Pass an int."
        ) from None
    if not least <= number <= most or isinstance(value, bool):
        bound = f"at most {most}" if number > most else f"at least {least}"
        raise ValueError(f"`{name}={value!r}` must be an integer, {bound}.")
    return number


def check_positive(name: str, value: Any) -> int:
    """Returns `value` as an int from 1 to 2**62 - 1, or raises a ValueError."""
    return check_integer(name, value, least=1, most=2**62 - 1)


def check_cost(name: str, value: Any) -> float:
    """Returns `value` as a float whose sums stay finite, or raises a ValueError."""
    return check_float(name, value, least=1e-100, most=1e100)


def check_float(
    name: str, value: Any, *, least: float | None = None, most: float = MAX_FLOAT
) -> float:
    """Returns `value` as a float, or raises a ValueError.

    Example:
      >>> check_float("share", np.float32(0.5), least=0, most=1)
      0.5

    Args:
      name: the name of the argument, for messages.
      value: a number, or an array of one number.
      least: the smallest value; by default, the value must be positive.
      most: the largest value; by default, the value must be finite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    above = number > 0 if least is None else number >= least
    if not (above and number <= most) or isinstance(value, bool | np.bool_ | str):
        bounds = "above 0" if least is None else f"from {least}"
        if most < MAX_FLOAT:
            bounds += f" to {most}"
        raise ValueError(f"`{name}={value!r}`: pass a finite number {bounds}.")
    return number


def check_accumulate(accumulate: Any) -> int:
    """Returns the number of micro-batches as an int, or raises a ValueError."""
    return check_integer("accumulate", accumulate, least=1, most=MAX_ACCUMULATE)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises a ValueError that lists the choices if `value` is not one of them."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"`{name}={value!r}`: choose {', '.join(others)} or {last}.")


def check_function(name: str, value: Any, arguments: str) -> None:
    """Raises a ValueError if an argument is not a function."""
    if not callable(value):
        raise ValueError(
            f"`{name}={value!r}` is not a function. Pass a function of {arguments}."
        )


def check_type(name: str, value: Any, kind: type[_T], remedy: str) -> _T:
    """Returns `value`, or raises a ValueError with a remedy if its type is another."""
    if not isinstance(value, kind):
        raise ValueError(
            f"`{name}` is of type {type(value).__name__}, not a "
            f"`{kind.__name__}`. {remedy}"
        )
    return value


def by_step(name: str, value: Any) -> dict[int, Any]:
    """Returns values by the step from which each of them holds.

    Example:
      >>> by_step("weights", [1, 2]), by_step("weights", {0: [1, 2], 1000: [1, 0]})
      ({0: [1, 2]}, {0: [1, 2], 1000: [1, 0]})

    Args:
      name: the name of the argument, for messages.
      value: a single value; or step -> value, by ascending steps from 0. A mapping from
        names is a single value.
    """
    is_single = not isinstance(value, Mapping) or any(isinstance(x, str) for x in value)
    values = {0: value} if is_single else value
    steps = [check_integer(name, step) for step in values]
    if steps != sorted({0, *steps}):
        raise ValueError(
            f"`{name}={value!r}`: pass a mapping from ascending steps, which starts "
            f"with step 0: `{name}={{0: first, 1000: second}}`."
        )
    return dict(zip(steps, values.values(), strict=True))


def selected_indices(name: str, selected: ArrayLike, size: int) -> np.ndarray:
    """Returns the indices of the selected examples, `[M]` int64.

    Example:
      >>> selected_indices("subset", [True, False, True], 3)
      array([0, 2])

    Args:
      name: the name of the argument, for messages.
      selected: `[N]` bool, whether each example is selected; or `[M]` indices.
      size: the number of examples, N.
    """
    given = array = np.asarray(selected)
    if array.dtype == bool and array.shape == (size,):
        array = np.flatnonzero(array)
    is_index = array.ndim == 1 and array.size and array.dtype.kind in "iu"
    if not is_index or array.min() < 0 or array.max() >= size:
        raise ValueError(
            f"`{name}` is {given}, {given.dtype}{list(given.shape)}. Pass at least one "
            f"index from 0 to {size - 1}, or {size} bool, not all of them False."
        )
    if array.size == size > 2 and array.max() <= 1:
        raise ValueError(
            f"`{name}` has only 0 and 1 for {size} examples. Pass "
            f"`{name}.astype(bool)`, because integers are indices."
        )
    return array.astype(np.int64)


def check_seed(seed: Any) -> int:
    """Returns `seed` as an int, or raises a ValueError if it is out of range."""
    return check_integer("seed", seed, least=0)
