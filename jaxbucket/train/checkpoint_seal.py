"""Seals of checkpoints, which reveal files that were deleted, truncated or changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from etils import epath

_SEAL = "seal.json"
# Orbax writes the time of publication to the first file after the checkpoint is sealed,
# and may create the second.
_STAMP = "_CHECKPOINT_METADATA"
_APPEARED = "commit_success.txt"


def write_seal(folder: epath.Path) -> None:
    """Writes the sizes and digests of all files of a checkpoint to its seal."""
    files = {name: _digest(path) for name, path in _files(folder).items()}
    (folder / _SEAL).write_text(json.dumps(files))


def find_damage(folder: epath.Path) -> str | None:
    """Returns a description of the first damaged file, or None if all are intact."""
    try:
        sealed = json.loads((folder / _SEAL).read_text())
        sealed = {name: (size, digest) for name, (size, digest) in sealed.items()}
    except FileNotFoundError:
        return f"{_SEAL} is missing"
    except (ValueError, TypeError, AttributeError, OSError):
        return f"{_SEAL} is truncated"
    present = _files(folder)
    for name in sealed.keys() - present.keys():
        return f"{name} is missing"
    for name in present.keys() - sealed.keys() - {_SEAL, _APPEARED}:
        return f"{name} was added"
    for name, (size, digest) in sealed.items():
        present_size = present[name].stat().length
        if name == _STAMP:
            if not _is_json_object(present[name]):
                return f"{name} is truncated"
        elif present_size != size:
            return f"{name} has {present_size} bytes, not {size}"
        elif _digest(present[name]) != (size, digest):
            return f"{name} was changed"
    return None


def _files(folder: epath.Path) -> dict[str, epath.Path]:
    """Returns all files below a directory by their relative path."""
    return dict(_walk(folder, ""))


def _walk(folder: epath.Path, prefix: str) -> Iterator[tuple[str, epath.Path]]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _walk(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name, path


def _digest(path: epath.Path) -> tuple[int, str]:
    """Returns the size of a file and a digest of its contents."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _blake2b)  # pyright: ignore
    return path.stat().length, digest.hexdigest()


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=16)


def _is_json_object(path: epath.Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text()), dict)
    except ValueError:
        return False
