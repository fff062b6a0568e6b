"""The rarity of the tokens of an example, as a metric of its difficulty."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxbucket.base.checks import check_positive
from jaxbucket.data.example import as_arrays
from jaxbucket.data.lengths.accumulated import AccumulatedMetric


def token_rarity(
    feature: str = "tokens", *, vocab_size: int, mean: bool = False
) -> AccumulatedMetric:
    """Returns the metric `sum(-log p(token))` over the tokens of an example, in nats.

    `p(token)` is the share of all tokens of the data set that are this token. So an
    example is difficult if it is long or has rare tokens. See Platanios et al.,
    "Competence-based Curriculum Learning for Neural Machine Translation", 2019.

    Example:
      >>> import jaxbucket as jb
      >>> source = [{"tokens": [5, 5, 5]}, {"tokens": [5, 2]}]
      >>> rarity = token_rarity(vocab_size=10)
      >>> jb.data.measure_difficulty(source, rarity, progress=False).round(2)
      array([0.67, 1.83], dtype=float32)

    Args:
      feature: the feature with the tokens, `[n]` integers.
      vocab_size: the number of different tokens, from 0 to `vocab_size - 1`.
      mean: whether to divide by the number of tokens of the example, so that long
        examples are not more difficult than short ones.

    Raises:
      ValueError: if `vocab_size` is not a positive integer. While measuring, if an
        example has no such feature, or has no tokens or invalid ones.
    """
    vocab_size = check_positive("vocab_size", vocab_size)
    tokens = _Tokens(feature, vocab_size)
    score = _Rarity(tokens, mean)
    # The last entry counts all tokens, so that scoring does not add up the others.
    return AccumulatedMetric(tokens.counts, score, vocab_size + 1)


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Reads the tokens of an example."""

    feature: str
    vocab_size: int

    def read(self, example: Any) -> np.ndarray:
        """Returns the tokens, `[n]` int64."""
        arrays = as_arrays(example)
        if self.feature not in arrays:
            raise ValueError(
                f"the example has features {sorted(arrays)}, but no {self.feature!r}. "
                "Name one of them as `feature`."
            )
        tokens = arrays[self.feature]
        if not tokens.size:
            raise ValueError(
                f"{self.feature!r} has no tokens. Remove empty examples from the "
                "source."
            )
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"{self.feature!r} is {tokens.dtype}{list(tokens.shape)}. Name a "
                "feature of integers [n] as `feature`."
            )
        if not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise ValueError(
                f"{self.feature!r} has tokens from {tokens.min()} to {tokens.max()}, "
                f"but `vocab_size={self.vocab_size}`. Pass a larger `vocab_size`, or "
                "fix the tokens."
            )
        return tokens.astype(np.int64)

    def counts(self, example: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids and counts of the tokens, and of all tokens together."""
        tokens = self.read(example)
        counts = np.ones(len(tokens) + 1, np.int64)
        counts[-1] = len(tokens)
        return np.append(tokens, self.vocab_size), counts


@dataclasses.dataclass(frozen=True)
class _Rarity:
    """Scores an example by the counts of all tokens."""

    tokens: _Tokens
    mean: bool

    def __call__(self, example: Any, total: np.ndarray) -> float:
        counts = total[self.tokens.read(example)]
        rarity = np.log(total[-1]) - np.log(counts)
        return float(rarity.mean() if self.mean else rarity.sum())
