"""How many operations a program has, those in loops as often as they run.

XLA's own count (`compiled.cost_analysis()`) takes the body of a loop once, so that a
model of 32 layers in a `lax.scan` counts as one of 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def count_flops(jaxpr: Any) -> int:
    """Returns the floating-point operations of all matrix products and convolutions.

    They are those of the whole program, over all devices: 2 * M * N * K for a product
    of `[M, K]` and `[K, N]`. A `lax.scan`, and a `fori_loop` of a number of turns that
    is known, counts its body that often; a `while_loop` counts it once, for nobody
    knows; of the branches of a `cond` the largest counts. A Pallas kernel counts as one
    turn of its grid, and what is neither product nor convolution not at all.

    Args:
      jaxpr: a traced program, such as `jax.jit(f).trace(x).jaxpr`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def power(x):
      ...     return jax.lax.fori_loop(0, 5, lambda _, y: y @ x, x)
      >>> count_flops(jax.jit(power).trace(jnp.ones((8, 8))).jaxpr) == 5 * 2 * 8**3
      True
    """
    # What is closed holds the program itself.
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _of_product(equation)
    if name == "conv_general_dilated":
        return _of_convolution(equation)
    inner = [count_flops(program) for program in _programs(params.values())]
    if name == "cond":
        return max(inner, default=0)
    return _turns(name, params) * sum(inner)


def _of_product(equation: Any) -> int:
    left = equation.invars[0].aval.shape
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth = math.prod(left[axis] for axis in contracted)
    return 2 * math.prod(equation.outvars[0].aval.shape) * depth


def _of_convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    # Each output is a sum over the kernel's window and the channels of its group.
    outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    window = math.prod(kernel) // max(outputs, 1)
    return 2 * math.prod(equation.outvars[0].aval.shape) * window


def _turns(name: str, params: dict[str, Any]) -> int:
    """How often the programs inside an equation run."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        # What is inside is one device's part.
        axes = params.get("manual_axes", params["mesh"].axis_names)
        return math.prod(params["mesh"].shape[axis] for axis in axes)
    return 1


def _programs(values: Any) -> Iterator[Any]:
    for value in values:
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)
