"""An exponential moving average of the parameters, in the state of the optimizer."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxbucket.optim.precision import at_least_float32


class AverageParamsState(NamedTuple):
    """The state of `average_params`.

    Attributes:
      num_updates: `[]` int32, the number of updates.
      average: the average of the parameters, in float32 or wider.
    """

    num_updates: jax.Array
    average: Any


def average_params(decay: float = 0.999) -> optax.GradientTransformationExtraArgs:
    """Keeps an exponential moving average (EMA) of the parameters for evaluation.

    It must be the last transformation of the chain, because it averages the parameters
    after the update. This is checked, unless what follows is a custom transformation
    whose state is an array. It does not change updates. The average after t updates is
    the weighted mean of the parameters after each of them, with weights that are
    proportional to `decay` to the power of 0, 1, ..., t - 1, from the last update back;
    the initial parameters have no weight (as in the bias correction of Adam, Kingma and
    Ba, "Adam: a method for stochastic optimization", 2015, section 3).

    After `optax.MultiSteps`, it would count every micro-batch as an update. Put it
    inside: `optax.MultiSteps(optax.chain(optax.adam(1e-3), average_params()), 4)`.

    Example:
      >>> tx = optax.chain(optax.sgd(1.0), average_params(decay=0.5))
      >>> params = jnp.array([0.0])
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.array([-3.0]), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params, average_of(state))  # (6 + 3 / 2) / (1 + 1 / 2)
      [6.] [5.]

    Args:
      decay: the decay per update, at least 0 and below 1.

    Returns:
      The transformation.

    Raises:
      ValueError: if `decay` is out of range, or `update` is called without parameters.
    """
    if not isinstance(decay, int | float):
        raise ValueError(
            f"`decay` is a {type(decay).__name__}, but must be a Python number. With "
            '`optax.inject_hyperparams`, pass `static_args=("decay",)`.'
        )
    if not 0 <= decay < 1:
        raise ValueError(f"`decay={decay!r}` must be at least 0 and below 1.")

    log_decay = math.log(decay) if decay else -math.inf

    def init(params: Any) -> AverageParamsState:
        # Copied, because a state with the same buffer twice could not be donated.
        average = jax.tree.map(lambda x: jnp.copy(at_least_float32(x)), params)
        return AverageParamsState(jnp.zeros((), jnp.int32), average)

    def update(
        updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, AverageParamsState]:
        if params is None:
            raise ValueError(
                "`average_params` needs the parameters: `tx.update(grads, opt_state, "
                "params)`."
            )
        num_updates = state.num_updates + 1

        def moved(average: jax.Array, param: jax.Array) -> jax.Array:
            # 1 / (1 + decay + decay**2 + ...), without cancellation if decay is near 1.
            exponent = num_updates.astype(average.dtype) * log_decay
            weight = (decay - 1) / jnp.expm1(exponent)
            return average + weight * (param.astype(average.dtype) - average)

        new = optax.apply_updates(params, updates)
        average = jax.tree.map(moved, state.average, new)
        return updates, AverageParamsState(num_updates, average)

    return optax.GradientTransformationExtraArgs(init, update)


def average_of(opt_state: optax.OptState) -> Any:
    """Returns the average of the parameters that an optimizer state contains.

    Example:
      >>> average_of(average_params().init({"w": jnp.ones(2)}))["w"].tolist()
      [1.0, 1.0]

    Args:
      opt_state: the state of an optimizer with `average_params`.

    Raises:
      ValueError: if it contains no average, or several, or one that is followed by
        another transformation.
    """
    check_average_is_last(opt_state)
    averages = [state.average for _, state in _averages(opt_state)]
    if len(averages) > 1:
        raise ValueError(
            f"`opt_state` has {len(averages)} averages of parameters. Keep one of all "
            "parameters: `optax.chain(optax.partition(...), "
            "jb.optim.average_params())`."
        )
    if averages:
        return averages[0]
    raise ValueError(
        "`opt_state` has no average of the parameters. End the optimizer with "
        "`average_params`: `optax.chain(optax.adam(1e-3), jb.optim.average_params())`."
    )


def check_average_is_last(opt_state: optax.OptState) -> None:
    """Raises a ValueError if other transformations follow `average_params`."""
    for path, _ in _averages(opt_state):
        node = opt_state
        for key in path:
            place, states = _place_in_chain(node, key)
            # A custom wrapper may have the state `(inner, count)`, with an array.
            if not all(map(_is_leaf, states[place + 1 :])):
                raise ValueError(
                    f"`average_params` is number {place + 1} of {len(states)} "
                    "transformations in a chain, and would average parameters before "
                    "the update is complete. Put it last: `optax.chain(..., "
                    "jb.optim.average_params())`."
                )
            node = _child(node, key)


def _place_in_chain(node: Any, key: Any) -> tuple[int, list[Any]]:
    """Returns the place of a child among the states of a chain, and these states."""
    if type(node) is tuple:
        return key.idx, list(node)
    # The state of `optax.named_chain`.
    if isinstance(node, collections.OrderedDict):
        return list(node).index(key.key), list(node.values())
    return 0, []


def _is_leaf(state: Any) -> bool:
    return jax.tree_util.all_leaves([state])


def _averages(opt_state: optax.OptState) -> list[tuple[Any, AverageParamsState]]:
    """Returns the path and the state of each average."""
    states = jax.tree.leaves_with_path(
        opt_state, is_leaf=lambda x: isinstance(x, AverageParamsState)
    )
    return [(path, x) for path, x in states if isinstance(x, AverageParamsState)]


def _child(node: Any, key: Any) -> Any:
    """Returns the child of a node of a tree."""
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(node, key.name)
    return node[getattr(key, "idx", getattr(key, "key", None))]
