"""The index of a token file, which describes its arrays and detects changes.

`index.json` lists every array with its dtype, shape and size, a digest of the whole
file and a digest of a few fixed pages. The index also contains a digest of itself, its
seal. Opening a token file checks everything but the whole-file digests, in constant
time.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxbucket.base.digest import digest

OFFSETS = "offsets"

_FORMAT = "jaxbucket.TokenFile"
_VERSION = 1
_INDEX = "index.json"
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")
_PAGE_BYTES, _PAGES = 4096, 16
_REMEDY = "Pass a folder written by `write_token_file`, or write it again."
_REWRITE = "Write the token file again."


def is_array_name(name: str) -> bool:
    """Returns whether a feature name is valid as a file name inside the folder."""
    return bool(_NAME.fullmatch(name))


def write_index(folder: pathlib.Path, names: list[str], sequences: list[str]) -> None:
    """Writes the index of the arrays in a folder.

    Args:
      folder: the folder of the token file.
      names: names of all features.
      sequences: names of the features with one entry per token.
    """
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "sequences": sequences,
        "files": {name: _entry(array_path(folder, name)) for name in (*names, OFFSETS)},
    }
    index["seal"] = _seal(index)
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def array_path(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of the array of a feature."""
    return folder / f"{name}.npy"


def _entry(path: pathlib.Path) -> dict[str, Any]:
    """Returns the index entry of an array."""
    dtype, shape, _ = _read_header(path)
    return {
        "bytes": path.stat().st_size,
        "digest": file_digest(path),
        "dtype": dtype.str,
        "shape": list(shape),
        "pages": _pages_digest(path),
    }


def file_digest(path: pathlib.Path) -> str:
    """Returns the digest of a whole file, 32 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _new_hasher).hexdigest()


def _pages_digest(path: pathlib.Path) -> str:
    """Returns the digest of 16 evenly spaced pages, including the first and last."""
    hasher = _new_hasher()
    last = max(0, path.stat().st_size - _PAGE_BYTES)
    with path.open("rb") as file:
        for page in range(_PAGES):
            # In a small file the pages overlap and cover all of it.
            file.seek(last * page // (_PAGES - 1))
            hasher.update(file.read(_PAGE_BYTES))
    return hasher.hexdigest()


def _new_hasher() -> Any:
    return hashlib.blake2b(digest_size=16)


def _seal(index: Mapping[str, Any]) -> str:
    parts = {name: index[name] for name in index if name != "seal"}
    return digest(json.dumps(parts, sort_keys=True).encode())


def index_fingerprint(index: Mapping[str, Any]) -> str:
    """Returns 32 hex digits that identify the contents."""
    parts = {name: index[name] for name in ("format", "version", "sequences")}
    parts["files"] = {
        name: {"bytes": entry["bytes"], "digest": entry["digest"]}
        for name, entry in index["files"].items()
    }
    return digest(json.dumps(parts, sort_keys=True).encode())


def read_index(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the index of a folder.

    Raises:
      ValueError: if it is missing, truncated or changed, or has a different version.
    """
    try:
        index = json.loads((folder / _INDEX).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder} is not a token file: {error}. {_REMEDY}") from None
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise ValueError(
            f'The index of {folder} has no "format": "{_FORMAT}". {_REMEDY}'
        )
    if index.get("version") != _VERSION:
        raise ValueError(
            f"{folder} has version {index.get('version')!r}; this jaxbucket reads "
            f"version {_VERSION}. {_REMEDY}"
        )
    if index.get("seal") != _seal(index):
        raise ValueError(
            f"{folder / _INDEX} has changed since it was written: its seal is missing "
            f"or wrong. {_REMEDY}"
        )
    for name in index["files"]:
        if not is_array_name(name):
            raise ValueError(
                f"{folder / _INDEX} names {name!r}, which is not a valid name for a "
                f"file in this folder. {_REMEDY}"
            )
    return index


def map_array(path: pathlib.Path, entry: Mapping[str, Any]) -> np.ndarray:
    """Returns a memory-mapped array.

    Args:
      path: path of the `.npy` file.
      entry: its entry in the index.

    Raises:
      ValueError: if the file is missing, truncated or changed, or belongs to a
        different feature. Only its header and a few pages are checked.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path} is missing: {error}. {_REWRITE}") from None
    if size != entry["bytes"]:
        raise ValueError(
            f"{path} has {size} bytes, but {entry['bytes']} were written, so it was "
            f"truncated or changed. {_REWRITE}"
        )
    try:
        dtype, shape, start = _read_header(path)
    except Exception as error:
        # numpy raises many kinds of exceptions for a damaged header.
        raise ValueError(
            f"{path} is not a numpy array file: {error}. {_REWRITE}"
        ) from None
    if (dtype.str, [*shape]) != (entry["dtype"], entry["shape"]):
        raise ValueError(
            f"{path} is {dtype.str}{[*shape]}, but {entry['dtype']}{entry['shape']} "
            f"was written, so it was changed or replaced. {_REWRITE}"
        )
    if _pages_digest(path) != entry["pages"]:
        raise ValueError(
            f"{path} has changed since it was written, or is the array of a different "
            f"feature. {_REWRITE}"
        )
    # A plain view, because slicing a `memmap` takes a microsecond longer.
    return np.asarray(np.memmap(path, dtype, "r", start, shape))


def _read_header(path: pathlib.Path) -> tuple[np.dtype, tuple[int, ...], int]:
    """Returns the dtype and shape of an array, and the file offset of its data."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return dtype, shape, file.tell()
