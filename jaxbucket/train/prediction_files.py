"""Writes the outputs for every example into files, and resumes an interrupted job.

The row of an example in a file depends on the example alone, so writing it a second
time changes nothing. The first process of the mesh writes all files.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
import uuid
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# `train.MeshLoader` is imported on first use, because its module imports Grain.
from jaxbucket import train
from jaxbucket.base.batch import EMPTY_ROW, Batch, BatchIndices
from jaxbucket.base.checks import check_seconds
from jaxbucket.base.position import DataPosition
from jaxbucket.data.example import Sequences
from jaxbucket.data.uncollate import split_examples
from jaxbucket.schedule.base import Schedule
from jaxbucket.train.prediction_arrays import (
    check_output,
    new_array,
    offsets_file,
)
from jaxbucket.train.prediction_epoch import (
    check_epoch,
    raised_in_all,
    run_epoch,
    values_of_devices,
)
from jaxbucket.train.prediction_outputs import OutputSequences, given_names
from jaxbucket.train.predictions import (
    WRITTEN,
    Manifest,
    OutputFile,
    Predictions,
)
from jaxbucket.train.state import TrainState, checked_state
from jaxbucket.train.state_checksum import checksum

_START_AGAIN = "Choose a different directory, or delete it to start again."


def write_predictions(
    directory: str | os.PathLike[str],
    steps: Callable[[Any, Batch], Batch],
    state: TrainState,
    batches: train.MeshLoader,
    *,
    sequences: Sequences = None,
    save_seconds: float = 30.0,
    progress: bool = True,
) -> Predictions:
    """Writes the outputs for all examples into files, in the order of the source.

    If the directory has predictions of the same batches, only the missing ones are
    computed; a job that was interrupted is resumed by calling it again. The function
    that predicts is not compared: if it has changed, choose a different directory. All
    processes of the mesh must call this function; the first of them writes the files.

    Example:
      >>> import tempfile, jaxbucket as jb
      >>> source = [{"x": np.arange(n, dtype=np.float32)} for n in (3, 1, 4)]
      >>> lengths = jb.measure_lengths(source, progress=False)
      >>> plan = jb.plan_buckets(lengths, max_tokens=8)
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> state = jb.create_state({"w": np.float32(2)}, mesh=mesh)
      >>> def predict_fn(model, batch):
      ...     y = model["w"] * batch.features["x"]
      ...     return {"y": y, "sum": y.sum(axis=1)}
      >>> step = jb.make_predict_step(predict_fn, mesh)
      >>> batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
      >>> folder = tempfile.mkdtemp()
      >>> outputs = write_predictions(folder, step, state, batches, sequences=["y"])
      >>> outputs.arrays["sum"].tolist(), outputs[2]["y"].tolist()
      ([6.0, 0.0, 12.0], [0.0, 2.0, 4.0, 6.0])

    Args:
      directory: a directory for the files, created if it does not exist: one `.npy`
        file per output (and one of offsets, if it is a sequence), "written.npy" and
        "predictions.json".
      steps: the step from `make_predict_step`, optionally compiled by `compile_steps`.
      state: a state that holds the model; it needs no optimizer.
      batches: the batches of exactly one epoch, in which each example appears once.
      sequences: the outputs of shape `[B, T, ...]` whose padding is removed, or the
        name of one; `[]` if there are none. If examples have several sequences, a
        mapping from each to its outputs, where each output is in one of them. Required
        if an output of the first batch has this shape, unless rows are packed.
      save_seconds: the seconds between two points from which the job can be resumed. A
        job that is killed before the first of them starts again.
      progress: whether to show a progress bar on a terminal.

    Returns:
      The predictions. All processes of the mesh must share the directory.

    Raises:
      ValueError: if `batches` is not exactly one epoch with each example once; if the
        directory has predictions of other batches, with the change, of another epoch,
        or of another state, by a checksum of its parameters and variables; if another
        job writes into it; if outputs have other names, shapes or dtypes than before,
        or it is not known whether they are padded; or if an output has a dtype that
        files cannot hold, a name that files cannot have, or the name of a file that
        this function has not written.
      RuntimeError: if another process could not write or open the files.
    """
    folder = pathlib.Path(directory)
    checked_state(state)
    check_seconds("save_seconds", save_seconds)
    epoch = check_epoch(batches)
    mesh, per_step = batches.mesh, len(epoch) // len(batches)
    files = _Files(folder, batches, state, sequences)
    first = files.first_step()
    rest = batches.resume(batches.position(first))
    remaining = epoch[(first - batches.start_step) * per_step :]
    saved = time.monotonic()
    for number, (indices, output) in enumerate(
        run_epoch(steps, state, rest, remaining, progress)
    ):
        with raised_in_all(mesh):
            files.write(indices, output)
            is_due = time.monotonic() - saved > save_seconds
            if is_due and number % per_step == per_step - 1:
                files.save(first + number // per_step + 1)
                saved = time.monotonic()
    if remaining:
        with raised_in_all(mesh):
            files.save(batches.start_step + len(batches))
    with raised_in_all(mesh):
        return Predictions(folder)


class _Files:
    """The files of a job, which the first process of the mesh writes."""

    def __init__(
        self,
        folder: pathlib.Path,
        batches: train.MeshLoader,
        state: TrainState,
        sequences: Sequences,
    ):
        self._folder = folder
        self._batches = batches
        self._schedule = batches.schedule
        self._sequences = sequences
        self._checksum = checksum((state.params, state.frozen, state.variables))
        owners = [device.process_index for device in batches.mesh.devices.flat]
        # The index of a device of the process that writes.
        self._writer = owners.index(min(owners))
        self._is_writer = jax.process_index() == min(owners)
        # The manifest that this job has read or written last.
        self._manifest: Manifest | None = None
        # Output -> its sequence, if it is one; None before the first output.
        self._axes: dict[str, tuple[str, ...]] | None = None
        # Output that is a sequence -> `[N + 1]` places of the examples in its file.
        self._offsets: dict[str, np.ndarray] = {}
        # Output -> its file.
        self._arrays: dict[str, np.memmap] = {}
        self._written: np.memmap | None = None

    def first_step(self) -> int:
        """Returns the step to continue at, the same on all processes."""
        start = step = self._batches.start_step
        with raised_in_all(self._batches.mesh):
            if self._is_writer:
                _create_folder(self._folder)
                self._manifest = Manifest.read(self._folder)
                if self._manifest is not None:
                    step = self._step_of(self._manifest)
                    # Nothing to resume: the files will be created again.
                    if step > start:
                        self._open(self._manifest)
        steps = values_of_devices(self._batches.mesh, np.array([step], np.uint32))
        return int(steps[self._writer, 0])

    def _step_of(self, manifest: Manifest) -> int:
        """Returns the step of a manifest, if it is one of the same predictions."""
        position = DataPosition.from_dict(manifest.position)
        start = self._batches.start_step
        if changes := position.changes(self._batches.position(position.step)):
            raise ValueError(
                f"{self._folder} has predictions of other batches (written -> now): "
                f"{'; '.join(changes)}. {_START_AGAIN}"
            )
        is_within = start <= position.step <= start + len(self._batches)
        if manifest.first_step != start or not is_within:
            raise ValueError(
                f"{self._folder} has predictions of another epoch, which starts at "
                f"step {manifest.first_step}, but `batches` starts at step {start}. "
                f"Pass a loader with `start_step={manifest.first_step}`, or choose a "
                "different directory."
            )
        if manifest.checksum != self._checksum:
            raise ValueError(
                f"{self._folder} has predictions of a state with other parameters or "
                f"variables. {_START_AGAIN}"
            )
        return position.step

    def write(self, indices: BatchIndices, output: Batch) -> None:
        """Writes the outputs of a batch, if this process is the one that writes."""
        if not self._is_writer:
            return
        if self._axes is None:
            self._find_sequences(output)
        assert self._axes is not None
        examples = split_examples(output, self._axes, self._schedule.max_segments)
        if not examples:
            return
        if self._written is None:
            self._create(examples[0])
        assert self._written is not None
        if examples[0].keys() != self._arrays.keys():
            raise ValueError(
                f"`steps` returned the outputs {sorted(examples[0])}, but "
                f"{self._folder} has {sorted(self._arrays)}. Return the same outputs, "
                "or choose a different directory."
            )
        present = indices.rows[indices.rows != EMPTY_ROW].tolist()
        for index, example in zip(present, examples, strict=True):
            for name, value in example.items():
                self._write_value(index, name, value)
        self._written[present] = True

    def _find_sequences(self, output: Batch) -> None:
        outputs = OutputSequences(self._sequences, self._schedule.max_segments)
        outputs.add(output)
        axes = outputs.axes()
        if several := sorted(name for name, keys in axes.items() if len(keys) > 1):
            raise ValueError(
                f"`sequences={self._sequences!r}` lists {several} for several "
                "sequences, but a file holds outputs with one padded axis. Use "
                "`predict`, which returns all outputs."
            )
        self._axes = axes
        self._offsets = {n: _offsets(self._schedule, k) for n, (k,) in axes.items()}
        if self._manifest is not None and self._written is not None:
            self._check_sequences(self._manifest, list(axes))

    def _check_sequences(self, manifest: Manifest, names: list[str]) -> None:
        """Raises a ValueError unless the same outputs are sequences as before."""
        before = sorted(n for n, x in manifest.outputs.items() if x.is_sequence)
        if before != sorted(names):
            raise ValueError(
                f"{self._folder} has outputs with `sequences={before}`. Pass the same, "
                "or choose a different directory."
            )

    def _write_value(self, index: int, name: str, value: np.ndarray) -> None:
        array = self._arrays[name]
        place, shape = index, array.shape[1:]
        if name in self._offsets:
            start, end = self._offsets[name][index : index + 2].tolist()
            place, shape = slice(start, end), (end - start, *shape)
        if (value.shape, value.dtype) != (shape, array.dtype):
            raise ValueError(
                f"`steps` returned {name!r} as {value.dtype}{list(value.shape)} for "
                f"example {index}, but {array.dtype}{list(shape)} is expected. Name "
                "outputs of shape [B, T, ...] in `sequences`; to change outputs, "
                "choose a different directory."
            )
        array[place] = value

    def save(self, step: int) -> None:
        """Records that the outputs of all steps before `step` are written."""
        if self._written is None or self._manifest is None:
            return
        for array in (*self._arrays.values(), self._written):
            array.flush()
        position = self._batches.position(step).to_dict()
        self._replace_manifest(dataclasses.replace(self._manifest, position=position))

    def _replace_manifest(self, manifest: Manifest) -> None:
        """Saves a manifest, unless another job has changed it."""
        self._check_no_other_job()
        manifest.save(self._folder)
        self._manifest = manifest

    def _check_no_other_job(self) -> None:
        saved = Manifest.read(self._folder)
        if (saved and saved.job) != (self._manifest and self._manifest.job):
            raise ValueError(
                f"Another job writes into {self._folder}. Stop it and start this one "
                "again, or choose a different directory for each job."
            )

    def _create(self, example: dict[str, np.ndarray]) -> None:
        """Creates the files for outputs like those of an example."""
        # Its files are not foreign.
        self._check_no_other_job()
        manifest = self._first_manifest(example)
        old = set() if self._manifest is None else self._manifest.files()
        new = manifest.files()
        _check_none_exists(self._folder, new - old)
        # Saved first, because it shows that the files are not foreign.
        self._replace_manifest(manifest)
        # Removed, because another job may still have the old files open.
        for file in old | new:
            (self._folder / file).unlink(missing_ok=True)
        for name, file in manifest.outputs.items():
            path = self._folder / f"{name}.npy"
            self._arrays[name] = new_array(path, np.dtype(file.dtype), file.shape)
        for name, offsets in self._offsets.items():
            np.save(self._folder / offsets_file(name), offsets)
        self._written = new_array(
            self._folder / WRITTEN, np.dtype(bool), [manifest.num_examples]
        )

    def _first_manifest(self, example: dict[str, np.ndarray]) -> Manifest:
        """Returns the manifest of files in which nothing is complete."""
        num_examples = len(self._schedule.lengths)
        outputs = {}
        for name, value in example.items():
            check_output(name, value)
            is_sequence = name in self._offsets
            shape = [num_examples, *value.shape]
            if is_sequence:
                shape = [int(self._offsets[name][-1]), *value.shape[1:]]
            outputs[name] = OutputFile(value.dtype.str, shape, is_sequence)
        start = self._batches.start_step
        position = self._batches.position(start).to_dict()
        job = uuid.uuid4().hex
        return Manifest(outputs, num_examples, start, position, self._checksum, job)

    def _open(self, manifest: Manifest) -> None:
        """Opens the files of an interrupted job."""
        if self._sequences is not None:
            self._check_sequences(manifest, given_names(self._sequences))
        # This checks the offsets, too.
        Predictions(self._folder)
        self._written = manifest.open_written(self._folder, "r+")
        for name in manifest.outputs:
            self._arrays[name] = manifest.open_output(self._folder, name, "r+")
        if manifest.position["step"] < self._batches.start_step + len(self._batches):
            job = uuid.uuid4().hex
            self._replace_manifest(dataclasses.replace(manifest, job=job))


def _offsets(schedule: Schedule, key: str) -> np.ndarray:
    """Returns `[N + 1]` places of the examples in a file of their tokens.

    Args:
      schedule: the schedule.
      key: the sequence of the tokens, if examples have several.
    """
    plan, lengths = schedule.plan, schedule.columns
    lengths = plan.truncated(lengths)
    if plan.sequences:
        lengths = lengths[:, plan.sequences.index(key)]
    kept = np.where(schedule.is_kept, lengths, 0)
    return np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])


def _create_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`directory={str(folder)!r}` cannot be created: {error}. Choose a "
            "different one."
        ) from None


def _check_none_exists(folder: pathlib.Path, files: set[str]) -> None:
    """Raises a ValueError if there is a file that this module has not written."""
    for file in sorted(files):
        if (folder / file).exists():
            raise ValueError(
                f"{folder / file} was not written by `write_predictions`. Rename the "
                "file or the output, or choose a different directory."
            )
