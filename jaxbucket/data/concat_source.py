"""A source that concatenates examples and splits them, so that every row is full."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_positive, check_seed
from jaxbucket.base.digest import digest
from jaxbucket.base.permutation import fold, permute
from jaxbucket.data.part_source import PartSource
from jaxbucket.data.source import Source, contents
from jaxbucket.packing.rows import Packing

# Separates this permutation from those of schedules with the same seed.
_CONCAT = 0xC0A7


def concat_then_split(
    source: Source,
    max_seq_len: int,
    *,
    lengths: ArrayLike,
    seed: int = 0,
    sequences: Sequence[str] | None = None,
) -> ConcatSource:
    """Concatenates shuffled examples and splits them into rows of T tokens.

    Each element of the returned source is a part of an example. Its `packing` assigns
    the parts to rows, of which all but the last are full. Every token is in exactly one
    row. The points at which examples are split depend only on the seed; parts of equal
    length are randomly permuted among their positions in every epoch.

    Attention that uses the segment ids keeps the parts of a row apart. To attend across
    parts, as some pretraining does, ignore the segment ids and use `jnp.arange(T)` as
    positions.

    Example:
      >>> examples = [{"x": [1] * 5}, {"x": [2] * 4}, {"x": [3] * 3}]
      >>> source = concat_then_split(examples, 4, lengths=[5, 4, 3])
      >>> source.packing
      Packing(4 examples in 3 rows of 4, fill 100.0%)
      >>> [source[part]["x"].tolist() for part in range(len(source))]
      [[1, 1, 1, 1], [1], [3, 3, 3], [2, 2, 2, 2]]

    Args:
      source: random-access source of examples.
      max_seq_len: number of tokens T in every row.
      lengths: `[N]` integers, the lengths of the examples, from `measure_lengths`.
      seed: seed of the order in which examples are concatenated.
      sequences: names of the features that are split. By default all features with a
        leading axis.

    Returns:
      The source of parts, with the rows that they fill as `packing`.

    Raises:
      ValueError: if `max_seq_len` is not positive, or `lengths` or `sequences` do not
        match the source. Reading a part raises if its example cannot be read or its
        length has changed.
    """
    return ConcatSource(source, max_seq_len, lengths, seed, sequences)


class ConcatSource(PartSource):
    """The source that `concat_then_split` returns.

    Attributes:
      lengths: `[M]` int32, the lengths of the parts, read-only.
      packing: the rows that the parts fill.
      sequences: names of the features that are split; None for all with a leading axis.
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
        super().__init__(source, lengths, sequences)
        lengths, size = self._example_lengths, len(self._example_lengths)
        order = permute(np.arange(size), size, fold(check_seed(seed), _CONCAT))
        ends = np.cumsum(lengths[order], dtype=np.int64)
        total = int(ends[-1])
        rows = np.arange(0, total, seq_len)
        starts = np.unique(np.concatenate([rows, ends[:-1]]))
        self.lengths = np.diff(starts, append=total).astype(np.int32)
        self.lengths.setflags(write=False)
        ranks = np.searchsorted(ends, starts, side="right")
        self._examples = order[ranks]
        self._begins = starts - (ends[ranks] - lengths[self._examples])
        splits = np.append(np.searchsorted(starts, rows), len(starts))
        most = int(np.diff(splits).max())
        self.packing = Packing((seq_len,), self.lengths, splits, most)

    def __repr__(self) -> str:
        return (
            f"ConcatSource({len(self)} parts of {len(self._example_lengths)} examples)"
        )

    def _spans(self, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._examples[parts], self._begins[parts]

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the source and how it is split."""
        parts = (self._examples.astype("<i8"), self._begins.astype("<i8"))
        return digest(contents(self._source).encode(), *(x.data for x in parts))
