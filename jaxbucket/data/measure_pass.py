"""One pass over a source that measures each example, with a cache of whole shares.

The examples are measured in shares of consecutive ones. Each share is stored in a file
as soon as it is complete, so a run that was killed, or another process, measures only
the shares that are missing.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from jaxbucket.base.checks import check_integer
from jaxbucket.base.digest import digest
from jaxbucket.base.files import complete
from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.base.progress import progress_bar
from jaxbucket.data.pool import Span, map_spans
from jaxbucket.data.source import Source, contents

# The functions that measure an example, by name. A single one has the name None.
Functions: TypeAlias = Mapping[str | None, Callable[[Any], Any]]
# A source is measured in at most this many shares, of at least this many examples.
_SHARES, _SMALLEST = 256, 64


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measures each example with several functions, but reads it only once.

    Attributes:
      source: random-access source of examples.
      functions: functions from an example to a number, by name.
      dtypes: the dtype of each of these numbers, by name.
      minimum: the smallest valid number, or None.
      argument: the argument with the user's functions, for messages.
    """

    source: Source
    functions: Functions
    dtypes: Mapping[str | None, np.dtype]
    minimum: int | None
    argument: str

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the result, with a field for each function."""
        types = [self.dtypes[name] for name in self.functions]
        return np.dtype([(str(number), x) for number, x in enumerate(types)])

    def key(self, label: str) -> str:
        """Returns 32 hex digits that identify the source and what is measured.

        Args:
          label: a text that identifies the functions.
        """
        what = f"{len(self.source)} {[*self.functions]} {self.dtype} {label}"
        return digest(what.encode(), contents(self.source).encode())

    def by_name(self, values: np.ndarray) -> dict[str | None, np.ndarray]:
        """Returns a contiguous array for each function, by name."""
        fields = zip(self.functions, self.dtype.names or (), strict=True)
        return {name: np.ascontiguousarray(values[field]) for name, field in fields}

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Returns the numbers of the examples `start <= index < stop`.

        Raises:
          ValueError: if an example cannot be read or has no valid number.
        """
        values = np.empty(stop - start, self.dtype)
        columns = [
            (name, function, values[str(number)])
            for number, (name, function) in enumerate(self.functions.items())
        ]
        for index in range(start, stop):
            which = ""
            try:
                example = self.source[index]
                for name, function, column in columns:
                    which = "" if name is None else f", {name!r},"
                    column[index - start] = self._checked(function(example), column)
            except Exception as error:
                kind = "" if isinstance(error, ValueError) else type(error).__name__
                raise ValueError(
                    f"`source[{index}]`{which} cannot be measured: "
                    f"{kind}{': ' if kind else ''}{error}"
                ) from error
        return values

    def _checked(self, value: Any, column: np.ndarray) -> Any:
        number, is_float = np.asarray(value), column.dtype.kind == "f"
        limits = np.finfo(column.dtype) if is_float else np.iinfo(column.dtype)
        minimum = limits.min if self.minimum is None else self.minimum
        kinds = "biuf" if is_float else "iu"
        # NaN is not between the limits.
        if (
            number.ndim
            or number.dtype.kind not in kinds
            or not minimum <= number <= limits.max
        ):
            kind = "a number" if is_float else "an integer"
            raise ValueError(
                f"`{self.argument}` returned {value!r}, not {kind} from {minimum} to "
                f"{limits.max}. Fix the function, or remove the example."
            )
        return number


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """How a pass over a source is run.

    Attributes:
      num_workers: number of worker processes; 0 measures in this process.
      progress: whether to show a progress bar on a terminal.
      folder: the cache folder, or None.
      key: the key of the measurement in the cache.
      title: the title of the progress bar.

    Raises:
      ValueError: if `num_workers` is not an integer from 0.
    """

    num_workers: int
    progress: bool
    folder: pathlib.Path | None
    key: str
    title: str

    def __post_init__(self):
        if check_integer("num_workers", self.num_workers) < 0:
            raise ValueError(f"`num_workers={self.num_workers}` must not be negative.")

    def run(self, measure: Measurement, start: int, stop: int) -> np.ndarray:
        """Returns the numbers of the examples `start <= index < stop`."""
        if start == stop:
            # There are more processes than examples.
            return np.empty(0, measure.dtype)
        spans = self._spans(measure, start, stop)
        stored: dict[Span, Any] = {span: self._read(measure, span) for span in spans}
        missing = [span for span, values in stored.items() if values is None]
        with progress_bar(self.progress) as bar:
            total = spans[-1][1] - spans[0][0]
            left = sum(last - first for first, last in missing)
            task = bar.add_task(self.title, total=total, completed=total - left)
            for span, values in map_spans(measure, missing, self.num_workers):
                stored[span] = values
                self._write(span, values)
                bar.advance(task, span[1] - span[0])
        offset = spans[0][0]
        whole = np.concatenate([stored[span] for span in spans])
        return whole[start - offset : stop - offset]

    def check_complete(self, measure: Measurement) -> None:
        """Raises a ValueError if this process does not see the files of the others."""
        for span in self._spans(measure, 0, len(measure.source)):
            if self._read(measure, span) is None:
                raise ValueError(
                    f"`cache={str(self.folder)!r}` lacks shares that other processes "
                    "measured. Pass a folder that all processes share."
                )

    def _spans(self, measure: Measurement, start: int, stop: int) -> list[Span]:
        """Returns the shares that include these examples, the same in every process."""
        size = len(measure.source)
        step = max(_SMALLEST, -(-size // _SHARES))
        if self.folder is None:
            # Nothing that other processes measure, too.
            return [(x, min(x + step, stop)) for x in range(start, stop, step)]
        first = start // step * step
        return [(x, min(x + step, size)) for x in range(first, stop, step)]

    def _path(self, span: Span) -> pathlib.Path | None:
        return self.folder and self.folder / f"{self.key}-{span[0]}.npy"

    def _read(self, measure: Measurement, span: Span) -> np.ndarray | None:
        """Returns a stored share, or None if it is missing or damaged."""
        path = self._path(span)
        if path is None or not path.exists():
            return None
        try:
            values = np.load(path)
        except Exception:
            # A damaged file raises many kinds of exceptions. It is measured again.
            return None
        is_whole = values.dtype == measure.dtype and len(values) == span[1] - span[0]
        return values if is_whole else None

    def _write(self, span: Span, values: np.ndarray) -> None:
        path = self._path(span)
        if path is None:
            return
        with complete(path) as draft, draft.open("wb") as file:
            np.save(file, values)


def share_of(size: int, group: ProcessGroup) -> tuple[int, int]:
    """Returns `(start, stop)`, the examples that a process measures."""
    return (
        size * group.index // group.count,
        size * (group.index + 1) // group.count,
    )


def cache_label(
    cache: str | os.PathLike[str] | None, cache_key: str | None, argument: str | None
) -> str:
    """Returns the text that identifies the user's functions in a cache.

    Args:
      cache: the cache folder, or None.
      cache_key: the user's name of the functions, or None.
      argument: the argument with the functions; None if there are none.

    Raises:
      ValueError: if `cache_key` is missing or not a text.
    """
    if cache is not None and argument is not None and cache_key is None:
        raise ValueError(
            f"`cache_key` is missing: the cache cannot detect changes of `{argument}`. "
            f'Pass a name for it, such as `cache_key="{argument}-1"`, and change it '
            "whenever the function changes."
        )
    if cache_key is not None and not (isinstance(cache_key, str) and cache_key):
        raise ValueError(
            f'`cache_key={cache_key!r}` must be a non-empty string, such as "words-1".'
        )
    return f"{argument} {cache_key}"
