"""Lengths and difficulties of all examples of a source, measured once."""

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
    """Returns the difficulty of every example in this process's share.

    Several processes measure a share each, process 0 the first one, as
    `write_difficulty_index` takes them.

    Example:
      >>> words = [{"text": "a b"}, {"text": "a b c"}]
      >>> measure_difficulty(words, lambda x: len(x["text"].split()), progress=False)
      array([2., 3.], dtype=float32)

    Args:
      source: examples by index.
      difficulty_fn: example -> any finite number.
      num_workers: worker processes to start; 0 measures in this one. The source and the
        function are sent to each of them.
      cache: a folder for what is measured. Each process has a file of its own there, so
        that the folder need not be shared; the next run reads it, and one that was
        killed goes on with it.
      cache_key: the name of `difficulty_fn` in the cache, needed with `cache`. Change
        it whenever the function, or a model that it calls, changes.
      processes: all processes that measure, from `jb.Processes`; by default this alone.
      progress: show a progress bar on a terminal.

    Returns:
      `[n]` float32, read-only if it comes from a file.

    Raises:
      ValueError: if the source is empty, an example has no finite difficulty,
        `cache_key` is missing, or a file in the folder is cut or foreign; in every
        process, if they measure different sources, or the functions have different
        names or keys: what these do is not looked into.
      RuntimeError: if a worker is lost.
    """
    size = _size_of(source)
    workers = _checked_workers(num_workers)
    group = processes or SingleProcess()
    measure = functools.partial(_values, source, difficulty_fn, _difficulty, np.float32)
    start, stop = share_of(size, group.index, group.count)
    key = _file_key(source, cache, cache_key, "difficulty_fn")
    name = getattr(difficulty_fn, "__qualname__", type(difficulty_fn).__qualname__)
    _check_same(group.gather("difficulty measured", f"{key} {name}"), group.index)
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

    With `cache` the pass is made once: the result is a file in that folder, which is
    mapped into memory from then on. A pass that was killed goes on where it was.

    Example:
      >>> measure_lengths([{"tokens": [1, 2, 3]}, {"tokens": [4]}], progress=False)
      array([3, 1], dtype=int32)

    Args:
      source: examples by index.
      length_fn: example -> length; by default the common length of its `sequences`.
      sequences: the features that will be padded, by default all with a leading axis.
      num_workers: worker processes to start; 0 measures in this one. The source and the
        function are sent to each of them.
      cache: a folder. A file in it is taken for that of this source if `sequences`,
        `cache_key`, the number of examples, some of them, and the source's own
        `fingerprint`, if it has one, are the same.
      cache_key: the name of `length_fn` in the cache, needed where both are given.
        Change it whenever the function changes; or, with a function or without, where
        examples change behind the same fingerprint.
      processes: all processes that measure, from `jb.Processes`, a share each; `cache`
        must be a folder that they share. By default this alone.
      progress: show a progress bar on a terminal.

    Returns:
      `[N]` int32, read-only if it comes from a file.

    Raises:
      ValueError: if the source is empty, an example has no positive length, `cache_key`
        is missing, or a file in the folder is cut or foreign.
      RuntimeError: if a worker is lost.
    """
    size = _size_of(source)
    if length_fn is None and isinstance(source, RowSource):
        check_sequences(source, sequences)
        return source.lengths
    workers = _checked_workers(num_workers)
    length_of = length_fn or functools.partial(example_length, sequences=sequences)
    measure = functools.partial(_values, source, length_of, _length, np.int32)

    def fill_share(lengths: np.ndarray, start: int) -> None:
        fill(lengths, start, measure, workers, progress, "Measuring lengths")

    if cache is not None:
        key = _file_key(source, cache, cache_key, length_fn and "length_fn", sequences)
        folder, group = pathlib.Path(cache), processes or SingleProcess()
        return _cached_lengths(folder, key, size, fill_share, group)
    if processes is not None and processes.count > 1:
        raise ValueError(
            "`processes` measure together by files: pass `cache`, a folder that all of "
            "them share."
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
    # At first, because a file that appears later is seen by some of them only.
    replies = group.gather("lengths", f"{key} {whole.path.exists()}")
    if len({reply.split()[0] for reply in replies}) > 1:
        raise ValueError(
            f"The processes measure different sources: {replies}. Give all of them the "
            "same one."
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
        group.gather("lengths measured", "")
        if group.count > 1 and group.index == 0:
            join(whole, shares)
        group.gather("lengths joined", "")
    return whole.read()


def _file_key(
    source: Source,
    cache: str | os.PathLike[str] | None,
    cache_key: str | None,
    function: str | None,
    sequences: Sequence[str] | None = None,
) -> str:
    """32 hex digits that name the source, and how it is measured.

    Args:
      source: examples by index.
      cache: the folder, if there is one.
      cache_key: as the user gave it.
      function: the name of the argument that is a function of the user's, if one is.
      sequences: the features that are measured.
    """
    if cache_key is not None and (not isinstance(cache_key, str) or not cache_key):
        raise ValueError(
            f"`cache_key={cache_key!r}` must be a string that is not empty, such as "
            '"words-1".'
        )
    if cache is not None and function and cache_key is None:
        raise ValueError(
            f"`cache={str(cache)!r}` cannot see what `{function}` does: name it by "
            f'`cache_key`, such as `cache_key="{function}-1"`, and change that '
            "whenever the function changes."
        )
    # A key names what measures: a function, or the default way beside changed data.
    name = "" if cache_key is None else repr((function, cache_key))
    how = f"{len(source)} {name} {sequences and list(sequences)}"
    return digest(how.encode(), contents(source).encode())


def _check_same(replies: list[str], index: int) -> None:
    others = [i for i, reply in enumerate(replies) if reply != replies[index]]
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


def _values(
    source: Source,
    function: Callable[[Any], Any],
    checked: Callable[[int, Any], float],
    dtype: type[np.generic],
    start: int,
    stop: int,
) -> np.ndarray:
    """What the function says of the examples from `start` to before `stop`."""
    values = (checked(i, _measured(source, i, function)) for i in range(start, stop))
    return np.fromiter(values, dtype, stop - start)


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
            f"`source[{index}]` has difficulty {value!r}, which is not a finite number "
            "of 32 bits. Leave the example out, or mend `difficulty_fn`."
        )
    return number


def _length(index: int, length: Any) -> int:
    try:
        integer = operator.index(length)
    except TypeError:
        integer = 0
    if not 1 <= integer <= MAX_LENGTH:
        raise ValueError(
            f"`source[{index}]` has length {length!r}, which is not an integer from 1 "
            f"to {MAX_LENGTH}. Leave the example out, or mend `length_fn`."
        )
    return integer
