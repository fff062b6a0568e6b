"""One pass over a source that applies several functions to each example."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np

from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.data.lengths.cache import ArrayFile, is_measured
from jaxbucket.data.lengths.cache_key import CacheKey
from jaxbucket.data.lengths.parallel_pass import Workers, chunks
from jaxbucket.data.lengths.quantities import Quantity
from jaxbucket.data.source import Source

# The functions that measure an example, by name. A single one has the name None.
Functions: TypeAlias = dict[str | None, Callable[..., Any]]
Quantities: TypeAlias = Mapping[str | None, Quantity]
Value = TypeVar("Value")


class PassOptions(TypedDict, total=False):
    """The options of `measure_lengths` and `measure_difficulty`."""

    num_workers: int
    cache: str | os.PathLike[str] | None
    cache_key: CacheKey
    processes: ProcessGroup | None
    progress: bool


@dataclasses.dataclass(frozen=True)
class SourcePass:
    """Measures each example with several functions, but reads it only once.

    Attributes:
      source: random-access source of examples.
      functions: functions from an example to its value, by name.
      quantities: what each of the functions measures, by name.
      workers: the processes that measure.
    """

    source: Source
    functions: Functions
    quantities: Quantities
    workers: Workers

    def values(self, start: int, stop: int) -> dict[str | None, np.ndarray]:
        """Returns the values `[n]` of the examples `start <= index < stop`, by name."""
        values = {
            name: np.full(stop - start, quantity.missing, quantity.dtype)
            for name, quantity in self.quantities.items()
        }
        self._fill(values, start, stop)
        return values

    def write(self, files: Mapping[str | None, ArrayFile]) -> None:
        """Measures the files that do not exist, all of the same examples.

        Args:
          files: the file for the values of each function, by name.
        """
        missing = {name: x for name, x in files.items() if not x.path.exists()}
        if not missing:
            return
        with contextlib.ExitStack() as stack:
            values = {
                name: stack.enter_context(file.writing())
                for name, file in missing.items()
            }
            _, start, stop, *_ = next(iter(missing.values()))
            self._fill(values, start, stop)

    def _fill(
        self, values: Mapping[str | None, np.ndarray], start: int, stop: int
    ) -> None:
        """Measures the missing values of the examples `start <= index < stop`."""
        functions = {name: self.functions[name] for name in values}
        quantities = {name: self.quantities[name] for name in values}
        measure = functools.partial(_measure_span, self.source, functions, quantities)
        unmeasured = np.zeros(stop - start, bool)
        for name, array in values.items():
            unmeasured |= ~is_measured(array, quantities[name].missing)
        spans = [
            (first, last)
            for first, last in chunks(start, stop)
            if unmeasured[first - start : last - start].any()
        ]
        title = next(iter(quantities.values())).title
        for (first, last), columns in self.workers.map(
            measure, spans, stop - start, title
        ):
            for array, column in zip(values.values(), columns, strict=True):
                array[first - start : last - start] = column


def functions_by_name(argument: str, functions: Any) -> Functions:
    """Returns the functions that a user passed, sorted by name.

    Args:
      argument: the name of the argument.
      functions: a function, or a mapping from names to functions.

    Raises:
      ValueError: if the mapping is empty, or has other names or values.
    """
    if not isinstance(functions, Mapping):
        return {None: functions}
    for name, function in functions.items():
        if not isinstance(name, str) or not callable(function):
            raise ValueError(
                f"`{argument}[{name!r}]={function!r}`: pass a mapping from strings to "
                "functions of an example."
            )
    if not functions:
        raise ValueError(f"`{argument}` is empty. Name at least one function.")
    return {name: functions[name] for name in sorted(functions)}


def unnamed(values: Mapping[str | None, Value]) -> Any:
    """Returns values by name; or the value itself, if it has no name."""
    return values[None] if None in values else values


def num_examples(source: Source) -> int:
    """Returns the number of examples of a source.

    Raises:
      ValueError: if there are none, or `len` raises.
    """
    try:
        size = len(source)
    except Exception as error:
        raise ValueError(
            f"`len(source)` raised {type(error).__name__}: {error}. Pass a source "
            "whose `__len__` returns the number of its examples."
        ) from error
    if not size:
        raise ValueError("`source` is empty. Pass a source with at least one example.")
    return size


def _measure_span(
    source: Source, functions: Functions, quantities: Quantities, start: int, stop: int
) -> list[np.ndarray]:
    """Returns the values `[n]` of the examples `start <= index < stop`.

    Returns:
      An array for each function.
    """
    columns: dict[str | None, list[float]] = {name: [] for name in functions}
    where = next(iter(quantities.values())).where
    for index in range(start, stop):
        for name, value in measure_one(source, index, functions, where):
            columns[name].append(quantities[name].checked(value, index, name))
    return [np.array(x, quantities[name].dtype) for name, x in columns.items()]


def measure_one(
    source: Source,
    index: int,
    functions: Functions,
    where: Callable[[int, str | None], str],
) -> list[tuple[str | None, Any]]:
    """Returns the name of each function, and its value of one example.

    Args:
      source: random-access source of examples.
      index: the index of the example.
      functions: functions of an example, by name.
      where: function from the index and a name to the start of error messages.

    Raises:
      ValueError: if the example cannot be read, or a function raises.
    """
    name = None
    values = []
    try:
        example = source[index]
        for name, function in functions.items():
            values.append((name, function(example)))
    except ValueError as error:
        raise ValueError(f"{where(index, name)}: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{where(index, name)} cannot be measured: {type(error).__name__}: {error}"
        ) from error
    return values
