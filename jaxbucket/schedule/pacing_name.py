"""Names of pacing functions, which identify them in fingerprints."""

from __future__ import annotations

import numbers
from typing import Any

from jaxbucket.schedule.pacing import (
    ByValue,
    CyclicPacing,
    LinearPacing,
    Pacing,
    RootPacing,
    StepPacing,
    Unit,
    open_share,
    pacing_unit,
)


def pacing_name(pacing: Pacing) -> list[str]:
    """Returns strings that identify a pacing function, the same in every process.

    The functions of the library are identified by their parameters. Other functions are
    sampled: every 1/256 of an epoch up to epoch 16, and every 1/16 up to epoch 256; or
    at all steps up to 256, and at 128 steps between each larger power of two and the
    next; or at as many numbers of tokens.
    """
    # `type(...) is` excludes subclasses, which may return different shares.
    if isinstance(pacing, ByValue) and type(pacing) is ByValue:
        values = [_exact(x) for x in (pacing.low, pacing.high, pacing.multiple or 0)]
        return ["ByValue", str(values), *pacing_name(pacing.pacing)]
    if isinstance(pacing, CyclicPacing) and type(pacing) is CyclicPacing:
        every = float(pacing.every)  # pyright: ignore
        return ["CyclicPacing", repr(every), *pacing_name(pacing.pacing)]
    unit = pacing_unit(pacing)
    # Epochs are left out, so that fingerprints from before other units stay valid.
    units = [] if unit == "epochs" else [unit]
    if type(pacing) in (LinearPacing, RootPacing, StepPacing):
        parts = [part for _, part in pacing.given()]  # pyright: ignore
        values = [
            x for part in parts for x in (part if type(part) is tuple else [part])
        ]
        return [type(pacing).__name__, str([float(value) for value in values]), *units]
    # Rounded, because powers differ between machines in the last bit.
    shares = [f"{open_share(pacing, x):.9g}" for x in _SAMPLES[unit]]
    return [*units, *shares]


def _exact(value: Any) -> float:
    """Returns a number as a float, or as an integer that no float equals."""
    if isinstance(value, numbers.Integral) and int(float(value)) != int(value):
        return int(value)
    return float(value)


# Powers of two that exceed the steps and the tokens of any run.
_STEP_BITS, _TOKEN_BITS = 40, 60


def _floats(bits: int) -> list[int]:
    """Returns all integers below `2**bits` with at most 8 significant bits."""
    scaled = [i << bit for bit in range(bits - 8) for i in range(128, 256)]
    return [*range(128), *scaled]


_SAMPLES: dict[Unit, list[Any]] = {
    "epochs": [i / 256 for i in range(16 * 256)] + [i / 16 for i in range(256 * 16)],
    "steps": _floats(_STEP_BITS),
    "tokens": _floats(_TOKEN_BITS),
}
