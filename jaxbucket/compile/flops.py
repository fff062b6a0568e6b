"""Counts the operations of a program, including all iterations of its loops.

XLA's own count (`compiled.cost_analysis()`) counts the body of a loop once, so that a
model of 32 layers in a `lax.scan` counts as one layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def count_flops(jaxpr: Any) -> int:
    """Returns the floating-point operations of all matrix products and convolutions.

    The count covers the whole program on all devices: 2 * M * N * K for a product of
    `[M, K]` and `[K, N]`. The body of a `lax.scan`, or of a `fori_loop` with a known
    number of iterations, counts once per iteration. The body of a `while_loop` counts
    once, because its number of iterations is unknown. A `cond` counts as its largest
    branch, and a Pallas kernel as one cell of its grid. Other operations do not count.

    Args:
      jaxpr: a traced program, such as `jax.jit(f).trace(x).jaxpr`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def power(x):
      ...     return jax.lax.fori_loop(0, 5, lambda _, y: y @ x, x)
      >>> count_flops(jax.jit(power).trace(jnp.ones((8, 8))).jaxpr) == 5 * 2 * 8**3
      True
    """
    # A ClosedJaxpr contains the program itself.
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _product_flops(equation)
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    inner = [count_flops(program) for program in _programs(params.values())]
    if name == "cond":
        return max(inner, default=0)
    return _num_runs(name, params) * sum(inner)


def _product_flops(equation: Any) -> int:
    left = equation.invars[0].aval.shape
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth = math.prod(left[axis] for axis in contracted)
    return 2 * math.prod(equation.outvars[0].aval.shape) * depth


def _convolution_flops(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    # Each output is a sum over the kernel's window and the channels of its group.
    outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    window = math.prod(kernel) // max(outputs, 1)
    return 2 * math.prod(equation.outvars[0].aval.shape) * window


def _num_runs(name: str, params: dict[str, Any]) -> int:
    """Returns how many times the programs inside an equation run."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        # The program inside is that of a single device.
        axes = params.get("manual_axes", params["mesh"].axis_names)
        return math.prod(params["mesh"].shape[axis] for axis in axes)
    return 1


def _programs(values: Any) -> Iterator[Any]:
    for value in values:
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)
