"""Keyed permutations as integer arithmetic, without tables or random generators.

`permute(index, size, key)` is a bijection of `range(size)` that can be evaluated at
single indices. It is a Feistel network over a rectangle just larger than `size`, with
cycle walking for the few indices that land outside (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002). On a small set, a few rounds would be visibly
non-uniform, so its elements are sorted by their hashes instead. A schedule depends on
the exact values, so they must never change; golden digests in the tests check this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

_MASK = 2**64 - 1
_ROUNDS = 6
_SORTED_SIZE = 1024
# Tables of small permutations that `permute_each` caches, at most 8 kB each.
_MAX_TABLES = 8192
# Up to this many indices, Python integers are faster than numpy arrays.
_FEW = 8
# splitmix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
# Generators", OOPSLA 2014.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
# The same constants as 0-d arrays, because numpy is half as fast with scalars.
_INCREMENT_ARRAY = np.array(_INCREMENT, np.uint64)
_SHIFT_ARRAYS = [
    (np.array(shift, np.uint64), np.array(multiplier, np.uint64))
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False)
]
_LAST_SHIFT_ARRAY = np.array(_SHIFTS[-1], np.uint64)
_HALF_WORD = np.array(32, np.uint64)


def mix(number: int) -> int:
    """Returns a 64-bit hash of a 64-bit number (the splitmix64 step)."""
    number = (number + _INCREMENT) & _MASK
    number = ((number ^ (number >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    number = ((number ^ (number >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return number ^ (number >> _SHIFTS[2])


def fold(*numbers: int) -> int:
    """Returns a 64-bit key that depends on all numbers and on their order."""
    key = len(numbers)
    for number in numbers:
        key = mix(key ^ mix(number & _MASK))
    return key


def mix_each(numbers: np.ndarray, key: int) -> np.ndarray:
    """Returns one key for each number, `[n]` uint64, derived from a single key."""
    return _hash(np.asarray(numbers).astype(np.uint64), key)


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Returns the image of each index under a keyed permutation of `range(size)`.

    Example:
      >>> permute(np.arange(5), 5, key=1)
      array([4, 2, 0, 1, 3])

    Args:
      index: `[n]` integers in `[0, size)`.
      size: the number of permuted elements, below 2**62.
      key: any 64-bit number, which selects the permutation.

    Returns:
      `[n]` int64 in `[0, size)`, distinct for distinct indices.
    """
    if size <= _SORTED_SIZE:
        hashed = _hash(np.arange(size, dtype=np.uint64), fold(key))
        return np.argsort(hashed, kind="stable")[index]
    width = math.isqrt(size - 1) + 1
    sides = (width, -(-size // width))
    keys = [fold(key, turn) for turn in range(_ROUNDS)]
    index = np.asarray(index)
    if len(index) <= _FEW:
        out = np.array([_encrypt_one(int(i), sides, keys) for i in index], np.int64)
    else:
        unsigned = np.uint64(sides[0]), np.uint64(sides[1])
        out = _encrypt(index.astype(np.uint64), unsigned, keys).astype(np.int64)
    for i in np.flatnonzero(out >= size):
        while out[i] >= size:
            out[i] = _encrypt_one(int(out[i]), sides, keys)
    return out


def permute_each(index: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns `permute(index[i], sizes[i], keys[i])` for every i.

    Example:
      >>> permute_each(np.array([0, 1, 0]), np.array([5, 5, 2]), np.array([1, 1, 9]))
      array([4, 2, 0])

    Args:
      index: `[n]` integers, each in `[0, sizes[i])`.
      sizes: `[n]` integers below 2**52, the sizes of the permutations.
      keys: `[n]` uint64, the keys of the permutations.

    Returns:
      `[n]` int64 in `[0, sizes[i])`.
    """
    sizes, keys = np.asarray(sizes, np.int64), np.asarray(keys, np.uint64)
    out = np.empty(len(index), np.int64)
    small = sizes <= _SORTED_SIZE
    few = (x[small].tolist() for x in (index, sizes, keys))
    out[small] = [_table(size, key)[i] for i, size, key in zip(*few, strict=True)]
    large = np.flatnonzero(~small)
    values = index[large]
    while len(large):
        part = sizes[large]
        width = np.sqrt(part - 1).astype(np.int64) + 1
        sides = width.astype(np.uint64), (-(-part // width)).astype(np.uint64)
        # The keys are `fold(key, turn)`.
        folded = _hash(_hash(keys[large], 0), 2)
        each = (_hash(folded, mix(turn)) for turn in range(_ROUNDS))
        values = _encrypt(values.astype(np.uint64), sides, each).astype(np.int64)
        out[large] = values
        is_outside = values >= part
        large, values = large[is_outside], values[is_outside]
    return out


# Cached, because a batch uses the same permutation many times if few examples have the
# same length.
@functools.lru_cache(maxsize=_MAX_TABLES)
def _table(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size), size, key)


def _encrypt_one(index: int, sides: tuple[int, int], keys: list[int]) -> int:
    """Does the same as `_encrypt` for one number, faster than with an array."""
    halves = [*divmod(index, sides[1])]
    for turn, key in enumerate(keys):
        changed, kept = turn % 2, 1 - turn % 2
        shifted = (mix(halves[kept] ^ key) >> 32) * sides[changed] >> 32
        halves[changed] = (halves[changed] + shifted) % sides[changed]
    return halves[0] * sides[1] + halves[1]


def _encrypt(index: np.ndarray, sides: Any, keys: Iterable[Any]) -> np.ndarray:
    """Applies a bijection of `range(sides[0] * sides[1])` to `[n]` uint64.

    Args:
      index: `[n]` uint64.
      sides: two uint64, or two `[n]` uint64.
      keys: a key for each round, an integer or `[n]` uint64.
    """
    high = index // sides[1]
    halves = [high, index - high * sides[1]]
    for turn, key in enumerate(keys):
        changed, kept = turn % 2, 1 - turn % 2
        side = sides[changed]
        shifted = _hash(halves[kept], key)
        # The high 32 bits are scaled to [0, side), which is far cheaper than a
        # remainder (Lemire, "Fast Random Integer Generation in an Interval", 2019).
        shifted >>= _HALF_WORD
        shifted *= side
        shifted >>= _HALF_WORD
        shifted += halves[changed]
        # This is the sum modulo side: if the sum is below side, the subtraction wraps
        # around to a huge number, and the minimum is the sum.
        halves[changed] = np.minimum(shifted, shifted - side)
    return halves[0] * sides[1] + halves[1]


def _hash(values: np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """Returns `mix(value ^ key)` for `[n]` uint64, with one key or `[n]` keys."""
    hashed = values ^ (key if isinstance(key, np.ndarray) else np.uint64(key))
    hashed += _INCREMENT_ARRAY
    for shift, multiplier in _SHIFT_ARRAYS:
        hashed ^= hashed >> shift
        hashed *= multiplier
    hashed ^= hashed >> _LAST_SHIFT_ARRAY
    return hashed
