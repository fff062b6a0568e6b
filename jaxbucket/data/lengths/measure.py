"""Measures the length of every example of a source."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack, overload

import numpy as np

from jaxbucket.base.process_group import ProcessGroup, SingleProcess
from jaxbucket.base.sizes import check_sequence_names
from jaxbucket.data.example import Sequences, example_length, listed_names
from jaxbucket.data.lengths.cache import ArrayFile, join, share_of
from jaxbucket.data.lengths.cache_key import CacheKey, file_keys
from jaxbucket.data.lengths.parallel_pass import Workers
from jaxbucket.data.lengths.quantities import LENGTH
from jaxbucket.data.lengths.source_pass import (
    Functions,
    PassOptions,
    SourcePass,
    functions_by_name,
    num_examples,
    unnamed,
)
from jaxbucket.data.lengths.together import write_together
from jaxbucket.data.sequence_axes import (
    axis_labels,
    check_not_nested,
    length_functions,
)
from jaxbucket.data.source import RowSource, Source, check_sequences

_PATH_CHARACTERS = 200


@overload
def measure_lengths(
    source: Source,
    *,
    sequences: Mapping[str, Sequence[str]],
    length_fn: Mapping[str, Callable[[Any], int]] | None = None,
    **options: Unpack[PassOptions],
) -> dict[str, np.ndarray]: ...
@overload
def measure_lengths(
    source: Source,
    *,
    length_fn: Mapping[str, Callable[[Any], int]],
    **options: Unpack[PassOptions],
) -> dict[str, np.ndarray]: ...
@overload
def measure_lengths(
    source: Source,
    *,
    length_fn: Callable[[Any], int] | None = None,
    sequences: Sequence[str] | None = None,
    **options: Unpack[PassOptions],
) -> np.ndarray: ...


def measure_lengths(
    source: Source,
    *,
    length_fn: Callable[[Any], int] | Mapping[str, Callable[[Any], int]] | None = None,
    sequences: Sequences = None,
    num_workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    cache_key: CacheKey = None,
    processes: ProcessGroup | None = None,
    progress: bool = True,
) -> np.ndarray | dict[str, np.ndarray]:
    """Returns the length of every example, in one pass over the source.

    With `cache` the lengths are measured once and stored in that folder; later calls
    map the stored file into memory. A pass that was killed resumes where it stopped.

    Example:
      >>> measure_lengths([{"tokens": [1, 2, 3]}, {"tokens": [4]}], progress=False)
      array([3, 1], dtype=int32)

    Example: several lengths per example, still in one pass.
      >>> pairs = [{"source": [5, 6], "target": [7]}, {"source": [8], "target": [9]}]
      >>> sequences = {"source": ["source"], "target": ["target"]}
      >>> measure_lengths(pairs, sequences=sequences, progress=False)["source"]
      array([2, 1], dtype=int32)

    Args:
      source: random-access source of examples.
      length_fn: function from an example to its length. By default the common length of
        the features in `sequences`. With several sequences: a mapping from the name of
        a sequence to the function that measures it.
      sequences: names of the features that will be padded. By default all features with
        a leading axis. With several sequences: a mapping from each to the features that
        share its length, as in `MeshLoader`. A feature in several of them has an axis
        for each, in the order of the mapping.
      num_workers: number of worker processes; 0 measures in this process. The source
        and the function are pickled and sent to each worker.
      cache: folder in which lengths are stored, those of each sequence in a file. A
        stored file is reused if `sequences`, `cache_key`, the number of examples, a
        fixed sample of the examples and the source's `fingerprint` attribute (if it has
        one) are unchanged.
      cache_key: name of `length_fn` in the cache; a mapping, if `length_fn` is one.
        Required if both `length_fn` and `cache` are given. Change it whenever the
        function changes, or when examples change but neither the sample nor the
        fingerprint shows it.
      processes: all participating processes, from `jb.Processes`. Each measures a share
        of the source, and `cache` must be a folder that all of them can access. By
        default only this process measures.
      progress: whether to show a progress bar on a terminal.

    Returns:
      `[N]` int32, read-only if it is read from the cache; with several sequences, a
      dict from the name of each to its `[N]`, sorted by name, as `plan_buckets` takes
      it.

    Raises:
      ValueError: if the source is a path or empty, if an example has no positive
        length, if a feature is nested, if `length_fn` has names that `sequences` lacks,
        if a feature lacks an axis, if `cache_key` is missing or does not name each
        function, or if a cached file is truncated or was not written by this function.
      RuntimeError: if a worker process dies.
    """
    _check_not_a_path(source)
    size = num_examples(source)
    is_single = not isinstance(sequences, Mapping)
    if length_fn is None and is_single and isinstance(source, RowSource):
        check_sequences(source, sequences)
        return source.lengths
    features = _features(length_fn, sequences)
    functions = _functions(length_fn, sequences, features)
    quantities = dict.fromkeys(functions, LENGTH)
    workers = Workers(num_workers, progress)
    measuring = SourcePass(source, functions, quantities, workers)
    if cache is not None:
        keys = file_keys(
            source,
            features,
            length_fn,
            argument="length_fn",
            cache=cache,
            cache_key=cache_key,
        )
        files = {
            name: ArrayFile(pathlib.Path(cache) / f"lengths-{key}.npy", 0, size)
            for name, key in keys.items()
        }
        group = processes or SingleProcess()
        write_together("lengths", files, group, _shares, measuring.write, join)
        lengths = {name: file.read() for name, file in files.items()}
    elif processes is not None and processes.count > 1:
        raise ValueError(
            "`processes` requires `cache`: the processes exchange lengths through "
            "files. Pass a folder that all of them can access."
        )
    else:
        lengths = measuring.values(0, size)
    if length_fn is None:
        check_not_nested(source, sequences, lengths)
    return unnamed(lengths)


def _features(length_fn: Any, sequences: Sequences) -> dict[str | None, Any]:
    """Returns what identifies the features of each sequence; None for the default.

    Raises:
      ValueError: if `length_fn` and `sequences` do not fit together.
    """
    if isinstance(sequences, Mapping):
        check_sequence_names("sequences", sequences)
        if length_fn is not None and not isinstance(length_fn, Mapping):
            raise ValueError(
                f"`length_fn` is one function, but `sequences` names "
                f"{list(sequences)}. Pass a mapping with the function of each."
            )
        if unknown := [name for name in length_fn or () if name not in sequences]:
            raise ValueError(
                f"`length_fn` has functions for {unknown}, but `sequences` names "
                f"{list(sequences)}. Use the same names."
            )
        return dict(sorted(axis_labels(sequences).items()))
    if not isinstance(length_fn, Mapping):
        return {None: sequences and listed_names(sequences)}
    if sequences is not None:
        raise ValueError(
            f"`length_fn` has functions for {list(length_fn)}, but `sequences="
            f"{sequences!r}` names the features of one sequence. Pass a mapping with "
            "the features of each, or remove `sequences`."
        )
    check_sequence_names("length_fn", length_fn)
    return dict.fromkeys(sorted(length_fn))


def _functions(
    length_fn: Any, sequences: Sequences, names: Collection[str | None]
) -> Functions:
    """Returns the function that measures each sequence."""
    by_features: Functions
    if isinstance(sequences, Mapping):
        functions = length_functions(sequences)
        by_features = {name: functions[name] for name in sorted(functions)}
    else:
        measure = functools.partial(example_length, sequences=sequences)
        by_features = dict.fromkeys(names, measure)
    if length_fn is None:
        return by_features
    return {**by_features, **functions_by_name("length_fn", length_fn)}


def _shares(file: ArrayFile, count: int) -> list[ArrayFile]:
    """Returns the files in which `count` processes store their shares of a file."""
    return [
        ArrayFile(
            file.path.with_name(f"{file.path.stem}-{index}-of-{count}.npy"),
            *share_of(file.stop, index, count),
        )
        for index in range(count)
    ]


def _check_not_a_path(source: Any) -> None:
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fsdecode(source)[:_PATH_CHARACTERS]
        raise ValueError(
            f"`source` is a path, {path!r}. Load the file first, for example with "
            "`np.load` or `json.load`, or run `jaxbucket measure "
            f"{path} -o lengths.npy` and `np.load` the result."
        )
