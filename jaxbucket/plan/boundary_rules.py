"""Heuristic rules that choose the boundaries of buckets.

A chooser is a function of `Candidates` and a number of buckets. It returns the
increasing indices of the chosen candidates, which always include the last candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from jaxbucket.plan.candidates import Candidates

Chooser: TypeAlias = Callable[[Candidates, int], np.ndarray]


def quantile(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Chooses boundaries such that all buckets have equally many examples."""
    return _equal_shares(candidates, candidates.examples, num_buckets)


def equal_tokens(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Chooses boundaries such that all buckets have equally many real tokens.

    This is the rule by which Lhotse and NeMo divide durations.
    """
    return _equal_shares(candidates, candidates.tokens, num_buckets)


def equal_width(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Chooses boundaries at equal distances between 0 and the longest candidate."""
    ends = np.arange(1, num_buckets + 1) * candidates.seq_lens[-1] / num_buckets
    return _at(candidates, ends)


def quarters(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Chooses four boundaries at equal distances, even if more buckets are allowed."""
    return equal_width(candidates, min(4, num_buckets))


def geometric(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Chooses boundaries in constant ratio between the shortest and longest example."""
    shortest = candidates.seq_lens[np.argmax(candidates.examples > 0)]
    ends = np.geomspace(shortest, candidates.seq_lens[-1], num_buckets + 1)[1:]
    return _at(candidates, ends)


def powers_of_two(candidates: Candidates, num_buckets: int) -> np.ndarray:
    """Chooses the longest candidate, and the largest powers of two below it."""
    longest = int(candidates.seq_lens[-1])
    stop = (longest - 1).bit_length()
    return _at(candidates, 2.0 ** np.arange(max(0, stop - num_buckets + 1), stop))


def _equal_shares(
    candidates: Candidates, cumulative: np.ndarray, num_buckets: int
) -> np.ndarray:
    total = int(cumulative[-1])
    # The last share is left out, because the last candidate is always chosen.
    shares = [-(-share * total // num_buckets) for share in range(1, num_buckets)]
    return _with_last(candidates, np.searchsorted(cumulative, shares))


def _at(candidates: Candidates, ends: np.ndarray) -> np.ndarray:
    """Returns the index of the shortest candidate that reaches each end."""
    # Ends have rounding errors. Without the slack, an end that equals a candidate could
    # be rounded up to the next one.
    chosen = np.searchsorted(candidates.seq_lens, ends * (1 - 1e-12))
    return _with_last(candidates, chosen)


def _with_last(candidates: Candidates, chosen: np.ndarray) -> np.ndarray:
    last = len(candidates) - 1
    return np.unique(np.append(np.minimum(chosen, last), last))


_CHOOSERS = quantile, equal_tokens, equal_width, quarters, geometric, powers_of_two
RULES: dict[str, Chooser] = {chooser.__name__: chooser for chooser in _CHOOSERS}
