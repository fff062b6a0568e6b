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

from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_number, check_positive

CostFn: TypeAlias = Callable[[int, int], float]
SECONDS = "s"
# What a shape may be beyond all others for the fit without it still to be asked.
_BEYOND = 1.1
# So many shapes, and no more, are left out in turn.
_FEW = 40
# What a term weighs in the fit beside errors, if times do not tell: a constant or pairs
# only where tokens do not say the same.
_TIES = np.array([1e-6, 0, 1e-6])


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
    """Seconds of a step: a + b * B * T + c * B * T^2, or what its shape was measured.

    Example:
      >>> times = {(4, 64): 0.3, (2, 128): 0.42, (1, 256): 0.6, (1, 64): 0.1125}
      >>> cost = StepTime.fit({Bucket(*shape): time for shape, time in times.items()})
      >>> print(f"{cost(1, 128):.3f} s, off by up to {cost.error:.1%}")
      0.225 s, off by up to 10.0%

    Attributes:
      per_step: a, of starting a step.
      per_token: b, of a position.
      per_pair: c, of a pair of positions in one row, as attention has.
      error: the largest relative error of the three terms on a measured step; NaN where
        there are not more of these than terms. Of shapes that lie between others in T
        and in B * T, by a fit without them, each left out in turn.
      measured: shapes whose time is known, and not that of the terms.
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
        or more are measured, one that takes longer than its neighbours, as a T that is
        a power of two may on a CPU, does not bend what is said of the others. Few
        shapes do, if they differ, as those of `calibration_shapes` do: the shortest and
        the longest T, some in between, and one of a smaller B * T, which tells a and b
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

    Least absolute deviations as a linear program: errors e are made as small as
    -e <= row @ terms - 1 <= e leaves them.
    """
    from scipy.optimize import linprog

    size, num_terms = relative.shape
    # Scaled, for the columns are of very different size.
    scale = relative.max(axis=0)
    rows, ones, errors = relative / scale, np.ones(size), np.eye(size)
    found = linprog(
        np.concatenate([_TIES, ones]),
        A_ub=np.block([[rows, -errors], [-rows, -errors]]),
        b_ub=np.concatenate([ones, -ones]),
    )
    return np.maximum(found.x[:num_terms], 0) / scale


def _check_speed(cost: TokenCost | TransformerCost, name: str) -> None:
    speed = getattr(cost, name)
    if speed is not None:
        object.__setattr__(cost, name, check_number(name, speed))
