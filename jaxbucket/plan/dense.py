"""Boundaries of very many buckets, of which no search can look at all.

They begin as close together as is best for full batches on average. Then a few of them
at a time are made the best there are between two others, by dynamic programming.
"""

from __future__ import annotations

import numpy as np

from jaxbucket.plan.lower_bound import Problem, lower_bounds, traced_ends

# Lengths are counted in so many bins, because the count of a single one is noise.
_BINS = 1024
# The fewest boundaries that are solved together.
_LEAST = 4


def evenly_dense(problem: Problem, num_buckets: int) -> np.ndarray:
    """Returns so many boundaries, or fewer: positions `[K]`, increasing.

    Near a length with n examples, where a row costs r more for each position, buckets
    are best in inverse proportion to the square root of n * r (Panter and Dite,
    "Quantization distortion in pulse-count modulation with nonuniform spacing of
    levels", 1951).
    """
    last = len(problem) - 1
    ends = np.unique(np.arange(min(last, _BINS) + 1) * last // min(max(last, 1), _BINS))
    examples, rates = np.diff(problem.examples[ends]), np.diff(problem.rates[ends])
    density = np.sqrt(examples.astype(np.float64) * rates)
    # Where there is nothing to save a few are enough.
    density += density.sum() / (1 << 20) + 1
    below = np.append(0, np.cumsum(density))
    shares = below[-1] * np.arange(1, num_buckets) / num_buckets
    return np.unique(np.append(np.interp(shares, below, ends).astype(np.int64), last))


def improved(problem: Problem, chosen: np.ndarray, most_pairs: int) -> np.ndarray:
    """Returns boundaries whose full batches cost no more: positions `[K]`.

    Neighbors are solved together, as many as take about `most_pairs` pairs of a
    beginning and an end in all; then others, shifted by half of them.
    """
    pairs = len(problem) * len(problem).bit_length()
    together = max(_LEAST, most_pairs // (2 * pairs))
    for first in (together, together // 2):
        ends, begin = [], 0
        for part in np.split(chosen, range(first, len(chosen), together)):
            end = int(part[-1]) + 1
            _, best = lower_bounds(
                problem.part(begin, end), min(len(part), end - begin)
            )
            ends.append(begin + traced_ends(best))
            begin = end
        chosen = np.concatenate(ends)
    return chosen


def beside(chosen: np.ndarray, size: int, num_candidates: int) -> np.ndarray:
    """Returns the chosen `[K]` and those on both sides of each, about `size` in all."""
    reach = size // (2 * len(chosen))
    near = chosen[:, None] + np.arange(-reach, reach + 1)
    return np.unique(np.clip(near, 0, num_candidates - 1))
