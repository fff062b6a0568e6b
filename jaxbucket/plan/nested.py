"""Nested shapes for several sequences, from buckets of one number per example.

Examples are sorted by a number, such as the longest of their sequences. Each bucket
holds all examples up to some number, so its T are the longest sequences among these.
The best such shapes are where the search for better ones starts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxbucket.plan.candidates import Candidates
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.optimal import optimal

# With more distinct numbers, only some of them can be the end of a bucket.
_MAX_ENDS = 1024


def nested_shapes(
    lengths: np.ndarray, limits: Limits, num_buckets: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names of numbers, each with the T of the best nested shapes, `[K, Q]`."""
    for name, numbers in (
        ("longest", lengths.max(axis=1)),
        ("sum", lengths.sum(axis=1, dtype=np.int64)),
    ):
        seq_lens, candidates = _candidates(lengths, numbers, limits)
        # The last shape holds all examples.
        longest = limits.rounded(lengths.max(axis=0))
        if len(candidates) and np.array_equal(seq_lens[-1], longest):
            yield name, seq_lens[optimal(candidates, min(num_buckets, len(candidates)))]


def _candidates(
    lengths: np.ndarray, numbers: np.ndarray, limits: Limits
) -> tuple[np.ndarray, Candidates]:
    """Returns the T of shapes that are allowed, `[G, Q]`, and what they hold."""
    order = np.argsort(numbers, kind="stable")
    # The number of examples up to each distinct number.
    ends = np.flatnonzero(np.diff(numbers[order], append=-1)) + 1
    if len(ends) > _MAX_ENDS:
        places = np.linspace(0, len(order), _MAX_ENDS + 1)[1:]
        ends = np.unique(ends[np.searchsorted(ends, np.ceil(places))])
    longest = np.maximum.accumulate(lengths[order], axis=0)[ends - 1]
    seq_lens = limits.rounded(longest)
    # The last of equal shapes holds the most examples.
    is_last = np.append((seq_lens[1:] != seq_lens[:-1]).any(axis=1), True)
    batch_sizes = limits.batch_sizes(seq_lens)
    is_used = is_last & (batch_sizes > 0)
    seq_lens, batch_sizes, ends = seq_lens[is_used], batch_sizes[is_used], ends[is_used]
    tokens = np.cumsum(lengths.sum(axis=1, dtype=np.int64)[order])
    return seq_lens, Candidates(
        # The positions of a row, which count for its cost as T does.
        seq_lens=seq_lens.sum(axis=1),
        examples=ends,
        tokens=tokens[ends - 1],
        sizes=limits.sizes(seq_lens, batch_sizes, ends),
        complete=False,
    )
