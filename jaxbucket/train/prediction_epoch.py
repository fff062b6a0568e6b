"""One epoch of predictions: its batches are checked, run and read back in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

# `train.MeshLoader` is imported on first use, because its module imports Grain.
from jaxbucket import train
from jaxbucket.base.batch import EMPTY_ROW, Batch, BatchIndices
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.progress import progress_bar
from jaxbucket.schedule.base import Schedule
from jaxbucket.sharding import prefetch
from jaxbucket.train.process_agreement import can_be_compared, check_same, digest


def run_epoch(
    steps: Callable[[Any, Batch], Batch],
    state: Any,
    batches: train.MeshLoader,
    epoch: Sequence[BatchIndices],
    progress: bool,
) -> Iterator[tuple[BatchIndices, Batch]]:
    """Yields the indices of each batch, and its outputs as numpy arrays.

    Args:
      steps: the predict step.
      state: the state.
      batches: the loader, which may start within the epoch.
      epoch: the indices of the batches of the loader.
      progress: whether to show a progress bar on a terminal.
    """
    # The next step runs while the host reads the outputs of the previous one.
    outputs = prefetch((steps(state, batch) for batch in _micro_batches(batches)), 1)
    with progress_bar(progress) as bar:
        tracked = bar.track(epoch, description="Predicting")
        for indices, output in zip(tracked, outputs, strict=True):
            _check_output(output, indices.bucket)
            yield indices, jax.tree.map(np.asarray, output)


def check_epoch(batches: train.MeshLoader) -> list[BatchIndices]:
    """Returns the indices of an epoch, after checking that it has each example once."""
    schedule = getattr(batches, "schedule", None)
    if not isinstance(schedule, Schedule) or not hasattr(batches, "mesh"):
        raise ValueError(
            f"`batches` is a {type(batches).__name__}. Pass a "
            "`MeshLoader(source, schedule, mesh)`, whose schedule maps rows to "
            "examples."
        )
    # First, so that the errors below are raised in all processes or in none.
    if can_be_compared(batches.mesh):
        position = batches.position(batches.start_step).to_dict()
        check_same(
            batches.mesh,
            {"batches": digest({"position": position, "steps": len(batches)})},
            "Use the same source, plan, lengths, seed and epoch in all of them.",
        )
    start, stop = batches.start_step, batches.start_step + len(batches)
    if len(batches) != len(schedule) or start % len(schedule):
        raise ValueError(
            f"`batches` has steps {start} to {stop - 1}, which are not exactly one "
            f"epoch of {len(schedule)} steps. Create a separate loader for "
            "predictions: `MeshLoader(source, schedule, mesh)`."
        )
    epoch = [x for step in range(start, stop) for x in schedule.micro_batches(step)]
    _check_once(schedule, epoch)
    return epoch


def _check_once(schedule: Schedule, epoch: Sequence[BatchIndices]) -> None:
    """Raises a ValueError unless each example that the plan keeps is in one row."""
    expected = schedule.is_kept.astype(np.int64)
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
