"""Outputs for every example, in the order of the source, from batches on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

# `train.MeshLoader` is imported on first use, because its module imports Grain.
from jaxbucket import train
from jaxbucket.base.batch import EMPTY_ROW, Batch, BatchIndices
from jaxbucket.base.checks import check_function
from jaxbucket.base.digest import digest
from jaxbucket.base.progress import progress_bar
from jaxbucket.data.example import Sequences
from jaxbucket.data.uncollate import unbatch
from jaxbucket.sharding.global_batch import prefetch
from jaxbucket.sharding.mesh import Axes
from jaxbucket.train.modes import Mode, checked_axes, jit_step, over_rows
from jaxbucket.train.state import TrainState, checked_state
from jaxbucket.train.variables import EVALUATION_REMEDY, call_model

Outputs: TypeAlias = Mapping[str, jax.Array]
PredictFn: TypeAlias = Callable[[Any, Batch], Outputs]


def make_predict_step(
    predict_fn: PredictFn,
    mesh: Mesh,
    *,
    mode: Mode = "jit",
    batch_axes: Axes = None,
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
      batch_axes: the mesh axes over which batches are sharded, as for
        `batch_sharding`.

    Returns:
      `(state, batch) -> Batch`, with the outputs as features, replicated on all
      devices.

    Raises:
      ValueError: if `predict_fn` is not a function, or the mode or an axis is unknown;
        when traced, if the outputs are not a dict of arrays with one entry per row, or
        if variables of the model change.
    """
    check_function("predict_fn", predict_fn, "(model, batch)")
    axes = checked_axes(mesh, mode, batch_axes)

    def on_rows(state: TrainState, batch: Batch) -> Batch:
        outputs, _ = call_model(
            lambda model: (predict_fn(model, batch), None),
            checked_state(state),
            EVALUATION_REMEDY,
        )
        _check_outputs(outputs, batch.bucket.batch_size)
        return batch._replace(features=dict(outputs))

    over_all_rows = over_rows(on_rows, mesh, mode, axes, gathers=True)

    def predict_step(state: TrainState, batch: Batch) -> Batch:
        return over_all_rows(state, batch)

    return jit_step(predict_step, mesh, mode)


def predict(
    steps: Callable[[Any, Batch], Batch],
    state: Any,
    batches: train.MeshLoader,
    *,
    sequences: Sequences,
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
      >>> [y["y"].tolist() for y in predict(step, state, batches, sequences=["y"])]
      [[0.0, 2.0, 4.0], [0.0], [0.0, 2.0, 4.0, 6.0]]

    Args:
      steps: the step from `make_predict_step`, optionally compiled by `compile_steps`.
      state: a state that holds the model; it needs no optimizer.
      batches: the batches of exactly one epoch, in which each example appears once.
      sequences: the outputs of shape `[B, T, ...]` whose padding is removed; `[]` if
        there are none. If examples have several sequences, a mapping from those with
        outputs to these; an output in two has shape `[B, T, T', ...]`. If rows are
        packed, all other outputs have shape `[B, S, ...]`, with an entry for each of
        the `max_segments` S that a row may hold.
      progress: whether to show a progress bar on a terminal.

    Returns:
      A dict for each example, with arrays `[length, ...]` for sequences, with a length
      for each sequence of the output, and `[...]` for other outputs; None for an
      example that is dropped by `overlong="drop"`.

    Raises:
      ValueError: if `batches` leaves out or repeats an example; if the processes have
        different batches; or if an output does not have the shape that `sequences`
        says.
    """
    epoch = _checked_epoch(batches)
    examples: list[dict[str, np.ndarray] | None]
    examples = [None] * len(batches.schedule.lengths)
    # The next step runs while the host reads the outputs of the previous one.
    outputs = prefetch((steps(state, batch) for batch in _micro_batches(batches)), 1)
    with progress_bar(progress) as bar:
        tracked = bar.track(epoch, description="Predicting")
        for indices, output in zip(tracked, outputs, strict=True):
            found = unbatch(
                output,
                sequences=sequences,
                max_segments=batches.schedule.max_segments,
            )
            for index, example in zip(_examples(indices), found, strict=True):
                examples[index] = example
    return examples


def _checked_epoch(batches: train.MeshLoader) -> list[BatchIndices]:
    """Returns the indices of all batches, which have each example once."""
    start, stop = batches.start_step, batches.start_step + len(batches)
    # First, so that the error below is raised in all processes or in none.
    owners = {device.process_index for device in batches.mesh.devices.flat}
    if 1 < len(owners) == jax.process_count():
        position = repr((batches.position(start).to_dict(), stop))
        digits = np.frombuffer(digest(position.encode()).encode(), np.uint8)
        if np.ptp(multihost_utils.process_allgather(digits), axis=0).any():
            raise ValueError(
                "`batches` differ between processes. Use the same loader in all."
            )
    schedule = batches.schedule
    epoch = [x for step in range(start, stop) for x in schedule.micro_batches(step)]
    expected = schedule.is_kept.astype(np.int64)
    counts = np.zeros_like(expected)
    for indices in epoch:
        np.add.at(counts, _examples(indices), 1)
    if not np.array_equal(counts, expected):
        index = int(np.argmax(counts != expected))
        raise ValueError(
            f"`batches` has example {index} in {counts[index]} rows of its steps "
            f"{start} to {stop - 1}, but each needs exactly one output. Predict with a "
            "loader of one epoch of a `BatchSchedule` with the default options."
        )
    return epoch


def _examples(indices: BatchIndices) -> np.ndarray:
    """Returns the indices of the examples of a batch, in row order."""
    return indices.rows[indices.rows != EMPTY_ROW]


def _micro_batches(elements: Iterable[Any]) -> Iterator[Batch]:
    """Yields single batches, also from steps of several micro-batches."""
    for element in elements:
        if isinstance(element, Batch):
            yield element
        else:
            yield from element


def _check_outputs(outputs: Any, num_rows: int) -> None:
    """Raises a ValueError unless outputs are arrays with an entry per row."""
    shapes = None
    if isinstance(outputs, Mapping):
        shapes = {name: getattr(x, "shape", ()) for name, x in outputs.items()}
    if not shapes or any(x[:1] != (num_rows,) for x in shapes.values()):
        raise ValueError(
            f"`predict_fn` returned {shapes or type(outputs).__name__}. Return a dict "
            f"of arrays with one entry per row of the batch, {num_rows} here."
        )
