"""Costs of a step of shape (B, T), in tokens, floating-point operations or seconds.

A cost function is any function of `(batch_size, seq_len)` that returns a positive
number. An optimal plan minimizes the sum of the costs over the steps of an epoch. A
cost function may have an attribute `unit`, the name of the unit of its costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_float, check_integer
from jaxbucket.base.sizes import Sizes, total

# T of several sequences is a mapping from their names.
CostFn: TypeAlias = Callable[[int, Any], float]
SECONDS = "s"
# Small penalties on the constant and the pair term. If the times do not distinguish the
# terms, they are attributed to the tokens.
_PENALTIES = np.array([1e-6, 0, 1e-6])


def unit_of(cost_fn: Callable[..., Any]) -> str:
    """Returns the unit of a cost function, or "cost" if it has no `unit`."""
    return str(getattr(cost_fn, "unit", "cost"))


@dataclasses.dataclass(frozen=True)
class TokenCost:
    """Costs proportional to B * T: every position costs the same, padding included.

    With several sequences, T is the sum of their T.

    Example:
      >>> TokenCost()(8, 128), TokenCost(tokens_per_second=4096)(8, 128)
      (1024, 0.25)

    Attributes:
      tokens_per_second: the number of positions that all devices process in a
        second. If given, the cost is in seconds, otherwise in tokens.

    Raises:
      ValueError: if `tokens_per_second` is not a positive, finite number.
    """

    tokens_per_second: float | None = None

    def __post_init__(self):
        if self.tokens_per_second is not None:
            check_float("tokens_per_second", self.tokens_per_second)

    @property
    def unit(self) -> str:
        """The unit of the cost: "tokens", or "s" with `tokens_per_second`."""
        return "tokens" if self.tokens_per_second is None else SECONDS

    def __call__(self, batch_size: int, seq_len: int | Sizes) -> float:
        tokens = batch_size * total(seq_len)
        return tokens / self.tokens_per_second if self.tokens_per_second else tokens


@dataclasses.dataclass(frozen=True)
class TransformerCost:
    """Floating-point operations of a train step of a transformer.

    The cost is 72 B T L d^2 (1 + T / 6d + V / 12 L d) for L layers of width d and V
    outputs (Narayanan et al., 2021, arXiv:2104.04473, section 5.1, without
    recomputation). Attention makes it quadratic in T.

    Example:
      >>> cost = TransformerCost(width=512, depth=8)
      >>> round(cost(1, 6 * 512) / cost(1, 3 * 512), 3)
      2.667

    Attributes:
      width: d, the width of the residual stream.
      depth: L, the number of layers.
      vocab_size: V, the number of outputs per position; 0 leaves out the output layer.
      flops_per_second: the number of operations that all devices perform in a second.
        If given, the cost is in seconds, otherwise in operations.

    Raises:
      ValueError: if a size is not a positive integer, or `flops_per_second` is not a
        positive, finite number.
    """

    width: int
    depth: int
    vocab_size: int = 0
    flops_per_second: float | None = None

    def __post_init__(self):
        for name, least in (("width", 1), ("depth", 1), ("vocab_size", 0)):
            number = check_integer(name, getattr(self, name), least=least)
            object.__setattr__(self, name, number)
        if self.flops_per_second is not None:
            check_float("flops_per_second", self.flops_per_second)

    @property
    def unit(self) -> str:
        """The unit of the cost: "FLOP", or "s" with `flops_per_second`."""
        return "FLOP" if self.flops_per_second is None else SECONDS

    def __call__(self, batch_size: int, seq_len: int) -> float:
        _check_one_length(self, seq_len)
        dense = 72 * self.depth * self.width**2 + 6 * self.width * self.vocab_size
        attention = 12 * self.depth * self.width * seq_len
        flops = batch_size * seq_len * (dense + attention)
        return flops / self.flops_per_second if self.flops_per_second else flops


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a step in seconds, from a model fitted to measured step times.

    The time of a measured shape is its measurement. Other shapes have the time
    a + b * B * T + c * B * T^2.

    Example: predict the time of a shape from four measured shapes.
      >>> times = {(4, 64): 0.3, (2, 128): 0.42, (1, 256): 0.6, (1, 64): 0.1125}
      >>> cost = StepTime.fit({Bucket(*shape): time for shape, time in times.items()})
      >>> print(f"{cost(1, 128):.3f} s, off by up to {cost.error:.1%}")
      0.225 s, off by up to 4.8%

    Attributes:
      per_step: a, the constant overhead of a step in seconds.
      per_token: b, the seconds per position.
      per_pair: c, the seconds per pair of positions in a row, for attention.
      error: the largest relative error of the three terms on a measured step; NaN if
        there are no more measured shapes than terms.
      measured: `(batch_size, seq_len)` -> seconds, which take precedence over the
        terms.

    Raises:
      ValueError: if a term is negative or not finite.
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
        for name in ("per_step", "per_token", "per_pair"):
            check_float(name, getattr(self, name), least=0)

    def __call__(self, batch_size: int, seq_len: int) -> float:
        _check_one_length(self, seq_len)
        known = self.measured.get((batch_size, seq_len))
        if known is not None:
            return known
        tokens = batch_size * seq_len
        return self.per_step + tokens * (self.per_token + seq_len * self.per_pair)

    def to_dict(self) -> dict[str, float | None]:
        """Returns the three terms and their error as plain Python numbers."""
        names = ("per_step", "per_token", "per_pair")
        error = None if np.isnan(self.error) else float(self.error)
        return {**{name: float(getattr(self, name)) for name in names}, "error": error}

    @classmethod
    def fit(cls, seconds: Mapping[Bucket, float]) -> StepTime:
        """Returns the step time that fits measured step times best.

        The fit minimizes the sum of the relative errors, and no term is negative. With
        five or more shapes it is robust to an outlier: for example, a T that is a power
        of two may be slow on a CPU. A few shapes are enough if they are as different as
        those of `calibration_shapes`: the shortest and the longest T, some T in
        between, and one shape with a smaller B * T, which distinguishes a from b.
        If no measurement distinguishes the two, a is 0.

        Example: steps that take 10 ms, and 20 us for each position.
          >>> shapes = [Bucket(8, 64), Bucket(4, 128), Bucket(2, 256), Bucket(2, 64)]
          >>> cost = StepTime.fit({b: 0.01 + 2e-5 * b.num_tokens for b in shapes})
          >>> print(f"{cost.per_step:.3f} {cost.per_token:.1e} {cost.per_pair:.1f}")
          0.010 2.0e-05 0.0

        Args:
          seconds: `Bucket` -> the measured time of one step in seconds.

        Raises:
          ValueError: if `seconds` is empty or not a dict of `Bucket`, or a time is not
            positive.
        """
        if not seconds or not all(isinstance(bucket, Bucket) for bucket in seconds):
            raise ValueError(
                f"`seconds={seconds!r}`: pass a dict from at least one `Bucket` to the "
                "time of a step."
            )
        # Sort the shapes, because a floating-point sum depends on the order.
        seconds = {shape: seconds[shape] for shape in sorted(seconds)}
        shapes = np.array(
            [(b.batch_size, b.tokens_per_row) for b in seconds], np.float64
        )
        times = np.array([check_float(f"seconds[{b}]", seconds[b]) for b in seconds])
        tokens = shapes.prod(axis=1)
        terms = np.stack([np.ones_like(tokens), tokens, tokens * shapes[:, 1]], axis=1)
        # Each row is divided by its time: `relative @ terms` is 1 for a perfect fit.
        relative = terms / times[:, None]
        fitted = _non_negative(relative)
        error = abs(relative @ fitted - 1).max().item()
        return cls(
            *fitted.tolist(),
            error=error if len(times) > terms.shape[1] else np.nan,
            measured={(b.batch_size, b.tokens_per_row): s for b, s in seconds.items()},
        )


def _non_negative(relative: np.ndarray) -> np.ndarray:
    """Returns the non-negative terms, `[3]`, for which `relative @ terms` is nearest 1.

    This is a fit by least absolute deviations. As a linear program, it has a solution
    in a corner: three of the terms and errors are 0. All corners are tried, which takes
    milliseconds for some dozens of shapes.
    """
    size, num_terms = relative.shape
    # Scale the columns, because they differ by orders of magnitude.
    scale = relative.max(axis=0)
    rows = relative / scale
    left = np.concatenate([rows, np.eye(num_terms)])
    right = np.concatenate([np.ones(size), np.zeros(num_terms)])
    best, least = np.zeros(num_terms), np.inf
    for first in range(size + 1):
        others = first + 1 + np.stack(np.triu_indices(len(left) - first - 1, 1), axis=1)
        corners = np.insert(others, 0, first, axis=1)
        corners = corners[abs(np.linalg.det(left[corners])) > 1e-12]
        terms = np.linalg.solve(left[corners], right[corners][:, :, None])[:, :, 0]
        # Rounding errors are no terms.
        terms[terms < 1e-12] = 0
        costs = abs(terms @ rows.T - 1).sum(axis=1) + terms @ _PENALTIES
        if len(costs) and costs.min() < least:
            best, least = terms[costs.argmin()], costs.min()
    return best / scale


def _check_one_length(cost: TransformerCost | StepTime, seq_len: Any) -> None:
    if isinstance(seq_len, Mapping):
        raise ValueError(
            f"`{type(cost).__name__}` requires examples with one length. Pass your own "
            "`cost_fn` of B and a mapping of T"
        )
