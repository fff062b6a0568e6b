"""Sorts examples by bucket without copying the lengths, by a chunked counting sort.

The result takes 4 bytes per example, and temporary memory is small. A hundred million
examples take a few seconds and less than half a gigabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.lengths import total_lengths

Within: TypeAlias = Literal["source", "ascending", "descending"]

_CHUNK = 1 << 20
_DROPPED = -1


def examples_by_bucket(
    plan: BucketPlan,
    lengths: np.ndarray,
    within: Within = "source",
    subset: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns all examples that the plan keeps, sorted by bucket.

    Example:
      >>> from jaxbucket import Bucket
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> examples_by_bucket(plan, np.array([9, 8, 16, 3, 5]))[0]
      array([1, 3, 4, 0, 2], dtype=uint32)
      >>> examples_by_bucket(plan, np.array([9, 8, 16, 3, 5]), "descending")[0]
      array([1, 4, 3, 2, 0], dtype=uint32)

    Args:
      plan: the buckets.
      lengths: `[N]` integers that the plan accepts, or `[N, Q]` with a column for each
        of several sequences.
      within: how the examples of a bucket are sorted: in "source" order, or
        "ascending" or "descending" by (total) length. Ties stay in source order.
      subset: `[N]` bool, the examples to return; None for all. The plan has to accept
        only these.

    Returns:
      `[N']` uint32 examples (int64 for more than 2**32 lengths), and `[K]` int64
      numbers of examples per bucket.
    """
    if within != "source" and lengths.ndim == 1:
        distinct, rank, bucket = _length_ranks(plan, lengths, within, subset)
        examples, sizes = _counting_sort(
            lengths,
            lambda part: rank[np.searchsorted(distinct, part)],
            len(bucket),
            subset,
        )
        counts = np.zeros(len(plan), np.int64)
        np.add.at(counts, bucket, sizes)
        return examples, counts
    examples, counts = _counting_sort(lengths, plan.assign, len(plan), subset)
    if within != "source":
        key = total_lengths(lengths).astype(np.int64)
        key = -key if within == "descending" else key
        for part in np.split(examples, np.cumsum(counts)[:-1]):
            part[:] = part[np.argsort(key[part], kind="stable")]
    return examples, counts


def _length_ranks(
    plan: BucketPlan, lengths: np.ndarray, within: str, subset: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `[M]` distinct lengths, `[M]` ranks or -1, and the bucket of a rank."""
    distinct = np.empty(0, lengths.dtype)
    for chunk in _chunks(lengths):
        part = lengths[chunk]
        distinct = np.union1d(distinct, part if subset is None else part[subset[chunk]])
    bucket = plan.assign(distinct).astype(np.int64)
    sign = -1 if within == "descending" else 1
    order = np.lexsort((sign * distinct.astype(np.int64), bucket))
    order = order[bucket[order] >= 0]
    rank = np.full(len(distinct), _DROPPED)
    rank[order] = np.arange(len(order))
    return distinct, rank, bucket[order]


def _counting_sort(
    lengths: np.ndarray,
    key_fn: Callable[[np.ndarray], np.ndarray],
    num_keys: int,
    subset: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples in a stable sort by key, and the number of examples per key.

    Examples with the key -1 are left out. The keys are computed twice, because storing
    them would take 2 bytes per example.
    """

    def keys_of(chunk: slice) -> np.ndarray:
        if subset is None:
            return key_fn(lengths[chunk])
        is_selected = subset[chunk]
        keys = np.full(len(is_selected), _DROPPED)
        if is_selected.any():
            keys[is_selected] = key_fn(lengths[chunk][is_selected])
        return keys

    sizes = np.zeros(num_keys + 1, np.int64)
    for chunk in _chunks(lengths):
        sizes += np.bincount(keys_of(chunk) + 1, minlength=num_keys + 1)
    # Where the next example of each key goes. Examples with the key -1 come first.
    cursor = np.cumsum(sizes) - sizes
    dtype = np.uint32 if len(lengths) <= 2**32 else np.int64
    examples = np.empty(int(sizes.sum()), dtype)
    # numpy uses a radix sort, which is linear, for integers of up to 16 bits.
    narrow = np.uint16 if num_keys < 2**16 else np.uint32
    for chunk in _chunks(lengths):
        keys = (keys_of(chunk) + 1).astype(narrow)
        order = np.argsort(keys, kind="stable")
        counts = np.bincount(keys, minlength=num_keys + 1)
        shift = cursor - (np.cumsum(counts) - counts)
        places = np.arange(len(keys)) + np.repeat(shift, counts)
        examples[places] = order + chunk.start
        cursor += counts
    return examples[sizes[0] :], sizes[1:]


def _chunks(array: np.ndarray) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, len(array), _CHUNK))
