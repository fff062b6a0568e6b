"""One pass over a source that applies several functions to each example."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np

from jaxbucket.base.checks import check_integer
from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.data.lengths.cache import ArrayFile, unmeasured
from jaxbucket.data.lengths.cache_key import CacheKey
from jaxbucket.data.lengths.parallel_pass import fill
from jaxbucket.data.lengths.quantities import Quantity
from jaxbucket.data.source import Source

# The functions that measure an example, by name. A single one has the name None.
Functions: TypeAlias = Mapping[str | None, Callable[[Any], Any]]
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
      quantity: what the functions measure.
      num_workers: number of worker processes; 0 measures in this process.
      progress: whether to show a progress bar on a terminal.

    Raises:
      ValueError: if `num_workers` is not an integer from 0.
    """

    source: Source
    functions: Functions
    quantity: Quantity
    num_workers: int
    progress: bool

    def __post_init__(self):
        workers = check_integer("num_workers", self.num_workers)
        if workers < 0:
            raise ValueError(f"`num_workers={workers}` must not be negative.")
        object.__setattr__(self, "num_workers", workers)

    def values(self, start: int, stop: int) -> dict[str | None, np.ndarray]:
        """Returns the values `[n]` of the examples `start <= index < stop`, by name."""
        dtype = self.quantity.dtype
        values = {name: unmeasured(stop - start, dtype) for name in self.functions}
        self._fill(values, start)
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
            self._fill(values, next(iter(missing.values())).start)

    def _fill(self, values: Mapping[str | None, np.ndarray], first: int) -> None:
        functions = {name: self.functions[name] for name in values}
        measure = functools.partial(
            _measure_span, self.source, functions, self.quantity
        )
        fill(
            list(values.values()),
            first,
            measure,
            self.num_workers,
            self.progress,
            self.quantity.title,
        )


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
    source: Source, functions: Functions, quantity: Quantity, start: int, stop: int
) -> np.ndarray:
    """Returns the values of the examples `start <= index < stop`.

    Returns:
      `[Q, n]`, with a row for each function.
    """
    values = (
        quantity.checked(value, index, name)
        for index in range(start, stop)
        for name, value in _measure_one(source, index, functions, quantity)
    )
    size = (stop - start) * len(functions)
    return np.fromiter(values, quantity.dtype, size).reshape(-1, len(functions)).T


def _measure_one(
    source: Source, index: int, functions: Functions, quantity: Quantity
) -> list[tuple[str | None, Any]]:
    """Returns the name of each function, and its value of one example."""
    name = None
    values = []
    try:
        example = source[index]
        for name, function in functions.items():
            values.append((name, function(example)))
    except ValueError as error:
        raise ValueError(f"{quantity.where(index, name)}: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{quantity.where(index, name)} cannot be measured: "
            f"{type(error).__name__}: {error}"
        ) from error
    return values
