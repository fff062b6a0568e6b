"""What a step of a shape (B, T) costs: in tokens, in operations, or in time.

A cost function is any function of `(batch_size, seq_len)` that returns a positive
number. A plan has the least sum of these over the steps of an epoch. The attribute
`unit`, if the function has one, says what it counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TypeAlias

import numpy as np

from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_number, check_positive

CostFn: TypeAlias = Callable[[int, int], float]
SECONDS = "s"
# A shape is between others if it is at most so many times beyond all of them.
_BEYOND = 1.1
# Up to so many shapes are left out of the fit in turn.
_FEW = 40
# Weights of the terms beside the errors, for times that do not tell them apart: a
# constant or pairs only where tokens do not say the same.
_TIES = np.array([1e-6, 0, 1e-6])


def unit_of(cost_fn: CostFn) -> str:
    """Returns the unit of a cost function, "cost" where it has none."""
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

    Raises:
      ValueError: for a speed that is not a positive, finite number.
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

    Raises:
      ValueError: for a size that is not a positive integer, or a speed that is not a
        positive, finite number.
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
    """Seconds of a step: a + b * B * T + c * B * T^2, or its shape's measured time.

    Example: four measured shapes tell the time of others.
      >>> times = {(4, 64): 0.3, (2, 128): 0.42, (1, 256): 0.6, (1, 64): 0.1125}
      >>> cost = StepTime.fit({Bucket(*shape): time for shape, time in times.items()})
      >>> print(f"{cost(1, 128):.3f} s, off by up to {cost.error:.1%}")
      0.225 s, off by up to 10.0%

    Attributes:
      per_step: a, seconds of starting a step.
      per_token: b, seconds of a position.
      per_pair: c, seconds of a pair of positions in one row, as attention has.
      error: the largest relative error of the three terms on a measured step; NaN
        unless there are more of these than terms. For a shape that lies between others
        in T and in B * T it is the error of a fit without that shape.
      measured: `(batch_size, seq_len)` -> seconds, in place of the terms.

    Raises:
      ValueError: for terms that are negative, not finite or all zero, or measured times
        that are not positive.
    """

    per_step: float
    per_token: float
    per_pair: float
    error: float = 0.0
    measured: Mapping[tuple[int, int], float] = dataclasses.field(
        default_factory=dict, hash=False, repr=False
    )

    unit = SECONDS

    def __post_init__(self):
        terms = (self.per_step, self.per_token, self.per_pair)
        numbers = all(isinstance(x, Real) and 0 <= x < np.inf for x in terms)
        if not (numbers and any(terms)):
            raise ValueError(
                f"`StepTime{terms}`: give numbers, none negative and one positive."
            )
        for shape, seconds in self.measured.items():
            check_number(f"measured[{shape}]", seconds)

    def __call__(self, batch_size: int, seq_len: int) -> float:
        known = self.measured.get((batch_size, seq_len))
        if known is not None:
            return known
        tokens = batch_size * seq_len
        return self.per_step + tokens * (self.per_token + seq_len * self.per_pair)

    def to_dict(self) -> dict[str, float | None]:
        """The three terms and their error, as plain Python."""
        names = ("per_step", "per_token", "per_pair")
        error = None if np.isnan(self.error) else float(self.error)
        return {**{name: float(getattr(self, name)) for name in names}, "error": error}

    @classmethod
    def fit(cls, seconds: Mapping[Bucket, float]) -> StepTime:
        """Returns the function that is closest to measured step times.

        Closest is the least sum of relative errors; no term is negative. So where five
        or more shapes are measured, one that takes longer than its neighbors, as a T
        that is a power of two may on a CPU, does not bend the times of the others. Few
        shapes are enough if they differ as those of `calibration_shapes` do: the
        shortest and the longest T, some in between, and one of a smaller B * T, which
        tells a and b apart. Without it, a is 0 where times do not tell.

        Example: steps that take 10 ms and 20 us for each position.
          >>> shapes = [Bucket(8, 64), Bucket(4, 128), Bucket(2, 256), Bucket(2, 64)]
          >>> cost = StepTime.fit({b: 0.01 + 2e-5 * b.num_tokens for b in shapes})
          >>> print(f"{cost.per_step:.3f} {cost.per_token:.1e} {cost.per_pair:.1f}")
          0.010 2.0e-05 0.0

        Args:
          seconds: `Bucket` -> measured seconds of one step.

        Raises:
          ValueError: if `seconds` is empty or not a dict of `Bucket`, or a time is not
            positive.
        """
        _check_measured(seconds)
        # Sorted, because sums in another order would differ in their last digits.
        seconds = {shape: seconds[shape] for shape in sorted(seconds)}
        shapes = np.array([(b.batch_size, b.seq_len) for b in seconds], np.float64)
        times = np.array([check_number(f"seconds[{b}]", seconds[b]) for b in seconds])
        tokens = shapes.prod(axis=1)
        terms = np.stack([np.ones_like(tokens), tokens, tokens * shapes[:, 1]], axis=1)
        # Relative: each row over its own time, so that all of them should come out 1.
        with np.errstate(over="ignore"):
            relative = terms / times[:, None]
        if not np.isfinite(relative).all():
            raise ValueError(
                f"`seconds` has {times.min()} s, which is next to nothing for B * T^2 "
                f"of {terms.max():g}. Measure it again."
            )
        fitted = _non_negative(relative)
        errors = abs(relative @ fitted - 1)
        between = np.flatnonzero(_between(tokens) & _between(shapes[:, 1]))
        # Where there are many, one that is left out changes nothing.
        for index in between if len(times) <= _FEW else ():
            others = np.delete(relative, index, axis=0)
            if len(others) >= terms.shape[1]:
                errors[index] = abs(relative[index] @ _non_negative(others) - 1)
        return cls(
            *fitted.tolist(),
            error=float(errors.max()) if len(times) > terms.shape[1] else np.nan,
            measured={(b.batch_size, b.seq_len): s for b, s in seconds.items()},
        )


def _check_measured(seconds: Mapping[Bucket, float]) -> None:
    if not isinstance(seconds, Mapping):
        raise ValueError(
            f"`seconds` is a {type(seconds).__name__}: make it a dict of `Bucket` -> "
            "seconds."
        )
    if not seconds:
        raise ValueError("`seconds` is empty: measure a step of one shape at least.")
    for bucket in seconds:
        if not isinstance(bucket, Bucket):
            raise ValueError(
                f"`seconds` is of {bucket!r}: make it a `Bucket(batch_size, seq_len)`."
            )


def _between(values: np.ndarray) -> np.ndarray:
    """`[n]` bool: which have others that are about as small, and as large.

    Without the smallest or the largest the fit would guess beyond all that it has seen,
    which a plan never asks of it.
    """
    if len(values) == 1:
        return np.zeros(1, bool)
    others = [np.delete(values, index) for index in range(len(values))]
    least, most = np.min(others, axis=1), np.max(others, axis=1)
    return (least <= values * _BEYOND) & (values <= most * _BEYOND)


def _non_negative(relative: np.ndarray) -> np.ndarray:
    """`[3]`: the terms, none negative, with which the rows `[n, 3]` are closest to 1.

    Least absolute deviations as a linear program: errors e are made as small as
    -e <= row @ terms - 1 <= e leaves them.
    """
    from scipy.optimize import linprog

    size, num_terms = relative.shape
    # Scaled, because the columns are of very different size.
    scale = relative.max(axis=0)
    rows, ones, errors = relative / scale, np.ones(size), np.eye(size)
    solution = linprog(
        np.concatenate([_TIES, ones]),
        A_ub=np.block([[rows, -errors], [-rows, -errors]]),
        b_ub=np.concatenate([ones, -ones]),
    )
    return np.maximum(solution.x[:num_terms], 0) / scale


def _check_speed(cost: TokenCost | TransformerCost, name: str) -> None:
    speed = getattr(cost, name)
    if speed is not None:
        object.__setattr__(cost, name, check_number(name, speed))
