"""Train and evaluation steps over a mesh, for losses as `loss` has them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.base.batch import Batch
from jaxbucket.base.checks import check_seed
from jaxbucket.compile import noting_arguments
from jaxbucket.optim import in_force, skip_where
from jaxbucket.optim.precision import computes_in, single_at_least
from jaxbucket.sharding import DATA_AXIS, Axes, axis_names
from jaxbucket.train.loss import (
    LossFn,
    Metrics,
    Mode,
    checked_loss,
    mean_metrics,
    over_batch,
)
from jaxbucket.train.pmap import PmapStep
from jaxbucket.train.rows import rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "variables", "opt_state"],
    meta_fields=["graphdef"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
      step: `[]` int32, steps done, skipped updates counted.
      params: what is differentiated.
      variables: the other variables of an NNX model, held fixed; else ().
      opt_state: state of the optimizer.
      graphdef: the structure of an NNX model; None for plain parameters.
    """

    step: jax.Array
    params: Any
    variables: Any
    opt_state: Any
    graphdef: Any = None

    @property
    def model(self) -> Any:
        """The NNX model with the current parameters, or the plain parameters."""
        if self.graphdef is None:
            return self.params
        return nnx.merge(self.graphdef, self.params, self.variables)


def create_state(model: Any, tx: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step.

    Args:
      model: a Flax NNX module, or any pytree of parameters (Linen, plain functions).
      tx: the optimizer.

    Raises:
      ValueError: if an NNX model has batch statistics, which these steps would not
        update: they differ from device to device; if `model` is neither a module nor
        parameters.
    """
    graphdef, params, variables = None, model, ()
    if isinstance(model, nnx.Module):
        if jax.tree.leaves(nnx.state(model, nnx.BatchStat)):
            raise ValueError(
                "The model has batch statistics (`nnx.BatchStat`), which these steps "
                "do not update. Use LayerNorm, RMSNorm or GroupNorm, or write your own "
                "step: `compile_steps` takes any."
            )
        graphdef, params, variables = nnx.split(model, nnx.Param, ...)
    elif isinstance(model, Mapping) and "batch_stats" in model:
        raise ValueError(
            "`model` has batch statistics, which would be trained as parameters: pass "
            '`variables["params"]`, and use LayerNorm, RMSNorm or GroupNorm, or write '
            "your own step: `compile_steps` takes any."
        )
    elif not all(map(_is_array, jax.tree.leaves(model))):
        raise ValueError(
            f"`model` is a {type(model).__name__}: pass an NNX module, or parameters "
            'such as `module.init(key, x)["params"]` of a Linen module.'
        )
    # A Python number's weak dtype would change, and recompile, after the first step.
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), params)
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, params, variables, tx.init(params), graphdef)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.number | float | int)


def data_parallel(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    mode: Mode = "jit",
    batch_axes: Axes = DATA_AXIS,
    seed: int = 0,
    state_sharding: Any = None,
    skip_nonfinite: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns a jitted train step over a mesh: `(state, batch) -> (state, metrics)`.

    Args:
      loss_fn: the loss, see the top of `jaxbucket.train.loss`.
      tx: the optimizer. It is given the mean gradient over the global batch, and as
        extra arguments `num_examples`, `num_tokens` and `num_rows` of this batch, the
        `step` and the mean loss, `value`.
      mesh: where batches are sharded.
      mode: "jit" leaves the partitioning to the compiler; "shard_map" runs the loss on
        each device's rows and adds up by an explicit `psum`; "pmap" runs the whole
        step so, by `jax.pmap`. Equal results.
      batch_axes: the mesh axes that cut the rows.
      seed: what dropout keys are derived from.
      state_sharding: sharding of the state, or a tree of them; by default replicated.
        Under "pmap" it always is.
      skip_nonfinite: leave parameters and the optimizer's averages as they are where
        the loss, a gradient, its norm, an update or an average is not finite. The step
        counts, and schedules go on (`skip_where`), so that neither the data nor the
        learning rate drifts from the step.

    Returns:
      The step. It donates its state. Metrics: "loss" (`loss_sum / weight`), "loss_sum",
      "weight", "num_tokens", "num_examples"; "num_rows" and "num_positions", B and
      B * T of the bucket; "padding", the share of positions; "grad_norm", of the mean
      gradient; "lr_factor" and "learning_rate", as far as the optimizer's state tells
      what is in force; "skipped", 1 or 0, with `skip_nonfinite`; and the loss's own
      sums.

    Raises:
      ValueError: for an unknown mode or axis, a seed out of range, or a sharded state
        or a mesh that mixes the devices of processes under "pmap"; when traced, for a
        loss that breaks the contract.
    """
    check_state_sharding(mode, state_sharding)
    over_devices = over_batch(
        gradient_sums(loss_fn), mesh, mode, batch_axes, check_seed(seed)
    )
    update = updater(tx, skip_nonfinite)

    @noting_arguments
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return update(state, *over_devices(state, batch))

    if mode == "pmap":
        return PmapStep(train_step, mesh, axis_names(mesh, batch_axes), donate=(0,))
    replicated = NamedSharding(mesh, PartitionSpec())
    if state_sharding is None:
        state_sharding = replicated
    return jax.jit(
        train_step, donate_argnums=0, out_shardings=(state_sharding, replicated)
    )


def check_state_sharding(mode: Mode, state_sharding: Any) -> None:
    """Raises a ValueError if a state is to be sharded where it cannot be."""
    if mode == "pmap" and state_sharding is not None:
        raise ValueError(
            "`state_sharding`: under `mode='pmap'` every device holds the whole state. "
            "Shard it under 'jit' or 'shard_map'."
        )


def gradient_sums(loss_fn: LossFn) -> Callable[..., tuple[Any, Metrics]]:
    """Returns `(state, batch, keys) -> (gradients of the loss sum, sums)`.

    Gradients in half precision come in float32, which holds the sum of many, and in
    which devices can add them up.
    """

    def sums(state: TrainState, batch: Batch, keys: jax.Array | None) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Metrics]:
            model = dataclasses.replace(state, params=params).model
            return checked_loss(loss_fn, model, batch, keys)

        _check_differentiable(state.params)
        loss_sum, pull_back, sums = jax.vjp(loss, state.params, has_aux=True)
        # Of all devices, because a gradient may come from another one's loss.
        weight = rows().add_up(sums["weight"])

        def gradients(least: int, most: int) -> Any:
            exponent = _cotangent_exponent(weight, loss_sum.dtype, least, most)
            (grads,) = pull_back(_power_of_two(exponent).astype(loss_sum.dtype))
            undo = _power_of_two(-exponent)
            return jax.tree.map(functools.partial(_times, undo), grads)

        grads = gradients(*_MEAN_EXPONENTS)
        if computes_in(jnp.float16, pull_back, loss_sum):
            overflows = (~_all_finite(grads, (), ())).astype(jnp.int32)
            grads = jax.lax.cond(
                # The same on all devices, which may gather rows of each other.
                rows().add_up(overflows) > 0,
                functools.partial(gradients, -1, -1),
                lambda: grads,
            )
        return grads, sums

    return sums


def _check_differentiable(params: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"`model`: parameter {jax.tree_util.keystr(path)} is of {leaf.dtype}, "
                "which has no gradient here. Make it a float, or let `loss_fn` close "
                "over what is not trained (in an NNX model: any other variable than "
                "`nnx.Param`)."
            )


# What is differentiated is the sum if it is from 2**0 to 2**7 times the mean, and else
# that many times the mean, up to a factor of two. float16 ends at 65,504 and loses bits
# below 2**-14: gradients of a sum over a batch are beyond the one, a token's share of
# the mean (1 / weight) below the other. So a token's share keeps all its bits down to
# 2**-21. Means beyond 2**8 overflow; they are differentiated again, as less than the
# mean itself.
_MEAN_EXPONENTS = (0, 7)


def _cotangent_exponent(
    weight: jax.Array, dtype: jnp.dtype, least: int, most: int
) -> jax.Array:
    """The power of two by which `loss_sum` of this dtype is differentiated.

    A cotangent of 1 gives the gradient of the sum, 1 / weight that of the mean: this is
    the sum's where it is 2**least to 2**most times the mean's, up to a factor of two,
    and else what is nearest. A power of two is exact.
    """
    # From the bits of float32: there and back through logarithms may be inexact.
    bits = jax.lax.bitcast_convert_type(weight.astype(jnp.float32), jnp.int32)
    floor_log2 = ((bits >> 23) & 0xFF) - 127
    exponent = jnp.clip(floor_log2, least, most) - floor_log2
    usable = (weight > 0) & jnp.isfinite(weight)
    # No subnormals, which devices flush to zero, in either direction.
    normal = min(126, -jnp.finfo(dtype).minexp)
    return jnp.clip(jnp.where(usable, exponent, 0), -normal, normal)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """float32, for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _times(factor: jax.Array, grad: jax.Array) -> jax.Array:
    """The product, in float32 at least."""
    grad = single_at_least(grad)
    return grad * factor.astype(grad.dtype)


def updater(
    tx: optax.GradientTransformation, skip_nonfinite: bool
) -> Callable[[TrainState, Any, Metrics], tuple[TrainState, Metrics]]:
    """Returns `(state, gradients, sums) -> (state, metrics)`: sums of a whole step."""
    tx = optax.with_extra_args_support(tx)

    def update(
        state: TrainState, grads: Any, sums: Metrics
    ) -> tuple[TrainState, Metrics]:
        metrics = mean_metrics(sums)
        # A batch of zero weight has zero gradients, and a mean of zero; one of infinite
        # weight has none.
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
        )
        params = optax.apply_updates(state.params, updates)
        metrics |= {"grad_norm": _norm(grads), **in_force(opt_state)}
        if skip_nonfinite:
            told = (metrics["loss"], metrics["grad_norm"])
            skipped = ~_all_finite((updates, told), opt_state, state.opt_state)
            params = jax.tree.map(
                functools.partial(jnp.where, skipped), state.params, params
            )
            opt_state = skip_where(skipped, opt_state, state.opt_state)
            metrics["skipped"] = skipped.astype(jnp.int32)
        return dataclasses.replace(
            state, step=state.step + 1, params=params, opt_state=opt_state
        ), metrics

    return update


def data_parallel_eval(
    loss_fn: LossFn,
    mesh: Mesh,
    *,
    mode: Mode = "jit",
    batch_axes: Axes = DATA_AXIS,
) -> Callable[[TrainState, Batch], Metrics]:
    """Returns a jitted evaluation step over a mesh: `(state, batch) -> metrics`.

    Arguments and errors are those of `data_parallel`; the loss is called with keys
    None. Metrics are as there, and "loss_sum": over several batches, add `loss_sum`
    and `weight` and divide at the end.
    """

    def sums(state: TrainState, batch: Batch, keys: jax.Array | None) -> Any:
        return checked_loss(loss_fn, state.model, batch, keys)[1]

    over_devices = over_batch(sums, mesh, mode, batch_axes, seed=None)

    @noting_arguments
    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return mean_metrics(over_devices(state, batch))

    if mode == "pmap":
        return PmapStep(eval_step, mesh, axis_names(mesh, batch_axes))
    return jax.jit(eval_step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _divide(value: jax.Array, divisor: jax.Array) -> jax.Array:
    # Half precision is divided in the divisor's: 1 / 65,536 is not exact in float16.
    wide = max(value.dtype, divisor.dtype, key=lambda dtype: dtype.itemsize)
    return value.astype(wide) / divisor.astype(wide)


def _norm(tree: Any) -> jax.Array:
    """The square root of the sum of squares, in single precision at least."""
    leaves = [jnp.abs(x) for x in jax.tree.leaves(tree)]
    dtypes = [jnp.dtype(jnp.float32), *(x.dtype for x in leaves)]
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(wide))) for x in leaves))


def _all_finite(tree: Any, new: Any, old: Any) -> jax.Array:
    """Whether everything is, and all of a new state that was so in the old one.

    An average that has overflown gives updates of zero from then on.
    """
    found = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    found += [
        (jnp.isfinite(x) | ~jnp.isfinite(y)).all()
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.array(found))
