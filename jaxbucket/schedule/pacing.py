"""Pacing functions, which decide how many of the easiest examples are open and when.

A pacing function maps the number of completed epochs, a float from 0, to a share of the
examples, from 0 to 1. Any function with this signature works. The classes in this
module are the usual choices. They are dataclasses, so that they can be printed,
compared and sent to worker processes.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import TypeAlias

Pacing: TypeAlias = Callable[[float], float]


@dataclasses.dataclass(frozen=True)
class LinearPacing:
    """A share that grows linearly from `start` to 1.

    Example:
      >>> pacing = LinearPacing(start=0.5, epochs=2)
      >>> pacing(0), pacing(1), pacing(2), pacing(3)
      (0.5, 0.75, 1.0, 1.0)

    Attributes:
      start: the initial share.
      epochs: the number of epochs after which all examples are open.

    Raises:
      ValueError: if `start` is not from 0 to 1, or `epochs` is not positive.
    """

    start: float = 0.1
    epochs: float = 1.0

    def __post_init__(self):
        _check_share("start", self.start)
        _check_positive("epochs", self.epochs)

    def __call__(self, epochs: float) -> float:
        return self.start + (1 - self.start) * min(1.0, epochs / self.epochs)


@dataclasses.dataclass(frozen=True)
class RootPacing:
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
      epochs: the number of epochs after which all examples are open.
      degree: the exponent p; 2 for the square root.

    Raises:
      ValueError: if `start` is not from 0 to 1, or `epochs` or `degree` is not
        positive.
    """

    start: float = 0.1
    epochs: float = 1.0
    degree: float = 2.0

    def __post_init__(self):
        _check_share("start", self.start)
        _check_positive("epochs", self.epochs)
        _check_positive("degree", self.degree)

    def __call__(self, epochs: float) -> float:
        least = self.start**self.degree
        share = min(1.0, epochs / self.epochs) * (1 - least) + least
        return min(1.0, share ** (1 / self.degree))


@dataclasses.dataclass(frozen=True)
class StepPacing:
    """A share that is constant between given epochs.

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

    Raises:
      ValueError: if a share is not from 0 to 1, the numbers of entries do not match,
        or `epochs` is not positive and ascending.
    """

    shares: tuple[float, ...]
    epochs: tuple[float, ...]

    def __post_init__(self):
        object.__setattr__(self, "shares", tuple(self.shares))
        object.__setattr__(self, "epochs", tuple(self.epochs))
        for share in self.shares:
            _check_share("shares", share)
        if len(self.shares) != len(self.epochs) + 1:
            raise ValueError(
                f"`shares` has {len(self.shares)} entries for {len(self.epochs)} in "
                "`epochs`. Pass one share more than `epochs`, the first one for the "
                "start."
            )
        pairs = zip(self.epochs, self.epochs[1:], strict=False)
        if not all(a < b for a, b in pairs) or not all(x > 0 for x in self.epochs):
            raise ValueError(f"`epochs={self.epochs}` must be positive and ascending.")

    def __call__(self, epochs: float) -> float:
        return self.shares[bisect.bisect_right(self.epochs, epochs)]


@dataclasses.dataclass(frozen=True)
class CyclicPacing:
    """A pacing function that restarts another one periodically.

    Example:
      >>> pacing = CyclicPacing(LinearPacing(start=0.5, epochs=0.5), every=1)
      >>> pacing(0), pacing(0.25), pacing(0.75), pacing(1)
      (0.5, 0.75, 1.0, 0.5)

    Attributes:
      pacing: the pacing function of one cycle.
      every: the length of a cycle, in epochs.

    Raises:
      ValueError: if `pacing` is not callable, or `every` is not positive.
    """

    pacing: Pacing
    every: float = 1.0

    def __post_init__(self):
        check_pacing(self.pacing)
        _check_positive("every", self.every)

    def __call__(self, epochs: float) -> float:
        return self.pacing(math.fmod(epochs, self.every))


def check_pacing(pacing: Pacing) -> None:
    """Raises a ValueError if `pacing` is not callable."""
    if not callable(pacing):
        raise ValueError(
            f"`pacing={pacing!r}` is not a function. Pass one from epochs to a share, "
            "such as `jb.schedule.LinearPacing(start=0.5)`."
        )


def open_share(pacing: Pacing, epochs: float) -> float:
    """Returns the share that is open after a number of epochs.

    Raises:
      ValueError: if the function does not return a number from 0 to 1.
    """
    share = pacing(epochs)
    # `numbers.Real` also covers the scalars of numpy.
    if not (isinstance(share, numbers.Real) and 0 <= share <= 1):
        raise ValueError(
            f"`pacing({epochs})` returned {share!r}. Return a share of the examples, "
            "a number from 0 to 1."
        )
    return float(share)


def pacing_name(pacing: Pacing) -> list[str]:
    """Returns strings that identify a pacing function, the same in every process.

    The functions of this module are identified by their parameters. Other functions are
    sampled: every 1/256 of an epoch up to epoch 16, and every 1/16 up to epoch 256.
    """
    # `type(...) is` excludes subclasses, which may return different shares.
    if isinstance(pacing, CyclicPacing) and type(pacing) is CyclicPacing:
        return ["CyclicPacing", repr(float(pacing.every)), *pacing_name(pacing.pacing)]
    if type(pacing) in (LinearPacing, RootPacing, StepPacing):
        parts = dataclasses.astuple(pacing)  # pyright: ignore
        values = [
            x for part in parts for x in (part if type(part) is tuple else [part])
        ]
        return [type(pacing).__name__, str([float(value) for value in values])]
    samples = [i / 256 for i in range(16 * 256)] + [i / 16 for i in range(256 * 16)]
    # Rounded, because powers differ between machines in the last bit.
    return [f"{open_share(pacing, epochs):.9g}" for epochs in samples]


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"`{name}={share!r}` must be a share from 0 to 1.")


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"`{name}={value!r}` must be positive and finite.")
