"""Boundaries for very many buckets, when a search over all candidates is too slow.

They follow the density that is best for full batches on average.
"""

from __future__ import annotations

import numpy as np

from jaxbucket.plan.lower_bound import Problem

# Lengths are counted in this many bins, because counts of single lengths are noisy.
_NUM_BINS = 1024


def evenly_dense(problem: Problem, num_buckets: int) -> np.ndarray:
    """Returns at most `num_buckets` boundaries: increasing indices, `[K]`.

    At a length with n examples, where the cost of a row increases by r per position,
    the best bucket width is inversely proportional to the square root of n * r (Panter
    and Dite, "Quantization distortion in pulse-count modulation with nonuniform spacing
    of levels", 1951).
    """
    last = len(problem) - 1
    num_bins = min(last, _NUM_BINS)
    ends = np.unique(np.arange(num_bins + 1) * last // max(num_bins, 1))
    examples, rates = np.diff(problem.examples[ends]), np.diff(problem.rates[ends])
    density = np.sqrt(examples.astype(np.float64) * rates)
    # A small constant keeps the density positive where a boundary saves nothing.
    density += density.sum() / (1 << 20) + 1
    total = np.append(0, np.cumsum(density))
    shares = total[-1] * np.arange(1, num_buckets) / num_buckets
    return np.unique(np.append(np.interp(shares, total, ends).astype(np.int64), last))


def near(chosen: np.ndarray, size: int, num_candidates: int) -> np.ndarray:
    """Returns the chosen indices, `[K]`, and their neighbors: about `size` indices."""
    reach = size // (2 * len(chosen))
    neighbors = chosen[:, None] + np.arange(-reach, reach + 1)
    return np.unique(np.clip(neighbors, 0, num_candidates - 1))
