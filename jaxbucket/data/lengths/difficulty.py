"""Measures the difficulty of every example of a source."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, Unpack, overload

import numpy as np
from numpy.typing import DTypeLike

from jaxbucket.base.digest import digest
from jaxbucket.base.process_group import ProcessGroup, SingleProcess
from jaxbucket.data.lengths.accumulated import AccumulatedMetric
from jaxbucket.data.lengths.cache import ArrayFile, share_of
from jaxbucket.data.lengths.cache_key import CacheKey, file_keys
from jaxbucket.data.lengths.count_pass import CountPass
from jaxbucket.data.lengths.parallel_pass import Workers
from jaxbucket.data.lengths.quantities import DIFFICULTY_DTYPES, difficulty
from jaxbucket.data.lengths.source_pass import (
    Functions,
    PassOptions,
    Quantities,
    SourcePass,
    functions_by_name,
    num_examples,
    unnamed,
)
from jaxbucket.data.source import Source

Metric: TypeAlias = Callable[[Any], float] | AccumulatedMetric


@overload
def measure_difficulty(
    source: Source,
    difficulty_fn: Metric,
    *,
    dtype: DTypeLike = ...,
    **options: Unpack[PassOptions],
) -> np.ndarray: ...
@overload
def measure_difficulty(
    source: Source,
    difficulty_fn: Mapping[str, Metric],
    *,
    dtype: DTypeLike | Mapping[str, DTypeLike] = ...,
    **options: Unpack[PassOptions],
) -> dict[str, np.ndarray]: ...


def measure_difficulty(
    source: Source,
    difficulty_fn: Metric | Mapping[str, Metric],
    *,
    dtype: DTypeLike | Mapping[str, DTypeLike] = np.float32,
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
      difficulty_fn: function from an example to a finite number, or an
        `AccumulatedMetric`, such as `token_rarity`, which needs a pass of its own; or a
        mapping from the name of each metric to one of these.
      dtype: dtype of the values: float32, float64, int32 or int64. float32 is exact for
        integers up to 2**24. With several metrics, one dtype for all, or a mapping from
        the names of some to their dtypes.
      num_workers: number of worker processes; 0 measures in this process. The source
        and the function are pickled and sent to each worker.
      cache: folder in which measured values are stored, each metric in a file. Each
        process writes its own files, so the folder need not be shared, except by
        processes that exchange the counts of an `AccumulatedMetric`. Later runs read
        these files, and a run that was killed resumes from them.
      cache_key: name of `difficulty_fn` in the cache; with several metrics, a mapping
        from the name of each. Required with `cache`. Change it whenever the function,
        or a model that it calls, changes.
      processes: all participating processes, from `jb.Processes`. By default only this
        process measures.
      progress: whether to show a progress bar on a terminal.

    Returns:
      `[n]` of `dtype`, read-only if it is read from the cache; with several metrics, a
      dict from the name of each to its `[n]`, sorted by name.

    Raises:
      ValueError: if the source is empty, if an example has no finite difficulty or
        none of `dtype`, if `difficulty_fn` is an empty mapping, if `cache_key` is
        missing or does not name each metric, if processes exchange counts without a
        `cache`, or if a cached file is truncated or was not written by this function.
        Every process raises if their sources differ, or the dtypes, names or keys of
        their functions; the code of the functions is not compared.
      RuntimeError: if a worker process dies.
    """
    size = num_examples(source)
    functions = functions_by_name("difficulty_fn", difficulty_fn)
    quantities = _quantities(dtype, functions)
    workers = Workers(num_workers, progress)
    group = processes or SingleProcess()
    keys = file_keys(
        source,
        dict.fromkeys(functions),
        difficulty_fn,
        argument="difficulty_fn",
        cache=cache,
        cache_key=cache_key,
    )
    _check_same(keys, functions, quantities, group)
    folder = None if cache is None else pathlib.Path(cache)
    totals = _totals(source, functions, keys, folder, workers, group)
    for name, total in totals.items():
        functions[name] = functools.partial(functions[name], total=total)
        # Scores of other counts are never mixed with these.
        keys[name] = digest(keys[name].encode(), total.data)
    measuring = SourcePass(source, functions, quantities, workers)
    start, stop = share_of(size, group.index, group.count)
    if folder is None:
        return unnamed(measuring.values(start, stop))
    files = {
        name: ArrayFile(
            folder / f"difficulty-{key}-{group.index}-of-{group.count}.npy",
            start,
            stop,
            quantities[name].dtype,
            quantities[name].missing,
        )
        for name, key in keys.items()
    }
    measuring.write(files)
    return unnamed({name: file.read() for name, file in files.items()})


def _quantities(
    dtype: DTypeLike | Mapping[str, DTypeLike], functions: Functions
) -> Quantities:
    """Returns what each function measures, by name.

    Raises:
      ValueError: if a dtype is not supported, or `dtype` names a different metric.
    """
    if not isinstance(dtype, Mapping):
        return dict.fromkeys(functions, difficulty(_checked_dtype("dtype", dtype)))
    dtypes: dict[Any, Any] = dict(dtype)
    if unknown := [name for name in dtypes if name not in functions]:
        raise ValueError(
            f"`dtype={dtypes}` names {unknown}, which are not metrics in "
            "`difficulty_fn`. Name some of its metrics, or pass one dtype for all."
        )
    quantities = dict.fromkeys(functions, difficulty(np.dtype(np.float32)))
    for name, value in dtypes.items():
        quantities[name] = difficulty(_checked_dtype(f"dtype[{name!r}]", value))
    return quantities


def _checked_dtype(argument: str, value: Any) -> np.dtype:
    # `np.dtype(None)` is float64.
    if value is not None:
        with contextlib.suppress(TypeError):
            dtype = np.dtype(value)
            if dtype.name in DIFFICULTY_DTYPES:
                return dtype.newbyteorder("=")
    raise ValueError(
        f"`{argument}={value!r}` is not a dtype of difficulties. Pass one of "
        f"{list(DIFFICULTY_DTYPES)}."
    )


def _totals(
    source: Source,
    functions: Functions,
    keys: Mapping[str | None, str],
    folder: pathlib.Path | None,
    workers: Workers,
    group: ProcessGroup,
) -> dict[str | None, np.ndarray]:
    """Returns the counts of each `AccumulatedMetric` over all examples, by name.

    Raises:
      ValueError: if processes have no folder to exchange counts.
    """
    metrics = {
        name: function
        for name, function in functions.items()
        if isinstance(function, AccumulatedMetric)
    }
    if not metrics:
        return {}
    counting = CountPass(source, metrics, difficulty(np.dtype(np.float32)), workers)
    if folder is not None:
        return counting.cached_totals(folder, keys, group)
    if group.count > 1:
        raise ValueError(
            "`processes` requires `cache` for an `AccumulatedMetric`: the processes "
            "exchange counts through files. Pass a folder that all of them can access."
        )
    return counting.totals()


def _check_same(
    keys: Mapping[str | None, str],
    functions: Functions,
    quantities: Quantities,
    group: ProcessGroup,
) -> None:
    """Raises a ValueError if other processes measure something else."""
    reply = str(
        [
            (name, key, _describe(functions[name]), quantities[name].dtype.name)
            for name, key in keys.items()
        ]
    )
    replies = group.gather("comparing sources of difficulty", reply)
    others = [i for i, x in enumerate(replies) if x != reply]
    if others:
        raise ValueError(
            f"The processes measure different sources or use different functions or "
            f"dtypes: processes {others} differ from process {group.index}. Pass the "
            "same source and the same functions and dtypes in every process."
        )


def _describe(function: Callable[..., Any]) -> str:
    """Returns the name of a function, the same in every process."""
    if isinstance(function, AccumulatedMetric):
        parts = (function.count_fn, function.score_fn)
        return f"{function.size} {' '.join(map(_describe, parts))}"
    return getattr(function, "__qualname__", type(function).__qualname__)
