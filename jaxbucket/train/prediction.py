"""Outputs for every example, in the order of the source, from batches on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# `train.MeshLoader` is imported on first use, because its module imports Grain.
from jaxbucket import train
from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.checks import check_choice, check_function
from jaxbucket.data.example import Sequences
from jaxbucket.data.uncollate import split_examples
from jaxbucket.sharding import DATA_AXIS, Axes, axis_names
from jaxbucket.train.loss import Mode
from jaxbucket.train.pmap import PmapStep, Rows
from jaxbucket.train.prediction_epoch import check_epoch, run_epoch
from jaxbucket.train.prediction_outputs import OutputSequences
from jaxbucket.train.state import TrainState, checked_state
from jaxbucket.train.variables import (
    EVALUATION_REMEDY,
    Values,
    check_parameters,
    check_variables,
    values_after,
)

Outputs: TypeAlias = Mapping[str, jax.Array]
PredictFn: TypeAlias = Callable[[Any, Batch], Outputs]


def make_predict_step(
    predict_fn: PredictFn,
    mesh: Mesh,
    *,
    mode: Mode = "jit",
    batch_axes: Axes = DATA_AXIS,
) -> Callable[[TrainState, Batch], Batch]:
    """Returns a jitted step that returns the outputs of all rows to every process.

    Example:
      >>> import jaxbucket as jb
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> def predict_fn(params, batch):
      ...     return {"y": params["w"] * batch.features["x"]}
      >>> predict_step = make_predict_step(predict_fn, mesh)
      >>> state = jb.create_state({"w": np.float32(2)}, mesh=mesh)
      >>> rows = [{"x": [1.0, 3.0]}, {"x": [2.0]}]
      >>> batch = jb.data.collate_rows(rows, jb.Bucket(2, 2))
      >>> predict_step(state, batch).features["y"].tolist()
      [[2.0, 6.0], [4.0, 0.0]]

    Args:
      predict_fn: `(model, batch) -> outputs`, a dict of `[B, ...]` arrays. Outputs
        `[B, T, ...]` have their padding where `batch` has it; after
        `jb.attention.left_padded`, move it back by `right_padded`. The outputs of a row
        must not depend on other rows.
      mesh: the mesh on which batches are sharded.
      mode: how the step runs on the devices: "jit", "shard_map" or "pmap". Results are
        equal.
      batch_axes: the mesh axes over which rows are sharded.

    Returns:
      `(state, batch) -> Batch`, with the outputs as features, replicated on all
      devices.

    Raises:
      ValueError: if `predict_fn` is not a function, or the mode or an axis is unknown;
        when traced, if the outputs are not a dict of arrays with one entry per row, or
        if variables of the model change.
    """
    check_function("predict_fn", predict_fn, "(model, batch)")
    check_choice("mode", mode, get_args(Mode))
    axes = axis_names(mesh, batch_axes)

    def on_rows(state: TrainState, batch: Batch) -> Batch:
        def call(state: TrainState) -> tuple[Any, Values]:
            model = state.model
            outputs = predict_fn(model, batch)
            return outputs, values_after(state.variables, model, None)

        outputs, new = call(checked_state(state))
        check_parameters(state, new, lambda x: call(x)[1])
        check_variables(state, new, lambda x: call(x)[1], EVALUATION_REMEDY)
        return batch._replace(features=_checked(outputs, batch.bucket.batch_size))

    def predict_step(state: TrainState, batch: Batch) -> Batch:
        return over_rows(state, batch)

    if mode == "pmap":
        rows = Rows.of(mesh, axes)

        def over_rows(state: TrainState, batch: Batch) -> Batch:
            return rows.gather(on_rows(state, batch))

        return PmapStep(predict_step, mesh, axes)
    over_rows = on_rows
    if mode == "shard_map":
        over_rows = jax.shard_map(
            on_rows,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(axes)),
            out_specs=PartitionSpec(axes),
            axis_names=set(axes),
            check_vma=False,
        )
    return jax.jit(predict_step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def predict(
    steps: Callable[[Any, Batch], Batch],
    state: Any,
    batches: train.MeshLoader,
    *,
    sequences: Sequences = None,
    progress: bool = True,
) -> list[dict[str, np.ndarray] | None]:
    """Returns the outputs for all examples of the source, in the order of the source.

    All processes of the mesh must call this function. Each of them returns all outputs.
    If they do not fit into memory, run the step in a loop of your own, and take each
    batch apart by `unbatch`.

    Example:
      >>> import jaxbucket as jb
      >>> source = [{"x": np.arange(n, dtype=np.float32)} for n in (3, 1, 4)]
      >>> lengths = jb.measure_lengths(source, progress=False)
      >>> plan = jb.plan_buckets(lengths, max_tokens=8)
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> state = jb.create_state({"w": np.float32(2)}, mesh=mesh)
      >>> step = make_predict_step(
      ...     lambda model, batch: {"y": model["w"] * batch.features["x"]}, mesh
      ... )
      >>> batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
      >>> [y["y"].tolist() for y in predict(step, state, batches)]
      [[0.0, 2.0, 4.0], [0.0], [0.0, 2.0, 4.0, 6.0]]

    Args:
      steps: the step from `make_predict_step`, optionally compiled by `compile_steps`.
      state: a state that holds the model; it needs no optimizer.
      batches: the batches of exactly one epoch, in which each example appears once.
      sequences: the outputs whose padding is removed, or the name of one; `[]` if there
        are none. If examples have several sequences, a mapping from each to its
        outputs; an output in two of them has shape `[B, T, T', ...]`. By default all
        outputs of shape `[B, T, ...]` in every batch; required if an output has axes of
        two sequences, or if all batches have the same T and an output has this shape,
        because it may have T values that are not padded. If rows are packed, all other
        outputs have shape `[B, S, ...]`, with an entry for each of the `max_segments` S
        that a row may hold.
      progress: whether to show a progress bar on a terminal.

    Returns:
      A dict for each example, with arrays `[length, ...]` for sequences, with a length
      for each sequence of the output, and `[...]` for other outputs; None for an
      example that is dropped by `overlong="drop"`.

    Raises:
      ValueError: if `batches` is not a `MeshLoader`, is not exactly one epoch, or
        leaves out or repeats an example; if the processes have different batches; if
        `sequences` names an output that is not a sequence; or if it is not known
        whether an output is padded.
    """
    epoch = check_epoch(batches)
    max_segments = batches.schedule.max_segments
    is_uniform = len({indices.bucket.seq_len for indices in epoch}) == 1
    names = OutputSequences(sequences, max_segments)
    outputs: list[tuple[np.ndarray, Batch]] = []
    for indices, output in run_epoch(steps, state, batches, epoch, progress):
        names.add(output)
        if is_uniform:
            # Other batches have the same T, so an error need not wait for them.
            names.axes()
        outputs.append((indices.rows[indices.rows != EMPTY_ROW], output))
    # Padding is removed at the end, because a later batch may show that an output is
    # not a sequence.
    axes = names.axes()
    num_examples = len(batches.schedule.lengths)
    examples: list[dict[str, np.ndarray] | None] = [None] * num_examples
    for present, output in outputs:
        rows = split_examples(output, axes, max_segments)
        for index, example in zip(present, rows, strict=True):
            examples[index] = example
    return examples


def _checked(outputs: Any, num_rows: int) -> dict[str, jax.Array]:
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"`predict_fn` returned a value of type {type(outputs).__name__}. Return a "
            "dict of arrays."
        )
    if not outputs:
        raise ValueError(
            "`predict_fn` returned no outputs. Return a dict with at least one array."
        )
    for name, value in outputs.items():
        if not hasattr(value, "shape"):
            raise ValueError(
                f"`predict_fn` returned {name!r} as a {type(value).__name__}. Outputs "
                "must be arrays; give the arrays in it names of their own."
            )
        shape = value.shape
        if not shape or shape[0] != num_rows:
            raise ValueError(
                f"`predict_fn` returned {name!r} with shape {list(shape)}. Its first "
                f"axis must have one entry per row of the batch, {num_rows} here."
            )
    return dict(outputs)
