"""Sources of examples: what they must have, and what names their contents."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.data.example import listed_names

# How many examples stand for the contents of all.
_SAMPLES = 16


class Source(Protocol):
    """Random access to examples: a list, a `grain` source or `MapDataset`, ..."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class RowSource(Protocol):
    """A source that gathers the rows of a batch at once, such as a `TokenFile`.

    Attributes:
      lengths: `[N]` int32, known without reading an example.
      sequences: the features that are padded.
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
    """One whose `collate` gathers packed rows as well, `[B, max_segments]`."""

    gathers_packed_rows: Literal[True]


@runtime_checkable
class SpanSource(RowSource, Protocol):
    """One that gathers parts of examples as well, so that these can be split."""

    def collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue,
    ) -> Batch: ...


def check_sequences(
    source: Source | RowSource, sequences: Sequence[str] | None
) -> Sequence[str] | None:
    """Returns the sequences of a source; None for all features with a leading axis.

    Raises:
      ValueError: if they are not those of a source that gathers rows, which has its
        own.
    """
    names = None if sequences is None else listed_names(sequences)
    if not isinstance(source, RowSource):
        return names
    if names not in (None, list(source.sequences)):
        raise ValueError(
            f"`sequences={names}`: the source has {list(source.sequences)}, by itself. "
            "Leave them out, or write it with these."
        )
    return source.sequences


def contents(source: Source) -> str:
    """Returns 32 hex digits: of some fixed examples, and the source's fingerprint."""
    indices = np.unique(np.linspace(0, len(source) - 1, _SAMPLES).astype(int))
    examples = (read_example(source, int(index)) for index in indices)
    return digest(_fingerprint(source).encode(), *map(_to_bytes, examples))


def fingerprints(sources: Sequence[Source]) -> str:
    """Returns the fingerprints that sources have of themselves, one on each line."""
    return "\n".join(map(_fingerprint, sources))


def _fingerprint(source: Source) -> str:
    return str(getattr(source, "fingerprint", ""))


def read_example(source: Source, index: int, purpose: str = "") -> Any:
    """Returns `source[index]`.

    Raises:
      ValueError: if that raises anything; it names the index and the purpose.
    """
    try:
        return source[index]
    except Exception as error:
        raise ValueError(
            f"`source[{index}]`{purpose} cannot be read: {type(error).__name__}: "
            f"{error}"
        ) from error


def refuse_changed(index: int, length: int, measured: int, which: str = "") -> NoReturn:
    """Raises a ValueError that says which example has another length than before."""
    raise ValueError(
        f"`source[{index}]`{which} has length {length}, but `lengths[{index}]="
        f"{measured}`: the data changed since it was measured, or these are the "
        "lengths of another source, or `length_fn` counts in another unit, such as "
        "words or seconds. Measure again, and leave out a `length_fn` that does not "
        "return the length of the arrays."
    )


def check_measured(lengths: np.ndarray, measured: np.ndarray) -> None:
    """Raises a ValueError if an example is not as long as it was measured.

    Args:
      lengths: `[N]` integers, as the source knows them.
      measured: `[N]` integers.
    """
    changed = np.flatnonzero(lengths != measured)
    if len(changed):
        index = int(changed[0])
        refuse_changed(index, int(lengths[index]), int(measured[index]))


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
    """What objects hold, the same in every process."""
    text = str(values.tolist())
    if " at 0x" not in text:
        return text
    # Some of them are shown by their addresses.
    try:
        return str(pickle.dumps(values.tolist(), protocol=4))
    except Exception:
        return str([type(value).__qualname__ for value in values.ravel().tolist()])
