"""Tests whether the updates of an optimizer are linear in its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxbucket.base.checks import check_float

_STEPS = 6
# Above the rounding errors of float32, below the effect of an old learning rate.
_TOLERANCE = 1e-4


def is_linear_in_lr(
    make_tx: Callable[[float], optax.GradientTransformation],
    *,
    learning_rate: float = 1e-2,
) -> bool:
    """Returns whether scaling updates equals scaling the learning rate.

    Runs the optimizer twice for a few steps on a few parameters, with a factor that
    changes from step to step: once applied to the updates, once to the learning rate.
    If both agree, `scale_by_batch_size` may follow the optimizer. If not, use
    `scale_schedule` inside it.

    Example:
      >>> is_linear_in_lr(optax.adamw)
      True
      >>> is_linear_in_lr(lambda lr: optax.lars(lr, momentum=0.9))
      False

    Args:
      make_tx: a function from a learning rate to the optimizer, without
        `inject_hyperparams`. An optimizer that does nothing is not linear. A difference
        that appears only after more than a few steps is not detected.
      learning_rate: the learning rates are drawn around this value. A bound on the
        step, such as Polyak's, is detected only if these learning rates reach it.

    Returns:
      True if the two runs agree within rounding errors.

    Raises:
      ValueError: if `learning_rate` is not positive, or `make_tx` is not a function.
    """
    rate = check_float("learning_rate", learning_rate)
    if not callable(make_tx):
        raise ValueError(
            f"`make_tx` is a {type(make_tx).__name__}. Pass a function from a learning "
            "rate to the optimizer, such as `optax.adamw`."
        )
    # Allows optimizers that mix dtypes, which does not matter here.
    with jax.numpy_dtype_promotion("standard"):
        return _is_linear(make_tx, rate)


def _is_linear(
    make_tx: Callable[[float], optax.GradientTransformation], rate: float
) -> bool:
    rng = np.random.default_rng(0)

    def draw() -> Any:
        values = {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=2)}
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)

    start = scaled_updates = scaled_rate = draw()
    scaled_updates_state = scaled_rate_state = make_tx(rate).init(start)
    for _ in range(_STEPS):
        factor, target = float(rng.uniform(0.25, 4)), draw()
        updates, scaled_updates_state = _update(
            make_tx(rate), scaled_updates, scaled_updates_state, target
        )
        scaled_updates = optax.tree.add_scale(scaled_updates, factor, updates)
        scaled = make_tx(rate * factor)
        updates, scaled_rate_state = _update(
            scaled, scaled_rate, scaled_rate_state, target
        )
        scaled_rate = optax.apply_updates(scaled_rate, updates)
    difference = optax.tree.norm(optax.tree.sub(scaled_rate, scaled_updates))
    distance = optax.tree.norm(optax.tree.sub(scaled_rate, start))
    return bool(distance > 0 and difference <= _TOLERANCE * distance)


def _update(
    tx: optax.GradientTransformation, params: Any, state: Any, target: Any
) -> tuple[Any, Any]:
    """Returns the update towards a target, and the new state of the optimizer.

    All extra arguments that the optimizers of optax use are passed.
    """

    def loss(params: Any) -> jax.Array:
        return 0.5 * optax.tree.norm(optax.tree.sub(params, target), squared=True)

    value, grads = jax.value_and_grad(loss)(params)
    extra = {"value": value, "grad": grads, "value_fn": loss}
    return optax.with_extra_args_support(tx).update(grads, state, params, **extra)
