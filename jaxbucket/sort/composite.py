"""Composite keys: columns and index as one number, or a few bytes, in the same order.

A column becomes unsigned integers in the same order, less their minimum; columns and
the index behind them are then put side by side in as few bits as they need. If 64 bits
are enough, a composite key is one uint64, which numpy sorts by vector instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_WORD_BITS = 64
# Rows at a time, so that intermediate arrays stay in the cache.
_BLOCK = 1 << 15


@dataclasses.dataclass(frozen=True)
class Column:
    """Dtype and direction of a column, the same on every device.

    Attributes:
      dtype: of its keys.
      descending: whether the largest come first; NaN comes last either way.
    """

    dtype: np.dtype
    descending: bool

    def __str__(self) -> str:
        return f"{self.dtype} {'descending' if self.descending else 'ascending'}"

    @property
    def unsigned(self) -> np.dtype:
        return np.dtype(f"u{self.dtype.itemsize}")

    def encode(self, keys: np.ndarray) -> np.ndarray:
        """Returns `[n]` unsigned integers of the same size in the keys' order.

        Those that are equal get the same: 0.0 and -0.0, and all NaNs.
        """
        sign = self._sign
        if self.dtype.kind == "f":
            bits = np.array(keys).view(self.unsigned)
            bits[bits == sign] = 0
            bits[np.isnan(keys)] = ~(sign ^ sign) if self.descending else ~sign
            # The more below zero, the greater are the bits of a float.
            bits ^= -(bits >> self._shift) | sign
        else:
            bits = keys.astype(self.unsigned)
            if self.dtype.kind == "i":
                bits ^= sign
        return np.invert(bits, out=bits) if self.descending else bits

    def decode(self, bits: np.ndarray) -> np.ndarray:
        """Returns the `[n]` keys of encoded ones, which are overwritten."""
        sign = self._sign
        if self.descending:
            np.invert(bits, out=bits)
        if self.dtype.kind == "f":
            bits ^= ((bits >> self._shift) - self.unsigned.type(1)) | sign
        elif self.dtype.kind == "i":
            bits ^= sign
        return bits.view(self.dtype)

    @property
    def _shift(self) -> np.unsignedinteger:
        return self.unsigned.type(8 * self.dtype.itemsize - 1)

    @property
    def _sign(self) -> np.unsignedinteger:
        return self.unsigned.type(1) << self._shift


@dataclasses.dataclass(frozen=True)
class _Field:
    """The bits of a composite key that hold one number.

    Attributes:
      word: of the key.
      shift: the number of lower bits in the word.
      bits: the width.
      is_highest: whether no field of the word is above it.
    """

    word: int
    shift: int
    bits: int
    is_highest: bool


class Composite:
    """The layout of columns and index side by side.

    Args:
      columns: compared left to right.
      ranges: `[columns, 2]` uint64, the least and the greatest of each as encoded.
      size: the number of keys; indices are smaller.

    Attributes:
      dtype: of the composite keys: uint64, or bytes that compare as their words do.
    """

    def __init__(self, columns: Sequence[Column], ranges: np.ndarray, size: int):
        self._columns = tuple(columns)
        self._least = ranges[:, 0]
        spans = [int(high) - int(low) for low, high in ranges]
        self._fields, num_words = _side_by_side([*spans, max(size - 1, 0)])
        self.dtype = np.dtype(np.uint64 if num_words == 1 else f"S{8 * num_words}")

    @property
    def num_words(self) -> int:
        """uint64 words of a composite key."""
        return self.dtype.itemsize // 8

    def encode(self, keys: Sequence[np.ndarray], first: int) -> np.ndarray:
        """Returns `[n]` composite keys of columns whose first row has this index."""
        size = len(keys[0])
        words = np.empty((size, self.num_words), np.uint64)
        indices = np.arange(first, first + min(size, _BLOCK), dtype=np.uint64)
        for start in range(0, size, _BLOCK):
            block = words[start : start + _BLOCK]
            for i, column in enumerate(self._columns):
                bits = column.encode(keys[i][start : start + _BLOCK])
                bits -= self._least[i].astype(bits.dtype)
                self._put(block, i, bits)
            self._put(block, -1, indices[: len(block)])
            indices += np.uint64(_BLOCK)
        if self.num_words == 1:
            return words[:, 0]
        # Of bytes the first one counts most.
        return words.byteswap(inplace=True).view(self.dtype)[:, 0]

    def _put(self, words: np.ndarray, i: int, bits: np.ndarray) -> None:
        field = self._fields[i]
        word, shift = words[:, field.word], np.uint64(field.shift)
        if field.is_highest:
            word[:] = bits
            word <<= shift
        else:
            bits = bits.astype(np.uint64, copy=False)
            word |= bits << shift if field.shift else bits

    def decode_into(
        self, composite: np.ndarray, keys: Sequence[np.ndarray], index: np.ndarray
    ) -> None:
        """Writes columns and index of `[n]` composite keys into `[n]` arrays."""
        words = composite.view(np.uint64).reshape(len(composite), self.num_words)
        for start in range(0, len(composite), _BLOCK):
            rows = slice(start, start + _BLOCK)
            block = words[rows] if self.num_words == 1 else words[rows].byteswap()
            for i, column in enumerate(self._columns):
                bits = self._get(block, i) + self._least[i]
                keys[i][rows] = column.decode(bits.astype(column.unsigned))
            index[rows] = self._get(block, -1)

    def _get(self, words: np.ndarray, i: int) -> np.ndarray:
        field = self._fields[i]
        mask = np.uint64((1 << field.bits) - 1)
        return (words[:, field.word] >> np.uint64(field.shift)) & mask


def _side_by_side(greatest: Sequence[int]) -> tuple[list[_Field], int]:
    """Fields for numbers up to these, the first highest; and the number of words."""
    fields: list[_Field] = []
    word, used = 0, 0
    for value in greatest:
        bits = value.bit_length()
        if used + bits > _WORD_BITS:
            word, used = word + 1, 0
        # A shift by the whole word is undefined, and a field without bits needs none.
        shift = _WORD_BITS - used - bits if bits else 0
        fields.append(_Field(word, shift, bits, is_highest=used == 0))
        used += bits
    return fields, word + 1
