"""Examples with several lengths, counted by the T that they need."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxbucket.base.sizes import row_keys


@dataclasses.dataclass(frozen=True, eq=False)
class Points:
    """The distinct combinations of T that examples need, and how many need each.

    A T is represented by its index in the list of possible T of its sequence.

    Attributes:
      values: for each of the Q sequences the possible T, increasing int64.
      indices: `[P, Q]` int64, indices into `values`: the least T that hold an example.
      counts: `[P]` int64, the number of examples.
    """

    values: tuple[np.ndarray, ...]
    indices: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(
        cls, lengths: np.ndarray, multiples: np.ndarray, last: np.ndarray, most: int
    ) -> Points:
        """Returns the points of examples.

        Args:
          lengths: `[N, Q]` integers, 0 for a sequence that an example lacks.
          multiples: `[Q]` integers, of which every T of a sequence is a multiple.
          last: `[Q]` multiples of these, the longest possible T.
          most: if there are at most this many combinations of T, all are possible.
            Otherwise, only the lengths of examples and `last`, rounded up, are.
        """
        units = np.maximum(-(-lengths // multiples), 1).T
        ends = (last // multiples).tolist()
        if np.prod(last // multiples, dtype=np.float64) <= most:
            present = [np.arange(1, end + 1) for end in ends]
        else:
            pairs = zip(units, ends, strict=True)
            present = [np.unique(np.append(column, end)) for column, end in pairs]
        pairs = zip(present, units, strict=True)
        indices = [np.searchsorted(values, column) for values, column in pairs]
        values = tuple(map(np.multiply, present, multiples.tolist()))
        return _merged(values, indices, np.ones(len(lengths), np.int64))

    def __len__(self) -> int:
        return len(self.counts)

    @functools.cached_property
    def columns(self) -> np.ndarray:
        """`[Q, P]` int32: the indices, contiguous for each sequence."""
        return np.ascontiguousarray(self.indices.T, np.int32)

    @property
    def last(self) -> np.ndarray:
        """`[Q]` int64: the indices of the longest T."""
        return np.array([len(values) - 1 for values in self.values])

    def seq_lens(self, indices: np.ndarray) -> np.ndarray:
        """Returns the T of shapes, `[..., Q]`, from their indices, `[..., Q]`."""
        columns = [values[indices[..., q]] for q, values in enumerate(self.values)]
        return np.stack(columns, axis=-1)

    def indices_of(self, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the indices of T, `[n, Q]`, rounded up to possible ones."""
        columns = zip(self.values, seq_lens.T, strict=True)
        return np.stack([np.searchsorted(values, t) for values, t in columns], axis=1)

    def frontier(self) -> np.ndarray:
        """Returns the points that no other point dominates, `[n, Q]` indices."""
        # A dominating point has a larger sum. Those are compared first.
        order = np.argsort(-self.indices.sum(axis=1), kind="stable")
        left, kept = self.indices[order], []
        while len(left):
            kept.append(left[0])
            left = left[(left > left[0]).any(axis=1)]
        return np.array(kept).reshape(-1, len(self.values))

    def held(self, shape: np.ndarray) -> np.ndarray:
        """Returns which points a shape holds, `[P]` bool, from its indices, `[Q]`."""
        held = self.columns[0] <= shape[0]
        for column, end in zip(self.columns[1:], shape[1:], strict=True):
            held &= column <= end
        return held

    def restricted(self, axes: list[np.ndarray]) -> Points:
        """Returns the points if only some T are possible, the last among them.

        Their increasing indices are given for each sequence.
        """
        sides = zip(axes, self.values, self.columns, strict=True)
        indices = [
            np.searchsorted(axis, np.arange(len(values)))[column]
            for axis, values, column in sides
        ]
        values = tuple(map(np.take, self.values, axes))
        return _merged(values, indices, self.counts)

    def quantiles(self, size: int) -> list[np.ndarray]:
        """Returns at most `size` indices of T for each sequence, including the last.

        Between two of them are about equally many examples and tokens.
        """
        return [
            _quantiles(values, np.bincount(column, self.counts, len(values)), size)
            for values, column in zip(self.values, self.columns, strict=True)
        ]

    def near(self, shapes: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
        """Returns the indices of T that are at given distances from those of shapes."""
        axes = []
        for column, values in zip(shapes.T, self.values, strict=True):
            neighbors = (column[:, None] + offsets).ravel()
            inside = (neighbors >= 0) & (neighbors < len(values))
            axes.append(np.unique(neighbors[inside]))
        return axes


def _merged(
    values: tuple[np.ndarray, ...], indices: list[np.ndarray], counts: np.ndarray
) -> Points:
    """Returns points from indices that may occur several times, `[n]` for each side."""
    rows = np.stack(indices, axis=1)
    keys = row_keys(rows, [len(column) - 1 for column in values])
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    totals = np.bincount(which, counts).astype(np.int64)
    return Points(values, rows[first], totals)


def _quantiles(values: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    if len(values) <= size:
        return np.arange(len(values))
    tokens = counts * values
    # The square root keeps candidates apart where there are very many examples.
    density = np.sqrt(counts / counts.sum() + tokens / tokens.sum())
    cumulative = np.cumsum(density)
    shares = cumulative[-1] * np.arange(1, size) / size
    chosen = np.searchsorted(cumulative, shares)
    return np.unique(np.append(chosen, len(values) - 1).clip(max=len(values) - 1))
