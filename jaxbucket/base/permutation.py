"""Permutations as integer arithmetic: no table, no library's random stream.

`permute(index, size, key)` is a bijection of `range(size)` that is evaluated only
where it is asked for. It is a Feistel network over a rectangle just larger than
`size`, with cycle walking for the few indices that land outside (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002). So few rounds would be visibly
uneven on a small set, which is sorted by its hashes instead. The result is part of the
format of a schedule: golden digests guard it.
"""

from __future__ import annotations

import functools
import math

import numpy as np

_MASK = 2**64 - 1
_ROUNDS = 6
_SORTED_SIZE = 1024
# Kept for small sizes, 8 MB each thousand at most.
_TABLES = 8192
# So many numbers are done sooner one by one.
_FEW = 8
# splitmix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
# Generators", OOPSLA 2014.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
# The same as 0-d arrays: numpy takes twice as long with its scalars.
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
    """Returns one 64-bit key that depends on every number and on their order."""
    key = len(numbers)
    for number in numbers:
        key = mix(key ^ mix(number & _MASK))
    return key


def mix_each(numbers: np.ndarray, key: int) -> np.ndarray:
    """Returns `[n]` uint64 keys, one for each number, of one key."""
    return _hash(np.asarray(numbers).astype(np.uint64), key)


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Returns where a keyed permutation of `range(size)` sends each index.

    Example:
      >>> permute(np.arange(5), 5, key=1)
      array([4, 2, 0, 1, 3])

    Args:
      index: `[n]` integers in `[0, size)`.
      size: number of elements permuted, below 2**62.
      key: any 64-bit number; another key is another permutation.

    Returns:
      `[n]` int64 in `[0, size)`, distinct where `index` is.
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
        out = _encrypt(index.astype(np.uint64), sides, keys).astype(np.int64)
    for place in np.flatnonzero(out >= size):
        while out[place] >= size:
            out[place] = _encrypt_one(int(out[place]), sides, keys)
    return out


def permute_each(index: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns `permute(index[i], sizes[i], keys[i])` for every i.

    Example:
      >>> permute_each(np.array([0, 1, 0]), np.array([5, 5, 2]), np.array([1, 1, 9]))
      array([4, 2, 0])

    Args:
      index: `[n]` integers, each in the range of its size.
      sizes: `[n]` integers below 2**52, of the permutations.
      keys: `[n]` uint64; of one size and key, it is one permutation.

    Returns:
      `[n]` int64.
    """
    sizes, keys = np.asarray(sizes, np.int64), np.asarray(keys, np.uint64)
    out = np.empty(len(index), np.int64)
    small = sizes <= _SORTED_SIZE
    few = (x[small].tolist() for x in (index, sizes, keys))
    out[small] = [_table(size, key)[i] for i, size, key in zip(*few, strict=True)]
    large = np.flatnonzero(~small)
    values = index[large]
    while len(large):
        values = _encrypt_each(values, sizes[large], keys[large])
        out[large] = values
        outside = values >= sizes[large]
        large, values = large[outside], values[outside]
    return out


# A batch asks for many of the same: lengths of which there are few examples.
@functools.lru_cache(maxsize=_TABLES)
def _table(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size), size, key)


def _encrypt_each(index: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """What `_encrypt` does, with sides and keys of their own."""
    width = np.sqrt(sizes - 1).astype(np.int64) + 1
    sides = (width.astype(np.uint64), (-(-sizes // width)).astype(np.uint64))
    halves = [*np.divmod(index.astype(np.uint64), sides[1])]
    for turn in range(_ROUNDS):
        changed, kept = turn % 2, 1 - turn % 2
        shifted = _hash(halves[kept], _fold_each(keys, turn)) >> _HALF_WORD
        shifted = (shifted * sides[changed] >> _HALF_WORD) + halves[changed]
        halves[changed] = np.minimum(shifted, shifted - sides[changed])
    return (halves[0] * sides[1] + halves[1]).astype(np.int64)


def _fold_each(keys: np.ndarray, *numbers: int) -> np.ndarray:
    """`fold(key, *numbers)` of `[n]` uint64 keys."""
    folded = _hash(_hash(keys, 0), 1 + len(numbers))
    for number in numbers:
        folded = _hash(folded, mix(number))
    return folded


def _encrypt_one(index: int, sides: tuple[int, int], keys: list[int]) -> int:
    """What `_encrypt` does, for a single number much sooner than an array of one."""
    halves = [*divmod(index, sides[1])]
    for turn, key in enumerate(keys):
        changed, kept = turn % 2, 1 - turn % 2
        shifted = (mix(halves[kept] ^ key) >> 32) * sides[changed] >> 32
        halves[changed] = (halves[changed] + shifted) % sides[changed]
    return halves[0] * sides[1] + halves[1]


def _encrypt(index: np.ndarray, sides: tuple[int, int], keys: list[int]) -> np.ndarray:
    """A bijection of `range(sides[0] * sides[1])` on `[n]` uint64."""
    high = index // np.uint64(sides[1])
    halves = [high, index - high * np.uint64(sides[1])]
    for turn, key in enumerate(keys):
        changed, kept = turn % 2, 1 - turn % 2
        side = np.uint64(sides[changed])
        shifted = _hash(halves[kept], key)
        # The high 32 bits, scaled to [0, side): Lemire, "Fast Random Integer
        # Generation in an Interval", 2019. Far cheaper than a remainder.
        shifted >>= _HALF_WORD
        shifted *= side
        shifted >>= _HALF_WORD
        shifted += halves[changed]
        # Modulo side: below side the subtraction wraps around to a huge number.
        halves[changed] = np.minimum(shifted, shifted - side)
    return halves[0] * np.uint64(sides[1]) + halves[1]


def _hash(values: np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """`mix(value ^ key)` of `[n]` uint64, with one key or `[n]` of them."""
    hashed = values ^ (key if isinstance(key, np.ndarray) else np.uint64(key))
    hashed += _INCREMENT_ARRAY
    for shift, multiplier in _SHIFT_ARRAYS:
        hashed ^= hashed >> shift
        hashed *= multiplier
    hashed ^= hashed >> _LAST_SHIFT_ARRAY
    return hashed
