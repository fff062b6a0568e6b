"""Measures the length or the difficulty of every example of a source."""

from __future__ import annotations

import functools
import math
import operator
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.checks import MAX_LENGTH, check_integer
from jaxbucket.base.digest import digest
from jaxbucket.base.process_group import ProcessGroup, SingleProcess
from jaxbucket.data.example import example_length
from jaxbucket.data.lengths.cache import ArrayFile, join, share_of
from jaxbucket.data.lengths.parallel_pass import fill
from jaxbucket.data.source import RowSource, Source, check_sequences, contents

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_PATH_CHARACTERS = 200
_FLOAT32 = np.dtype(np.float32)


def measure_difficulty(
    source: Source,
    difficulty_fn: Callable[[Any], float],
    *,
    num_workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    cache_key: str | None = None,
    processes: ProcessGroup | None = None,
    progress: bool = True,
) -> np.ndarray:
    """Returns the difficulty of each example in this process's share.

    With several processes, each one measures a contiguous share of the source, in the
    order of their indices. This is the layout that `write_difficulty_index` expects.

    Example:
      >>> words = [{"text": "a b"}, {"text": "a b c"}]
      >>> measure_difficulty(words, lambda x: len(x["text"].split()), progress=False)
      array([2., 3.], dtype=float32)

    Args:
      source: random-access source of examples.
      difficulty_fn: function from an example to a finite number.
      num_workers: number of worker processes; 0 measures in this process. The source
        and the function are pickled and sent to each worker.
      cache: folder in which measured values are stored. Each process writes its own
        file, so the folder need not be shared. Later runs read that file, and a run
        that was killed resumes from it.
      cache_key: name of `difficulty_fn` in the cache. Required with `cache`. Change it
        whenever the function, or a model that it calls, changes.
      processes: all participating processes, from `jb.Processes`. By default only this
        process measures.
      progress: whether to show a progress bar on a terminal.

    Returns:
      `[n]` float32, read-only if it is read from the cache.

    Raises:
      ValueError: if the source is empty, if an example has no finite difficulty, if
        `cache_key` is missing, or if a cached file is truncated or was not written by
        this function. Every process raises if their sources differ, or the names or
        keys of their functions; the code of the functions is not compared.
      RuntimeError: if a worker process dies.
    """
    size = _num_examples(source)
    workers = _check_num_workers(num_workers)
    group = processes or SingleProcess()
    measure = functools.partial(
        _measure_span, source, difficulty_fn, _check_difficulty, np.float32
    )
    start, stop = share_of(size, group.index, group.count)
    key = _file_key(source, cache, cache_key, "difficulty_fn")
    name = getattr(difficulty_fn, "__qualname__", type(difficulty_fn).__qualname__)
    _check_same_replies(
        group.gather("comparing sources of difficulty", f"{key} {name}"), group.index
    )
    if cache is None:
        values = np.full(stop - start, np.nan, np.float32)
        fill(values, start, measure, workers, progress, "Measuring difficulty")
        return values
    path = f"difficulty-{key}-{group.index}-of-{group.count}.npy"
    file = ArrayFile(pathlib.Path(cache) / path, start, stop, _FLOAT32)
    if not file.path.exists():
        with file.writing() as values:
            fill(values, start, measure, workers, progress, "Measuring difficulty")
    return file.read()


def measure_lengths(
    source: Source,
    *,
    length_fn: Callable[[Any], int] | None = None,
    sequences: Sequence[str] | None = None,
    num_workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    cache_key: str | None = None,
    processes: ProcessGroup | None = None,
    progress: bool = True,
) -> np.ndarray:
    """Returns the length of every example, in one pass over the source.

    With `cache` the lengths are measured once and stored in that folder; later calls
    map the stored file into memory. A pass that was killed resumes where it stopped.

    Example:
      >>> measure_lengths([{"tokens": [1, 2, 3]}, {"tokens": [4]}], progress=False)
      array([3, 1], dtype=int32)

    Args:
      source: random-access source of examples.
      length_fn: function from an example to its length. By default the common length of
        the features in `sequences`.
      sequences: names of the features that will be padded. By default all features with
        a leading axis.
      num_workers: number of worker processes; 0 measures in this process. The source
        and the function are pickled and sent to each worker.
      cache: folder in which lengths are stored. A stored file is reused if `sequences`,
        `cache_key`, the number of examples, a fixed sample of the examples and the
        source's `fingerprint` attribute (if it has one) are unchanged.
      cache_key: name of `length_fn` in the cache. Required if both `length_fn` and
        `cache` are given. Change it whenever the function changes, or when examples
        change but neither the sample nor the fingerprint shows it.
      processes: all participating processes, from `jb.Processes`. Each measures a share
        of the source, and `cache` must be a folder that all of them can access. By
        default only this process measures.
      progress: whether to show a progress bar on a terminal.

    Returns:
      `[N]` int32, read-only if it is read from the cache.

    Raises:
      ValueError: if the source is a path or empty, if an example has no positive
        length, if `cache_key` is missing, or if a cached file is truncated or was not
        written by this function.
      RuntimeError: if a worker process dies.
    """
    _check_not_a_path(source)
    size = _num_examples(source)
    if length_fn is None and isinstance(source, RowSource):
        check_sequences(source, sequences)
        return source.lengths
    workers = _check_num_workers(num_workers)
    length_of = length_fn or functools.partial(example_length, sequences=sequences)
    measure = functools.partial(
        _measure_span, source, length_of, _check_length, np.int32
    )

    def fill_share(lengths: np.ndarray, start: int) -> None:
        fill(lengths, start, measure, workers, progress, "Measuring lengths")

    if cache is not None:
        key = _file_key(source, cache, cache_key, length_fn and "length_fn", sequences)
        folder, group = pathlib.Path(cache), processes or SingleProcess()
        return _cached_lengths(folder, key, size, fill_share, group)
    if processes is not None and processes.count > 1:
        raise ValueError(
            "`processes` requires `cache`: the processes exchange lengths through "
            "files. Pass a folder that all of them can access."
        )
    lengths = np.zeros(size, np.int32)
    fill_share(lengths, 0)
    return lengths


def _cached_lengths(
    folder: pathlib.Path,
    key: str,
    size: int,
    fill_share: Callable[[np.ndarray, int], None],
    group: ProcessGroup,
) -> np.ndarray:
    whole = ArrayFile(folder / f"lengths-{key}.npy", 0, size)
    # Checked once by all processes together: a file that appears later may be visible
    # to some of them only.
    replies = group.gather("comparing sources", f"{key} {whole.path.exists()}")
    if len({reply.split()[0] for reply in replies}) > 1:
        raise ValueError(
            f"The processes measure different sources: {replies}. Pass the same source "
            "in every process."
        )
    if not all(reply.endswith("True") for reply in replies):
        shares = [whole]
        if group.count > 1:
            shares = [
                ArrayFile(
                    folder / f"lengths-{key}-{index}-of-{group.count}.npy",
                    *share_of(size, index, group.count),
                )
                for index in range(group.count)
            ]
        local = shares[group.index]
        if not local.path.exists():
            with local.writing() as lengths:
                fill_share(lengths, local.start)
        group.gather("measuring lengths", "")
        if group.count > 1 and group.index == 0:
            join(whole, shares)
        group.gather("joining lengths", "")
    return whole.read()


def _file_key(
    source: Source,
    cache: str | os.PathLike[str] | None,
    cache_key: str | None,
    function: str | None,
    sequences: Sequence[str] | None = None,
) -> str:
    """Returns 32 hex digits that identify the source and how it is measured.

    Args:
      source: random-access source of examples.
      cache: cache folder, or None.
      cache_key: key passed by the user.
      function: name of the argument that holds the user's function, if one was passed.
      sequences: names of the features that are measured.
    """
    if cache_key is not None and (not isinstance(cache_key, str) or not cache_key):
        raise ValueError(
            f'`cache_key={cache_key!r}` must be a non-empty string, such as "words-1".'
        )
    if cache is not None and function and cache_key is None:
        raise ValueError(
            f"`cache={str(cache)!r}` requires `cache_key`: the cache cannot detect "
            f"changes of `{function}`. Pass a name for the function, such as "
            f'`cache_key="{function}-1"`, and change it whenever the function changes.'
        )
    # Without a function the key stands for a version of the data.
    name = "" if cache_key is None else repr((function, cache_key))
    how = f"{len(source)} {name} {sequences and list(sequences)}"
    return digest(how.encode(), contents(source).encode())


def _check_same_replies(replies: list[str], index: int) -> None:
    others = [i for i, reply in enumerate(replies) if reply != replies[index]]
    if others:
        raise ValueError(
            f"The processes measure different sources or use different functions: "
            f"processes {others} differ from process {index}. Pass the same source and "
            "the same function in every process."
        )


def _check_not_a_path(source: Any) -> None:
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fsdecode(source)[:_PATH_CHARACTERS]
        raise ValueError(
            f"`source` is a path, {path!r}. Load the file first, for example with "
            "`np.load` or `json.load`, or run `jaxbucket measure "
            f"{path} -o lengths.npy` and `np.load` the result."
        )


def _num_examples(source: Source) -> int:
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


def _check_num_workers(num_workers: int) -> int:
    workers = check_integer("num_workers", num_workers)
    if workers < 0:
        raise ValueError(f"`num_workers={workers}` must not be negative.")
    return workers


def _measure_span(
    source: Source,
    function: Callable[[Any], Any],
    check: Callable[[int, Any], float],
    dtype: type[np.generic],
    start: int,
    stop: int,
) -> np.ndarray:
    """Returns the checked values of the examples `start <= index < stop`."""
    values = (check(i, _measure_one(source, i, function)) for i in range(start, stop))
    return np.fromiter(values, dtype, stop - start)


def _measure_one(source: Source, index: int, measure: Callable[[Any], Any]) -> Any:
    try:
        return measure(source[index])
    except ValueError as error:
        raise ValueError(f"`source[{index}]`: {error}") from error
    except Exception as error:
        raise ValueError(
            f"`source[{index}]` cannot be measured: {type(error).__name__}: {error}"
        ) from error


def _check_difficulty(index: int, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _MAX_FLOAT32:
        raise ValueError(
            f"`source[{index}]` has difficulty {value!r}, which is not a finite 32-bit "
            "number. Remove the example, or fix `difficulty_fn`."
        )
    return number


def _check_length(index: int, length: Any) -> int:
    try:
        integer = operator.index(length)
    except TypeError:
        integer = 0
    if not 1 <= integer <= MAX_LENGTH:
        raise ValueError(
            f"`source[{index}]` has length {length!r}, which is not an integer from 1 "
            f"to {MAX_LENGTH}. Remove the example, or fix `length_fn`."
        )
    return integer
