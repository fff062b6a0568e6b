"""The index of a token file: what its arrays are, under a seal.

`index.json` names every array with its dtype, shape and size, a digest of all of it,
and one of a few fixed pages, and is sealed by a digest of itself. So whatever is opened
is compared with what was written, in a time that does not depend on its size.
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
    dtype, shape, _ = _read_header(path)
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
    pages = _new_digest()
    last = max(0, path.stat().st_size - _PAGE_BYTES)
    with path.open("rb") as file:
        for page in range(_PAGES):
            # Of a small file these overlap, and leave out nothing.
            file.seek(last * page // (_PAGES - 1))
            pages.update(file.read(_PAGE_BYTES))
    return pages.hexdigest()


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _seal(index: Mapping[str, Any]) -> str:
    parts = {name: index[name] for name in index if name != "seal"}
    return digest(json.dumps(parts, sort_keys=True).encode())


def fingerprint_of(index: Mapping[str, Any]) -> str:
    """Returns 32 hex digits that name all contents."""
    parts = {name: index[name] for name in ("format", "version", "sequences")}
    parts["files"] = {
        name: {"bytes": entry["bytes"], "digest": entry["digest"]}
        for name, entry in index["files"].items()
    }
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
    if index.get("seal") != _seal(index):
        raise ValueError(
            f"{folder / _INDEX} is not what was written: its seal is missing, or of "
            f"another index. {_REMEDY}"
        )
    for name in index["files"]:
        if not is_array_name(name):
            raise ValueError(
                f"{folder / _INDEX} names {name!r}, which is not a file in this "
                f"folder. {_REMEDY}"
            )
    return index


def map_array(path: pathlib.Path, entry: Mapping[str, Any]) -> np.ndarray:
    """Returns an array, mapped.

    Args:
      path: of its file.
      entry: what the index says of it.

    Raises:
      ValueError: if the file is missing, cut or changed, or is that of another feature,
        as far as its header and a few pages tell.
    """
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
        dtype, shape, begin = _read_header(path)
    except Exception as error:
        # What numpy raises of bytes that are not a header is of many kinds.
        raise ValueError(
            f"{path} is not an array of numpy: {error}. {_AGAIN}"
        ) from None
    if (dtype.str, [*shape]) != (entry["dtype"], entry["shape"]):
        raise ValueError(
            f"{path} is {dtype.str}{[*shape]}, but {entry['dtype']}{entry['shape']} "
            f"was written: it was changed, or is another array. {_AGAIN}"
        )
    if _digest_of_pages(path) != entry["pages"]:
        raise ValueError(
            f"{path} is not what was written: it was changed, or is the array of "
            f"another feature. {_AGAIN}"
        )
    # Not as a `memmap`, whose every slice costs a microsecond more.
    return np.asarray(np.memmap(path, dtype, "r", begin, shape))


def _read_header(path: pathlib.Path) -> tuple[np.dtype, tuple[int, ...], int]:
    """The dtype and the shape of an array, and where in the file it begins."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return dtype, shape, file.tell()
