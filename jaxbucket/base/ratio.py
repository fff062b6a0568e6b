"""The largest ratio between the lengths of two sequences of an example."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxbucket.base.checks import check_number
from jaxbucket.base.sizes import PerSequence

# A ratio for all pairs of sequences, or for some, as in {"source/target": 2.5}.
MaxRatio: TypeAlias = float | Mapping[str, float]


class PairRatios(PerSequence[float]):
    """A largest ratio for some pairs of sequences, such as "source/target"."""

    def __init__(self, ratios: Mapping[str, float]):
        self._values = {pair: ratios[pair] for pair in sorted(ratios)}


def checked_ratio(max_ratio: Any, sequences: Sequence[str]) -> float | PairRatios:
    """Returns a ratio, or the ratios of some pairs, after checking them.

    Args:
      max_ratio: a number from 1, or a mapping from pairs of names to positive numbers.
      sequences: the names of the sequences.

    Raises:
      ValueError: if there is only one sequence, a number is out of range, or a key is
        not a pair of names.
    """
    if not sequences:
        raise ValueError(
            f"`max_ratio={max_ratio!r}` requires examples with several sequences. "
            "Remove it, or pass a mapping from sequence name to lengths."
        )
    if not isinstance(max_ratio, Mapping):
        ratio = check_number("max_ratio", max_ratio)
        if ratio < 1:
            raise ValueError(
                f"`max_ratio={max_ratio!r}` must be at least 1, because it applies to "
                "all pairs of sequences, in both directions. For one direction, pass "
                f"a mapping, such as {{{min(_pairs(sequences))!r}: {max_ratio!r}}}."
            )
        return ratio
    pairs = _pairs(sequences)
    ratios = {}
    for pair, value in max_ratio.items():
        if pair not in pairs:
            raise ValueError(
                f"`max_ratio` has the key {pair!r}. Pass two sequences with a slash: "
                f"some of {sorted(pairs)}."
            )
        ratios[pair] = check_number(f"max_ratio[{pair!r}]", value)
    if not ratios:
        raise ValueError("`max_ratio` is empty. Pass a number, or remove it.")
    return PairRatios(ratios)


def within_ratio(
    lengths: np.ndarray, sequences: Sequence[str], max_ratio: MaxRatio | None
) -> np.ndarray:
    """Returns whether no sequence of an example is too long for another, `[N]` bool.

    Example:
      >>> lengths = np.array([[8, 2], [4, 2], [2, 8]])
      >>> within_ratio(lengths, ["x", "y"], 2.0)
      array([False,  True, False])
      >>> within_ratio(lengths, ["x", "y"], {"x/y": 2})
      array([False,  True,  True])

    Args:
      lengths: `[N, Q]` integers, the lengths of the sequences of each example.
      sequences: the names of the Q sequences.
      max_ratio: the result of `checked_ratio`; None for no limit.
    """
    is_within = np.ones(len(lengths), bool)
    if max_ratio is None:
        return is_within
    pairs = _pairs(sequences)
    if not isinstance(max_ratio, Mapping):
        max_ratio = dict.fromkeys(pairs, max_ratio)
    for pair, ratio in max_ratio.items():
        long, short = pairs[pair]
        is_within &= lengths[:, long] <= ratio * lengths[:, short]
    return is_within


def _pairs(sequences: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Returns the columns of every pair of sequences, by its name."""
    numbered = itertools.permutations(enumerate(sequences), 2)
    return {f"{x}/{y}": (i, j) for (i, x), (j, y) in numbered}
