"""A source whose examples run on from row to row, so that every row is full."""

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
      ValueError: if `max_seq_len` is not positive, or the lengths or the sequences are
        not those of the source. And from a part, if its example cannot be read or is
        not as long as it was measured.
    """
    return ConcatSource(source, max_seq_len, lengths, seed, sequences)


class ConcatSource(PartSource):
    """What `concat_then_split` returns.

    Attributes:
      lengths: `[M]` int32, those of the parts; not to be written to.
      packing: the rows that they fill.
      sequences: the features that are cut; None for all with a leading axis.
    """

    _before = ", before it was cut,"

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
        places = np.searchsorted(ends, starts, side="right")
        self._examples = order[places]
        self._begins = starts - (ends[places] - lengths[self._examples])
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
        """32 hex digits that name the source, as `contents` does, and how it is cut."""
        parts = (self._examples.astype("<i8"), self._begins.astype("<i8"))
        return digest(contents(self._source).encode(), *(x.data for x in parts))
