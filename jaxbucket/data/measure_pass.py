"""One pass over a source that measures each example, with a cache of whole shares.

The examples are measured in shares of consecutive ones. Each share is stored in a file
as soon as it is complete, so a run that was killed, or another process, measures only
the shares that are missing.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from jaxbucket.base.checks import MAX_FLOAT, MAX_LENGTH
from jaxbucket.base.digest import digest
from jaxbucket.base.files import complete
from jaxbucket.base.lazy import naming_the_extra
from jaxbucket.base.notes import Noting
from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.base.progress import progress_bar
from jaxbucket.data.source import Source, contents

# The functions that measure an example, by name. A single one has the name None.
Functions: TypeAlias = Mapping[str | None, Callable[[Any], Any]]
# `(start, stop)`, the examples `start <= index < stop`.
Span: TypeAlias = tuple[int, int]
# A source is measured in at most this many shares, of at least this many examples.
_SHARES, _SMALLEST = 256, 64


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measures each example with several functions, but reads it only once.

    Attributes:
      source: random-access source of examples.
      functions: functions from an example to a number, by name.
      dtype: int32 for lengths, or float64 for any finite numbers.
      argument: the argument with the user's functions, for messages.
    """

    source: Source
    functions: Functions
    dtype: DTypeLike
    argument: str

    def __call__(self, span: Span) -> np.ndarray:
        """Returns the numbers of the examples of a share, `[n, functions]`."""
        values = np.empty((span[1] - span[0], len(self.functions)), self.dtype)
        for row, index in zip(values, range(*span), strict=True):
            with Noting(f"This is `source[{index}]`."):
                example = self.source[index]
                for place, (name, function) in enumerate(self.functions.items()):
                    row[place] = self._checked(name, function(example))
        is_empty = ~values.any(axis=1)
        if self.dtype == np.int32 and is_empty.any():
            raise ValueError(
                f"`{self.argument}` found no token of any sequence in "
                f"`source[{span[0] + int(is_empty.argmax())}]`. Remove the example "
                "(`jb.data.select`), or fix the function."
            )
        return values

    def _checked(self, name: str | None, value: Any) -> Any:
        number, kinds, least, most = np.asarray(value), "biuf", -MAX_FLOAT, MAX_FLOAT
        if self.dtype == np.int32:
            kinds, least, most = "iu", 0, MAX_LENGTH
        # NaN is not between the limits.
        is_number = number.ndim == 0 and number.dtype.kind in kinds
        if not is_number or not least <= number.item() <= most:
            which = "" if name is None else f" of {name!r}"
            kind = f"an integer from {least} to 2**31-1"
            kind = "a finite number" if "f" in kinds else kind
            raise ValueError(
                f"`{self.argument}`{which} returned {value!r}, not {kind}. Fix the "
                "function, or remove the example."
            )
        return number


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass over a source.

    Attributes:
      measure: what is measured.
      label: what identifies the functions, besides their names and `cache_key`.
      title: the title of the progress bar.
      num_workers, cache, cache_key, processes, progress: as for `measure_lengths`.
    """

    measure: Measurement
    label: str
    title: str
    num_workers: int
    cache: str | os.PathLike[str] | None
    cache_key: str | None
    processes: ProcessGroup
    progress: bool

    def __post_init__(self):
        if not len(self.measure.source):
            raise ValueError("`source` is empty. Pass one with at least one example.")
        if self.processes.count > 1:
            keys = self.processes.gather("comparing sources", self._key)
            if others := [i for i, key in enumerate(keys) if key != self._key]:
                raise ValueError(
                    f"`source`, or the names or key of its functions, differ in the "
                    f"processes {others}. Pass the same in every process."
                )

    @functools.cached_property
    def _key(self) -> str:
        """32 hex digits that identify what is measured."""
        names = [*self.measure.functions]
        what = (len(self.measure.source), names, self.label, self.cache_key)
        return digest(repr(what).encode(), contents(self.measure.source).encode())

    def share(self) -> tuple[int, int]:
        """Returns `(start, stop)`, the examples that this process measures."""
        size, group = len(self.measure.source), self.processes
        start, stop = (size * (group.index + x) // group.count for x in range(2))
        return start, stop

    def run(self, start: int, stop: int) -> dict[str | None, np.ndarray]:
        """Returns the numbers of the examples `start <= index < stop`, by name."""
        spans = self.spans(start, stop)
        stored: dict[Span, Any] = {span: self._read(span) for span in spans}
        missing = [span for span in spans if stored[span] is None]
        total, left = (sum(end - first for first, end in x) for x in (spans, missing))
        with progress_bar(self.progress) as bar:
            task = bar.add_task(self.title, total=total, completed=total - left)
            for span, values in self._measured(missing):
                stored[span] = values
                self._write(span, values)
                bar.advance(task, len(values))
        # There may be no share, with more processes than examples.
        empty = np.empty((0, len(self.measure.functions)), self.measure.dtype)
        rows = np.concatenate([empty, *stored.values()])
        offset = spans[0][0] if spans else 0
        columns = np.ascontiguousarray(rows[start - offset : stop - offset].T)
        return dict(zip(self.measure.functions, columns, strict=True))

    def _measured(self, spans: Sequence[Span]) -> Iterator[tuple[Span, np.ndarray]]:
        """Yields each share and its numbers."""
        if not self.num_workers or not spans:
            yield from ((span, self.measure(span)) for span in spans)
            return
        # Here, because measuring in this process does without Grain.
        with naming_the_extra():
            import grain

            from jaxbucket.data.workers import load_in_workers

        measured = grain.MapDataset.source(spans).map(self.measure)
        workers = load_in_workers(measured, self.num_workers, num_threads=0)
        yield from zip(spans, workers, strict=True)

    def spans(self, start: int, stop: int) -> list[Span]:
        """Returns the shares that include these examples, the same in every process."""
        size = len(self.measure.source)
        step = max(_SMALLEST, -(-size // _SHARES))
        if self.cache is None:
            # Nothing that other processes measure, too.
            return [(x, min(x + step, stop)) for x in range(start, stop, step)]
        first = start // step * step
        return [(x, min(x + step, size)) for x in range(first, stop, step)]

    def _path(self, span: Span) -> pathlib.Path | None:
        if self.cache is None:
            return None
        return pathlib.Path(self.cache, f"{self._key}-{span[0]}.npy")

    def _read(self, span: Span) -> np.ndarray | None:
        """Returns a stored share, or None if it is missing."""
        path = self._path(span)
        if path is None or not path.exists():
            return None
        with Noting(f"This is {path}. Delete it to measure its examples again."):
            return np.load(path)

    def _write(self, span: Span, values: np.ndarray) -> None:
        if path := self._path(span):
            with complete(path) as draft, draft.open("wb") as file:
                np.save(file, values)
