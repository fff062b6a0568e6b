"""The weights of a mixture, which may change during a run."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias, cast

import numpy as np

StepWeights: TypeAlias = Sequence[float] | Mapping[str, float]
# The weights of all steps, or step -> the weights from this step on.
Weights: TypeAlias = StepWeights | Mapping[int, StepWeights]


def check_weights(
    weights: Weights, names: Sequence[str], count: int
) -> dict[int, list[float]]:
    """Returns step -> the weights of all components from this step on.

    Example:
      >>> check_weights({0: {"a": 1}, 500: {"a": 0.5, "b": 0.5}}, ["a", "b"], 2)
      {0: [1.0, 0.0], 500: [0.5, 0.5]}

    Args:
      weights: a weight for each component, by name if components have names; or a
        mapping from steps to such weights.
      names: the names of the components; empty if they have none.
      count: the number of components.

    Raises:
      ValueError: if a weight is missing, unknown, not a number, negative or not finite;
        if a weight is 0 at all steps; or if steps are not integers, do not start at 0
        or are not ascending.
    """
    if not _has_steps(weights):
        constant = cast(StepWeights, weights)
        return {0: _listed("weights", constant, names, count, changes=False)}
    items = cast(Mapping[int, StepWeights], weights).items()
    by_step = {_step(key): value for key, value in items}
    steps = list(by_step)
    ascending = all(a < b for a, b in itertools.pairwise(steps))
    if steps[0] != 0 or not ascending:
        raise ValueError(
            f"`weights` has the steps {steps}. Start with step 0, in ascending order."
        )
    result = {
        step: _listed(f"weights[{step}]", x, names, count, changes=len(steps) > 1)
        for step, x in by_step.items()
    }
    for index in range(count):
        if not any(values[index] for values in result.values()):
            key = repr(names[index]) if names else index
            raise ValueError(
                f"`weights` gives {key} no share at any step. Leave it out of "
                "the mixture, too."
            )
    return result


def as_share(weight: float) -> Fraction:
    """Returns the decimal that the user wrote, 7/10 for 0.7, for a short period."""
    return Fraction(repr(weight))


def _has_steps(weights: Any) -> bool:
    """Returns whether weights are given by step."""
    if not isinstance(weights, Mapping) or not weights:
        return False
    # Names are strings.
    return all(isinstance(key, numbers.Number) for key in weights)


def _step(key: Any) -> int:
    """Returns a key of weights by step as an int, which JSON can hold."""
    if not isinstance(key, numbers.Integral) or isinstance(key, bool):
        raise ValueError(
            f"`weights` has the step {key!r}, which is not an integer. Pass a mapping "
            "from integer steps to weights, such as `{0: ..., 1000: ...}`."
        )
    return int(key)


def _listed(
    label: str, weights: StepWeights, names: Sequence[str], count: int, *, changes: bool
) -> list[float]:
    """Returns the weights of all components at some steps.

    Args:
      label: the argument, for messages.
      changes: whether there are weights of other steps, so that some may be 0.
    """
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if name not in names]
        missing = [name for name in names if name not in weights]
        if unknown or (missing and not changes):
            raise ValueError(
                f"`{label}` has the names {list(weights)}, but the mixture has "
                f"{list(names)}. Pass a weight for each."
            )
        keys: list[Any] = list(names)
        values = [weights.get(name, 0.0) for name in names]
    else:
        if names:
            raise ValueError(
                f"`{label}` is a {type(weights).__name__}, but the mixture has names. "
                f"Pass a weight by name: `{{{names[0]!r}: 1.0, ...}}`."
            )
        values = _items(label, weights, count)
        keys = list(range(count))
        if not count or len(values) != count:
            raise ValueError(
                f"`{label}` has {len(values)} entries for {count} components. Pass at "
                "least one component, and one weight for each."
            )
    result = [
        _number(f"{label}[{key!r}]", x) for key, x in zip(keys, values, strict=True)
    ]
    for key, weight in zip(keys, result, strict=True):
        if not 0 <= weight < math.inf or (weight == 0 and not changes):
            raise ValueError(
                f"`{label}[{key!r}]={weight}` must be positive and finite. Leave "
                "out components that have no share."
            )
    if not any(result):
        raise ValueError(f"`{label}` gives no component a share. Pass a positive one.")
    return result


def _items(label: str, weights: Any, count: int) -> list[Any]:
    try:
        return list(weights)
    except TypeError:
        raise ValueError(
            f"`{label}={weights!r}` is a {type(weights).__name__}. Pass a list with "
            f"one weight for each of the {count} components."
        ) from None


def _number(label: str, weight: Any) -> float:
    try:
        # `float` would also take text and booleans, which are mistakes here.
        if np.asarray(weight).dtype.kind not in "bSU":
            return float(weight)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"`{label}={weight!r}` is not a number. Pass a positive one.")
