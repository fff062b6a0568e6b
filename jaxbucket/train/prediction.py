"""Outputs for every example, in the order of the source, from batches on a mesh."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.base.batch import EMPTY_ROW, Batch, BatchIndices
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_choice
from jaxbucket.base.digest import digest
from jaxbucket.base.progress import progress_bar
from jaxbucket.compile import noting_arguments
from jaxbucket.data.collate import unbatch
from jaxbucket.schedule.schedule import Schedule
from jaxbucket.sharding import (
    DATA_AXIS,
    Axes,
    ahead,
    axis_names,
    local_rows,
    prefetch_to_mesh,
)
from jaxbucket.train.loss import Mode
from jaxbucket.train.pmap import PmapStep, Rows
from jaxbucket.train.step import TrainState

if TYPE_CHECKING:
    from jaxbucket.data.pipeline import BatchDataset

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
    dataset: BatchDataset,
    mesh: Mesh,
    *,
    batch_axes: Axes = DATA_AXIS,
    sequences: Sequence[str] | None = None,
    progress: bool = True,
) -> list[dict[str, np.ndarray] | None]:
    """Returns the outputs for every example of the source, in its order.

    All processes have to call it, each with the rows of its own devices; each has all
    outputs then.

    Example:
      >>> import jaxbucket as jb, optax
      >>> source = [{"x": np.arange(n, dtype=np.float32)} for n in (3, 1, 4)]
      >>> lengths = jb.measure_lengths(source, progress=False)
      >>> plan = jb.plan_buckets(lengths, max_tokens=8)
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> state = jb.create_state({"w": np.float32(2)}, optax.sgd(0.0))
      >>> state = jb.sharding.replicate(state, mesh)
      >>> steps = jb.data_parallel_predict(
      ...     lambda model, batch: {"y": model["w"] * batch.features["x"]}, mesh
      ... )
      >>> dataset = jb.batch_dataset(source, jb.BatchSchedule(plan, lengths))
      >>> [y["y"].tolist() for y in predict(steps, state, dataset, mesh)]
      [[0.0, 2.0, 4.0], [0.0], [0.0, 2.0, 4.0, 6.0]]

    Args:
      steps: from `data_parallel_predict`, compiled by `compile_steps` or not.
      state: whose model predicts.
      dataset: one epoch of `batch_dataset(source, schedule, shard=local_rows(mesh))`,
        any epoch. It is read and put on the mesh here, so that its schedule says which
        example is in which row. Threads of this process read it, and not the workers
        of `load_in_workers`, whose batches know of no schedule.
      mesh: where the rows go.
      batch_axes: the mesh axes that cut the rows.
      sequences: outputs that have padding to be cut off, by default all that are of
        shape `[B, T, ...]` in every batch. Name them where an epoch has one bucket
        only, and another output's second axis may be as long.
      progress: show a progress bar on a terminal.

    Returns:
      A dict for each example: `[length, ...]` for sequences, `[...]` for the rest; None
      where `overlong="drop"` leaves the example out.

    Raises:
      ValueError: if the dataset is something else, or not exactly one epoch, or has
        packed rows, or its epoch leaves out or repeats an example; if its shard is not
        that of the mesh, or another process has another dataset; or if `sequences`
        names an output that is not one.
    """
    epoch = _epoch(dataset, mesh, batch_axes)
    schedule = dataset.schedule
    if isinstance(sequences, str):
        sequences = [sequences]
    padded: set[str] | None = None if sequences is None else set(sequences)
    found: list[dict[str, np.ndarray] | None] = [None] * len(schedule.lengths)
    batches = prefetch_to_mesh(_micro_batches(dataset), mesh, batch_axes=batch_axes)
    # The next step runs while the host reads the last one's.
    outputs = ahead((steps(state, batch) for batch in batches), 1)
    with progress_bar(progress) as bar:
        tracked = bar.track(epoch, description="Predicting")
        for indices, output in zip(tracked, outputs, strict=True):
            _check_output(output, indices.bucket)
            output = jax.tree.map(np.asarray, output)
            names = _with_positions(output)
            if sequences is None:
                padded = names if padded is None else padded & names
            elif not names.issuperset(sequences):
                raise ValueError(
                    f"`sequences={list(sequences)}`: the outputs of shape [B, T, ...] "
                    f"are {sorted(names)}. Choose from these."
                )
            rows = indices.rows[indices.rows != EMPTY_ROW]
            # Uncut, because a later batch may show that an output is not a sequence.
            for index, example in zip(rows, unbatch(output, sequences=()), strict=True):
                found[index] = example
    last = schedule.plan.max_seq_len
    for example, length in zip(found, schedule.lengths, strict=True):
        if example is not None:
            for name in padded or ():
                example[name] = example[name][: min(int(length), last)]
    return found


def _epoch(dataset: BatchDataset, mesh: Mesh, batch_axes: Axes) -> list[BatchIndices]:
    """The batches of the dataset, which has every example that is kept once."""
    schedule = getattr(dataset, "schedule", None)
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"`dataset` is a {type(dataset).__name__}, not what `batch_dataset` "
            "returned, which knows the rows of its examples. Give that, neither "
            "transformed nor loaded, and the mesh behind it."
        )
    start, stop = dataset.start_step, dataset.start_step + len(dataset)
    if len(dataset) != len(schedule) or (start - schedule.first_step) % len(schedule):
        raise ValueError(
            f"`dataset` has steps {start} to {stop - 1}, which are not exactly one "
            f"epoch of {len(schedule)} steps. Make another one for predictions, "
            "`batch_dataset(source, schedule, shard=local_rows(mesh))`."
        )
    if schedule.max_segments is not None:
        raise ValueError(
            "The schedule of `dataset` has packed rows: predict with one of a single "
            "example in every row."
        )
    shard = local_rows(mesh, batch_axes=batch_axes)
    for batch_size in schedule.plan.batch_sizes.tolist():
        if not np.array_equal(shard.rows(batch_size), dataset.shard.rows(batch_size)):
            raise ValueError(
                f"`dataset` has {dataset.shard}, and the devices of this process hold "
                f"{shard}. Pass `shard=local_rows(mesh)` to `batch_dataset`."
            )
    epoch = [x for step in range(start, stop) for x in schedule.micro_batches(step)]
    _check_once(schedule, epoch)
    _check_same(dataset, mesh)
    return epoch


def _check_once(schedule: Schedule, epoch: Sequence[BatchIndices]) -> None:
    """Raises a ValueError unless every example that the plan keeps is in one row."""
    expected = (schedule.plan.assign(schedule.lengths) >= 0).astype(np.int64)
    rows = np.concatenate([indices.rows for indices in epoch])
    times = np.bincount(rows[rows != EMPTY_ROW], minlength=len(expected))
    if not np.array_equal(times, expected):
        index = int(np.argmax(times != expected))
        raise ValueError(
            f"The schedule of `dataset` has example {index} in {times[index]} rows of "
            "this epoch, and one output is needed of each. Predict with a "
            "`BatchSchedule` of the same plan and lengths in its usual order, which "
            'leaves out no remainder: not with `replacement=True`, `remainder="drop"` '
            "or a `Mixture`."
        )


def _check_same(dataset: BatchDataset, mesh: Mesh) -> None:
    """Raises a ValueError if the processes of the mesh have other batches each."""
    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return
    position = json.dumps(dataset.position(dataset.start_step).to_dict())
    own = np.frombuffer(bytes.fromhex(digest(position.encode())), np.uint32)
    # Each device has its process's, and then all have those of all.
    each = jax.make_array_from_callback(
        (mesh.size, len(own)),
        NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        lambda index: own[None],
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    every = np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(each))
    if np.any(every != own):
        raise ValueError(
            "The processes have different datasets, so that their rows are not of the "
            "same batches. Give all of them the same source, plan, lengths, seed and "
            "epoch."
        )


def _micro_batches(elements: Iterable[Any]) -> Iterator[Batch]:
    """Those of steps with accumulation one after another."""
    for element in elements:
        if isinstance(element, Batch):
            yield element
        else:
            yield from element


def _check_output(output: Any, bucket: Bucket) -> None:
    if not isinstance(output, Batch):
        raise ValueError(
            f"`steps` returned a {type(output).__name__}, not a `Batch` of outputs: "
            "make them by `data_parallel_predict`."
        )
    if output.bucket != bucket:
        raise ValueError(
            f"`steps` returned outputs of bucket {output.bucket} for a batch of "
            f"{bucket}: compile them for the buckets of the dataset's own plan."
        )


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
