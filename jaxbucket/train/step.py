"""Train and evaluation steps over a mesh, for losses as described in `loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.base.batch import Batch, check_is_batch
from jaxbucket.base.checks import check_function, check_seed, check_type
from jaxbucket.sharding.mesh import Axes
from jaxbucket.train.accumulation import AccumulatingStep
from jaxbucket.train.gradients import gradient_sums
from jaxbucket.train.loss import LossFn, Metrics, call_loss, mean_metrics
from jaxbucket.train.modes import (
    Mode,
    check_is_replicated,
    check_not_gathered,
    checked_axes,
    jit_step,
    sum_over_batch,
)
from jaxbucket.train.state import TrainState, check_optimizer, checked_state
from jaxbucket.train.update import updater
from jaxbucket.train.variables import EVALUATION_REMEDY, call_model


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    accumulate: bool = False,
    mode: Mode = "jit",
    batch_axes: Axes = None,
    seed: int = 0,
    state_sharding: Any = None,
    skip_nonfinite: bool = False,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """Returns a jitted train step over a mesh: `(state, batch) -> (state, metrics)`.

    The step donates its state. With `accumulate`, only the final phase of the step
    does: if a micro-batch is rejected or its loss cannot be traced, the state is still
    usable. Errors on the devices are reported only later.

    Example:
      >>> import jaxbucket as jb, numpy as np
      >>> mesh, tx = jb.data_mesh(jax.devices()[:1]), optax.sgd(0.25)
      >>> def loss_fn(params, batch, keys):
      ...     losses = (params["w"] - batch.features["x"]) ** 2
      ...     return losses.sum(where=batch.mask), batch.num_tokens
      >>> train_step = make_train_step(loss_fn, tx, mesh)
      >>> state = jb.create_state({"w": np.float32(0)}, tx, mesh)
      >>> rows = [{"x": [1.0, 3.0]}, {"x": [2.0]}]
      >>> batch = jb.data.collate_rows(rows, jb.Bucket(2, 4))
      >>> state, metrics = train_step(state, batch)
      >>> print(state.params["w"], metrics["loss"], metrics["num_tokens"])
      1.0 4.6666665 3

    Args:
      loss_fn: `(model, batch, keys) -> (loss_sum, weight)`, `(loss_sum, weight, sums)`
        or `(loss_sum, weight, sums, variables)`, sums over the rows it is given. The
        page on losses, and `jaxbucket.train.loss`, have the full contract.
      tx: the optimizer. It receives the mean gradient over the global batch, and these
        extra arguments: `num_examples`, `num_tokens` and `num_rows` of the batch,
        the `weight` of the loss, `step`, and `value`, the mean loss.
      mesh: the mesh on which batches are sharded.
      accumulate: whether the step is called with tuples of micro-batches, as yielded by
        a schedule with `accumulate`. Gradients and sums are added up over all of
        them, in float32 or wider, and divided once. `compile_steps` compiles such a
        step in phases, and traces the loss once more to find out which sums it returns.
      mode: "jit" leaves the partitioning to the compiler. "shard_map" runs the loss on
        the rows of each device and adds the results up with an explicit `psum`. "pmap"
        runs the whole step on each device with `jax.pmap`. Results are equal. Models
        with variables that their forward pass changes, such as batch statistics, need
        "jit". There every micro-batch sees the variables that the one before has
        changed, and a micro-batch without examples changes none.
      batch_axes: the mesh axes over which batches are sharded, as for
        `batch_sharding`.
      seed: the seed of the dropout keys.
      state_sharding: sharding of the state, or a tree of shardings; by default
        replicated, and a state that is not is refused. "pmap" supports a replicated
        state only.
      skip_nonfinite: leave parameters and the optimizer state unchanged if the loss, a
        gradient, its norm, an update or the new optimizer state is not finite. The step
        still counts, and learning rate schedules advance (`skip_where`), so that the
        data and the learning rate still match the step number.

    Returns:
      The step. Its metrics, over all micro-batches, are "loss" (`loss_sum / weight`),
      "loss_sum", "weight", "num_tokens" and "num_examples"; "num_rows" and
      "num_positions", the B and B * T of the bucket; "padding", the share of positions
      that are padding; "grad_norm", the norm of the mean gradient; "lr_factor" and
      "learning_rate", if the optimizer's state contains them; "skipped" (1 or 0), with
      `skip_nonfinite`; and the loss's own sums.

    Raises:
      ValueError: if `loss_fn` is not a function, the mode or an axis is unknown, the
        seed is out of range, `tx` is not an optimizer, or `accumulate` is not a bool;
        with "pmap", if the state is sharded, not all axes of the mesh shard the rows,
        or the devices of a process are not adjacent in it; when traced, if the loss
        breaks the contract, the state is of another optimizer, variables change in
        another mode than "jit", or micro-batches are passed without `accumulate`.
    """
    remedy = "Pass the number of micro-batches to `BatchSchedule(accumulate=...)`."
    check_type("accumulate", accumulate, bool, remedy)
    check_optimizer(tx)
    if mode == "pmap" and state_sharding is not None:
        raise ValueError(
            "`state_sharding` is not supported by `mode='pmap'`, under which every "
            "device holds the whole state. Use 'jit' to shard it."
        )
    check_function("loss_fn", loss_fn, "(model, batch, keys)")
    axes = checked_axes(mesh, mode, batch_axes)
    if mode == "shard_map":
        check_not_gathered("`state_sharding`", [state_sharding], axes)
    local_sums = gradient_sums(loss_fn, updates_variables=mode == "jit")
    global_sums = sum_over_batch(local_sums, mesh, mode, axes, check_seed(seed))
    update = updater(tx, skip_nonfinite)
    replicated = NamedSharding(mesh, PartitionSpec())
    check = None
    if state_sharding is None:
        state_sharding, check = replicated, check_is_replicated
    if accumulate:
        return AccumulatingStep(
            local_sums, global_sums, update, mesh, mode, state_sharding, check
        )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_is_batch("batch", batch)
        (grads, sums), variables = global_sums(state, batch)
        return update(state, grads, sums, variables)

    return jit_step(
        train_step,
        mesh,
        mode,
        donate=(0,),
        out_shardings=(state_sharding, replicated),
        check=check,
    )


def make_eval_step(
    loss_fn: LossFn,
    mesh: Mesh,
    *,
    mode: Mode = "jit",
    batch_axes: Axes = None,
) -> Callable[[TrainState, Batch], Metrics]:
    """Returns a jitted evaluation step over a mesh: `(state, batch) -> metrics`.

    Example:
      >>> import jaxbucket as jb, numpy as np
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> def loss_fn(params, batch, keys):
      ...     losses = (params["w"] - batch.features["x"]) ** 2
      ...     return losses.sum(where=batch.mask), batch.num_tokens
      >>> eval_step = make_eval_step(loss_fn, mesh)
      >>> state = jb.create_state({"w": np.float32(0)}, optax.sgd(0.1), mesh)
      >>> rows = [{"x": [1.0, 3.0]}, {"x": [2.0]}]
      >>> batch = jb.data.collate_rows(rows, jb.Bucket(2, 4))
      >>> metrics = eval_step(state, batch)
      >>> print(metrics["loss_sum"], metrics["weight"])
      14.0 3.0

    Args:
      loss_fn: the loss, as for `make_train_step`. It is called with `keys=None`.
      mesh: the mesh on which batches are sharded.
      mode: how the step runs on the devices: "jit", "shard_map" or "pmap". Results are
        equal.
      batch_axes: the mesh axes over which batches are sharded, as for
        `batch_sharding`.

    Returns:
      The step. Its metrics are "loss" (`loss_sum / weight`), "loss_sum", "weight",
      "num_tokens", "num_examples", "num_rows", "num_positions", "padding", and the
      loss's own sums. To average over several batches, add up `loss_sum` and `weight`,
      and divide at the end.

    Raises:
      ValueError: if `loss_fn` is not a function, or the mode or an axis is unknown;
        with "pmap", if the devices of a process are not adjacent in the mesh; when
        traced, if the loss breaks the contract or changes variables of the model.
    """
    check_function("loss_fn", loss_fn, "(model, batch, keys)")
    axes = checked_axes(mesh, mode, batch_axes)

    def local_sums(state: TrainState, batch: Batch, keys: jax.Array | None) -> Any:
        sums, _ = call_model(
            lambda model: call_loss(loss_fn, model, batch, keys)[1:],
            checked_state(state),
            EVALUATION_REMEDY,
        )
        return sums, ()

    global_sums = sum_over_batch(local_sums, mesh, mode, axes, seed=None)

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        sums, _ = global_sums(state, batch)
        return mean_metrics(sums)

    return jit_step(eval_step, mesh, mode)
