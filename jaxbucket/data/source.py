"""Protocols of sources of examples, and digests of their contents."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.data.example import listed_names

# Number of examples whose contents represent the whole source.
_SAMPLES = 16


class Source(Protocol):
    """Random access to examples, such as a list, a `grain` source or a `MapDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class RowSource(Protocol):
    """A source that gathers all rows of a batch in one call, such as a `TokenFile`.

    Attributes:
      lengths: `[N]` int32, known without reading an example.
      sequences: names of the features that are padded.
    """

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def sequences(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def collate(
        self, rows: np.ndarray, bucket: Bucket, *, pad_value: PadValue, truncate: bool
    ) -> Batch: ...


@runtime_checkable
class PackedSource(RowSource, Protocol):
    """A row source that also gathers packed rows, `[B, max_segments]`."""

    gathers_packed_rows: Literal[True]


@runtime_checkable
class SpanSource(RowSource, Protocol):
    """A row source that also gathers spans of examples, so that they can be split."""

    def collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue,
    ) -> Batch: ...


def gathers(source: Any, packed: bool, truncates_left: bool) -> bool:
    """Returns whether a source gathers the batches of a schedule.

    Args:
      source: random-access source of examples.
      packed: whether rows hold several examples.
      truncates_left: whether batches have the last tokens of longer examples.
    """
    needed = PackedSource if packed else RowSource
    is_left = not truncates_left or isinstance(source, SpanSource)
    return isinstance(source, needed) and is_left


def check_sequences(
    source: Source | RowSource, sequences: Sequence[str] | None
) -> Sequence[str] | None:
    """Returns the sequence features of a source; None for all with a leading axis.

    Raises:
      ValueError: if the source declares its sequences, and `sequences` differs.
    """
    names = None if sequences is None else listed_names(sequences)
    if not isinstance(source, RowSource):
        return names
    if names not in (None, list(source.sequences)):
        raise ValueError(
            f"`sequences={names}`, but the source has {list(source.sequences)}. Remove "
            "`sequences`, or write the source with these sequences."
        )
    return source.sequences


def contents(source: Source) -> str:
    """Returns a digest of a fixed sample of examples and the source's fingerprint."""
    indices = np.unique(np.linspace(0, len(source) - 1, _SAMPLES).astype(int))
    examples = (read_example(source, int(index)) for index in indices)
    return digest(_fingerprint(source).encode(), *map(_to_bytes, examples))


def fingerprints(sources: Sequence[Source]) -> str:
    """Returns the fingerprints of sources, one per line, empty if there is none."""
    return "\n".join(map(_fingerprint, sources))


def _fingerprint(source: Source) -> str:
    return str(getattr(source, "fingerprint", ""))


def check_index(source: Source, index: int) -> int:
    """Returns the index of an example as an int.

    Raises:
      IndexError: if it is negative or too large.
    """
    index = operator.index(index)
    if not 0 <= index < len(source):
        raise IndexError(f"`index={index}` must be from 0 to {len(source) - 1}.")
    return index


def read_example(source: Source, index: int, purpose: str = "") -> Any:
    """Returns `source[index]`.

    Raises:
      ValueError: if reading raises; the message names the index and the purpose.
    """
    try:
        return source[index]
    except Exception as error:
        raise ValueError(
            f"`source[{index}]`{purpose} cannot be read: {type(error).__name__}: "
            f"{error}"
        ) from error


def raise_length_changed(
    index: int, length: int, measured: int, which: str = ""
) -> NoReturn:
    """Raises a ValueError for an example whose length differs from the measured one."""
    raise ValueError(
        f"`source[{index}]`{which} has length {length}, but `lengths[{index}]="
        f"{measured}`. The data changed since it was measured, or the lengths belong "
        "to a different source, or `length_fn` counts a different unit, such as words "
        "or seconds. Measure the lengths again, with a `length_fn` that returns the "
        "length of the arrays."
    )


def check_measured(lengths: np.ndarray, measured: np.ndarray) -> None:
    """Raises a ValueError if the length of an example has changed.

    Args:
      lengths: `[N]` integers, the lengths that the source declares.
      measured: `[N]` integers, the lengths that were measured.
    """
    changed = np.flatnonzero(lengths != measured)
    if len(changed):
        index = int(changed[0])
        raise_length_changed(index, int(lengths[index]), int(measured[index]))


def _to_bytes(example: Any) -> bytes:
    if not isinstance(example, Mapping):
        example = {"": example}
    parts = []
    for name in sorted(example):
        value = np.asarray(example[name])
        parts += [name, value.dtype.str, str(value.shape)]
        parts.append(
            _object_text(value) if value.dtype.hasobject else str(value.tobytes())
        )
    return "\n".join(parts).encode()


def _object_text(values: np.ndarray) -> str:
    """Returns a string of objects that is the same in every process."""
    text = str(values.tolist())
    if " at 0x" not in text:
        return text
    # The text contains memory addresses, which differ between processes.
    try:
        return str(pickle.dumps(values.tolist(), protocol=4))
    except Exception:
        return str([type(value).__qualname__ for value in values.ravel().tolist()])
