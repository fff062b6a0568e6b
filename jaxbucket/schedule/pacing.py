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
import numbers
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

from jaxbucket.base.checks import check_number, check_share

Pacing: TypeAlias = Callable[[float], float]
Unit: TypeAlias = Literal["epochs", "steps", "tokens"]
UNITS: tuple[Unit, ...] = get_args(Unit)
# Shares are floats. By this much, they may differ from the fractions that are meant.
SHARE_TOLERANCE = 1e-12


@dataclasses.dataclass(frozen=True, repr=False)
class _Timed:
    """A pacing function that runs over a number of epochs, steps or tokens.

    Subclasses have a field `epochs`, too.
    """

    steps: Any = dataclasses.field(default=None, kw_only=True)
    tokens: Any = dataclasses.field(default=None, kw_only=True)

    def __repr__(self) -> str:
        fields = dataclasses.asdict(self).items()
        values = ", ".join(f"{name}={x!r}" for name, x in fields if x is not None)
        return f"{type(self).__name__}({values})"

    @property
    def unit(self) -> Unit:
        """The unit of progress: "epochs", "steps" or "tokens"."""
        return next(unit for unit in UNITS if getattr(self, unit) is not None)

    @property
    def duration(self) -> Any:
        """The value of the field that is named like the unit."""
        return getattr(self, self.unit)

    def _check_unit(self) -> None:
        given = [unit for unit in UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            raise ValueError(
                f"`epochs={getattr(self, 'epochs', None)!r}`, `steps={self.steps!r}` "
                f"and `tokens={self.tokens!r}`: pass one of them."
            )


@dataclasses.dataclass(frozen=True, repr=False)
class LinearPacing(_Timed):
    """A share that grows linearly from `start` to 1.

    Example:
      >>> pacing = LinearPacing(start=0.5, epochs=2)
      >>> pacing(0), pacing(1), pacing(2), pacing(3)
      (0.5, 0.75, 1.0, 1.0)
      >>> LinearPacing(start=0.5, steps=10_000)(5_000)
      0.75

    Attributes:
      start: the initial share.
      epochs: the number of epochs after which all examples are open; 1 by default.
      steps: the number of steps instead of epochs.
      tokens: the number of real tokens instead of epochs.

    Raises:
      ValueError: if `start` is not from 0 to 1, the duration is not positive, or it is
        given in several units.
    """

    start: float = 0.1
    epochs: float | None = None

    def __post_init__(self):
        check_share("start", self.start)
        _check_duration(self)

    def __call__(self, progress: float) -> float:
        return self.start + (1 - self.start) * min(1.0, progress / self.duration)


@dataclasses.dataclass(frozen=True, repr=False)
class RootPacing(_Timed):
    """A share that grows quickly at first and then more and more slowly.

    It is the competence function of Platanios et al., "Competence-based Curriculum
    Learning for Neural Machine Translation", NAACL 2019:
    `(t * (1 - start**p) + start**p) ** (1 / p)`, where t runs from 0 to 1.

    Example:
      >>> pacing = RootPacing(start=0.6, epochs=1)
      >>> round(pacing(0), 3), round(pacing(0.4375), 3), pacing(1)
      (0.6, 0.8, 1.0)

    Attributes:
      start: the initial share.
      epochs: the number of epochs after which all examples are open; 1 by default.
      degree: the exponent p; 2 for the square root.
      steps: the number of steps instead of epochs.
      tokens: the number of real tokens instead of epochs.

    Raises:
      ValueError: if `start` is not from 0 to 1, the duration or `degree` is not
        positive, or the duration is given in several units.
    """

    start: float = 0.1
    epochs: float | None = None
    degree: float = 2.0

    def __post_init__(self):
        check_share("start", self.start)
        _check_duration(self)
        check_number("degree", self.degree)

    def __call__(self, progress: float) -> float:
        least = self.start**self.degree
        share = min(1.0, progress / self.duration) * (1 - least) + least
        return min(1.0, share ** (1 / self.degree))


@dataclasses.dataclass(frozen=True, repr=False)
class StepPacing(_Timed):
    """A share that is constant between given epochs, steps or numbers of tokens.

    See Hacohen and Weinshall, "On the Power of Curriculum Learning in Training Deep
    Networks", ICML 2019.

    Example:
      >>> pacing = StepPacing(shares=(0.25, 0.5, 1.0), epochs=(1, 2))
      >>> pacing(0.9), pacing(1), pacing(2)
      (0.25, 0.5, 1.0)

    Attributes:
      shares: the shares, each from 0 to 1; one entry more than `epochs`.
      epochs: the number of completed epochs at which the next share applies, positive
        and ascending.
      steps: the number of completed steps instead of epochs.
      tokens: the number of real tokens instead of epochs.

    Raises:
      ValueError: if a share is not from 0 to 1, the numbers of entries do not match,
        or the times are missing, given in several units, or not positive and ascending.
    """

    shares: tuple[float, ...]
    epochs: tuple[float, ...] | None = None

    def __post_init__(self):
        object.__setattr__(self, "shares", tuple(self.shares))
        for share in self.shares:
            check_share("shares", share)
        self._check_unit()
        times = tuple(self.duration)
        object.__setattr__(self, self.unit, times)
        ascending = all(a < b for a, b in itertools.pairwise((0, *times, math.inf)))
        if not ascending or len(self.shares) != len(times) + 1:
            raise ValueError(
                f"`shares={self.shares}` with `{self.unit}={times}`: pass one share "
                "more than times, which are positive, finite and ascending."
            )

    def __call__(self, progress: float) -> float:
        return self.shares[bisect.bisect_right(self.duration, progress)]


@dataclasses.dataclass(frozen=True)
class ByValue:
    """Opens the examples whose difficulty is at most a value, in place of a share.

    The value runs from `low` to `high` as the share of `pacing` runs from 0 to 1, and
    is rounded down to a multiple of `multiple`. Examples beyond it are not open, even
    at the end: without replacement they come last in every epoch, and with replacement
    never. If difficulties are float32, the value is rounded to float32, too.

    Example:
      >>> value = ByValue(LinearPacing(start=0, steps=100), 8, 128, multiple=8)
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
        check_share_pacing(self.pacing)
        if not -math.inf < self.low <= self.high < math.inf:
            raise ValueError(
                f"`low={self.low!r}` and `high={self.high!r}` must be finite, and "
                "`low` must not exceed `high`."
            )
        if self.multiple is not None:
            check_number("multiple", self.multiple)

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
        # As decimals, because 1.0 // 0.1 is 9.
        multiple = _decimal(self.multiple)
        whole = _decimal(value) // multiple * multiple
        return whole.numerator if whole.denominator == 1 else float(whole)


def check_pacing(pacing: Pacing) -> None:
    """Raises a ValueError if `pacing` is not callable or has an unknown unit."""
    if not callable(pacing):
        raise ValueError(
            f"`pacing={pacing!r}` is not a function. Pass a function from epochs to "
            "a share, such as `jb.schedule.LinearPacing(start=0.5)`."
        )
    if pacing_unit(pacing) not in UNITS:
        raise ValueError(
            f"`pacing.unit={pacing_unit(pacing)!r}` is unknown. Set it to 'epochs', "
            "'steps' or 'tokens'."
        )


def check_share_pacing(pacing: Pacing) -> None:
    """Raises a ValueError if `pacing` is not a function to a share."""
    check_pacing(pacing)
    if isinstance(pacing, ByValue):
        raise ValueError(
            "`pacing` is a `ByValue`, whose results are no shares. Put `ByValue` "
            "around the other pacing function."
        )


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
    """Returns the share that is open after an amount of progress.

    Raises:
      ValueError: if the function does not return a number from 0 to 1.
    """
    share = pacing(progress)
    # `numbers.Real` also covers the scalars of numpy.
    if not (isinstance(share, numbers.Real) and 0 <= share <= 1):
        raise ValueError(
            f"`pacing({progress})` returned {share!r}. Return a share of the examples, "
            "a number from 0 to 1."
        )
    return float(share)


def _check_duration(pacing: Any) -> None:
    """Sets the default of one epoch, and checks that the duration is positive."""
    if all(getattr(pacing, unit) is None for unit in UNITS):
        object.__setattr__(pacing, "epochs", 1.0)
    pacing._check_unit()
    check_number(pacing.unit, pacing.duration)


def _decimal(value: float) -> Fraction:
    """Returns the decimal that a number is printed as."""
    return Fraction(str(value))
