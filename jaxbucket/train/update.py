"""The optimizer update of a state, given the gradients and sums of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxbucket.optim.batch_size import at_least_float32
from jaxbucket.optim.states import learning_rate_metrics, skip_where
from jaxbucket.train.loss import Metrics, mean_metrics
from jaxbucket.train.state import TrainState
from jaxbucket.train.variables import Values, by_path, with_values


def updater(
    tx: optax.GradientTransformation, skip_nonfinite: bool
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns `(state, gradients, sums, variables) -> (state, metrics)`.

    `make_train_step` describes the arguments.
    """
    tx = optax.with_extra_args_support(tx)

    def update(
        state: TrainState, grads: Any, sums: Metrics, variables: Values
    ) -> tuple[TrainState, Metrics]:
        _check_state_of(tx, state)
        metrics = mean_metrics(sums)
        grads = _mean_gradients(grads, sums["weight"], state.params)
        updates, opt_state = tx.update(
            grads,
            state.opt_state,
            state.params,
            value=metrics["loss"],
            step=state.step,
            num_examples=metrics["num_examples"],
            num_tokens=metrics["num_tokens"],
            num_rows=metrics["num_rows"],
            weight=metrics["weight"],
        )
        norm = optax.tree.norm(jax.tree.map(at_least_float32, grads))
        metrics |= {"grad_norm": norm, **learning_rate_metrics(opt_state)}
        new = dataclasses.replace(
            state,
            params=optax.apply_updates(state.params, updates),
            variables=with_values(state.variables, variables),
            opt_state=opt_state,
        )
        if skip_nonfinite:
            checked = updates, metrics["loss"], norm
            skipped = ~_all_finite(checked, new, state)
            new = _skip_where(skipped, new, state)
            metrics["skipped"] = skipped.astype(jnp.int32)
        return dataclasses.replace(new, step=state.step + 1), metrics

    return update


def _check_state_of(tx: Any, state: TrainState) -> None:
    """Raises a ValueError if a state was made with another optimizer."""
    try:
        initial = jax.eval_shape(tx.init, state.params)
    except Exception:
        # The initial state depends on the values or the shardings of the parameters, so
        # its structure is not known.
        return
    if not state.has_optimizer or _shapes(state.opt_state) != _shapes(initial):
        raise ValueError(
            "`state` was made without an optimizer, or with another one than the step. "
            "Pass the same `tx` to `create_state` and `make_train_step`."
        )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {path: jnp.shape(leaf) for path, leaf in by_path(tree).items()}


def _mean_gradients(grads: Any, weight: jax.Array, params: Any) -> Any:
    """Returns the gradients of the mean loss, in the dtypes of the parameters."""
    # With zero weight, the mean gradient is zero; with infinite weight, it is NaN.
    divisor = jnp.where(weight == 0, jnp.inf, weight)
    divisor = jnp.where(jnp.isinf(weight), jnp.nan, divisor)

    def divide(grad: jax.Array, param: jax.Array) -> jax.Array:
        # Half precision is divided in the dtype of the divisor, because 1 / 65,536 is
        # not exact in float16.
        wide = max(grad.dtype, divisor.dtype, key=lambda dtype: dtype.itemsize)
        return (grad.astype(wide) / divisor.astype(wide)).astype(param.dtype)

    return jax.tree.map(divide, grads, params)


def _skip_where(skipped: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """Returns the old state where an update is skipped, with schedules advanced."""
    keep = functools.partial(jnp.where, skipped)
    return dataclasses.replace(
        new,
        params=jax.tree.map(keep, old.params, new.params),
        variables=jax.tree.map(keep, old.variables, new.variables),
        opt_state=skip_where(skipped, new.opt_state, old.opt_state),
    )


def _all_finite(tree: Any, new: TrainState, old: TrainState) -> jax.Array:
    """Returns whether a tree is finite, and a new state wherever the old one was.

    The state is checked because an average that has overflowed yields updates of zero
    from then on.
    """
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    finite += [
        (jnp.isfinite(x) | ~jnp.isfinite(y)).all()
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.array(finite))
