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
    origins = _origins(jax.make_jaxpr(function)(values).jaxpr)
    return [index == origin for index, origin in enumerate(origins)]


def _origins(jaxpr: Jaxpr) -> list[int | None]:
    """Returns the index of the argument that each result is; None if it is computed."""
    origins = {id(argument): index for index, argument in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)  # without its constants
        # The arguments and results of these equations are those of the function
        # inside, in the same order.
        if not isinstance(inner, Jaxpr) or (len(inner.invars), len(inner.outvars)) != (
            len(eqn.invars),
            len(eqn.outvars),
        ):
            continue
        for index, position in enumerate(_origins(inner)):
            if position is not None and _is_kept(eqn, inner, position, index):
                origin = origins.get(id(eqn.invars[position]))
                if origin is not None:
                    origins[id(eqn.outvars[index])] = origin
    return [origins.get(id(result)) for result in jaxpr.outvars]


def _is_kept(eqn: JaxprEqn, inner: Jaxpr, position: int, index: int) -> bool:
    """Whether an equation whose function passes on an argument returns all of it.

    The arguments of a scan are constants, carried values and arrays of slices, its
    results are carried values and arrays of slices.
    """
    if eqn.primitive.name != "scan":
        return True
    sliced_arguments = list(map(_is_sliced, eqn.invars, inner.invars))
    sliced_results = list(map(_is_sliced, eqn.outvars, inner.outvars))
    if sliced_results[index]:
        return sliced_arguments[position]
    num_carried = sliced_results.count(False)
    num_constants = sliced_arguments.count(False) - num_carried
    # Another carried value would move on by one place in each iteration.
    return position == num_constants + index


def _is_sliced(outer: Any, inner: Any) -> bool:
    return outer.aval.shape != inner.aval.shape
