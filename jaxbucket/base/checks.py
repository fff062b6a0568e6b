"""What an argument must be, and the sentence that says so where it is not."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

MAX_LENGTH = 2**31 - 1
MAX_ACCUMULATE = 2**16
# Twice as many are still counted in 64 bits: two of them may be added.
MAX_COUNT = 2**62


def check_lengths(lengths: ArrayLike) -> np.ndarray:
    """Returns `lengths` as an integer array `[N]`, or says what is wrong with it.

    An int32 or int64 array comes back uncopied.

    Raises:
      ValueError: if `lengths` is empty, not one-dimensional, not of integers, or
        holds a value below 1 or above 2**31 - 1.
    """
    if isinstance(lengths, Mapping):
        raise ValueError(
            f"`lengths` is a mapping of {list(lengths)}: pass one length per example, "
            "[N]. Several sequences are for `jb.packing.pack(lengths, max_seq_len)`, "
            "with a capacity for each, and a `BatchSchedule` of that packing."
        )
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise ValueError(
            "`lengths` is ragged: pass one length per example, [N]."
        ) from None
    if array.ndim != 1:
        raise ValueError(
            f"`lengths` has shape {array.shape}; pass one length per example, [N]."
        )
    if array.size == 0:
        raise ValueError(
            "`lengths` is empty: there is no example to batch. Check the source."
        )
    # By kind, because numpy counts timedelta64 as an integer as well.
    if array.dtype.kind not in "iu":
        raise ValueError(_not_integers(array))
    low, high = int(array.min()), int(array.max())
    if low < 1 or high > MAX_LENGTH:
        bad = int(np.argmax((array < 1) | (array > MAX_LENGTH)))
        raise ValueError(
            f"`lengths[{bad}]={array[bad]}`: a length must be between 1 and "
            f"{MAX_LENGTH}. Remove the example or measure it again."
        )
    # Narrow and unsigned integers cannot be compared with every T.
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int32)


def _not_integers(array: np.ndarray) -> str:
    if np.issubdtype(array.dtype, np.floating):
        odd = ~np.isfinite(array) | (array != np.floor(array))
        if odd.any():
            bad = int(np.argmax(odd))
            return (
                f"`lengths[{bad}]={array[bad]}` is not an integer. Lengths count "
                "positions: measure the example again, or round it yourself."
            )
    if array.dtype.kind in "mM":
        return (
            f"`lengths` has dtype {array.dtype}, which is time. Pass positions, such "
            "as `lengths.astype(np.int64)` of a unit that counts them."
        )
    return (
        f"`lengths` has dtype {array.dtype}, not an integer dtype. "
        "Pass `lengths.astype(np.int32)`."
    )


def overlong_message(lengths: np.ndarray, max_seq_len: int) -> str:
    """Says which example is longer than the last bucket, and what to do."""
    example = int(np.argmax(lengths > max_seq_len))
    return (
        f"`lengths[{example}]={lengths[example]}` is beyond the last bucket, "
        f"`seq_len={max_seq_len}`. Plan with a larger `max_seq_len`, or choose "
        "`overlong='drop'`, `overlong='truncate'` or `overlong='split'`."
    )


def unsplit_message(lengths: np.ndarray, max_seq_len: int) -> str:
    """Says which example has not been split though the plan says so, and how to."""
    example = int(np.argmax(lengths > max_seq_len))
    return (
        f"`lengths[{example}]={lengths[example]}` is beyond the last bucket, "
        f"`seq_len={max_seq_len}`, and `overlong='split'` makes several rows of it. "
        f"Go on with the chunks: `{split_line(max_seq_len)}` and `source.lengths`."
    )


def split_line(max_seq_len: int) -> str:
    """The line to paste that splits a source."""
    return f"source = jb.data.split_source(source, {max_seq_len}, lengths=lengths)"


def check_integer(name: str, value: Any) -> int:
    """Returns `value` as an int, or raises a ValueError that names it."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(
            f"`{name}={value!r}` is not an integer. Pass an int."
        ) from None


def check_positive(name: str, value: Any) -> int:
    """Returns `value` as an int of 1 to 2**62 - 1, or raises a ValueError."""
    number = check_integer(name, value)
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"`{name}={value!r}` must be a positive integer.")
    if number >= MAX_COUNT:
        raise ValueError(f"`{name}={value!r}` must be below 2**62.")
    return number


def check_countable(number: int, what: str, remedy: str) -> None:
    """Raises a ValueError if 64 bits do not count so many.

    Args:
      number: of Python, which has no end.
      what: is counted, with the arguments that it is made of.
      remedy: what to lower.
    """
    if number >= MAX_COUNT:
        raise ValueError(
            f"{what} would be {number}, and must be below 2**62 to be counted. {remedy}"
        )


def check_costs(name: str, costs: Any, size: int) -> np.ndarray:
    """Returns positive numbers as `[size]` float64, or raises a ValueError."""
    if not isinstance(costs, Sequence | np.ndarray) or np.shape(costs) != (size,):
        raise ValueError(
            f"`{name}={costs!r}` must be {size} positive numbers, one for each bucket."
        )
    return np.array([check_cost(f"{name}[{i}]", x) for i, x in enumerate(costs)])


def check_cost(name: str, value: Any) -> float:
    """Returns `value` as a float of which sums have no end, or raises a ValueError."""
    number = check_number(name, value)
    if not 1e-100 <= number <= 1e100:
        raise ValueError(
            f"`{name}={value!r}`: a cost must be between 1e-100 and 1e100. Count in "
            "another unit."
        )
    return number


def check_number(name: str, value: Any) -> float:
    """Returns `value` as a positive, finite float, or raises a ValueError."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf or isinstance(value, bool | str):
        raise ValueError(f"`{name}={value!r}` must be a positive, finite number.")
    return number


def check_accumulate(accumulate: Any) -> int:
    """Returns the micro-batches of a step as an int, or raises a ValueError."""
    number = check_positive("accumulate", accumulate)
    if number > MAX_ACCUMULATE:
        raise ValueError(
            f"`accumulate={number}`: a step has at most {MAX_ACCUMULATE} micro-batches."
        )
    return number


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises a ValueError that names them if `value` is none of the choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"`{name}={value!r}`: choose {', '.join(others)} or {last}.")


def check_seed(seed: Any) -> int:
    """Returns `seed` as an int, or raises a ValueError if it is out of range."""
    number = check_integer("seed", seed)
    if not 0 <= number < 2**63:
        raise ValueError(f"`seed={seed}` must be between 0 and 2**63 - 1.")
    return number
