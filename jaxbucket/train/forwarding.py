"""Which results of a function are its arguments, passed on unchanged.

Comparing tracers is not enough: `jax.checkpoint`, `jax.jit` and `jax.lax.scan` return
new tracers even for arguments that they only pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn


def are_forwarded(
    function: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]
) -> list[bool]:
    """Returns whether each result of a function is the argument of the same index.

    A result that passes through `jax.lax.while_loop` or branches may count as changed.

    Example:
      >>> def function(values):
      ...     x, y = values
      ...     return jax.checkpoint(lambda x, y: (x, y + 1))(x, y)
      >>> are_forwarded(function, [1.0, 2.0])
      [True, False]

    Args:
      function: a function that can be traced, from values to as many values.
      values: its arguments.
    """
    jaxpr = jax.make_jaxpr(function)(values).jaxpr
    pairs = zip(jaxpr.outvars, jaxpr.invars, strict=True)
    return [_origin(jaxpr, result) is argument for result, argument in pairs]


def _origin(jaxpr: Jaxpr, variable: Any) -> Any:
    """Returns the variable that was passed on as this one; None if it was computed."""
    producers = {
        id(result): (eqn, index)
        for eqn in jaxpr.eqns
        for index, result in enumerate(eqn.outvars)
    }
    while id(variable) in producers:
        eqn, index = producers[id(variable)]
        variable = _passed_on(eqn, index)
    return variable


def _passed_on(eqn: JaxprEqn, index: int) -> Any:
    """Returns the argument that an equation returns as a result; None if there is none.

    The arguments and results of these equations are those of the function inside, in
    the same order.
    """
    inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)  # without its constants
    if not isinstance(inner, Jaxpr) or (len(inner.invars), len(inner.outvars)) != (
        *(len(eqn.invars), len(eqn.outvars)),
    ):
        return None
    origin = _origin(inner, inner.outvars[index])
    for position, argument in enumerate(inner.invars):
        if origin is argument:
            is_kept = eqn.primitive.name != "scan" or _is_kept(
                eqn, inner, position, index
            )
            return eqn.invars[position] if is_kept else None
    return None


def _is_kept(scan: JaxprEqn, inner: Jaxpr, position: int, index: int) -> bool:
    """Whether a scan that passes on an argument in each iteration returns all of it.

    Its arguments are constants, carried values and arrays of slices, its results are
    carried values and arrays of slices.
    """
    sliced_arguments = [
        _is_sliced(*x) for x in zip(scan.invars, inner.invars, strict=True)
    ]
    sliced_results = [
        _is_sliced(*x) for x in zip(scan.outvars, inner.outvars, strict=True)
    ]
    if sliced_results[index]:
        return sliced_arguments[position]
    num_carried = sliced_results.count(False)
    num_constants = sliced_arguments.count(False) - num_carried
    # Another carried value would move on by one place in each iteration.
    return position == num_constants + index


def _is_sliced(outer: Any, inner: Any) -> bool:
    return outer.aval.shape != inner.aval.shape
