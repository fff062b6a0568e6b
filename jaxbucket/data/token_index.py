"""The index of a token file, which names its arrays and detects changes.

`index.json` has two digests of every array: of the whole file, and of a few fixed
pages, which are compared whenever the token file is opened.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxbucket.base.digest import digest, file_digest

OFFSETS = "offsets"

_FORMAT = {"format": "jaxbucket.TokenFile", "version": 2}
_INDEX = "index.json"
_PAGE_BYTES, _PAGES = 4096, 16


def write_index(folder: pathlib.Path, names: list[str], sequences: list[str]) -> None:
    """Writes the index of the arrays in a folder.

    Args:
      folder: the folder of the token file.
      names: names of all features.
      sequences: names of the features with one entry per token.
    """
    paths = {name: array_path(folder, name) for name in (*names, OFFSETS)}
    files = {
        name: {"all": file_digest(path), "pages": _pages_digest(path)}
        for name, path in paths.items()
    }
    index = {**_FORMAT, "sequences": sequences, "files": files}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def array_path(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of the array of a feature."""
    return folder / f"{name}.npy"


def _pages_digest(path: pathlib.Path) -> str:
    """Returns the digest of the size and of 16 evenly spaced pages of a file."""
    size = path.stat().st_size
    last = max(0, size - _PAGE_BYTES)
    pages = []
    with path.open("rb") as file:
        for page in range(_PAGES):
            # In a small file the pages overlap and cover all of it.
            file.seek(last * page // (_PAGES - 1))
            pages.append(file.read(_PAGE_BYTES))
    return digest(str(size).encode(), *pages)


def index_fingerprint(index: Mapping[str, Any]) -> str:
    """Returns 32 hex digits that identify the contents."""
    files = {name: digests["all"] for name, digests in index["files"].items()}
    return digest(json.dumps([index["sequences"], files], sort_keys=True).encode())


def read_index(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the index of a folder.

    Raises:
      ValueError: if it is missing or damaged, or has a different version.
    """
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        if {name: index.get(name) for name in _FORMAT} != _FORMAT:
            raise ValueError(f"its index does not have {_FORMAT}")
        names = [*index["sequences"], OFFSETS]
        if len(names) < 2 or any(name not in index["files"] for name in names):
            raise ValueError("its index does not name its arrays")
        index_fingerprint(index)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} is not a token file: {error}. Pass a folder written by "
            "`write_token_file`, or write it again."
        ) from None
    return index


def map_array(path: pathlib.Path, digests: Mapping[str, str]) -> np.ndarray:
    """Returns a memory-mapped array.

    Args:
      path: path of the `.npy` file.
      digests: its digests in the index.

    Raises:
      ValueError: if the file is missing, truncated or changed, or belongs to a
        different feature. Only a few pages are checked.
    """
    if not path.exists() or _pages_digest(path) != digests["pages"]:
        raise ValueError(
            f"{path} is missing, was truncated or changed, or is the array of a "
            "different feature. Write the token file again."
        )
    # A plain view, because slicing a `memmap` takes a microsecond longer.
    return np.asarray(np.load(path, mmap_mode="r"))
