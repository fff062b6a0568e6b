"""What the state of an optimizer says, and what of it a skipped update leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxbucket.optim.adam_sde import ScaleByAdamSdeState
from jaxbucket.optim.batch_size import ScaleByBatchSizeState
from jaxbucket.optim.schedules import ScaledScheduleState, WorkScheduleState

# What has counted the data, and not what was learned of it.
_CLOCKS = (
    ScaleByBatchSizeState,
    ScaledScheduleState,
    WorkScheduleState,
    optax.ScaleByScheduleState,
)
_Injected = optax.schedules.InjectStatefulHyperparamsState


def in_force(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns what an optimizer's last update was scaled by, as its state says.

    Returns:
      "lr_factor", if the batch size scales it; "learning_rate", the factor in it, if it
      is known: of `scale_schedule`, `scale_by_batch_size(learning_rate=...)` and
      `optax.inject_hyperparams`. Of several, such as for groups of parameters, the
      first one.

    Example:
      >>> from jaxbucket.optim import scale_by_batch_size
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
      >>> tx = optax.chain(tx, scale_by_batch_size(base_examples=2))
      >>> params = jnp.ones(1)
      >>> _, state = tx.update(params, tx.init(params), params, num_examples=8)
      >>> print({name: float(value) for name, value in in_force(state).items()})
      {'lr_factor': 2.0, 'learning_rate': 1.0}
    """
    found: dict[str, jax.Array] = {}
    own = _first(opt_state, ScaleByBatchSizeState)
    injected = _first(opt_state, _Injected)
    for kind in (ScaleByBatchSizeState, ScaledScheduleState, ScaleByAdamSdeState):
        scaled = _first(opt_state, kind)
        if scaled is not None and "lr_factor" not in found:
            found["lr_factor"] = scaled.factor
    if own is not None and own.learning_rate is not None:
        found["learning_rate"] = own.learning_rate
    elif injected is not None and "learning_rate" in injected.hyperparams:
        rate = jnp.asarray(injected.hyperparams["learning_rate"], jnp.float32)
        found["learning_rate"] = rate if own is None else rate * own.factor
    return found


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
        return isinstance(state, (*_CLOCKS, _Injected))

    def kept(new: Any, old: Any) -> Any:
        if isinstance(new, _CLOCKS):
            return new
        if isinstance(new, _Injected):
            return new._replace(
                inner_state=skip_where(skipped, new.inner_state, old.inner_state)
            )
        return jnp.where(skipped, old, new)

    return jax.tree.map(kept, new, old, is_leaf=is_known)


def _first(tree: Any, kind: type) -> Any:
    """The first node of a kind, wherever it is; None where there is none."""

    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return next(filter(is_kind, jax.tree.leaves(tree, is_leaf=is_kind)), None)
