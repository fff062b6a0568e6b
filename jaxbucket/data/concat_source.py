"""A source whose examples run on from row to row, so that every row is full."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_lengths, check_positive, check_seed
from jaxbucket.base.digest import digest
from jaxbucket.base.permutation import fold, permute
from jaxbucket.data.source import (
    RowSource,
    Source,
    SpanSource,
    check_sequences,
    contents,
    read_to_cut,
)
from jaxbucket.packing.rows import Packing

# Another key than those of schedules, which may have the same seed.
_CONCAT = 0xC0A7


def concat_then_split(
    source: Source,
    max_seq_len: int,
    *,
    lengths: ArrayLike,
    seed: int = 0,
    sequences: Sequence[str] | None = None,
) -> ConcatSource:
    """Returns the source with examples end to end, cut where rows of T tokens end.

    An index of it is a part of an example, and `packing` says which parts fill a row:
    all rows but the last are full. No token is lost, and none is in two rows. Which
    part of the same length takes a place is drawn in every epoch; where examples are
    cut depends on the seed alone.

    Parts in a row do not see one another where attention has their segment ids. Where
    it may run across them, as in some pretraining, leave these out, and count positions
    by `jnp.arange(T)`.

    Example:
      >>> examples = [{"x": [1] * 5}, {"x": [2] * 4}, {"x": [3] * 3}]
      >>> source = concat_then_split(examples, 4, lengths=[5, 4, 3])
      >>> source.packing
      Packing(4 examples in 3 rows of 4, fill 100.0%)
      >>> [source[part]["x"].tolist() for part in range(len(source))]
      [[1, 1, 1, 1], [1], [3, 3, 3], [2, 2, 2, 2]]

    Args:
      source: examples by index.
      max_seq_len: T of every row.
      lengths: `[N]` integers, those of the examples, from `measure_lengths`.
      seed: of the order in which examples stand end to end.
      sequences: the features that are cut, by default all with a leading axis.

    Raises:
      ValueError: for lengths that `check_lengths` refuses or that are not those of the
        source, or `max_seq_len` that is not positive.
    """
    return ConcatSource(source, max_seq_len, lengths, seed, sequences)


class ConcatSource:
    """What `concat_then_split` returns.

    Attributes:
      lengths: `[M]` int32, those of the parts; not to be written to.
      packing: the rows that they fill.
      sequences: the features that are cut; None for all with a leading axis.
    """

    def __init__(
        self,
        source: Source,
        max_seq_len: int,
        lengths: ArrayLike,
        seed: int,
        sequences: Sequence[str] | None,
    ):
        seq_len = check_positive("max_seq_len", max_seq_len)
        lengths = check_lengths(lengths)
        if len(lengths) != len(source):
            raise ValueError(
                f"`lengths` has {len(lengths)} entries, but `source` has {len(source)} "
                "examples. Pass the lengths measured of it."
            )
        self.sequences = check_sequences(source, sequences)
        if isinstance(source, RowSource) and np.any(source.lengths != lengths):
            raise ValueError(
                "`lengths` are not those of `source`, which knows its own: pass "
                "`source.lengths`."
            )
        self._source = source
        self._measured = lengths
        size = len(lengths)
        order = permute(np.arange(size), size, fold(check_seed(seed), _CONCAT))
        ends = np.cumsum(lengths[order], dtype=np.int64)
        total = int(ends[-1])
        rows = np.arange(0, total, seq_len)
        starts = np.unique(np.concatenate([rows, ends[:-1]]))
        self.lengths = np.diff(starts, append=total).astype(np.int32)
        self.lengths.setflags(write=False)
        which = np.searchsorted(ends, starts, side="right")
        self._examples = order[which]
        self._begins = starts - (ends[which] - lengths[self._examples])
        splits = np.append(np.searchsorted(starts, rows), len(starts))
        most = int(np.diff(splits).max())
        self.packing = Packing((seq_len,), self.lengths, splits, most)

    def __repr__(self) -> str:
        return f"ConcatSource({len(self)} parts of {len(self._measured)} examples)"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"`index={index}` must be from 0 to {len(self) - 1}.")
        example, begin = int(self._examples[index]), int(self._begins[index])
        if isinstance(self._source, SpanSource):
            return self._gathered(example, begin, int(self.lengths[index]))
        measured = int(self._measured[example])
        arrays, names = read_to_cut(
            self._source, example, measured, self.sequences, ", before it was cut,"
        )
        end = begin + int(self.lengths[index])
        return {
            name: value[begin:end] if name in names else value
            for name, value in arrays.items()
        }

    def _gathered(self, example: int, begin: int, length: int) -> dict[str, Any]:
        """What such a source has of a part, without the rest of the example."""
        rows, begins, lengths = (np.array([x]) for x in (example, begin, length))
        batch = cast(SpanSource, self._source).collate_spans(
            rows, begins, lengths, Bucket(1, length), pad_value=0
        )
        return {name: value[0] for name, value in batch.features.items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that name the source, as `contents` does, and how it is cut."""
        parts = (self._examples.astype("<i8"), self._begins.astype("<i8"))
        return digest(contents(self._source).encode(), *(x.data for x in parts))
