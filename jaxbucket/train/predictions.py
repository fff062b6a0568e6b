"""A directory of outputs for every example, and the file that describes it.

There is one `.npy` file per output, with all examples in the order of the source.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Literal, overload

import numpy as np

from jaxbucket.train.prediction_arrays import offsets_file, open_array

MANIFEST, WRITTEN = "predictions.json", "written.npy"
# Of the format of the files. The first version did not write it.
_VERSION = 2


@dataclasses.dataclass(frozen=True)
class OutputFile:
    """The array in the file of an output.

    Attributes:
      dtype: as in the header of the file.
      shape: `[N, ...]`, or `[total, ...]` for a sequence.
      is_sequence: whether there is also a file of offsets.
    """

    dtype: str
    shape: list[int]
    is_sequence: bool


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a directory has, and which outputs are complete.

    Attributes:
      outputs: the file of each output.
      num_examples: the number of examples of the source.
      first_step: the first step of the epoch that is predicted.
      position: the position up to which outputs are written, as a dict.
      checksum: that of the parameters and variables.
      job: identifies the call that writes the files.
      version: that of the format.
    """

    outputs: dict[str, OutputFile]
    num_examples: int
    first_step: int
    position: dict[str, Any]
    checksum: int
    job: str
    version: int = _VERSION

    @classmethod
    def read(cls, folder: pathlib.Path) -> Manifest | None:
        """Returns the manifest of a directory, or None if it has none.

        Raises:
          ValueError: if the file is not a manifest, or one of another version.
        """
        path = folder / MANIFEST
        if not path.exists():
            return None
        try:
            fields = dict(json.loads(path.read_text()))
            outputs, fields["position"] = (
                fields.pop("outputs"),
                dict(fields["position"]),
            )
            version = int(fields.get("version", 1))
            if version == _VERSION:
                files = {name: OutputFile(**x) for name, x in outputs.items()}
                return cls(files, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged or foreign: {error!r}. Delete the directory to "
                "start again, or choose a different one."
            ) from None
        kind = "an earlier" if version < _VERSION else "a later"
        raise ValueError(
            f"{path} was written by {kind} version of jaxbucket. Read the predictions "
            "with that version, or choose a different directory to predict again."
        )

    def save(self, folder: pathlib.Path) -> None:
        """Replaces the manifest atomically, so that a killed job leaves a valid one."""
        temporary = folder / f"{MANIFEST}.tmp"
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        temporary.replace(folder / MANIFEST)

    def files(self) -> set[str]:
        """Returns the names of the files, without that of the manifest."""
        sequences = [name for name, x in self.outputs.items() if x.is_sequence]
        arrays = {f"{name}.npy" for name in self.outputs}
        return {WRITTEN, *arrays, *map(offsets_file, sequences)}

    def open_output(
        self, folder: pathlib.Path, name: str, mode: Literal["r", "r+"]
    ) -> np.memmap:
        """Returns the array in the file of an output, after checking it."""
        file = self.outputs[name]
        return open_array(folder / f"{name}.npy", mode, file.dtype, *file.shape)

    def open_written(self, folder: pathlib.Path, mode: Literal["r", "r+"]) -> np.memmap:
        """Returns `[N]` bool, whether an example has outputs, after checking it."""
        return open_array(folder / WRITTEN, mode, "|b1", self.num_examples)


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
      offsets: output that is a sequence -> `[N + 1]` int64: tokens `offsets[i]` to
        `offsets[i + 1]` are those of example i.
      written: `[N]` bool, whether an example has outputs.

    Raises:
      ValueError: if the directory has no predictions, or a file of them is damaged.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        folder = pathlib.Path(directory)
        manifest = Manifest.read(folder)
        if manifest is None:
            raise ValueError(
                f"`directory={str(directory)!r}` has no {MANIFEST}. Pass a directory "
                "that `write_predictions` has written."
            )
        self.arrays: dict[str, np.ndarray] = {
            name: manifest.open_output(folder, name, "r") for name in manifest.outputs
        }
        size = manifest.num_examples + 1
        self.offsets: dict[str, np.ndarray] = {
            name: open_array(folder / offsets_file(name), "r", "<i8", size)
            for name, output in manifest.outputs.items()
            if output.is_sequence
        }
        self.written: np.ndarray = manifest.open_written(folder, "r")

    def __len__(self) -> int:
        return len(self.written)

    @overload
    def __getitem__(self, index: int) -> dict[str, np.ndarray] | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, np.ndarray] | None]: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no example {index} among {len(self)}.")
        index = range(len(self))[index]
        if not self.written[index]:
            return None
        return {name: self._value(name, index) for name in self.arrays}

    def _value(self, name: str, index: int) -> np.ndarray:
        if name not in self.offsets:
            return self.arrays[name][index]
        start, end = self.offsets[name][index : index + 2]
        return self.arrays[name][start:end]

    def __iter__(self) -> Iterator[dict[str, np.ndarray] | None]:
        return (self[index] for index in range(len(self)))
