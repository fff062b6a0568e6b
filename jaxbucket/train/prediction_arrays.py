"""The `.npy` files of outputs: their names, and arrays that are mapped into memory."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any, Literal

import numpy as np

# Of a file name, on most systems.
_MAX_BYTES = 255
# A file in the directory, which is not hidden.
_FILE_NAME = re.compile(r"[^./\\\0][^/\\\0]*")
# Names of outputs whose files this module needs for itself.
_RESERVED = re.compile(r"written|.*\.offsets")


def offsets_file(name: str) -> str:
    """Returns the name of the file with the offsets of an output."""
    return f"{name}.offsets.npy"


def open_array(
    path: pathlib.Path, mode: Literal["r", "r+"], dtype: str, *shape: int
) -> np.memmap:
    """Returns the array in a file, mapped into memory.

    Raises:
      ValueError: if the file is missing or damaged, or has another dtype or shape.
    """
    try:
        # For reading first, because `r+` extends a file that is too short with zeros.
        array = np.lib.format.open_memmap(path, mode="r")
        if (array.dtype.str, array.shape) != (dtype, shape):
            raise ValueError(
                f"it has {array.dtype}{list(array.shape)} instead of "
                f"{np.dtype(dtype)}{list(shape)}"
            )
        return array if mode == "r" else np.lib.format.open_memmap(path, mode=mode)
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise ValueError(
            f"{path} is missing or damaged: {error}. Delete the directory to start "
            "again."
        ) from None


def check_output(name: str, value: np.ndarray) -> None:
    """Raises a ValueError if there cannot be a file for an output."""
    is_reserved = isinstance(name, str) and bool(_RESERVED.fullmatch(name))
    if is_reserved or not _is_file_name(name):
        why = "is reserved" if is_reserved else "cannot be a file name"
        raise ValueError(
            f"`steps` returned an output named {name!r}, which {why}. Outputs are "
            "written to files of their names. Rename it."
        )
    description = np.lib.format.dtype_to_descr(value.dtype)
    if np.lib.format.descr_to_dtype(description) != value.dtype:
        raise ValueError(
            f"`steps` returned {name!r} as {value.dtype}, which `.npy` files do not "
            "support. Convert it, for instance to float32."
        )


def _is_file_name(name: Any) -> bool:
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        return False
    return len(offsets_file(name).encode()) <= _MAX_BYTES


def new_array(path: pathlib.Path, dtype: np.dtype, shape: list[int]) -> np.memmap:
    """Creates a file for an array of zeros, and maps it into memory."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=tuple(shape))
    if hasattr(os, "posix_fallocate"):
        # Otherwise a full disk would kill the process when a page is written.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array
