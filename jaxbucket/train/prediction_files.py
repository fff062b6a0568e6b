"""Outputs for every example in files, which an interrupted job resumes.

There is one `.npy` file per output, with all examples in the order of the source. Each
row has the place of its example, so writing it a second time changes nothing. The first
process of the mesh writes all files.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

# `train.MeshLoader` is imported on first use, because its module imports Grain.
from jaxbucket import train
from jaxbucket.base.batch import EMPTY_ROW, Batch, BatchIndices
from jaxbucket.base.position import DataPosition
from jaxbucket.data.example import listed_names
from jaxbucket.data.uncollate import unbatch
from jaxbucket.train.prediction_epoch import (
    check_epoch,
    raised_in_all,
    run_epoch,
    values_of_devices,
)
from jaxbucket.train.state import TrainState, checked_state
from jaxbucket.train.state_checksum import checksum

_MANIFEST, _WRITTEN, _OFFSETS = "predictions.json", "written.npy", "offsets.npy"
# A file in the directory, which is not hidden.
_FILE_NAME = re.compile(r"[^./\\\0][^/\\\0]*")


class Predictions:
    """The outputs in a directory that `write_predictions` has written.

    It is a sequence with an entry for each example of the source: a dict of arrays, or
    None if the example has no outputs (yet). Files are mapped into memory, so only what
    is accessed is read.

    Args:
      directory: the directory.

    Attributes:
      arrays: output -> `[N, ...]` for the N examples of the source; for sequences
        `[total, ...]`, the tokens of all examples one after another.
      offsets: `[N + 1]` int64: tokens `offsets[i]` to `offsets[i + 1]` of a sequence
        are those of example i.
      written: `[N]` bool, whether an example has outputs.

    Raises:
      ValueError: if the directory has no predictions.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        folder = pathlib.Path(directory)
        manifest = _read_manifest(folder)
        if manifest is None:
            raise ValueError(
                f"`directory={str(directory)!r}` has no {_MANIFEST}. Pass a directory "
                "that `write_predictions` has written."
            )
        self._sequences = {x for x, y in manifest["outputs"].items() if y["sequence"]}
        self.arrays: dict[str, np.ndarray] = {
            name: _open_array(folder / f"{name}.npy", "r")
            for name in manifest["outputs"]
        }
        self.offsets: np.ndarray = _open_array(folder / _OFFSETS, "r")
        self.written: np.ndarray = _open_array(folder / _WRITTEN, "r")

    def __len__(self) -> int:
        return len(self.written)

    def __getitem__(self, index: int) -> dict[str, np.ndarray] | None:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no example {index} among {len(self)}.")
        index = range(len(self))[index]
        if not self.written[index]:
            return None
        start, end = self.offsets[index : index + 2]
        return {
            name: x[start:end] if name in self._sequences else x[index]
            for name, x in self.arrays.items()
        }

    def __iter__(self) -> Iterator[dict[str, np.ndarray] | None]:
        return (self[index] for index in range(len(self)))


def write_predictions(
    directory: str | os.PathLike[str],
    steps: Callable[[Any, Batch], Batch],
    state: TrainState,
    batches: train.MeshLoader,
    *,
    sequences: str | Sequence[str] = (),
    save_seconds: float = 30.0,
    progress: bool = True,
) -> Predictions:
    """Writes the outputs for all examples into files, in the order of the source.

    If the directory has predictions of the same batches, only the missing ones are
    computed; a job that was interrupted is resumed by calling it again. All processes
    of the mesh must call this function; the first of them writes the files.

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
        file per output, "offsets.npy", "written.npy" and "predictions.json".
      steps: the step from `make_predict_step`, optionally compiled by `compile_steps`.
      state: a state that holds the model; it needs no optimizer.
      batches: the batches of exactly one epoch, in which each example appears once.
      sequences: the outputs of shape `[B, T, ...]` whose padding is removed, or the
        name of one.
      save_seconds: the time between two points from which the job can be resumed.
      progress: whether to show a progress bar on a terminal.

    Returns:
      The predictions. All processes of the mesh must share the directory.

    Raises:
      ValueError: if `batches` is not exactly one epoch with each example once; if the
        directory has predictions of other batches, with the change, or of another
        state, by a checksum of its parameters and variables; if outputs have
        other names, shapes or dtypes than before; or if an output has a dtype that
        files cannot hold, a name that files cannot have, or the name of a file that
        this function has not written.
      RuntimeError: if another process could not write or open the files.
    """
    folder = pathlib.Path(directory)
    checked_state(state)
    epoch = check_epoch(batches)
    mesh, per_step = batches.mesh, len(epoch) // len(batches)
    files = _Files(folder, batches, state, listed_names(sequences))
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
        sequences: list[str],
    ):
        schedule = batches.schedule
        if sequences and schedule.plan.sequences:
            raise ValueError(
                f"`sequences={sequences}` is not supported for examples with "
                "several lengths. Return outputs without a T axis."
            )
        kept = schedule.plan.assign(schedule.lengths) >= 0
        lengths = np.minimum(schedule.lengths, schedule.plan.max_seq_len)
        self._offsets = np.concatenate([[0], np.cumsum(np.where(kept, lengths, 0))])
        self._folder = folder
        self._batches = batches
        self._sequences = sequences
        self._checksum = checksum((state.params, state.frozen, state.variables))
        owners = [device.process_index for device in batches.mesh.devices.flat]
        # The index of a device of the process that writes.
        self._writer = owners.index(min(owners))
        self._is_writer = jax.process_index() == min(owners)
        # Output -> its file.
        self._arrays: dict[str, np.memmap] = {}
        self._written: np.memmap | None = None

    def first_step(self) -> int:
        """Returns the step to continue at, the same on all processes."""
        step = self._batches.start_step
        with raised_in_all(self._batches.mesh):
            if self._is_writer:
                _create_folder(self._folder)
                if (manifest := _read_manifest(self._folder)) is not None:
                    if manifest["checksum"] != self._checksum:
                        raise ValueError(
                            f"{self._folder} has predictions of a state with other "
                            "parameters or variables. Choose a different directory, "
                            "or delete it to start again."
                        )
                    position = DataPosition.from_dict(manifest["position"])
                    step = self._batches.resume(position).start_step
                    self._open(manifest["outputs"])
        steps = values_of_devices(self._batches.mesh, np.array([step], np.uint32))
        return int(steps[self._writer, 0])

    def write(self, indices: BatchIndices, output: Batch) -> None:
        """Writes the outputs of a batch, if this process is the one that writes."""
        if not self._is_writer:
            return
        examples = unbatch(
            output,
            sequences=self._sequences,
            max_segments=self._batches.schedule.max_segments,
        )
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
            start, end = self._offsets[index : index + 2]
            for name, array in self._arrays.items():
                value = example[name]
                is_sequence = name in self._sequences
                shape = (end - start, *array.shape[1:])[0 if is_sequence else 1 :]
                if (value.shape, value.dtype) != (shape, array.dtype):
                    raise ValueError(
                        f"`steps` returned {name!r} as {value.dtype}"
                        f"{list(value.shape)} for example {index}, but "
                        f"{array.dtype}{list(shape)} is expected. Name outputs of "
                        "shape [B, T, ...] in `sequences`; to change outputs, choose "
                        "a different directory."
                    )
                if is_sequence:
                    array[start:end] = value
                else:
                    array[index] = value
        self._written[present] = True

    def save(self, step: int) -> None:
        """Records that the outputs of all steps before `step` are written."""
        if self._written is None:
            return
        for array in (*self._arrays.values(), self._written):
            array.flush()
        outputs = {
            name: {
                "dtype": array.dtype.str,
                "shape": list(array.shape[1:]),
                "sequence": name in self._sequences,
            }
            for name, array in self._arrays.items()
        }
        manifest = {
            "outputs": outputs,
            "position": self._batches.position(step).to_dict(),
            "checksum": self._checksum,
        }
        text = json.dumps(manifest, indent=2)
        # Replaced atomically, so that a killed job leaves a valid file.
        temporary = self._folder / f"{_MANIFEST}.tmp"
        temporary.write_text(text + "\n")
        temporary.replace(self._folder / _MANIFEST)

    def _create(self, example: dict[str, np.ndarray]) -> None:
        self._check_new(example)
        num_examples, total = len(self._offsets) - 1, int(self._offsets[-1])
        # The first file, because it shows that the others are not foreign.
        self._written = _new_array(
            self._folder / _WRITTEN, np.dtype(bool), num_examples
        )
        np.save(self._folder / _OFFSETS, self._offsets)
        for name, value in example.items():
            shape = (num_examples, *value.shape)
            if name in self._sequences:
                shape = (total, *value.shape[1:])
            self._arrays[name] = _new_array(
                self._folder / f"{name}.npy", value.dtype, *shape
            )

    def _check_new(self, example: dict[str, np.ndarray]) -> None:
        """Raises a ValueError unless files can be created for these outputs."""
        for name, value in example.items():
            is_reserved = f"{name}.npy" in (_WRITTEN, _OFFSETS)
            if is_reserved or not _is_file_name(name):
                why = "is reserved" if is_reserved else "cannot be a file name"
                raise ValueError(
                    f"`steps` returned an output named {name!r}, which {why}. Outputs "
                    "are written to files of their names. Rename it."
                )
            if not _can_be_saved(value.dtype):
                raise ValueError(
                    f"`steps` returned {name!r} as {value.dtype}, which `.npy` files "
                    "do not support. Convert it, for instance to float32."
                )
            path = self._folder / f"{name}.npy"
            if path.exists() and not (self._folder / _WRITTEN).exists():
                raise ValueError(
                    f"{path} was not written by `write_predictions`. Rename the output "
                    f"{name!r}, or choose a different directory."
                )

    def _open(self, outputs: dict[str, Any]) -> None:
        """Opens the files of an interrupted job."""
        sequences = sorted(x for x, y in outputs.items() if y["sequence"])
        if sequences != sorted(self._sequences):
            raise ValueError(
                f"{self._folder} has outputs with `sequences={sequences}`. Pass the "
                "same, or choose a different directory."
            )
        self._written = _open_array(self._folder / _WRITTEN, "r+")
        for name in outputs:
            self._arrays[name] = _open_array(self._folder / f"{name}.npy", "r+")


def _create_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`directory={str(folder)!r}` cannot be created: {error}. Choose a "
            "different one."
        ) from None


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and bool(_FILE_NAME.fullmatch(name))


def _new_array(path: pathlib.Path, dtype: np.dtype, *shape: int) -> np.memmap:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # Otherwise a full disk would kill the process when a page is written.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _open_array(path: pathlib.Path, mode: Literal["r", "r+"]) -> np.memmap:
    try:
        return np.lib.format.open_memmap(path, mode=mode)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is missing or damaged: {error}. Delete the directory to start "
            "again."
        ) from None


def _can_be_saved(dtype: np.dtype) -> bool:
    description = np.lib.format.dtype_to_descr(dtype)
    return np.lib.format.descr_to_dtype(description) == dtype


def _read_manifest(folder: pathlib.Path) -> dict[str, Any] | None:
    path = folder / _MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        return {
            "outputs": dict(manifest["outputs"]),
            "position": dict(manifest["position"]),
            "checksum": int(manifest["checksum"]),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged or foreign: {error!r}. Delete the directory to start "
            "again, or choose a different one."
        ) from None
