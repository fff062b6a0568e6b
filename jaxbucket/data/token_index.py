"""The index of a token file: what its arrays are, and a seal that knows others.

`index.json` names every array with its dtype, shape and size, a digest of all of it,
and one of a few fixed pages, and is sealed by a digest of itself. So whatever is opened
is compared with what was written, in a time that does not depend on how large it is.
"""

from __future__ import annotations

import hashlib
import json
import math
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
# What an array's entry has had from the first, and what came with the seal.
_ENTRY = {"bytes": int, "digest": str}
_SEALED_ENTRY = {**_ENTRY, "dtype": str, "shape": list, "pages": str}
_REMEDY = "Name the folder that `write_token_file` wrote, or write it again."
_AGAIN = "Write the token file again."


def is_array_name(name: str) -> bool:
    """Whether a feature of this name has a file in the folder, and none elsewhere."""
    return bool(_NAME.fullmatch(name))


def write_index(folder: pathlib.Path, names: list[str], sequences: list[str]) -> None:
    """Writes the index of the arrays in a folder.

    Args:
      folder: where they are.
      names: of the features.
      sequences: those with a position for each token.
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
    """Returns where the array of a feature is."""
    return folder / f"{name}.npy"


def _entry(path: pathlib.Path) -> dict[str, Any]:
    """What the index says of an array."""
    dtype, shape, _ = _header(path)
    return {
        "bytes": path.stat().st_size,
        "digest": digest_of(path),
        "dtype": dtype.str,
        "shape": list(shape),
        "pages": _digest_of_pages(path),
    }


def digest_of(path: pathlib.Path) -> str:
    """Returns 32 hex digits of all that is in a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _new_digest).hexdigest()


def _digest_of_pages(path: pathlib.Path) -> str:
    """32 hex digits of some pages of a file, its first and its last among them."""
    found = _new_digest()
    last = max(0, path.stat().st_size - _PAGE_BYTES)
    with path.open("rb") as file:
        for page in range(_PAGES):
            # Of a small file these overlap, and leave out nothing.
            file.seek(last * page // (_PAGES - 1))
            found.update(file.read(_PAGE_BYTES))
    return found.hexdigest()


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _seal(index: Mapping[str, Any]) -> str:
    parts = {name: index[name] for name in index if name != "seal"}
    return digest(json.dumps(parts, sort_keys=True).encode())


def fingerprint_of(index: Mapping[str, Any]) -> str:
    """Returns 32 hex digits that name all contents, with a seal or without."""
    named = ("format", "version", "sequences")
    files = {
        name: {key: entry[key] for key in _ENTRY}
        for name, entry in index["files"].items()
    }
    parts = {**{name: index[name] for name in named}, "files": files}
    return digest(json.dumps(parts, sort_keys=True).encode())


def read_index(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the index of a folder.

    Raises:
      ValueError: if there is none, or it is of another version, cut or changed.
    """
    try:
        index = json.loads((folder / _INDEX).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder} is not a token file: {error}. {_REMEDY}") from None
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise ValueError(f'{folder}: its index has no "format": "{_FORMAT}". {_REMEDY}')
    if index.get("version") != _VERSION:
        raise ValueError(
            f"{folder} has version {index.get('version')!r}; this jaxbucket reads "
            f"version {_VERSION}. {_REMEDY}"
        )
    fault = _fault_of(index)
    if fault:
        raise ValueError(f"{folder / _INDEX} {fault}. {_REMEDY}")
    return index


def _fault_of(index: dict[str, Any]) -> str | None:
    """What is wrong with an index, in words."""
    for name, kind in (("files", dict), ("sequences", list)):
        if not isinstance(index.get(name), kind):
            return f"lacks {name!r}"
    files, sequences = index["files"], index["sequences"]
    is_sealed = "seal" in index
    if is_sealed and index["seal"] != _seal(index):
        return "is not what was written: its seal is of another index"
    for name, entry in files.items():
        if not is_array_name(name):
            return f"names {name!r}, which is not a file in this folder"
        if not isinstance(entry, dict):
            return f"lacks what {name!r} is"
        if not is_sealed and entry.keys() & _SEALED_ENTRY.keys() > _ENTRY.keys():
            return "is not what was written: its seal is missing"
        for key, kind in (_SEALED_ENTRY if is_sealed else _ENTRY).items():
            if not isinstance(entry.get(key), kind):
                return f"lacks {key!r} of {name!r}"
    if not all(isinstance(name, str) for name in sequences) or not sequences:
        return "lacks the names of sequences"
    missing = [name for name in (OFFSETS, *sequences) if name not in files]
    if missing or OFFSETS in sequences or len(set(sequences)) < len(sequences):
        return f"lacks {OFFSETS!r} or a sequence: it has {sorted(files)}"
    return None


def map_arrays(folder: pathlib.Path, index: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns every array of the index, mapped, by its name.

    Raises:
      ValueError: if one is missing, cut or changed, or is that of another feature, as
        far as its header and a few pages tell; or if they do not go together.
    """
    arrays = {
        name: _map(array_path(folder, name), entry)
        for name, entry in index["files"].items()
    }
    offsets = arrays[OFFSETS]
    path = array_path(folder, OFFSETS)
    if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(
            f"{path} is {offsets.dtype}{list(offsets.shape)}, not int64 of one axis. "
            f"{_AGAIN}"
        )
    if offsets[0] != 0:
        raise ValueError(f"{path} begins with {offsets[0]}, not with 0. {_AGAIN}")
    for name, values in arrays.items():
        if name == OFFSETS:
            continue
        counted = "tokens" if name in index["sequences"] else "examples"
        expected = offsets[-1] if counted == "tokens" else len(offsets) - 1
        if values.shape[:1] != (expected,):
            raise ValueError(
                f"{array_path(folder, name)} has shape {list(values.shape)}, but "
                f"{path} counts {expected} {counted}. {_AGAIN}"
            )
    return arrays


def _map(path: pathlib.Path, entry: dict[str, Any]) -> np.ndarray:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path} is missing: {error}. Write it again.") from None
    if size != entry["bytes"]:
        raise ValueError(
            f"{path} has {size} bytes, but {entry['bytes']} were written: it was cut "
            f"or changed. {_AGAIN}"
        )
    try:
        dtype, shape, begin = _header(path)
    except Exception as error:
        # What numpy raises of bytes that are not a header is of many kinds.
        raise ValueError(
            f"{path} is not an array of numpy: {error}. {_AGAIN}"
        ) from None
    if size != begin + math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, but its header is that of "
            f"{dtype}{list(shape)}. {_AGAIN}"
        )
    # Files from before there was a seal have these in their headers alone.
    written = (entry.get("dtype", dtype.str), entry.get("shape", [*shape]))
    if (dtype.str, [*shape]) != written:
        raise ValueError(
            f"{path} is {dtype.str}{[*shape]}, but {written[0]}{written[1]} was "
            f"written: it was changed, or is another array. {_AGAIN}"
        )
    if "pages" in entry and _digest_of_pages(path) != entry["pages"]:
        raise ValueError(
            f"{path} is not what was written: it was changed, or is the array of "
            f"another feature. {_AGAIN}"
        )
    # Not as a `memmap`, whose every slice costs a microsecond more.
    return np.asarray(np.memmap(path, dtype, "r", begin, shape))


def _header(path: pathlib.Path) -> tuple[np.dtype, tuple[int, ...], int]:
    """The dtype and the shape of an array, and where in the file it begins.

    Raises:
      ValueError: if it is of another kind than those that are written.
      Exception: whatever numpy raises, if it is not an array.
    """
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"its header has version {version}, not (1, 0)")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        begin = file.tell()
    if dtype.kind not in "biufc":
        raise ValueError(f"its dtype is {dtype}, which is not one of numbers")
    if fortran_order or min(shape, default=0) < 0:
        raise ValueError(f"its order or its shape, {shape}, is another")
    return dtype, shape, begin
