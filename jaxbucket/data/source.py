"""What a source of examples provides, and digests of its contents."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxbucket.base.digest import digest
from jaxbucket.base.notes import Noting

# Number of examples whose contents represent the whole source.
_SAMPLES = 16


class Source(Protocol):
    """Random access to examples, such as a list, a `grain` source or a `MapDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def contents(source: Source) -> str:
    """Returns a digest of a fixed sample of examples and the source's fingerprint."""
    indices = np.unique(np.linspace(0, len(source) - 1, _SAMPLES).astype(int))
    examples = (_to_bytes(source, int(index)) for index in indices)
    return digest(fingerprints([source]).encode(), *examples)


def fingerprints(sources: Sequence[Source]) -> str:
    """Returns the fingerprints of sources, one per line, empty if there is none."""
    return "\n".join(str(getattr(source, "fingerprint", "")) for source in sources)


def check_index(source: Source, index: int) -> int:
    """Returns the index of an example as an int."""
    index = operator.index(index)
    if not 0 <= index < len(source):
        raise IndexError(f"`index={index}` must be from 0 to {len(source) - 1}.")
    return index


def check_length(index: int, length: int, measured: int, which: str = "") -> None:
    """Raises a ValueError if an example no longer has the length that was measured."""
    if length == measured:
        return
    raise ValueError(
        f"`source[{index}]`{which} has length {length}, but `lengths[{index}]="
        f"{measured}`. Measure the lengths of its arrays again."
    )


def check_measured(lengths: np.ndarray, measured: np.ndarray) -> None:
    """Raises a ValueError if the length of an example has changed.

    Args:
      lengths: `[N]` integers, the lengths that the source declares.
      measured: `[N]` integers, the lengths that were measured.
    """
    for index in np.flatnonzero(lengths != measured)[:1].tolist():
        check_length(index, int(lengths[index]), int(measured[index]))


def _to_bytes(source: Source, index: int) -> bytes:
    with Noting(f"This is `source[{index}]`."):
        example = source[index]
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
