"""What the compiler and the devices say when a program does not fit into memory."""

from __future__ import annotations

import re
from typing import Any

import jax

from jaxbucket.base.table import bytes_text

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
# How XLA for TPUs refuses a program: before it tries to save memory, and after.
_REFUSALS = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether jax raised an error because the memory of a device is exhausted."""
    text = str(error)
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    # The memory of a core, in which the blocks of a kernel have to be, is another.
    return is_of_jax and "RESOURCE_EXHAUSTED" in text and "vmem" not in text.lower()


def refused_bytes(error: BaseException) -> tuple[int, int] | None:
    """Returns the bytes that a program needs, and those that there are.

    Returns None if the compiler does not say.

    Example:
      >>> refused_bytes(ValueError("Used 20.50G of 15.75G hbm. Exceeded by 4.75G"))
      (22011707392, 16911433728)
    """
    for refusal in _REFUSALS:
        if match := refusal.search(str(error)):
            needed, unit, available, unit_available = match.groups()
            return (
                int(float(needed) * _UNITS[unit]),
                int(float(available) * _UNITS[unit_available]),
            )
    return None


def explain_out_of_memory(
    error: BaseException, label: Any, peak_bytes: int | None, args: Any
) -> None:
    """Adds to an error at run time which program it was, and what to do.

    Args:
      error: the error of an executable.
      label: the bucket or phase.
      peak_bytes: the memory that its program needs on each device, if known.
      args: the arguments of the executable, the first of which is the state; None if
        later steps have donated it.
    """
    needs = "" if peak_bytes is None else f", which needs {bytes_text(peak_bytes)}"
    is_lost = args is None or any(
        isinstance(leaf, jax.Array) and leaf.is_deleted()
        for leaf in jax.tree.leaves(args[:1])
    )
    state = "The state was donated to it: resume from the last checkpoint."
    if not is_lost:
        state = "The state is intact: save a checkpoint before you stop."
    error.add_note(
        f"Memory was exhausted by the program of {label}{needs} on each device, "
        f"besides batches that wait and anything else in memory. {state} Then plan "
        "with a smaller `max_tokens` for this T: `jaxbucket fit` finds the largest."
    )
