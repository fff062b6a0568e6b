"""The first of two passes over a source: counts of all examples are added up."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Mapping, Sequence

import numpy as np

from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.data.lengths.accumulated import AccumulatedMetric
from jaxbucket.data.lengths.cache import ArrayFile, share_of
from jaxbucket.data.lengths.parallel_pass import Workers, chunks
from jaxbucket.data.lengths.partial_counts import PartialCounts, add_counts
from jaxbucket.data.lengths.quantities import Quantity
from jaxbucket.data.lengths.source_pass import measure_one
from jaxbucket.data.lengths.together import Files, write_together
from jaxbucket.data.source import Source

# At most this much work is lost if the process is killed.
_SECONDS_BETWEEN_SAVES = 1.0


@dataclasses.dataclass(frozen=True)
class CountPass:
    """Adds up the counts of several metrics, but reads each example only once.

    Attributes:
      source: random-access source of examples.
      metrics: the metrics, by name.
      quantity: what the metrics measure, for messages.
      workers: the processes that count.
    """

    source: Source
    metrics: Mapping[str | None, AccumulatedMetric]
    quantity: Quantity
    workers: Workers

    def totals(self) -> dict[str | None, np.ndarray]:
        """Returns the sums over all examples, `[size]` int64, by name."""
        files = dict.fromkeys(self.metrics)
        counts = self._count(files, 0, len(self.source))
        return {name: _read_only(x.total) for name, x in counts.items()}

    def cached_totals(
        self,
        folder: pathlib.Path,
        keys: Mapping[str | None, str],
        group: ProcessGroup,
    ) -> dict[str | None, np.ndarray]:
        """Returns what `totals` returns, from files that all processes write together.

        Args:
          folder: a folder that all processes share.
          keys: the key of each metric in the cache, by name.
          group: all participating processes.

        Raises:
          ValueError: if a file is truncated or was not written by this function.
        """
        files = {
            name: ArrayFile(
                folder / f"counts-{keys[name]}.npy",
                0,
                metric.size,
                np.dtype(np.int64),
                missing=-1,
            )
            for name, metric in self.metrics.items()
        }
        start, stop = share_of(len(self.source), group.index, group.count)
        write = functools.partial(self._write, start=start, stop=stop)
        write_together("counts", files, group, _parts, write, _join)
        return {name: _read_only(np.array(x.read())) for name, x in files.items()}

    def _write(self, files: Files, start: int, stop: int) -> None:
        """Writes the counts of the examples `start <= index < stop`."""
        missing = {name: x for name, x in files.items() if not x.path.exists()}
        paths = {name: x.path.with_suffix(".npz") for name, x in missing.items()}
        counts = self._count(paths, start, stop)
        for name, file in missing.items():
            with file.writing() as array:
                array[:] = counts[name].total
            counts[name].delete()

    def _count(
        self, paths: Mapping[str | None, pathlib.Path | None], start: int, stop: int
    ) -> dict[str | None, PartialCounts]:
        """Returns the counts of the examples `start <= index < stop`, by name.

        Args:
          paths: for each metric, the file from which a later run resumes, or None.
          start: the index of the first example.
          stop: the index after the last example.
        """
        metrics = {name: self.metrics[name] for name in paths}
        numbers = {span: number for number, span in enumerate(chunks(start, stop))}
        counts = {
            name: PartialCounts.open(path, metrics[name].size, len(numbers))
            for name, path in paths.items()
        }
        missing = [
            span
            for span, number in numbers.items()
            if not all(x.done[number] for x in counts.values())
        ]
        measure = functools.partial(_count_span, self.source, metrics, self.quantity)
        saved = time.monotonic()
        for span, totals in self.workers.map(
            measure, missing, stop - start, "Counting"
        ):
            for each, total in zip(counts.values(), totals, strict=True):
                each.add(numbers[span], total)
            if time.monotonic() > saved + _SECONDS_BETWEEN_SAVES:
                for each in counts.values():
                    each.save()
                saved = time.monotonic()
        return counts


def _read_only(total: np.ndarray) -> np.ndarray:
    # A score must not depend on the examples that were scored before.
    total.setflags(write=False)
    return total


def _count_span(
    source: Source,
    metrics: Mapping[str | None, AccumulatedMetric],
    quantity: Quantity,
    start: int,
    stop: int,
) -> list[np.ndarray]:
    """Returns the counts `[size]` of the examples `start <= index < stop`.

    Returns:
      An array for each metric.
    """
    totals = [np.zeros(metric.size, np.int64) for metric in metrics.values()]
    functions = {
        name: functools.partial(metric.add_counts, total)
        for (name, metric), total in zip(metrics.items(), totals, strict=True)
    }
    for index in range(start, stop):
        measure_one(source, index, functions, quantity.where)
    return totals


def _parts(file: ArrayFile, count: int) -> list[ArrayFile]:
    """Returns the files in which `count` processes store the counts of their shares."""
    return [
        file._replace(
            path=file.path.with_name(f"{file.path.stem}-{index}-of-{count}.npy")
        )
        for index in range(count)
    ]


def _join(whole: ArrayFile, parts: Sequence[ArrayFile]) -> None:
    """Writes the sum of all parts and deletes them."""
    with whole.writing() as array:
        array[:] = functools.reduce(add_counts, (part.read() for part in parts))
    for part in parts:
        part.path.unlink()
