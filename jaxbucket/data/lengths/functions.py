"""Functions named on a command line, and the lengths of what one of them returns."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
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

    Modules are looked for in the current folder, too.

    Example:
      >>> load_function("math:sqrt")(9)
      3.0

    Raises:
      ValueError: if there is none, or its module cannot be imported.
    """
    if not is_function_name(name):
        raise ValueError(f"`{name}` must be `module:function`, such as `mydata:train`.")
    # For good, because what it imports later, or a worker, may lie there, too.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, path = name.split(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`{name}`: {module_name} cannot be imported: {_in_one_line(error)}. Run "
            "this in the folder of the module, or mend it."
        ) from error
    try:
        function = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        routines = [name for name, _ in inspect.getmembers(module, inspect.isroutine)]
        public = [name for name in routines if not name.startswith("_")]
        raise ValueError(
            f"`{name}`: {module_name} has no {path!r}, but {public}. Name one of its "
            "functions."
        ) from None
    if not callable(function):
        raise ValueError(f"`{name}` is {shown(function)}. Name a function.")
    return function


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
    function = load_function(name)
    try:
        returned = function()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`{name}` raises {_in_one_line(error)}. Mend it; it is called without "
            "arguments."
        ) from error
    try:
        return _measured(returned, column, measure or Measure(), num_workers)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"`{name}`: {error}") from error
    except (Exception, SystemExit) as error:
        # What a source of the user's own raises where nobody expects it.
        raise ValueError(f"`{name}`: {_in_one_line(error)}") from error


def _measured(
    returned: Any, column: str | None, measure: Measure, num_workers: int
) -> np.ndarray:
    by_default = measure == Measure()
    # Python looks methods up in the type: a class is not a source.
    has_indices = hasattr(type(returned), "__getitem__")
    several = has_indices or isinstance(returned, Iterable)
    if not several or isinstance(returned, (str, bytes, Mapping, type)):
        raise ValueError(
            f"it returns {shown(returned)}. Return a source with `len` and indices, an "
            "array of lengths, or an iterable of examples."
        )
    if isinstance(returned, np.ndarray) and by_default:
        return check_lengths(returned)
    length_of = functools.partial(_example_length, column, measure)
    if not has_indices or not hasattr(type(returned), "__len__"):
        return _of_iterable(returned, length_of)
    if isinstance(returned, RowSource) and by_default:
        return measure_lengths(returned, sequences=column and [column])
    source: Any = returned
    return measure_lengths(
        source,
        length_fn=length_of,
        num_workers=num_workers,
        progress=sys.stderr.isatty(),
    )


def _example_length(column: str | None, measure: Measure, example: Any) -> int:
    if column is None:
        if isinstance(example, Mapping) and measure == Measure():
            return example_length(example)
        return measure.of_value(example)
    if not isinstance(example, Mapping):
        raise ValueError(
            f"{shown(example)} is not a dict: leave out `--column {column}`."
        )
    if column not in example:
        raise ValueError(
            f"it has {list(example)}, and no {column!r}: name one of them by "
            "`--column`."
        )
    return measure.of_value(example[column])


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
        raise ValueError(
            f"its iterable raises {_in_one_line(error)}. Mend it."
        ) from error


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
