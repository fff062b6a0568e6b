"""The loss contract, and the train and evaluation steps built on it.

A loss is `loss_fn(model, batch, keys) -> (loss_sum, weight)` or `(loss_sum, weight,
sums)`: sums over the examples it is given, without collectives. `weight` is what the
mean is taken over, usually `batch.num_tokens`; `sums` is a dict of further sums to
report. The step differentiates `loss_sum`, adds gradients and sums over all devices,
and divides once, so that a token counts the same wherever it is.

`keys` are `[B]` random keys, one for each row, or None in evaluation. They depend on
the seed, the step and the row's place in the global batch alone: use them row by row
(`jax.vmap`), and dropout is the same on every mesh and after every resume.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxbucket.base import Batch
from jaxbucket.checks import check_choice, check_seed
from jaxbucket.pmap import PmapStep, Rows
from jaxbucket.sharding import DATA_AXIS, Axes, axis_names

LossFn: TypeAlias = Callable[[Any, Batch, jax.Array | None], tuple]
Mode: TypeAlias = Literal["jit", "shard_map", "pmap"]
Metrics: TypeAlias = dict[str, jax.Array]
_OWN_METRICS = {"loss", "loss_sum", "weight", "num_tokens", "num_examples"}
# (state, batch, keys of the rows given here) -> sums over these rows
_Sums: TypeAlias = Callable[["TrainState", Batch, jax.Array | None], Any]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "variables", "opt_state"],
    meta_fields=["graphdef"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
      step: `[]` int32, updates done.
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
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns a jitted train step over a mesh: `(state, batch) -> (state, metrics)`.

    Args:
      loss_fn: the loss, see the top of this module.
      tx: the optimizer. It is given `num_examples` and `num_tokens` of the global
        batch as extra arguments.
      mesh: where batches are sharded.
      mode: "jit" leaves the partitioning to the compiler; "shard_map" runs the loss on
        each device's rows and adds up by an explicit `psum`; "pmap" runs the whole
        step so, by `jax.pmap`. Equal results.
      batch_axes: the mesh axes that cut the rows.
      seed: what dropout keys are derived from.
      state_sharding: sharding of the state, or a tree of them; by default replicated.
        Under "pmap" it always is.

    Returns:
      The step. It donates its state. Metrics: "loss" (`loss_sum / weight`), "weight",
      "num_tokens", "num_examples", and the loss's own sums.

    Raises:
      ValueError: for an unknown mode or axis, a seed out of range, or a sharded state
        or a mesh that mixes the devices of processes under "pmap"; when traced, for a
        loss that breaks the contract.
    """
    if mode == "pmap" and state_sharding is not None:
        raise ValueError(
            "`state_sharding`: under `mode='pmap'` every device holds the whole state. "
            "Shard it under 'jit' or 'shard_map'."
        )
    tx = optax.with_extra_args_support(tx)
    seed = check_seed(seed)

    def gradient_sums(state: TrainState, batch: Batch, keys: jax.Array | None) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Metrics]:
            model = dataclasses.replace(state, params=params).model
            return _checked_loss(loss_fn, model, batch, keys)

        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return grads, sums

    over_batch = _over_batch(gradient_sums, mesh, mode, batch_axes, seed)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, sums = over_batch(state, batch)
        metrics = _mean(sums)
        # A batch of zero weight has zero gradients: let it be an update of zero.
        divisor = jnp.where(sums["weight"] > 0, sums["weight"], jnp.inf)
        grads = jax.tree.map(functools.partial(_divide, divisor=divisor), grads)
        updates, opt_state = tx.update(
            grads,
            state.opt_state,
            state.params,
            num_examples=metrics["num_examples"],
            num_tokens=metrics["num_tokens"],
        )
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(
            state, step=state.step + 1, params=params, opt_state=opt_state
        ), metrics

    if mode == "pmap":
        return PmapStep(train_step, mesh, axis_names(mesh, batch_axes), donate=True)
    replicated = NamedSharding(mesh, PartitionSpec())
    if state_sharding is None:
        state_sharding = replicated
    return jax.jit(
        train_step, donate_argnums=0, out_shardings=(state_sharding, replicated)
    )


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
        return _checked_loss(loss_fn, state.model, batch, keys)[1]

    over_batch = _over_batch(sums, mesh, mode, batch_axes, seed=None)

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return _mean(over_batch(state, batch))

    if mode == "pmap":
        return PmapStep(eval_step, mesh, axis_names(mesh, batch_axes), donate=False)
    return jax.jit(eval_step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _over_batch(
    sums: _Sums, mesh: Mesh, mode: Mode, batch_axes: Axes, seed: int | None
) -> Callable[[TrainState, Batch], Any]:
    """`sums` over the rows of the global batch, on whichever devices they are."""
    check_choice("mode", mode, get_args(Mode))
    axes = axis_names(mesh, batch_axes)
    rows = Rows.of(mesh, axes)

    def on_rows(state: TrainState, batch: Batch, first_row: Any) -> Any:
        num_rows = batch.bucket.batch_size
        keys = None if seed is None else row_keys(seed, state.step, first_row, num_rows)
        return sums(state, batch, keys)

    def on_all_rows(state: TrainState, batch: Batch) -> Any:
        try:
            return on_rows(state, batch, 0)
        except Exception as error:
            explicit = AxisType.Explicit in mesh.axis_types
            if not explicit or isinstance(error, ValueError):
                raise
            raise ValueError(
                f"`mesh` has axis types {mesh.axis_types}, and `loss_fn` is not "
                "written for Explicit ones. Build the mesh by `data_mesh()`, or by "
                "`jax.make_mesh(..., axis_types=(AxisType.Auto,) * n)`."
            ) from error

    def on_own_rows(state: TrainState, batch: Batch) -> Any:
        first_row = jax.lax.axis_index(axes) * batch.bucket.batch_size
        return jax.lax.psum(on_rows(state, batch, first_row), axes)

    def on_mapped_rows(state: TrainState, batch: Batch) -> Any:
        first_row = rows.first_row(batch.bucket.batch_size)
        return rows.add_up(on_rows(state, batch, first_row))

    if mode == "jit":
        return on_all_rows
    if mode == "pmap":
        return on_mapped_rows
    # check_vma would refuse ordinary models, such as a scan that starts from zeros;
    # gradients are of local sums, so the explicit psum is all they need.
    return jax.shard_map(
        on_own_rows,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(axes)),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
        check_vma=False,
    )


def row_keys(
    seed: int, step: Any, first_row: Any, num_rows: int, micro_batch: Any = 0
) -> jax.Array:
    """Returns `[num_rows]` random keys, one for each row of a step's global batch.

    Args:
      seed: of the run.
      step: the step, static or traced.
      first_row: place of the first row in the global batch.
      num_rows: how many rows.
      micro_batch: place of the micro-batch in the step.
    """
    # jax takes 32 bits of a seed, or all of them, as it is configured: take them here.
    low, high = seed & 0xFFFFFFFF, seed >> 32
    key = jax.random.key(np.uint32(low))
    for number in (np.uint32(high), step, micro_batch):
        key = jax.random.fold_in(key, number)
    rows = first_row + jnp.arange(num_rows, dtype=jnp.int32)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(rows)


def _checked_loss(
    loss_fn: LossFn, model: Any, batch: Batch, keys: jax.Array | None
) -> tuple[jax.Array, Metrics]:
    """The loss, and every sum that is to be added up over devices."""
    try:
        result = loss_fn(model, batch, keys)
    except TraceContextError as error:
        raise ValueError(
            "`loss_fn` changes the model's own variables, which these steps hold "
            "fixed. Draw dropout from `keys` (`dropout(x, rngs=key)`, row by row) and "
            "not from the model's `nnx.Rngs`."
        ) from error
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        what = type(result).__name__
        if isinstance(result, tuple):
            what = f"a tuple of {len(result)}"
        elif isinstance(result, jax.Array):
            what = "one array"
        raise ValueError(
            f"`loss_fn` returned {what}: return (loss_sum, weight) or (loss_sum, "
            "weight, sums), sums over the batch and not means."
        )
    own = result[2] if len(result) == 3 else {}
    if not isinstance(own, Mapping):
        raise ValueError(
            f"`loss_fn` returned `sums` as {type(own).__name__}: make it a dict."
        )
    if _OWN_METRICS & own.keys():
        raise ValueError(
            f"`loss_fn`: {sorted(_OWN_METRICS & own.keys())} in `sums` are names of "
            "the step's own metrics. Rename them."
        )
    sums = {"loss_sum": result[0], "weight": result[1], **own}
    for name, value in sums.items():
        _check_sum(name, value)
    if not jnp.issubdtype(result[0].dtype, jnp.floating):
        raise ValueError(
            f"`loss_fn` returned 'loss_sum' as {result[0].dtype}: make it a float."
        )
    # Half precision cannot count the tokens of a batch.
    exact = jnp.float64 if result[0].dtype == jnp.float64 else jnp.float32
    sums["weight"] = sums["weight"].astype(exact)
    counts = {"num_tokens": batch.num_tokens, "num_examples": batch.num_examples}
    return result[0], {**sums, **counts}


def _check_sum(name: str, value: Any) -> None:
    if not isinstance(value, jax.Array):
        # A Python number would be added once for each device.
        raise ValueError(
            f"`loss_fn` returned {name!r} as {type(value).__name__}: return a scalar "
            "jax.Array, a sum over the batch."
        )
    if value.shape:
        raise ValueError(
            f"`loss_fn` returned {name!r} of shape {list(value.shape)}: sum it to a "
            "scalar."
        )


def _divide(value: jax.Array, divisor: jax.Array) -> jax.Array:
    # Half precision is divided in the divisor's: 1 / 65,536 is not exact in float16.
    wide = max(value.dtype, divisor.dtype, key=lambda dtype: dtype.itemsize)
    return (value.astype(wide) / divisor.astype(wide)).astype(value.dtype)


def _mean(sums: Metrics) -> Metrics:
    weight = sums["weight"]
    loss = sums["loss_sum"].astype(weight.dtype) / jnp.where(weight > 0, weight, 1)
    return {"loss": jnp.where(weight > 0, loss, 0), **sums}
