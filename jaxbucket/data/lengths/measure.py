"""One pass over a source for the lengths of its examples, in parallel and kept."""

from __future__ import annotations

import functools
import math
import operator
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import numpy as np

from jaxbucket.base.checks import MAX_LENGTH, check_integer
from jaxbucket.base.digest import digest
from jaxbucket.base.peers import ProcessGroup, SingleProcess
from jaxbucket.base.progress import progress_bar
from jaxbucket.data.example import example_length
from jaxbucket.data.lengths.cache import LengthCache, Part, share_of
from jaxbucket.data.lengths.function_digest import function_name
from jaxbucket.data.source import RowSource, Source, check_sequences, contents
from jaxbucket.data.worker_exit import (
    UNGUARDED,
    end_if_importing,
    end_with_parent,
    unguarded,
)

# Examples that are measured together; what a kill may lose.
_CHUNK = 1024
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_AHEAD = 4


def measure_difficulty(
    source: Source,
    difficulty_fn: Callable[[Any], float],
    *,
    num_workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    processes: ProcessGroup | None = None,
    progress: bool = True,
) -> np.ndarray:
    """Returns the difficulty of every example that is this process's to measure.

    Of several processes each measures its share, those of process 0 first, as
    `write_difficulty_index` takes them. A function is known by its code and what it
    closes over, not by what is global: with `cache`, give one that has its model.

    Example:
      >>> words = [{"text": "a b"}, {"text": "a b c"}]
      >>> measure_difficulty(words, lambda x: len(x["text"].split()), progress=False)
      array([2., 3.], dtype=float32)

    Args:
      source: examples by index.
      difficulty_fn: example -> any finite number.
      num_workers: processes to start for it. The source is sent to each of them.
      cache: a folder, as for `measure_lengths`: each process has a file of its own
        there, which need not be shared.
      processes: all that measure, each its part.
      progress: show a progress bar on a terminal.

    Returns:
      `[n]` float32, not to be written to if it comes from a file.

    Raises:
      ValueError: if the source is empty, an example has no finite difficulty, or a file
        in the folder is cut or foreign; in every process, if they measure different
        sources or by different functions.
      RuntimeError: if a worker is lost.
    """
    size = _size_of(source)
    workers = _checked_workers(num_workers)
    group = processes or SingleProcess()
    measure = functools.partial(_difficulties, source, difficulty_fn)
    first, last = share_of(size, group.index, group.count)
    key = digest(
        f"{size} {function_name(difficulty_fn)}".encode(), contents(source).encode()
    )
    _check_same(group.gather("difficulty measured", key), group.index)
    if cache is None:
        found = np.full(last - first, np.nan, np.float32)
        _fill(found, first, measure, workers, progress, "Measuring difficulty")
        return found
    name = f"difficulty-{key}-{group.index}-of-{group.count}.npy"
    part = Part(pathlib.Path(cache) / name, first, last, np.float32(np.nan))
    if (found := part.read()) is None:
        with part.writing() as array:
            _fill(array, first, measure, workers, progress, "Measuring difficulty")
        found = part.read()
    if found is None or not np.isfinite(found).all():
        raise ValueError(
            f"{part.path} is not whole. Delete the file, to measure again."
        )
    return found


def measure_lengths(
    source: Source,
    *,
    length_fn: Callable[[Any], int] | None = None,
    sequences: Sequence[str] | None = None,
    num_workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    processes: ProcessGroup | None = None,
    progress: bool = True,
) -> np.ndarray:
    """Returns the length of every example, in one pass over the source.

    With `cache` the pass is made once: its result is a file in that folder, named by
    what was measured, and is mapped into memory from then on. A pass that was killed is
    gone on with where it was.

    Example:
      >>> measure_lengths([{"tokens": [1, 2, 3]}, {"tokens": [4]}], progress=False)
      array([3, 1], dtype=int32)

    Args:
      source: examples by index.
      length_fn: example -> length; by default the common length of its `sequences`.
      sequences: the features that will be padded, by default all with a leading axis.
      num_workers: processes to start for it. The source is sent to each of them.
      cache: a folder. A file is taken for that of this source if the number of
        examples, some of them, and the source's own `fingerprint`, if it has one, are
        the same, and so are `length_fn` and `sequences`. Delete it where others of the
        examples have changed, or what `length_fn` calls.
      processes: all that measure together, each its part; `cache` must be a folder
        that they share.
      progress: show a progress bar on a terminal.

    Returns:
      `[N]` int32, not to be written to if it comes from a file.

    Raises:
      ValueError: if the source is empty, an example has no positive length, or a file
        in the folder is cut or foreign.
      RuntimeError: if a worker is lost.
    """
    size = _size_of(source)
    if length_fn is None and isinstance(source, RowSource):
        check_sequences(source, sequences)
        return source.lengths
    workers = _checked_workers(num_workers)
    measure = functools.partial(_lengths, source, length_fn, sequences)

    def fill(found: np.ndarray, first: int) -> None:
        _fill(found, first, measure, workers, progress, "Measuring lengths")

    if cache is not None:
        key = _key(source, length_fn, sequences)
        group = processes or SingleProcess()
        return _cached(LengthCache(pathlib.Path(cache), key, size), fill, group)
    if processes is not None and processes.count > 1:
        raise ValueError(
            "`processes` measure together by files: pass `cache`, a folder that all of "
            "them share."
        )
    found = np.zeros(size, np.int32)
    fill(found, 0)
    return found


def _cached(
    cache: LengthCache, fill: Callable[[np.ndarray, int], None], processes: ProcessGroup
) -> np.ndarray:
    # First of all, for a file that comes later is seen by some of them only.
    seen = processes.gather("lengths", f"{cache.key} {cache.whole.exists()}")
    if len({text.split()[0] for text in seen}) > 1:
        raise ValueError(
            f"The processes measure different sources: {seen}. Give all of them the "
            "same one."
        )
    if not all(text.endswith("True") for text in seen):
        own = cache.part(processes.index, processes.count)
        if not own.path.exists():
            with own.writing() as found:
                fill(found, own.start)
        processes.gather("lengths measured", "")
        if processes.index == 0:
            cache.join(processes.count)
        processes.gather("lengths joined", "")
    return cache.read()


def _check_same(keys: list[str], index: int) -> None:
    others = [i for i, key in enumerate(keys) if key != keys[index]]
    if others:
        raise ValueError(
            f"The processes measure different sources, or by different functions: "
            f"{others} others than {index}. Give all of them the same."
        )


def _size_of(source: Source) -> int:
    try:
        size = len(source)
    except Exception as error:
        raise ValueError(
            f"`len(source)` raises {type(error).__name__}: {error}. Give a source "
            "whose `__len__` returns the number of its examples."
        ) from error
    if not size:
        raise ValueError("`source` is empty: there is no example to measure.")
    return size


def _checked_workers(num_workers: int) -> int:
    workers = check_integer("num_workers", num_workers)
    if workers < 0:
        raise ValueError(f"`num_workers={workers}` must not be negative.")
    return workers


def _lengths(
    source: Source,
    length_fn: Callable[[Any], int] | None,
    sequences: Sequence[str] | None,
    start: int,
    stop: int,
) -> np.ndarray:
    """The lengths of the examples from `start` to before `stop`, int32."""
    length_of = length_fn or functools.partial(example_length, sequences=sequences)
    lengths = np.empty(stop - start, np.int32)
    for index in range(start, stop):
        lengths[index - start] = _length(index, _measured(source, index, length_of))
    return lengths


def _difficulties(
    source: Source, difficulty_fn: Callable[[Any], float], start: int, stop: int
) -> np.ndarray:
    """The difficulties of the examples from `start` to before `stop`, float32."""
    found = np.empty(stop - start, np.float32)
    for index in range(start, stop):
        value = _measured(source, index, difficulty_fn)
        found[index - start] = _difficulty(index, value)
    return found


def _measured(source: Source, index: int, measure: Callable[[Any], Any]) -> Any:
    try:
        return measure(source[index])
    except ValueError as error:
        raise ValueError(f"`source[{index}]`: {error}") from error
    except Exception as error:
        raise ValueError(
            f"`source[{index}]` cannot be measured: {type(error).__name__}: {error}"
        ) from error


def _difficulty(index: int, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _MAX_FLOAT32:
        raise ValueError(
            f"`source[{index}]` has difficulty {value!r}, which is no finite number of "
            "32 bits. Leave the example out, or mend `difficulty_fn`."
        )
    return number


def _length(index: int, length: Any) -> int:
    try:
        whole = operator.index(length)
    except TypeError:
        whole = 0
    if not 1 <= whole <= MAX_LENGTH:
        raise ValueError(
            f"`source[{index}]` has length {length!r}, which is no integer from 1 to "
            f"{MAX_LENGTH}. Leave the example out, or mend `length_fn`."
        )
    return whole


def _fill(
    found: np.ndarray,
    first: int,
    measure: Callable[[int, int], np.ndarray],
    num_workers: int,
    progress: bool,
    title: str,
) -> None:
    """Measures what is missing in `found`, whose first entry is example `first`."""
    starts = range(0, len(found), _CHUNK)
    missing = [s for s in starts if _is_missing(found[s : s + _CHUNK]).any()]
    spans = [(first + s, first + min(s + _CHUNK, len(found))) for s in missing]
    run = _in_workers if num_workers else _here
    with progress_bar(progress) as bar:
        task = bar.add_task(title, total=len(found))
        bar.advance(task, len(found) - sum(stop - start for start, stop in spans))
        for (start, stop), lengths in run(measure, spans, num_workers):
            found[start - first : stop - first] = lengths
            bar.advance(task, stop - start)


def _is_missing(found: np.ndarray) -> np.ndarray:
    return np.isnan(found) if found.dtype.kind == "f" else found == 0


_Span = tuple[int, int]


def _here(
    measure: Callable[[int, int], np.ndarray], spans: list[_Span], num_workers: int
) -> Iterator[tuple[_Span, np.ndarray]]:
    return ((span, measure(*span)) for span in spans)


def _in_workers(
    measure: Callable[[int, int], np.ndarray], spans: list[_Span], num_workers: int
) -> Iterator[tuple[_Span, np.ndarray]]:
    """Yields each as soon as it is there; a few for each worker are under way."""
    end_if_importing()
    task = _dumped(measure)
    # jax has threads, and a fork of these would hang.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _begin, (task,))
    left = iter(spans)
    running: dict[Future[np.ndarray], _Span] = {}
    workers: list[BaseProcess] = []
    try:
        while True:
            while len(running) < _AHEAD * num_workers and (span := next(left, None)):
                running[pool.submit(_span_of_worker, span)] = span
            if not running:
                return
            workers = workers or active_children()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        # Until then, another thread may be about to read how they ended.
        pool.shutdown()
        if any(worker.exitcode == UNGUARDED for worker in workers):
            raise RuntimeError(unguarded("measure_lengths(...)")) from None
        raise RuntimeError(
            "A worker that measured was lost: killed, perhaps for want of memory. With "
            "`cache` what was measured is kept: run it again."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _dumped(measure: Callable[[int, int], np.ndarray]) -> bytes:
    # By cloudpickle, for then functions of a script or of another function can be, too.
    try:
        return cloudpickle.dumps(measure)
    except Exception as error:
        raise ValueError(
            f"The source or the function cannot be sent to a worker: {error}. Give "
            "some that can be pickled, or `num_workers=0`."
        ) from error


_task: bytes


def _begin(task: bytes) -> None:
    global _task
    end_with_parent()
    _task = task


def _span_of_worker(span: _Span) -> np.ndarray:
    try:
        return _loaded(_task)(*span)
    except SystemExit as error:
        # It would end the caller.
        raise RuntimeError(
            f"The source or the function ended a worker: SystemExit({error.code!r})."
        ) from None


@functools.cache
def _loaded(task: bytes) -> Callable[[int, int], np.ndarray]:
    try:
        return cloudpickle.loads(task)
    except Exception as error:
        raise ValueError(
            f"`source` cannot be opened in a worker: {type(error).__name__}: {error}. "
            "Give one that can, or `num_workers=0`."
        ) from error


def _key(
    source: Source,
    length_fn: Callable[[Any], int] | None,
    sequences: Sequence[str] | None,
) -> str:
    name = "" if length_fn is None else function_name(length_fn)
    how = f"{len(source)} {name} {sequences and list(sequences)}"
    return digest(how.encode(), contents(source).encode())
