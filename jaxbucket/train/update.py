"""The optimizer update of a state, given the gradients and sums of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxbucket.optim.states import learning_rate_metrics, skip_where
from jaxbucket.train.gradients import all_finite
from jaxbucket.train.loss import Metrics, mean_metrics
from jaxbucket.train.model_checks import check_state_of
from jaxbucket.train.state import TrainState
from jaxbucket.train.variables import Values, by_path, with_values


def updater(
    tx: optax.GradientTransformation, skip_nonfinite: bool
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns `(state, gradients, sums, variables) -> (state, metrics)`.

    Args:
      tx: the optimizer.
      skip_nonfinite: skip updates that are not finite, see `make_train_step`.
    """
    tx = optax.with_extra_args_support(tx)

    def update(
        state: TrainState, grads: Any, sums: Metrics, new_variables: Values
    ) -> tuple[TrainState, Metrics]:
        check_state_of(tx, state.params, state.opt_state)
        metrics = mean_metrics(sums)
        # With zero weight, the mean gradient is zero; with infinite weight, it is NaN.
        divisor = jnp.where(sums["weight"] == 0, jnp.inf, sums["weight"])
        divisor = jnp.where(jnp.isinf(sums["weight"]), jnp.nan, divisor)
        grads = jax.tree.map(
            lambda grad, param: _divide(grad, divisor).astype(param.dtype),
            grads,
            state.params,
        )
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
        params = optax.apply_updates(state.params, updates)
        metrics |= {"grad_norm": _norm(grads), **learning_rate_metrics(opt_state)}
        if skip_nonfinite:
            scalars = (metrics["loss"], metrics["grad_norm"])
            old_variables = by_path(state.variables)
            # Variables with a rule only, because the others do not change.
            old_variables = {path: old_variables[path] for path in new_variables}
            skipped = ~all_finite(
                (updates, scalars),
                (params, opt_state, new_variables),
                (state.params, state.opt_state, old_variables),
            )
            params = jax.tree.map(
                functools.partial(jnp.where, skipped), state.params, params
            )
            opt_state = skip_where(skipped, opt_state, state.opt_state)
            new_variables = {
                path: jnp.where(skipped, old_variables[path], new)
                for path, new in new_variables.items()
            }
            metrics["skipped"] = skipped.astype(jnp.int32)
        return dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            variables=with_values(state.variables, new_variables),
            opt_state=opt_state,
        ), metrics

    return update


def _divide(value: jax.Array, divisor: jax.Array) -> jax.Array:
    # Half precision is divided in the dtype of the divisor, because 1 / 65,536 is not
    # exact in float16.
    wide = max(value.dtype, divisor.dtype, key=lambda dtype: dtype.itemsize)
    return value.astype(wide) / divisor.astype(wide)


def _norm(tree: Any) -> jax.Array:
    """Returns the global norm of a tree, in single precision or wider."""
    leaves = [jnp.abs(x) for x in jax.tree.leaves(tree)]
    dtypes = [jnp.dtype(jnp.float32), *(x.dtype for x in leaves)]
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(wide))) for x in leaves))
