"""Measures the length or the difficulty of every example of a source."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast, overload

import numpy as np

from jaxbucket.base.checks import check_integer
from jaxbucket.base.process_group import ProcessGroup, SingleProcess
from jaxbucket.base.sizes import check_sequence_names
from jaxbucket.data.example import Sequences
from jaxbucket.data.example_spec import axis_labels, check_not_nested, sequence_length
from jaxbucket.data.measure_pass import Measurement, Pass
from jaxbucket.data.source import Source
from jaxbucket.data.spans import check_sequences
from jaxbucket.data.token_source import TokenSource


class MeasureOptions(TypedDict, total=False):
    """The options of `measure_lengths` and `measure_difficulty`."""

    num_workers: int
    cache: str | os.PathLike[str] | None
    cache_key: str | None
    processes: ProcessGroup | None
    progress: bool


@overload
def measure_lengths(
    source: Source,
    *,
    sequences: Mapping[str, Sequence[str]],
    length_fn: Mapping[str, Callable[[Any], int]] | None = None,
    share: tuple[int, int] | None = None,
    **options: Unpack[MeasureOptions],
) -> dict[str, np.ndarray]: ...
@overload
def measure_lengths(
    source: Source,
    *,
    length_fn: Mapping[str, Callable[[Any], int]],
    share: tuple[int, int] | None = None,
    **options: Unpack[MeasureOptions],
) -> dict[str, np.ndarray]: ...
@overload
def measure_lengths(
    source: Source,
    *,
    length_fn: Callable[[Any], int] | None = None,
    sequences: Sequence[str] | None = None,
    share: tuple[int, int] | None = None,
    **options: Unpack[MeasureOptions],
) -> np.ndarray: ...


def measure_lengths(
    source: Source,
    *,
    length_fn: Callable[[Any], int] | Mapping[str, Callable[[Any], int]] | None = None,
    sequences: Sequences = None,
    share: tuple[int, int] | None = None,
    num_workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    cache_key: str | None = None,
    processes: ProcessGroup | None = None,
    progress: bool = True,
) -> np.ndarray | dict[str, np.ndarray]:
    """Returns the length of every example, in one pass over the source.

    With `cache` the lengths are measured once and stored in that folder. A pass that
    was killed measures only the shares of the source that are missing.

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
        for each, in the order of the mapping. An example that lacks one of several
        sequences, as text without an image does, has an array of length 0 for it.
      share: `(index, count)`, to measure only part `index` of `count` parts of the
        source and store it in `cache`, which a task of another engine does, such as of
        Apache Beam. A call without it then reads what all tasks have stored.
      num_workers: number of worker processes; 0 measures in this process. The source
        and the function are pickled and sent to each worker.
      cache: folder in which lengths are stored. They are reused if `sequences`,
        `cache_key`, the number of examples, a fixed sample of the examples and the
        source's `fingerprint` attribute (if it has one) are unchanged.
      cache_key: name of `length_fn` in the cache. Required if both are given. Change it
        whenever a function changes, or when examples change but neither the sample nor
        the fingerprint shows it.
      processes: all participating processes, from `jb.Processes`. Each measures a share
        of the source, and `cache` must be a folder that all of them can access. By
        default only this process measures.
      progress: whether to show a progress bar on a terminal.

    Returns:
      `[N]` int32; with several sequences, a dict from the name of each to its `[N]`,
      sorted by name, as `plan_buckets` takes it. With `share`, only its examples.

    Raises:
      ValueError: if the source is empty, if an example has no positive length in any
        sequence, if a feature is nested, if `length_fn` has names that `sequences`
        lacks, if a feature lacks an axis, if `share` is no part or `cache_key` or
        `cache` is missing, or if processes measure different sources.
      RuntimeError: if a worker process dies.
    """
    is_single = share is None and not isinstance(sequences, Mapping)
    if length_fn is None and is_single and isinstance(source, TokenSource):
        check_sequences(source, cast(Sequence[str] | None, sequences))
        return source.lengths
    functions = _length_functions(length_fn, sequences)
    if length_fn is not None:
        _check_cache_key(cache, cache_key, "length_fn")
    measure = Measurement(source, functions, np.int32, "length_fn")
    group = processes or SingleProcess()
    if group.count > 1 and cache is None:
        raise ValueError(
            "`cache` is missing: the processes exchange lengths through files. Pass a "
            "folder that all of them can access."
        )
    label = str(axis_labels(sequences))
    options = (num_workers, cache, cache_key, group, progress)
    whole = Pass(measure, label, "Lengths", *options)
    if share is not None:
        return unnamed(whole.run(*_part(whole, share)))
    if group.count > 1:
        whole.run(*whole.share())
        group.gather("measuring lengths", "")
    lengths = whole.run(0, len(source))
    if length_fn is None:
        check_not_nested(source, sequences, lengths)
    return unnamed(lengths)


@overload
def measure_difficulty(
    source: Source,
    difficulty_fn: Callable[[Any], float],
    **options: Unpack[MeasureOptions],
) -> np.ndarray: ...
@overload
def measure_difficulty(
    source: Source,
    difficulty_fn: Mapping[str, Callable[[Any], float]],
    **options: Unpack[MeasureOptions],
) -> dict[str, np.ndarray]: ...


def measure_difficulty(
    source: Source,
    difficulty_fn: Callable[[Any], float] | Mapping[str, Callable[[Any], float]],
    *,
    num_workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    cache_key: str | None = None,
    processes: ProcessGroup | None = None,
    progress: bool = True,
) -> np.ndarray | dict[str, np.ndarray]:
    """Returns the difficulty of each example in this process's share.

    With several processes, each one measures a contiguous share of the source, in the
    order of their indices. This is the layout that `write_difficulty_index` expects.

    Example:
      >>> words = [{"text": "a b"}, {"text": "a b a"}]
      >>> measure_difficulty(words, lambda x: len(x["text"].split()), progress=False)
      array([2., 3.])

    Example: several metrics in one pass.
      >>> metrics = {"length": len, "letters": lambda x: len(set(x))}
      >>> scores = measure_difficulty(["aba", "ab"], metrics, progress=False)
      >>> scores["length"], scores["letters"]
      (array([3., 2.]), array([2., 2.]))

    Example: the rarity of tokens, `-log` of their share of all tokens, needs a sum over
    the source first.
      >>> source = [{"tokens": [5, 5, 5]}, {"tokens": [5, 2]}]
      >>> counts = sum(np.bincount(x["tokens"], minlength=10) for x in source)
      >>> surprise = np.log(counts.sum()) - np.log(np.maximum(counts, 1))
      >>> measure_difficulty(
      ...     source, lambda x: surprise[x["tokens"]].sum(), progress=False
      ... ).round(2)
      array([0.67, 1.83])

    Args:
      source: random-access source of examples.
      difficulty_fn: function from an example to a finite number; or a mapping from the
        name of each metric to such a function.
      num_workers: as for `measure_lengths`.
      progress: as for `measure_lengths`.
      cache: folder in which measured values are stored. Processes may use the same
        folder or folders of their own. Later runs read these files, and a run that was
        killed measures only the shares that are missing.
      cache_key: name of `difficulty_fn` in the cache. Required with `cache`. Change it
        whenever a function, or a model that it calls, changes.
      processes: all participating processes, from `jb.Processes`. By default only this
        process measures.

    Returns:
      `[n]` float64; with several metrics, a dict from the name of each to its `[n]`,
      sorted by name. `.astype` makes them smaller, for example int32 for counts.

    Raises:
      ValueError: if the source is empty, if an example has no finite difficulty, if
        `difficulty_fn` is an empty mapping, or if `cache_key` is missing. Every process
        raises if their sources differ, or the names or keys of their functions; the
        code of the functions is not compared.
      RuntimeError: if a worker process dies.
    """
    functions = _by_name("difficulty_fn", difficulty_fn)
    _check_cache_key(cache, cache_key, "difficulty_fn")
    measure = Measurement(source, functions, np.float64, "difficulty_fn")
    group = processes or SingleProcess()
    options = (num_workers, cache, cache_key, group, progress)
    share = Pass(measure, "difficulty", "Difficulty", *options)
    return unnamed(share.run(*share.share()))


def _part(whole: Pass, share: tuple[int, int]) -> tuple[int, int]:
    """Returns `(start, stop)`, the examples of one of several parts of a source."""
    index, count = (check_integer("share", number, least=0) for number in share)
    if whole.cache is None or index >= count:
        raise ValueError(
            f"`share={share}` with `cache={whole.cache}`: pass (index, count) with "
            "0 <= index < count, and the folder in which lengths are stored."
        )
    spans = whole.spans(0, len(whole.measure.source))
    ends = [0, *(stop for _, stop in spans)]
    return ends[len(spans) * index // count], ends[len(spans) * (index + 1) // count]


def _check_cache_key(
    cache: str | os.PathLike[str] | None, cache_key: str | None, argument: str
) -> None:
    """Raises a ValueError if functions in a cache have no name."""
    if cache is not None and cache_key is None:
        raise ValueError(
            f"`cache_key` is missing: the cache cannot detect changes of `{argument}`. "
            "Pass a name for it, and change it whenever the function changes."
        )


def _length_functions(length_fn: Any, sequences: Sequences) -> dict[str | None, Any]:
    """Returns the function that measures each sequence."""
    given = {} if length_fn is None else _by_name("length_fn", length_fn)
    names: Sequence[str | None] = []
    if isinstance(sequences, Mapping):
        check_sequence_names("sequences", sequences)
        names = list(sequences)
    elif length_fn is None:
        names = [None]
    elif isinstance(length_fn, Mapping):
        check_sequence_names("length_fn", length_fn)
    if sequences is not None and not given.keys() <= set(names or [None]):
        raise ValueError(
            f"`length_fn={length_fn!r}` does not fit `sequences={sequences!r}`. With "
            "several sequences, both are mappings with the same names."
        )
    functions = {x: functools.partial(sequence_length, sequences, x) for x in names}
    return dict(sorted({**functions, **given}.items()))


def _by_name(argument: str, functions: Any) -> dict[str | None, Any]:
    """Returns the functions that a user passed, sorted by name."""
    named = functions if isinstance(functions, Mapping) else {None: functions}
    if not named or not all(map(callable, named.values())):
        raise ValueError(
            f"`{argument}={functions!r}`: pass a function of an example, or a mapping "
            "from names to functions."
        )
    return {name: named[name] for name in sorted(named)}


def unnamed(values: Mapping[str | None, np.ndarray]) -> Any:
    """Returns values by name; or the value itself, if it has no name."""
    return values[None] if None in values else values
