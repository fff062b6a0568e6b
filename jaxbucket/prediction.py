"""Outputs for every example, in the order of the source, from batches on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.base import EMPTY_ROW, Batch
from jaxbucket.checks import check_choice
from jaxbucket.collate import unbatch
from jaxbucket.compile import noting_arguments
from jaxbucket.loss import Mode
from jaxbucket.pmap import PmapStep, Rows
from jaxbucket.schedule import Schedule
from jaxbucket.sharding import DATA_AXIS, Axes, ahead, axis_names
from jaxbucket.train import TrainState

Outputs: TypeAlias = Mapping[str, jax.Array]
PredictFn: TypeAlias = Callable[[Any, Batch], Outputs]


def data_parallel_predict(
    predict_fn: PredictFn,
    mesh: Mesh,
    *,
    mode: Mode = "jit",
    batch_axes: Axes = DATA_AXIS,
) -> Callable[[TrainState, Batch], Batch]:
    """Returns a jitted step that gives every process the outputs of all rows.

    Args:
      predict_fn: `(model, batch) -> outputs`, a dict of `[B, ...]` arrays. What it
        does with a row may not depend on others.
      mesh: where batches are sharded.
      mode: as in `data_parallel`.
      batch_axes: the mesh axes that cut the rows.

    Returns:
      `(state, batch) -> Batch` with the outputs in the place of the features, whole
      on every device.

    Raises:
      ValueError: for an unknown mode or axis; when traced, for outputs that are no
        dict of arrays with a row for each of the batch.
    """
    check_choice("mode", mode, get_args(Mode))
    axes = axis_names(mesh, batch_axes)

    def on_rows(state: TrainState, batch: Batch) -> Batch:
        outputs = predict_fn(state.model, batch)
        return batch._replace(features=_checked(outputs, batch.bucket.batch_size))

    @noting_arguments
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
    batches: Iterable[Batch],
    schedule: Schedule,
    *,
    sequences: Sequence[str] | None = None,
) -> list[dict[str, np.ndarray] | None]:
    """Returns the outputs for every example of the source, in its order.

    All processes have to call it, each with its own part of the same batches; each
    has all outputs then.

    Args:
      steps: from `data_parallel_predict`, compiled by `compile_steps` or not.
      state: whose model predicts.
      batches: those of one epoch of the schedule, on the mesh.
      schedule: says which example is in which row. In source order it is the same,
        whatever the seed.
      sequences: outputs that have padding to be cut off, by default all that are of
        shape `[B, T, ...]` in every batch. Name them where an epoch has one bucket
        only, and another output's second axis may be as long.

    Returns:
      A dict for each example: `[length, ...]` for sequences, `[...]` for the rest; None
      where the plan drops the example.

    Raises:
      ValueError: if the batches are not those of one epoch, the schedule has several
        at a step, or an output that `sequences` names is none.
    """
    if schedule.accumulate != 1:
        raise ValueError(
            f"The schedule has `accumulate={schedule.accumulate}`: predict with one of "
            "a single batch at every step."
        )
    if schedule.max_segments is not None:
        raise ValueError(
            "The schedule has packed rows: predict with one of a single example in "
            "every row."
        )
    found: list[dict[str, np.ndarray] | None] = [None] * len(schedule.lengths)
    if isinstance(sequences, str):
        sequences = [sequences]
    padded: set[str] | None = None if sequences is None else set(sequences)
    # The next step runs while the host reads the last one's.
    outputs = ahead((steps(state, batch) for batch in batches), 1)
    number = 0
    for indices, output in zip(schedule, outputs, strict=False):
        number += 1
        if output.bucket != indices.bucket:
            raise ValueError(
                f"`batches` has {output.bucket} where the schedule has "
                f"{indices.bucket}: pass those of one epoch, from its first step."
            )
        output = jax.tree.map(np.asarray, output)
        own = _with_positions(output)
        if sequences is None:
            padded = own if padded is None else padded & own
        elif not own.issuperset(sequences):
            raise ValueError(
                f"`sequences={list(sequences)}`: the outputs of shape [B, T, ...] are "
                f"{sorted(own)}. Choose from these."
            )
        rows = indices.rows[indices.rows != EMPTY_ROW]
        # Uncut, for a later batch may show that an output is no sequence.
        for index, example in zip(rows, unbatch(output, sequences=()), strict=True):
            found[index] = example
    if number != len(schedule) or next(outputs, None) is not None:
        raise ValueError(
            f"`batches` are not the {len(schedule)} of one epoch: pass all of them, "
            "from its first step."
        )
    last = schedule.plan.max_seq_len
    for example, length in zip(found, schedule.lengths, strict=True):
        if example is not None:
            for name in padded or ():
                example[name] = example[name][: min(int(length), last)]
    return found


def _with_positions(batch: Batch) -> set[str]:
    shape = (batch.bucket.batch_size, batch.bucket.seq_len)
    return {name for name, x in batch.features.items() if x.shape[:2] == shape}


def _checked(outputs: Any, num_rows: int) -> dict[str, jax.Array]:
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"`predict_fn` returned {type(outputs).__name__}: make it a dict of arrays."
        )
    for name, value in outputs.items():
        shape = getattr(value, "shape", ())
        if not shape or shape[0] != num_rows:
            raise ValueError(
                f"`predict_fn` returned {name!r} of shape {list(shape)}: its first "
                f"axis must be the batch's, of {num_rows} rows here."
            )
    return dict(outputs)
