"""Reads the learning rate from optimizer states, and restores skipped states."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxbucket.optim.batch_size import ScaleByBatchSizeState
from jaxbucket.optim.schedules import ScaledScheduleState

# Wrappers that count updates themselves are restored with everything inside.
_WRAPPERS = (
    *(optax.MultiStepsState, optax.ApplyIfFiniteState),
    *(optax.contrib.ScheduleFreeState, optax.contrib.MechanicState),
)
_Injected = optax.schedules.InjectStatefulHyperparamsState


def learning_rate_metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns the learning rate and the factor of the last update of an optimizer.

    Searches chains, but not the branches of `optax.multi_transform`.

    Example:
      >>> from jaxbucket.optim import scale_by_batch_size
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
      >>> tx = optax.chain(tx, scale_by_batch_size(base_examples=2))
      >>> params = jnp.ones(1)
      >>> _, state = tx.update(params, tx.init(params), params, num_examples=8)
      >>> print({k: float(v) for k, v in learning_rate_metrics(state).items()})
      {'lr_factor': 2.0, 'learning_rate': 1.0}

    Args:
      opt_state: the state of the optimizer.

    Returns:
      A dict with "lr_factor", the product of all factors, if anything is scaled by the
      batch size; and "learning_rate", if the optimizer is in
      `optax.inject_hyperparams`. It includes the factors of later transformations in
      the chain.
    """
    rate, factors = None, []
    for state in _in_chain(opt_state):
        if isinstance(state, _Injected):
            injected = state.hyperparams.get("learning_rate")
            rate = rate if injected is None else jnp.asarray(injected, jnp.float32)
            scaled = state.hyperparams_states.get("learning_rate")
            if isinstance(scaled, ScaledScheduleState):
                factors.append(scaled.factor)
        elif isinstance(state, ScaleByBatchSizeState):
            factors.append(state.factor)
            # Before the learning rate, the transformation scales gradients.
            rate = None if rate is None else rate * state.factor
    values = {}
    if factors:
        values["lr_factor"] = functools.reduce(operator.mul, factors)
    if rate is not None:
        values["learning_rate"] = rate
    return values


def skip_where(
    skipped: Any, new: optax.OptState, old: optax.OptState
) -> optax.OptState:
    """Returns the optimizer state after an update that may be skipped.

    A skipped update leaves moment estimates and their counts unchanged. Schedules
    advance with the data, so the learning rate of a step does not depend on skipped
    updates.

    Example:
      >>> tx = optax.sgd(optax.linear_schedule(1.0, 0.0, 10), momentum=0.9)
      >>> old = tx.init(jnp.ones(()))
      >>> _, new = tx.update(jnp.ones(()), old)
      >>> momentum, schedule = skip_where(True, new, old)
      >>> print(momentum.trace, schedule.count)
      0.0 1

    Args:
      skipped: `[]` bool, static or traced.
      new: the state after the update.
      old: the state before the update.

    Returns:
      `old` with the schedules of `new` if `skipped` is true, otherwise `new`.
    """

    def is_known(state: Any) -> bool:
        return isinstance(state, (*_schedule_states(), *_WRAPPERS, _Injected))

    def select(new: Any, old: Any) -> Any:
        if isinstance(new, _schedule_states()):
            return new
        if isinstance(new, _Injected):
            return new._replace(
                inner_state=skip_where(skipped, new.inner_state, old.inner_state)
            )
        return jax.tree.map(functools.partial(jnp.where, skipped), old, new)

    return jax.tree.map(select, new, old, is_leaf=is_known)


@functools.cache
def _schedule_states() -> tuple[type, ...]:
    """Returns the types of states that count steps of the data."""
    # The state of `add_decayed_weights` has no public name. It is looked up on first
    # use, because making one initializes jax.
    decay = optax.add_decayed_weights(optax.constant_schedule(0.0))
    decay_state = jax.eval_shape(decay.init, ())
    return ScaleByBatchSizeState, optax.ScaleByScheduleState, type(decay_state)


def _in_chain(opt_state: Any) -> Iterator[Any]:
    """Yields the states of a chain in order, also inside `inject_hyperparams`."""
    # Only the state of a chain is a plain tuple.
    if type(opt_state) is tuple:
        for state in opt_state:
            yield from _in_chain(state)
        return
    yield opt_state
    if isinstance(opt_state, _Injected):
        yield from _in_chain(opt_state.inner_state)
