"""Pacing functions, which decide how many of the easiest examples are open and when.

A pacing function maps the progress of training, a number from 0, to a share of the
examples, from 0 to 1. Progress is the number of completed epochs. If the function has
an attribute `unit`, which is "steps" or "tokens", it is the number of completed steps,
an integer, or of real tokens. Any function with this signature works. The classes in
this module are the usual choices. They are dataclasses, so that they can be printed,
compared and sent to worker processes.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

from jaxbucket.base.checks import (
    check_choice,
    check_float,
    check_function,
)

Pacing: TypeAlias = Callable[[float], float]
Unit: TypeAlias = Literal["epochs", "steps", "tokens"]
UNITS: tuple[Unit, ...] = get_args(Unit)
# Shares are floats. By this much, they may differ from the fractions that are meant.
SHARE_TOLERANCE = 1e-12


@dataclasses.dataclass(frozen=True)
class LinearPacing:
    """A share that grows linearly from `start` to 1.

    Example:
      >>> pacing = LinearPacing(start=0.5, duration=2)
      >>> pacing(0), pacing(1), pacing(2), pacing(3)
      (0.5, 0.75, 1.0, 1.0)
      >>> LinearPacing(start=0.5, duration=10_000, unit="steps")(5_000)
      0.75

    Attributes:
      start: the initial share.
      duration: the number of epochs after which all examples are open.
      unit: "steps" or "tokens" if `duration` is a number of steps or of real tokens.

    Raises:
      ValueError: if `start` is not from 0 to 1, `duration` is not positive and finite,
        or `unit` is unknown.
    """

    start: float = 0.1
    duration: float = 1.0
    unit: Unit = dataclasses.field(default="epochs", kw_only=True)

    def __post_init__(self):
        check_float("start", self.start, least=0, most=1)
        check_float("duration", self.duration)
        check_choice("unit", self.unit, UNITS)

    def __call__(self, progress: float) -> float:
        return self.start + (1 - self.start) * min(1.0, progress / self.duration)


@dataclasses.dataclass(frozen=True)
class RootPacing(LinearPacing):
    """A share that grows quickly at first and then more and more slowly.

    It is the competence function of Platanios et al., "Competence-based Curriculum
    Learning for Neural Machine Translation", NAACL 2019:
    `(t * (1 - start**p) + start**p) ** (1 / p)`, where t runs from 0 to 1.

    Example:
      >>> pacing = RootPacing(start=0.6, duration=1)
      >>> round(pacing(0), 3), round(pacing(0.4375), 3), pacing(1)
      (0.6, 0.8, 1.0)

    Attributes:
      start, duration, unit: as in `LinearPacing`.
      degree: the exponent p; 2 for the square root.

    Raises:
      ValueError: if `degree` is not positive, or as in `LinearPacing`.
    """

    degree: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        check_float("degree", self.degree)

    def __call__(self, progress: float) -> float:
        least = self.start**self.degree
        share = min(1.0, progress / self.duration) * (1 - least) + least
        return min(1.0, share ** (1 / self.degree))


@dataclasses.dataclass(frozen=True)
class StepPacing:
    """A share that is constant between given epochs, steps or numbers of tokens.

    See Hacohen and Weinshall, "On the Power of Curriculum Learning in Training Deep
    Networks", ICML 2019.

    Example:
      >>> pacing = StepPacing(shares=(0.25, 0.5, 1.0), boundaries=(1, 2))
      >>> pacing(0.9), pacing(1), pacing(2)
      (0.25, 0.5, 1.0)

    Attributes:
      shares: the shares, each from 0 to 1; one entry more than `boundaries`.
      boundaries: the number of completed epochs at which the next share applies,
        positive and ascending.
      unit: "steps" or "tokens" if `boundaries` are numbers of steps or of real tokens.

    Raises:
      ValueError: if a share is not from 0 to 1, the numbers of entries do not match,
        `boundaries` are not positive and ascending, or `unit` is unknown.
    """

    shares: tuple[float, ...]
    boundaries: tuple[float, ...]
    unit: Unit = dataclasses.field(default="epochs", kw_only=True)

    def __post_init__(self):
        object.__setattr__(self, "shares", tuple(self.shares))
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        for share in self.shares:
            check_float("shares", share, least=0, most=1)
        ends = itertools.pairwise((0, *self.boundaries, math.inf))
        ascending = all(a < b for a, b in ends)
        if not ascending or len(self.shares) != len(self.boundaries) + 1:
            raise ValueError(
                f"`boundaries={self.boundaries}` with `shares={self.shares}`: pass "
                "positive, finite and ascending numbers, one fewer than shares."
            )
        check_choice("unit", self.unit, UNITS)

    def __call__(self, progress: float) -> float:
        return self.shares[bisect.bisect_right(self.boundaries, progress)]


@dataclasses.dataclass(frozen=True)
class ByValue:
    """Opens the examples whose difficulty is at most a value, in place of a share.

    The value runs from `low` to `high` as the share of `pacing` runs from 0 to 1, and
    is rounded down to a multiple of `multiple`. Examples beyond it are not open, even
    at the end: without replacement they come last in every epoch, and with replacement
    never. If difficulties are float32, the value is rounded to float32, too.

    Example:
      >>> pacing = LinearPacing(start=0, duration=100, unit="steps")
      >>> value = ByValue(pacing, 8, 128, multiple=8)
      >>> [int(value(step)) for step in (0, 50, 99, 100)]
      [8, 64, 120, 128]

    Attributes:
      pacing: the pacing function of the share.
      low: the value at a share of 0.
      high: the value at a share of 1.
      multiple: the value is a multiple of this number; None to leave it as it is.

    Raises:
      ValueError: if `pacing` is not a function to a share, `low` and `high` are not
        finite and ascending, or `multiple` is not positive.
    """

    pacing: Pacing
    low: float
    high: float
    multiple: float | None = None

    def __post_init__(self):
        check_pacing(self.pacing)
        check_float("low", self.low, least=-math.inf)
        check_float("high", self.high, least=self.low)
        if self.multiple is not None:
            check_float("multiple", self.multiple)

    @property
    def unit(self) -> Unit:
        """The unit of progress, which is that of `pacing`."""
        return pacing_unit(self.pacing)

    def __call__(self, progress: float) -> float:
        # Raised slightly, because a float may miss the share that reaches a value.
        share = open_share(self.pacing, progress) + SHARE_TOLERANCE
        if share >= 1:
            return self.last
        return self._rounded(self.low + (self.high - self.low) * share)

    @property
    def last(self) -> float:
        """The value at a share of 1."""
        return self._rounded(self.high)

    def _rounded(self, value: float) -> float:
        if self.multiple is None:
            return value
        # As the decimals that are printed, because 1.0 // 0.1 is 9.
        multiple = Fraction(str(self.multiple))
        whole = Fraction(str(value)) // multiple * multiple
        return whole.numerator if whole.denominator == 1 else float(whole)


def check_pacing(pacing: Pacing) -> None:
    """Raises a ValueError if `pacing` is not callable or has an unknown unit."""
    check_function("pacing", pacing, "epochs, such as `jb.schedule.LinearPacing()`")
    check_choice("pacing.unit", pacing_unit(pacing), UNITS)


def pacing_name(pacing: Pacing) -> str:
    """Returns a name for fingerprints: the options, or the name of a user's function.

    The code of a function and the values that it refers to are not part of the name.
    """
    if dataclasses.is_dataclass(pacing):
        return repr(pacing)
    kind = pacing if hasattr(pacing, "__qualname__") else type(pacing)
    return f"{kind.__module__}.{kind.__qualname__}"  # pyright: ignore


def pacing_unit(pacing: Pacing) -> Unit:
    """Returns the unit of progress of a pacing function, epochs by default."""
    return getattr(pacing, "unit", "epochs")


def open_share(pacing: Pacing, progress: float) -> float:
    """Returns the share that is open after an amount of progress."""
    return check_float(f"pacing({progress})", pacing(progress), least=0, most=1)
