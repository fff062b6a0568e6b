"""Functions named on a command line, and the lengths of what one of them returns."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from jaxbucket.base.checks import check_lengths
from jaxbucket.data.example import example_length
from jaxbucket.data.lengths.files import reading_bar
from jaxbucket.data.lengths.measure import measure_lengths
from jaxbucket.data.lengths.values import Measure, measured, shown
from jaxbucket.data.source import RowSource

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_function_name(text: str) -> bool:
    """Returns whether a text reads as `module:function`."""
    return bool(_NAME.fullmatch(text))


def load_function(name: str) -> Callable[..., Any]:
    """Returns the function that `module:function` names.

    The current folder is one that modules are looked for in.

    Example:
      >>> load_function("math:sqrt")(9)
      3.0

    Raises:
      ValueError: if there is none, or its module cannot be imported.
    """
    if not is_function_name(name):
        raise ValueError(f"`{name}` must be `module:function`, such as `mydata:train`.")
    module_name, path = name.split(":")
    module = _imported(name, module_name)
    try:
        function = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        raise ValueError(
            f"`{name}`: {module_name} has no {path!r}, but {_functions_of(module)}. "
            "Name one of its functions."
        ) from None
    if not callable(function):
        raise ValueError(f"`{name}` is {shown(function)}. Name a function.")
    return function


def _imported(name: str, module_name: str) -> ModuleType:
    # For good: what it imports later may lie there, too, and so it may for workers.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`{name}`: {module_name} cannot be imported: {_said(error)}. Run this in "
            "the folder of the module, or mend it."
        ) from error


def _functions_of(module: ModuleType) -> list[str]:
    names = [name for name, _ in inspect.getmembers(module, inspect.isroutine)]
    return [name for name in names if not name.startswith("_")]


def measure_function(
    name: str,
    column: str | None = None,
    measure: Measure | None = None,
    num_workers: int = 0,
) -> np.ndarray:
    """Returns the length of every example that a function gives.

    Args:
      name: `module:function`, of a function without arguments that returns a source, an
        array of lengths, or an iterable of examples.
      column: the feature of an example that is measured.
      measure: what the length of one is; by default as by `measure_lengths`.
      num_workers: processes that measure a source.

    Returns:
      `[N]` integers from 1 to 2**31 - 1.

    Raises:
      ValueError: if there is no such function, it raises or returns something else, or
        an example has no length.
    """
    returned: Any = _called(name, load_function(name))
    measure = measure or Measure()
    length_of = functools.partial(_example_length, column, measure)
    try:
        _check_measurable(returned)
        if isinstance(returned, np.ndarray) and measure == Measure():
            return check_lengths(returned)
        if not _has(returned, "__getitem__") or not _has(returned, "__len__"):
            return _of_iterable(returned, length_of)
        if _knows_lengths(returned) and measure == Measure():
            return measure_lengths(returned, sequences=column and [column])
        return measure_lengths(
            returned,
            length_fn=length_of,
            num_workers=num_workers,
            progress=sys.stderr.isatty(),
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"`{name}`: {error}") from error
    except (Exception, SystemExit) as error:
        # What a source of the user's own raises where nobody expects it.
        raise ValueError(f"`{name}`: {_said(error)}") from error


def _called(name: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`{name}` raises {_said(error)}. Mend it; it is called without arguments."
        ) from error


def _check_measurable(returned: Any) -> None:
    several = isinstance(returned, Iterable) or _has(returned, "__getitem__")
    if not several or isinstance(returned, (str, bytes, Mapping, type)):
        raise ValueError(
            f"it returns {shown(returned)}. Return a source with `len` and indices, an "
            "array of lengths, or an iterable of examples."
        )


def _has(value: Any, method: str) -> bool:
    # As Python looks for it: a class is no source, though its objects may be.
    return hasattr(type(value), method)


def _knows_lengths(source: Any) -> bool:
    return isinstance(source, RowSource)


def _example_length(column: str | None, measure: Measure, example: Any) -> int:
    if column is not None:
        return measure.of_value(_field(example, column))
    if isinstance(example, Mapping) and measure == Measure():
        return example_length(example)
    return measure.of_value(example)


def _field(example: Any, column: str) -> Any:
    if not isinstance(example, Mapping):
        raise ValueError(f"{shown(example)} is no dict: leave out `--column {column}`.")
    if column not in example:
        raise ValueError(
            f"it has {list(example)}, and no {column!r}: name one of them by "
            "`--column`."
        )
    return example[column]


def _of_iterable(
    examples: Iterable[Any], length_of: Callable[[Any], int]
) -> np.ndarray:
    with reading_bar(None):
        parts = list(measured("example", enumerate(_drawn(examples)), length_of))
    lengths = np.concatenate(parts)
    if not len(lengths):
        raise ValueError("it gives no example. Return some.")
    return lengths


def _drawn(examples: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from examples
    except Exception as error:
        raise ValueError(f"its iterable raises {_said(error)}. Mend it.") from error


def _said(error: BaseException) -> str:
    """An error as a part of one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
