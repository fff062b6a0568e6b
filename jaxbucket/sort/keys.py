"""Composite keys: columns and index packed into one sortable number or byte string.

Each column is mapped to unsigned integers by an order-preserving encoding, and its
minimum is subtracted. The columns, followed by the index, are then packed into as few
bits as they need. If 64 bits are enough, a composite key is one uint64, which numpy
sorts with SIMD instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_WORD_BITS = 64
# The number of rows per block, so that intermediate arrays stay in the cache.
_BLOCK = 1 << 15


@dataclasses.dataclass(frozen=True)
class Column:
    """The dtype and direction of a column, the same on every device.

    Attributes:
      dtype: the dtype of the keys.
      descending: whether the largest keys come first. NaN comes last either way.
    """

    dtype: np.dtype
    descending: bool

    def __str__(self) -> str:
        return f"{self.dtype} {'descending' if self.descending else 'ascending'}"

    @property
    def unsigned(self) -> np.dtype:
        return np.dtype(f"u{self.dtype.itemsize}")

    def encode(self, keys: np.ndarray) -> np.ndarray:
        """Returns `[n]` unsigned integers of the same size, in the order of the keys.

        Equal keys get equal integers, as do 0.0 and -0.0, and all NaNs.
        """
        sign = self._sign
        if self.dtype.kind == "f":
            bits = np.array(keys).view(self.unsigned)
            bits[bits == sign] = 0
            bits[np.isnan(keys)] = ~(sign ^ sign) if self.descending else ~sign
            # Flips all bits of negative floats, whose order is reversed, and only the
            # sign bit of the others.
            bits ^= -(bits >> self._shift) | sign
        else:
            bits = keys.astype(self.unsigned)
            if self.dtype.kind == "i":
                bits ^= sign
        return np.invert(bits, out=bits) if self.descending else bits

    def decode(self, bits: np.ndarray) -> np.ndarray:
        """Decodes `[n]` encoded keys in place.

        -0.0 is decoded as 0.0, and every NaN as the same NaN.
        """
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


class Composite:
    """The layout of composite keys.

    Args:
      columns: the columns, compared from left to right.
      ranges: `[columns, 2]` uint64, the smallest and the largest encoded key of each
        column.
      size: the number of keys, which exceeds all indices.

    Attributes:
      dtype: the dtype of composite keys: uint64, or bytes in the order of their words.
    """

    def __init__(self, columns: Sequence[Column], ranges: np.ndarray, size: int):
        self._columns = tuple(columns)
        self._minima = ranges[:, 0]
        self._size = size
        spans = [int(high) - int(low) for low, high in ranges]
        self._fields, num_words = _packed_fields([*spans, max(size - 1, 0)])
        self.dtype = np.dtype(np.uint64 if num_words == 1 else f"S{8 * num_words}")

    @property
    def num_words(self) -> int:
        """The number of uint64 words of a composite key."""
        return self.dtype.itemsize // 8

    def encode(self, keys: Sequence[np.ndarray], first: int) -> np.ndarray:
        """Returns the `[n]` composite keys; `first` is the index of their first row."""
        size = len(keys[0])
        words = np.zeros((size, self.num_words), np.uint64)
        indices = np.arange(first, first + min(size, _BLOCK), dtype=np.uint64)
        for start in range(0, size, _BLOCK):
            block = words[start : start + _BLOCK]
            for i, column in enumerate(self._columns):
                bits = column.encode(keys[i][start : start + _BLOCK])
                bits -= self._minima[i].astype(bits.dtype)
                self._put(block, i, bits)
            self._put(block, -1, indices[: len(block)])
            indices += np.uint64(_BLOCK)
        if self.num_words == 1:
            return words[:, 0]
        # Big-endian, because byte strings are compared from the first byte.
        return words.byteswap(inplace=True).view(self.dtype)[:, 0]

    def _put(self, words: np.ndarray, i: int, bits: np.ndarray) -> None:
        word, shift, _ = self._fields[i]
        words[:, word] |= bits.astype(np.uint64, copy=False) << np.uint64(shift)

    def decode(
        self, composite: np.ndarray
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Returns the columns and the index of `[n]` composite keys, `[n]` each."""
        size = len(composite)
        keys = tuple(np.empty(size, column.dtype) for column in self._columns)
        index = np.empty(size, np.int32 if self._size <= 2**31 else np.int64)
        words = composite.view(np.uint64).reshape(size, self.num_words)
        for start in range(0, size, _BLOCK):
            rows = slice(start, start + _BLOCK)
            block = words[rows] if self.num_words == 1 else words[rows].byteswap()
            for i, column in enumerate(self._columns):
                bits = self._get(block, i) + self._minima[i]
                keys[i][rows] = column.decode(bits.astype(column.unsigned))
            index[rows] = self._get(block, -1)
        return keys, index

    def _get(self, words: np.ndarray, i: int) -> np.ndarray:
        word, shift, num_bits = self._fields[i]
        return (words[:, word] >> np.uint64(shift)) & np.uint64((1 << num_bits) - 1)


def _packed_fields(maxima: Sequence[int]) -> tuple[list[tuple[int, int, int]], int]:
    """Returns fields for numbers up to `maxima`, and the number of words.

    A field is the index of its word, the number of lower bits in the word, and its
    number of bits. The first one is the highest.
    """
    fields: list[tuple[int, int, int]] = []
    word, used = 0, 0
    for value in maxima:
        bits = value.bit_length()
        if used + bits > _WORD_BITS:
            word, used = word + 1, 0
        # A field without bits is not shifted, because a shift by 64 is undefined.
        shift = _WORD_BITS - used - bits if bits else 0
        fields.append((word, shift, bits))
        used += bits
    return fields, word + 1
