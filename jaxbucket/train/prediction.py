"""Outputs for every example, in the order of the source, from batches on a mesh."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# `train.MeshLoader` is imported on first use, because its module imports Grain.
from jaxbucket import train
from jaxbucket.base.batch import EMPTY_ROW, Batch, BatchIndices
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_choice
from jaxbucket.base.digest import digest
from jaxbucket.base.progress import progress_bar
from jaxbucket.compile.events import record_arguments
from jaxbucket.data.uncollate import unbatch
from jaxbucket.schedule.base import Schedule
from jaxbucket.sharding import DATA_AXIS, Axes, axis_names, prefetch
from jaxbucket.train.loss import Mode
from jaxbucket.train.pmap import PmapStep, Rows
from jaxbucket.train.state import TrainState

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
      >>> import jaxbucket as jb, optax
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> def predict_fn(params, batch):
      ...     return {"y": params["w"] * batch.features["x"]}
      >>> predict_step = make_predict_step(predict_fn, mesh)
      >>> state = jb.create_state({"w": np.float32(2)}, optax.sgd(0.0), mesh)
      >>> rows = [{"x": [1.0, 3.0]}, {"x": [2.0]}]
      >>> batch = jb.data.collate_rows(rows, jb.Bucket(2, 2))
      >>> predict_step(state, batch).features["y"].tolist()
      [[2.0, 6.0], [4.0, 0.0]]

    Args:
      predict_fn: `(model, batch) -> outputs`, a dict of `[B, ...]` arrays. The outputs
        of a row must not depend on other rows.
      mesh: the mesh on which batches are sharded.
      mode: how the step runs on the devices: "jit", "shard_map" or "pmap". Results are
        equal.
      batch_axes: the mesh axes over which rows are sharded.

    Returns:
      `(state, batch) -> Batch`, with the outputs as features, replicated on all
      devices.

    Raises:
      ValueError: if the mode or an axis is unknown; when traced, if the outputs are not
        a dict of arrays with one entry per row.
    """
    check_choice("mode", mode, get_args(Mode))
    axes = axis_names(mesh, batch_axes)

    def on_rows(state: TrainState, batch: Batch) -> Batch:
        outputs = predict_fn(state.model, batch)
        return batch._replace(features=_checked(outputs, batch.bucket.batch_size))

    @record_arguments
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
    sequences: Sequence[str] | None = None,
    progress: bool = True,
) -> list[dict[str, np.ndarray] | None]:
    """Returns the outputs for all examples of the source, in the order of the source.

    All processes of the mesh must call this function. Each of them returns all outputs.

    Example:
      >>> import jaxbucket as jb, optax
      >>> source = [{"x": np.arange(n, dtype=np.float32)} for n in (3, 1, 4)]
      >>> lengths = jb.measure_lengths(source, progress=False)
      >>> plan = jb.plan_buckets(lengths, max_tokens=8)
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> state = jb.create_state({"w": np.float32(2)}, optax.sgd(0.0), mesh)
      >>> step = make_predict_step(
      ...     lambda model, batch: {"y": model["w"] * batch.features["x"]}, mesh
      ... )
      >>> batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
      >>> [y["y"].tolist() for y in predict(step, state, batches)]
      [[0.0, 2.0, 4.0], [0.0], [0.0, 2.0, 4.0, 6.0]]

    Args:
      steps: the step from `make_predict_step`, optionally compiled by `compile_steps`.
      state: a state that holds the model.
      batches: the batches of exactly one epoch, in which each example appears once and
        in a row of its own.
      sequences: the outputs whose padding is removed; by default all outputs that have
        shape `[B, T, ...]` in every batch. Pass their names if the plan has a single
        bucket and the second axis of another output may also have length T.
      progress: whether to show a progress bar on a terminal.

    Returns:
      A dict for each example, with arrays `[length, ...]` for sequences and `[...]` for
      other outputs; None for an example that is dropped by `overlong="drop"`.

    Raises:
      ValueError: if `batches` is not a `MeshLoader`, is not exactly one epoch, has
        packed rows, or leaves out or repeats an example; if the processes have
        different batches; or if `sequences` names an output that is not a sequence.
    """
    epoch = _epoch(batches)
    schedule = batches.schedule
    if isinstance(sequences, str):
        sequences = [sequences]
    padded: set[str] | None = None if sequences is None else set(sequences)
    examples: list[dict[str, np.ndarray] | None] = [None] * len(schedule.lengths)
    # The next step runs while the host reads the outputs of the previous one.
    outputs = prefetch((steps(state, batch) for batch in _micro_batches(batches)), 1)
    with progress_bar(progress) as bar:
        tracked = bar.track(epoch, description="Predicting")
        for indices, output in zip(tracked, outputs, strict=True):
            _check_output(output, indices.bucket)
            output = jax.tree.map(np.asarray, output)
            names = _sequence_names(output)
            if sequences is None:
                padded = names if padded is None else padded & names
            elif not names.issuperset(sequences):
                raise ValueError(
                    f"`sequences={list(sequences)}` must name outputs of shape "
                    f"[B, T, ...]. Choose from {sorted(names)}."
                )
            rows = indices.rows[indices.rows != EMPTY_ROW]
            # Padding is removed at the end, because a later batch may show that an
            # output is not a sequence.
            for index, example in zip(rows, unbatch(output, sequences=()), strict=True):
                examples[index] = example
    last = schedule.plan.max_seq_len
    for example, length in zip(examples, schedule.lengths, strict=True):
        if example is not None:
            for name in padded or ():
                example[name] = example[name][: min(int(length), last)]
    return examples


def _epoch(batches: train.MeshLoader) -> list[BatchIndices]:
    """Returns the indices of an epoch, after checking that it has each example once."""
    schedule = getattr(batches, "schedule", None)
    if not isinstance(schedule, Schedule) or not hasattr(batches, "mesh"):
        raise ValueError(
            f"`batches` is a {type(batches).__name__}. Pass a "
            "`MeshLoader(source, schedule, mesh)`, whose schedule maps rows to "
            "examples."
        )
    start, stop = batches.start_step, batches.start_step + len(batches)
    if len(batches) != len(schedule) or (start - schedule.first_step) % len(schedule):
        raise ValueError(
            f"`batches` has steps {start} to {stop - 1}, which are not exactly one "
            f"epoch of {len(schedule)} steps. Create a separate loader for "
            "predictions: `MeshLoader(source, schedule, mesh)`."
        )
    if schedule.max_segments is not None:
        raise ValueError(
            "The schedule of `batches` has packed rows. Predict with a schedule that "
            "has one example per row."
        )
    epoch = [x for step in range(start, stop) for x in schedule.micro_batches(step)]
    _check_once(schedule, epoch)
    _check_same(batches)
    return epoch


def _check_once(schedule: Schedule, epoch: Sequence[BatchIndices]) -> None:
    """Raises a ValueError unless each example that the plan keeps is in one row."""
    expected = (schedule.plan.assign(schedule.lengths) >= 0).astype(np.int64)
    rows = np.concatenate([indices.rows for indices in epoch])
    counts = np.bincount(rows[rows != EMPTY_ROW], minlength=len(expected))
    if not np.array_equal(counts, expected):
        index = int(np.argmax(counts != expected))
        raise ValueError(
            f"The schedule of `batches` has example {index} in {counts[index]} rows of "
            "this epoch, but each example needs exactly one output. Predict with a "
            "`BatchSchedule` of the same plan and lengths in the default order, not "
            'with `replacement=True`, `remainder="drop"` or a `Mixture`.'
        )


def _check_same(batches: train.MeshLoader) -> None:
    """Raises a ValueError if the processes of the mesh have different batches."""
    mesh = batches.mesh
    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return
    position = json.dumps(batches.position(batches.start_step).to_dict())
    local = np.frombuffer(bytes.fromhex(digest(position.encode())), np.uint32)
    # Each process fills the rows of its devices; replicating them shows every process
    # the digests of all others.
    digests = jax.make_array_from_callback(
        (mesh.size, len(local)),
        NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        lambda index: local[None],
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    digests = jax.jit(lambda x: x, out_shardings=replicated)(digests)
    if np.any(np.asarray(digests) != local):
        raise ValueError(
            "The processes have different batches. Use the same source, plan, lengths, "
            "seed and epoch in all of them."
        )


def _micro_batches(elements: Iterable[Any]) -> Iterator[Batch]:
    """Yields single batches, also from steps of several micro-batches."""
    for element in elements:
        if isinstance(element, Batch):
            yield element
        else:
            yield from element


def _check_output(output: Any, bucket: Bucket) -> None:
    if not isinstance(output, Batch):
        raise ValueError(
            f"`steps` returned a {type(output).__name__}, not a `Batch` of outputs. "
            "Create the step with `make_predict_step`."
        )
    if output.bucket != bucket:
        raise ValueError(
            f"`steps` returned outputs of bucket {output.bucket} for a batch of "
            f"{bucket}. Compile the step for the buckets of the plan of `batches`."
        )


def _sequence_names(batch: Batch) -> set[str]:
    """Returns the names of the outputs of shape `[B, T, ...]`."""
    shape = (batch.bucket.batch_size, batch.bucket.seq_len)
    return {name for name, x in batch.features.items() if x.shape[:2] == shape}


def _checked(outputs: Any, num_rows: int) -> dict[str, jax.Array]:
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"`predict_fn` returned a value of type {type(outputs).__name__}. Return a "
            "dict of arrays."
        )
    for name, value in outputs.items():
        shape = getattr(value, "shape", ())
        if not shape or shape[0] != num_rows:
            raise ValueError(
                f"`predict_fn` returned {name!r} with shape {list(shape)}. Its first "
                f"axis must have one entry per row of the batch, {num_rows} here."
            )
    return dict(outputs)
