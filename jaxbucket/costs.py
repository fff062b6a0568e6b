"""What a step of a shape (B, T) costs: in tokens, in operations, or in time.

A cost function is any function of `(batch_size, seq_len)` that returns a positive
number; a plan is made for the least sum of these over the steps of an epoch. Its
`unit`, if it has one, says what it counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TypeAlias

import numpy as np

from jaxbucket.base import Bucket
from jaxbucket.checks import check_number, check_positive

CostFn: TypeAlias = Callable[[int, int], float]
SECONDS = "s"
# Sets of terms to fit, the fewest first. Where a step's constant and its tokens explain
# times alike, as for shapes of equal B * T, it is the tokens.
_TERMS = ([1], [2], [0], [1, 2], [0, 1], [0, 2], [0, 1, 2])
# What a shape may be beyond all others for the fit without it still to be asked.
_BEYOND = 1.1
# Columns that differ by less are one, and errors that small are none.
_RANK = 1e-9
_SAYS_MORE = 1e-9
_ROUNDING = 1e-24


def unit_of(cost_fn: CostFn) -> str:
    """Returns what a cost function counts, "cost" where it does not say."""
    return str(getattr(cost_fn, "unit", "cost"))


@dataclasses.dataclass(frozen=True)
class TokenCost:
    """B * T: every position costs the same, padding counted.

    Example:
      >>> TokenCost()(8, 128), TokenCost(tokens_per_second=4096)(8, 128)
      (1024, 0.25)

    Attributes:
      tokens_per_second: positions that the machine does in a second; without it the
        cost is in tokens, with it in seconds.
    """

    tokens_per_second: float | None = None

    def __post_init__(self):
        _check_speed(self, "tokens_per_second")

    @property
    def unit(self) -> str:
        return "tokens" if self.tokens_per_second is None else SECONDS

    def __call__(self, batch_size: int, seq_len: int) -> float:
        tokens = batch_size * seq_len
        return tokens / self.tokens_per_second if self.tokens_per_second else tokens


@dataclasses.dataclass(frozen=True)
class TransformerCost:
    """Operations of a train step of a transformer, whose attention is quadratic in T.

    72 B T L d^2 (1 + T / 6d + V / 12 L d) for L layers of width d and V outputs
    (Narayanan et al., 2021, arXiv:2104.04473, section 5.1, without recomputation).

    Example:
      >>> cost = TransformerCost(width=512, depth=8)
      >>> round(cost(1, 6 * 512) / cost(1, 3 * 512), 3)
      2.667

    Attributes:
      width: d, of the residual stream.
      depth: L, layers.
      vocab_size: V, outputs for each position; 0 leaves them out.
      flops_per_second: operations that the machine does in a second; without it the
        cost is in operations, with it in seconds.
    """

    width: int
    depth: int
    vocab_size: int = 0
    flops_per_second: float | None = None

    def __post_init__(self):
        for name in ("width", "depth"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        if self.vocab_size:
            vocab_size = check_positive("vocab_size", self.vocab_size)
            object.__setattr__(self, "vocab_size", vocab_size)
        _check_speed(self, "flops_per_second")

    @property
    def unit(self) -> str:
        return "FLOP" if self.flops_per_second is None else SECONDS

    def __call__(self, batch_size: int, seq_len: int) -> float:
        dense = 72 * self.depth * self.width**2 + 6 * self.width * self.vocab_size
        attention = 12 * self.depth * self.width * seq_len
        flops = batch_size * seq_len * (dense + attention)
        return flops / self.flops_per_second if self.flops_per_second else flops


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step: a + b * B * T + c * B * T^2, fitted to measured ones.

    Example:
      >>> measured = {Bucket(4, 64): 0.3, Bucket(1, 256): 0.6, Bucket(1, 64): 0.1125}
      >>> cost = StepTime.fit(measured)
      >>> print(f"{cost(2, 128):.3f} s, off by up to {cost.error:.1%}")
      0.400 s, off by up to 0.0%

    Attributes:
      per_step: a, of starting a step.
      per_token: b, of a position.
      per_pair: c, of a pair of positions in one row, as attention has.
      error: the largest relative error on a measured step. Of shapes that lie between
        others in T and in B * T, by a fit without them, each left out in turn.
    """

    per_step: float
    per_token: float
    per_pair: float
    error: float = 0.0

    unit = SECONDS

    def __post_init__(self):
        terms = (self.per_step, self.per_token, self.per_pair)
        numbers = all(isinstance(x, Real) and 0 <= x < np.inf for x in terms)
        if not (numbers and any(terms)):
            raise ValueError(
                f"`StepTime{terms}`: give numbers, none negative and one positive."
            )

    def __call__(self, batch_size: int, seq_len: int) -> float:
        tokens = batch_size * seq_len
        return self.per_step + tokens * (self.per_token + seq_len * self.per_pair)

    @classmethod
    def fit(cls, seconds: Mapping[Bucket, float]) -> StepTime:
        """Returns the function that is closest to measured step times.

        Closest is the least sum of squared relative errors; no term is negative. Few
        shapes do, if they differ, as those of `calibration_shapes` do: the shortest and
        the longest T, two in between, and one of a smaller B * T, which tells a and b
        apart. Where none does, and times say the same of both, a is 0.

        Args:
          seconds: of a step of each shape.

        Raises:
          ValueError: if there are none, or one is not positive.
        """
        _check_measured(seconds)
        # Sorted, for sums in another order would differ in their last digits.
        seconds = {shape: seconds[shape] for shape in sorted(seconds)}
        shapes = np.array([(b.batch_size, b.seq_len) for b in seconds], np.float64)
        times = np.array([check_number(f"seconds[{b}]", seconds[b]) for b in seconds])
        tokens = shapes.prod(axis=1)
        terms = np.stack([np.ones_like(tokens), tokens, tokens * shapes[:, 1]], axis=1)
        # Relative: each row over its own time, so that all of them should come out 1.
        relative = terms / times[:, None]
        fitted = _non_negative(relative)
        errors = abs(relative @ fitted - 1)
        for index in np.flatnonzero(_between(tokens) & _between(shapes[:, 1])):
            others = np.delete(relative, index, axis=0)
            if len(others) >= terms.shape[1]:
                errors[index] = abs(relative[index] @ _non_negative(others) - 1)
        return cls(*fitted.tolist(), error=float(errors.max()))


def _check_measured(seconds: Mapping[Bucket, float]) -> None:
    if not seconds:
        raise ValueError("`seconds` is empty: measure a step of one shape at least.")
    for bucket in seconds:
        if not isinstance(bucket, Bucket):
            raise ValueError(
                f"`seconds` is of {bucket!r}: make it a `Bucket(batch_size, seq_len)`."
            )


def _between(values: np.ndarray) -> np.ndarray:
    """`[n]` bool: which have others about as small as them, and as large.

    Without an end the fit would have to guess beyond all that it has seen, which a plan
    never asks of it.
    """
    if len(values) == 1:
        return np.zeros(1, bool)
    others = [np.delete(values, index) for index in range(len(values))]
    least, most = np.min(others, axis=1), np.max(others, axis=1)
    return (least <= values * _BEYOND) & (values <= most * _BEYOND)


def _non_negative(relative: np.ndarray) -> np.ndarray:
    """`[3]`: the terms, none negative, with which the rows `[n, 3]` are closest to 1.

    With three terms all choices of which are 0 can be tried (Lawson and Hanson,
    "Solving Least Squares Problems", 1974, has the theory).
    """
    best, least = np.zeros(3), np.inf
    for kept in _TERMS:
        # Scaled, for the columns are of very different size.
        scale = np.linalg.norm(relative[:, kept], axis=0)
        some, _, rank, _ = np.linalg.lstsq(
            relative[:, kept] / scale, np.ones(len(relative)), rcond=_RANK
        )
        terms = np.zeros(3)
        terms[kept] = some / scale
        error = float(((relative @ terms - 1) ** 2).sum())
        # Fewer terms unless more of them say more.
        better = error < least * (1 - _SAYS_MORE) - len(relative) * _ROUNDING
        if rank == len(kept) and terms.min() >= 0 and better:
            best, least = terms, error
    return best


def _check_speed(cost: TokenCost | TransformerCost, name: str) -> None:
    speed = getattr(cost, name)
    if speed is not None:
        object.__setattr__(cost, name, check_number(name, speed))
