"""Loads functions named on a command line, and measures what they return."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.checks import check_lengths
from jaxbucket.data.example import as_arrays, example_length
from jaxbucket.data.lengths.files import reading_bar
from jaxbucket.data.lengths.measure import measure_lengths
from jaxbucket.data.lengths.parallel_pass import WorkerDied
from jaxbucket.data.lengths.values import Measure, measure_all, short_repr
from jaxbucket.data.sequence_axes import check_not_nested
from jaxbucket.data.source import RowSource

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_function_name(text: str) -> bool:
    """Returns whether a string has the form `module:function`."""
    return bool(_NAME.fullmatch(text))


def load_function(name: str) -> Callable[..., Any]:
    """Loads a function named as `module:function`.

    Modules in the current folder are found, too.

    Example:
      >>> load_function("math:sqrt")(9)
      3.0

    Raises:
      ValueError: if there is no such function, or its module cannot be imported.
    """
    if not is_function_name(name):
        raise ValueError(f"`{name}` must be `module:function`, such as `mydata:train`.")
    # Added permanently, because later imports and workers may need the folder, too.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, path = name.split(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`{name}`: {module_name} cannot be imported: {_in_one_line(error)}. Run "
            "this in the folder of the module, or fix the module."
        ) from error
    try:
        function = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        routines = [name for name, _ in inspect.getmembers(module, inspect.isroutine)]
        public = [name for name in routines if not name.startswith("_")]
        raise ValueError(
            f"`{name}`: {module_name} has no {path!r}. Choose one of its functions: "
            f"{public}."
        ) from None
    if not callable(function):
        raise ValueError(
            f"`{name}` is {short_repr(function)}, not a function. Pass the name "
            "of a function."
        )
    return function


def call_function(name: str) -> Any:
    """Returns what a function named as `module:function` returns without arguments.

    Raises:
      ValueError: if `load_function` raises it, or the function raises an exception.
    """
    function = load_function(name)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`{name}` raised {_in_one_line(error)}. Fix the function, which is called "
            "without arguments."
        ) from error


def measure_function(
    name: str,
    columns: Sequence[str] = (),
    measure: Measure | None = None,
    num_workers: int = 0,
) -> list[np.ndarray]:
    """Returns the lengths of every example that a function returns.

    The function is called once, and each example is read once.

    Args:
      name: `module:function`, where the function takes no arguments and returns a
        source, an array of lengths, or an iterable of examples.
      columns: names of the features to measure. By default an example has one length.
      measure: rule that determines the length of an example. By default as in
        `measure_lengths`.
      num_workers: number of worker processes that measure a source.

    Returns:
      `[N]` integers from 1 to 2**31 - 1 for each of `columns`; one array by default.

    Raises:
      ValueError: if there is no such function, if it raises or returns anything else,
        or if an example has no length.
    """
    returned = call_function(name)
    try:
        return _measure_returned(returned, columns, measure or Measure(), num_workers)
    except WorkerDied:
        raise ValueError(
            f"`{name}`: a worker process died, possibly for lack of memory. Run the "
            "command again, with fewer `--num-workers`."
        ) from None
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"`{name}`: {error}") from error
    except (Exception, SystemExit) as error:
        # Any other exception comes from the user's source.
        raise ValueError(f"`{name}`: {_in_one_line(error)}") from error


def _measure_returned(
    returned: Any, columns: Sequence[str], measure: Measure, num_workers: int
) -> list[np.ndarray]:
    by_default = measure == Measure()
    # Special methods are looked up on the type, so that a class is not a source.
    has_indices = hasattr(type(returned), "__getitem__")
    is_collection = has_indices or isinstance(returned, Iterable)
    if not is_collection or isinstance(returned, (str, bytes, Mapping, type)):
        raise ValueError(
            f"the function returned {short_repr(returned)}. Return a random-access "
            "source, an array of lengths, or an iterable of examples."
        )
    if isinstance(returned, np.ndarray) and by_default and not columns:
        return [check_lengths(returned)]
    names = columns or (None,)
    functions = {x: functools.partial(_example_length, x, measure) for x in names}
    if not has_indices or not hasattr(type(returned), "__len__"):
        examples = _iterate(returned)
        first = list(itertools.islice(examples, 1))
        found = _measure_iterable(itertools.chain(first, examples), functions)
        _check_not_batches(first, dict(zip(names, found, strict=True)), measure)
        return found
    if isinstance(returned, RowSource) and by_default:
        # Its lengths are known, so that no example is read.
        return [measure_lengths(returned, sequences=x and [x]) for x in names]
    several = len(names) > 1
    source: Any = returned
    length_fn: Any = functions if several else functions[names[0]]
    lengths: Any = measure_lengths(
        source,
        length_fn=length_fn,
        num_workers=num_workers,
        progress=sys.stderr.isatty(),
    )
    lengths = lengths if several else {names[0]: lengths}
    _check_not_batches(returned, lengths, measure)
    return [lengths[name] for name in names]


def _check_not_batches(
    examples: Any, lengths: Mapping[str | None, np.ndarray], measure: Measure
) -> None:
    """Raises a ValueError as `measure_lengths` does for batches of one example."""
    for name, values in lengths.items():
        if measure.length_fn is None and values.max() == 1:
            value = examples[0] if name is None else examples[0][name]
            named = value if isinstance(value, Mapping) else {name or "example": value}
            nested = [x for x, array in as_arrays(named).items() if array.ndim > 1]
            check_not_nested([named], nested, {None: values} if nested else {})


def _example_length(column: str | None, measure: Measure, example: Any) -> int:
    if column is None:
        if isinstance(example, Mapping) and measure == Measure():
            return example_length(example)
        return measure.of_value(example)
    if not isinstance(example, Mapping):
        raise ValueError(
            f"{short_repr(example)} is not a dict. Remove `--column {column}`."
        )
    if column not in example:
        raise ValueError(
            f"the example has features {list(example)}, but no {column!r}. Choose one "
            "of them with `--column`."
        )
    return measure.of_value(example[column])


def _measure_iterable(
    examples: Iterable[Any], functions: Mapping[str | None, Callable[[Any], int]]
) -> list[np.ndarray]:
    places = [
        "example" if name is None else f"feature {name!r} of example"
        for name in functions
    ]
    rows = (
        (number, [functools.partial(x, example) for x in functions.values()])
        for number, example in enumerate(examples)
    )
    with reading_bar(None):
        parts = list(measure_all(places, rows, operator.call))
    if not any(part.size for part in parts):
        raise ValueError("the function returned no examples. Return at least one.")
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _iterate(examples: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from examples
    except Exception as error:
        raise ValueError(
            f"the iterable raised {_in_one_line(error)}. Fix the iterable."
        ) from error


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
