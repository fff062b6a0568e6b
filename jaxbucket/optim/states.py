"""What the state of an optimizer says, and what of it a skipped update leaves."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxbucket.optim.adam_sde import ScaleByAdamSdeState
from jaxbucket.optim.batch_size import ScaleByBatchSizeState
from jaxbucket.optim.schedules import ScaledScheduleState

# What counts for itself, with all that is inside of it.
_OWN_COUNT = (
    *(optax.MultiStepsState, optax.ApplyIfFiniteState),
    *(optax.contrib.ScheduleFreeState, optax.contrib.MechanicState),
)
_Injected = optax.schedules.InjectStatefulHyperparamsState


def in_force(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns what an optimizer's last update was scaled by, as its state says.

    It looks along a chain, not into the branches of `optax.multi_transform`.

    Returns:
      "lr_factor", the product of all factors, if the batch size scales something;
      "learning_rate", with the factors that stand behind it in it, and that of
      `scale_by_adam_sde`, which stands before it, if it is known: of
      `optax.inject_hyperparams`, `scale_schedule` and
      `scale_by_batch_size(learning_rate=...)`.

    Example:
      >>> from jaxbucket.optim import scale_by_batch_size
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
      >>> tx = optax.chain(tx, scale_by_batch_size(base_examples=2))
      >>> params = jnp.ones(1)
      >>> _, state = tx.update(params, tx.init(params), params, num_examples=8)
      >>> print({name: float(value) for name, value in in_force(state).items()})
      {'lr_factor': 2.0, 'learning_rate': 1.0}
    """
    rate, factors, of_sde = None, [], []
    for state in _in_chain(opt_state):
        if isinstance(state, _Injected):
            own = state.hyperparams.get("learning_rate")
            rate = rate if own is None else jnp.asarray(own, jnp.float32)
            scaled = state.hyperparams_states.get("learning_rate")
            if isinstance(scaled, ScaledScheduleState):
                factors.append(scaled.factor)
        elif isinstance(state, ScaleByBatchSizeState):
            factors.append(state.factor)
            # In front of the learning rate it scales gradients.
            rate = state.learning_rate if rate is None else rate * state.factor
        elif isinstance(state, ScaleByAdamSdeState):
            factors.append(state.factor)
            of_sde.append(state.factor)
    rate = None if rate is None else math.prod(of_sde, start=rate)
    found = (
        {} if not factors else {"lr_factor": math.prod(factors[1:], start=factors[0])}
    )
    return found if rate is None else {**found, "learning_rate": rate}


def skip_where(
    skipped: Any, new: optax.OptState, old: optax.OptState
) -> optax.OptState:
    """Returns the state after an update that is, or is not, skipped.

    Averages and their counts stay what they were. Schedules go on, for the data does:
    what the learning rate is at a step does not depend on what was skipped before it.

    Args:
      skipped: `[]` bool, static or traced.
      new: the state after the update.
      old: the state before it.
    """

    def is_known(state: Any) -> bool:
        return isinstance(state, (*_clocks(), *_OWN_COUNT, _Injected))

    def kept(new: Any, old: Any) -> Any:
        if isinstance(new, _clocks()):
            return new
        if isinstance(new, _Injected):
            return new._replace(
                inner_state=skip_where(skipped, new.inner_state, old.inner_state)
            )
        return jax.tree.map(functools.partial(jnp.where, skipped), old, new)

    return jax.tree.map(kept, new, old, is_leaf=is_known)


@functools.cache
def _clocks() -> tuple[type, ...]:
    """The states that have counted the data, and not what was learned of it."""
    # That of `add_decayed_weights` has no public name; and to make one starts jax.
    decay = optax.add_decayed_weights(optax.constant_schedule(0.0))
    of_decay = jax.eval_shape(decay.init, ())
    return ScaleByBatchSizeState, optax.ScaleByScheduleState, type(of_decay)


def _in_chain(opt_state: Any) -> Iterator[Any]:
    """The states of what is chained, in order; of what is injected into, too."""
    # A chain's state is a plain tuple, all others are of a type of their own.
    if type(opt_state) is tuple:
        for state in opt_state:
            yield from _in_chain(state)
        return
    yield opt_state
    if isinstance(opt_state, _Injected):
        yield from _in_chain(opt_state.inner_state)
