"""Measures the difficulty of every example of a source."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Unpack, overload

import numpy as np

from jaxbucket.base.process_group import ProcessGroup, SingleProcess
from jaxbucket.data.lengths.cache import ArrayFile, share_of
from jaxbucket.data.lengths.cache_key import CacheKey, file_keys
from jaxbucket.data.lengths.quantities import DIFFICULTY
from jaxbucket.data.lengths.source_pass import (
    PassOptions,
    SourcePass,
    functions_by_name,
    num_examples,
    unnamed,
)
from jaxbucket.data.source import Source


@overload
def measure_difficulty(
    source: Source,
    difficulty_fn: Callable[[Any], float],
    **options: Unpack[PassOptions],
) -> np.ndarray: ...
@overload
def measure_difficulty(
    source: Source,
    difficulty_fn: Mapping[str, Callable[[Any], float]],
    **options: Unpack[PassOptions],
) -> dict[str, np.ndarray]: ...


def measure_difficulty(
    source: Source,
    difficulty_fn: Callable[[Any], float] | Mapping[str, Callable[[Any], float]],
    *,
    num_workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    cache_key: CacheKey = None,
    processes: ProcessGroup | None = None,
    progress: bool = True,
) -> np.ndarray | dict[str, np.ndarray]:
    """Returns the difficulty of each example in this process's share.

    With several processes, each one measures a contiguous share of the source, in the
    order of their indices. This is the layout that `write_difficulty_index` expects.

    Example:
      >>> words = [{"text": "a b"}, {"text": "a b a"}]
      >>> measure_difficulty(words, lambda x: len(x["text"].split()), progress=False)
      array([2., 3.], dtype=float32)

    Example: several metrics in one pass.
      >>> metrics = {"length": len, "letters": lambda x: len(set(x))}
      >>> scores = measure_difficulty(["aba", "ab"], metrics, progress=False)
      >>> scores["length"], scores["letters"]
      (array([3., 2.], dtype=float32), array([2., 2.], dtype=float32))

    Args:
      source: random-access source of examples.
      difficulty_fn: function from an example to a finite number; or a mapping from the
        name of each metric to such a function.
      num_workers: number of worker processes; 0 measures in this process. The source
        and the function are pickled and sent to each worker.
      cache: folder in which measured values are stored, each metric in a file. Each
        process writes its own files, so the folder need not be shared. Later runs read
        these files, and a run that was killed resumes from them.
      cache_key: name of `difficulty_fn` in the cache; with several metrics, a mapping
        from the name of each. Required with `cache`. Change it whenever the function,
        or a model that it calls, changes.
      processes: all participating processes, from `jb.Processes`. By default only this
        process measures.
      progress: whether to show a progress bar on a terminal.

    Returns:
      `[n]` float32, read-only if it is read from the cache; with several metrics, a
      dict from the name of each to its `[n]`, sorted by name.

    Raises:
      ValueError: if the source is empty, if an example has no finite difficulty, if
        `difficulty_fn` is an empty mapping, if `cache_key` is missing or does not name
        each metric, or if a cached file is truncated or was not written by this
        function. Every process raises if their sources differ, or the names or keys of
        their functions; the code of the functions is not compared.
      RuntimeError: if a worker process dies.
    """
    size = num_examples(source)
    functions = functions_by_name("difficulty_fn", difficulty_fn)
    measuring = SourcePass(source, functions, DIFFICULTY, num_workers, progress)
    group = processes or SingleProcess()
    start, stop = share_of(size, group.index, group.count)
    keys = file_keys(
        source,
        dict.fromkeys(functions),
        difficulty_fn,
        argument="difficulty_fn",
        cache=cache,
        cache_key=cache_key,
    )
    _check_same(keys, functions, group)
    if cache is None:
        return unnamed(measuring.values(start, stop))
    files = {
        name: ArrayFile(
            pathlib.Path(cache)
            / f"difficulty-{key}-{group.index}-of-{group.count}.npy",
            start,
            stop,
            DIFFICULTY.dtype,
        )
        for name, key in keys.items()
    }
    measuring.write(files)
    return unnamed({name: file.read() for name, file in files.items()})


def _check_same(
    keys: Mapping[str | None, str],
    functions: Mapping[str | None, Callable[[Any], Any]],
    group: ProcessGroup,
) -> None:
    """Raises a ValueError if other processes measure something else."""
    names = {
        name: getattr(function, "__qualname__", type(function).__qualname__)
        for name, function in functions.items()
    }
    reply = str([(name, key, names[name]) for name, key in keys.items()])
    replies = group.gather("comparing sources of difficulty", reply)
    others = [i for i, x in enumerate(replies) if x != reply]
    if others:
        raise ValueError(
            f"The processes measure different sources or use different functions: "
            f"processes {others} differ from process {group.index}. Pass the same "
            "source and the same functions in every process."
        )
