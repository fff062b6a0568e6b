"""Sources of examples: what they must have, and several as one."""

from __future__ import annotations

import bisect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.data.collate import check_rows
from jaxbucket.data.example import (
    Example,
    as_arrays,
    common_length,
    listed_names,
    matching_arrays,
    sequence_names,
)

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
    """Returns 32 hex digits: of some fixed examples, and of the source's own name."""
    some = np.unique(np.linspace(0, len(source) - 1, _SAMPLES).astype(int))
    own = str(getattr(source, "fingerprint", ""))
    examples = (read_example(source, int(index)) for index in some)
    return digest(own.encode(), *map(_to_bytes, examples))


def read_example(source: Source, index: int, purpose: str = "") -> Any:
    """Returns `source[index]`.

    Raises:
      ValueError: if that fails, however it does; it names the index and the purpose.
    """
    try:
        return source[index]
    except Exception as error:
        raise ValueError(
            f"`source[{index}]`{purpose} cannot be read: {type(error).__name__}: "
            f"{error}"
        ) from error


def read_to_cut(
    source: Source,
    index: int,
    measured: int,
    sequences: Sequence[str] | None,
    before: str,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns a whole example as arrays, and which of its features are cut.

    Args:
      source: examples by index.
      index: of the example.
      measured: the length that it had.
      sequences: the features that are cut, by default all with a leading axis.
      before: what is done to it, for messages: there are two sources.

    Raises:
      ValueError: if it cannot be read or cut, or is not as long as it was measured.
    """
    example: Example = read_example(source, index, before)
    try:
        arrays = as_arrays(example)
        names = sequence_names(arrays, sequences)
        length = common_length(arrays, names)
    except ValueError as error:
        raise ValueError(f"`source[{index}]`{before} cannot be cut: {error}") from error
    if length != measured:
        refuse_changed(index, length, measured, before)
    return arrays, names


def refuse_changed(index: int, found: int, measured: int, which: str = "") -> NoReturn:
    """Raises a ValueError that says which length was another."""
    raise ValueError(
        f"`source[{index}]`{which} has length {found}, but `lengths[{index}]="
        f"{measured}`: the data changed since it was measured, or these are the "
        "lengths of another source, or `length_fn` counts in another unit, such as "
        "words or seconds. Measure again, and leave out a `length_fn` that does not "
        "return the length of the arrays."
    )


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


def concatenate(sources: Sequence[Source]) -> Source:
    """Returns several sources as one, for a `Mixture` or one schedule over all.

    It gathers rows at once if all of them do.

    Example:
      >>> both = concatenate([["a", "b"], ["c"]])
      >>> len(both), both[2]
      (3, 'c')

    Args:
      sources: one or more, whose examples have the same features.

    Raises:
      ValueError: if there is none, or sources that gather rows have other features,
        dtypes or trailing shapes.
    """
    sources = list(sources)
    if not sources:
        raise ValueError("`sources` is empty: give at least one.")
    gathering = [source for source in sources if isinstance(source, RowSource)]
    if len(gathering) < len(sources):
        return _Concatenation(sources)
    _check_alike(gathering)
    if all(isinstance(source, SpanSource) for source in gathering):
        return _SpanConcatenation(gathering)
    return _RowConcatenation(gathering)


def _check_alike(sources: Sequence[RowSource]) -> None:
    names = {tuple(source.sequences) for source in sources}
    if len(names) > 1:
        raise ValueError(
            f"`sources` have sequences {sorted(names)}. Give all the same ones."
        )
    template = as_arrays(sources[0][0])
    for number, source in enumerate(sources):
        try:
            matching_arrays(source[0], template, list(source.sequences), 0)
        except ValueError as error:
            raise ValueError(
                f"`sources[{number}]` is not as `sources[0]`: {error}"
            ) from None


class _Concatenation:
    def __init__(self, sources: Sequence[Any]):
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources]).tolist()

    @property
    def fingerprint(self) -> str:
        """Names the sources that can name themselves."""
        own = [str(getattr(source, "fingerprint", "")) for source in self._sources]
        return digest("\n".join([*own, str(self._ends)]).encode())

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"`index={index}` must be from 0 to {len(self) - 1}.")
        which = bisect.bisect_right(self._ends, index)
        return self._sources[which][index - self._start(which)]

    def _start(self, which: int) -> int:
        return self._ends[which - 1] if which else 0


class _RowConcatenation(_Concatenation):
    @property
    def lengths(self) -> np.ndarray:
        return np.concatenate([source.lengths for source in self._sources])

    @property
    def sequences(self) -> tuple[str, ...]:
        return self._sources[0].sequences

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: bool = False,
    ) -> Batch:
        def gather(source: RowSource, own: np.ndarray) -> Batch:
            return source.collate(own, bucket, pad_value=pad_value, truncate=truncate)

        return self._merged(check_rows(rows, len(self), bucket), gather)

    def _merged(
        self, rows: np.ndarray, gather: Callable[[Any, np.ndarray], Batch]
    ) -> Batch:
        """One batch of what each source gathers, with all rows empty but its own."""
        which = np.searchsorted(self._ends, rows, side="right")
        which[rows == EMPTY_ROW] = EMPTY_ROW
        present = [int(k) for k in np.unique(which) if k != EMPTY_ROW] or [0]
        parts = []
        for k in present:
            own = np.where(which == k, rows - self._start(k), EMPTY_ROW)
            parts.append(gather(self._sources[k], own))
        merged, *others = parts
        for k, part in zip(present[1:], others, strict=True):
            for into, values in zip(merged, part, strict=True):
                for name in into:
                    into[name][which == k] = values[name][which == k]
        return merged


class _SpanConcatenation(_RowConcatenation):
    def collate_spans(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        lengths: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
    ) -> Batch:
        def gather(source: SpanSource, own: np.ndarray) -> Batch:
            return source.collate_spans(
                own, begins, lengths, bucket, pad_value=pad_value
            )

        return self._merged(check_rows(rows, len(self), bucket), gather)
