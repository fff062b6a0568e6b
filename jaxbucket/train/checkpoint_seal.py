"""Seals of checkpoints, which reveal files that were deleted, truncated or changed."""

from __future__ import annotations

import json
from typing import Any

from etils import epath

from jaxbucket.base.digest import stream_digest

_SEAL = "seal.json"
# Orbax writes the time of publication to the first file after the checkpoint is sealed,
# and may create the second.
_UNSEALED = {"_CHECKPOINT_METADATA", "commit_success.txt", _SEAL}


def write_seal(folder: epath.Path) -> None:
    """Writes the digests of all files of a checkpoint to its seal."""
    (folder / _SEAL).write_text(json.dumps(_digests(folder)))


def find_damage(folder: epath.Path) -> str | None:
    """Returns a description of the first damaged file, or None if all are intact."""
    try:
        sealed: dict[str, Any] = dict(json.loads((folder / _SEAL).read_text()))
    except (OSError, ValueError, TypeError):
        return f"{_SEAL} is missing or truncated"
    present = _digests(folder)
    for name in sorted(sealed.keys() | present.keys()):
        if name not in present:
            return f"{name} is missing"
        if sealed.get(name) != present[name]:
            return f"{name} was changed"
    return None


def _digests(folder: epath.Path) -> dict[str, str]:
    """Returns the digest of each file below a directory by its relative path."""
    digests = {}
    for parent, _, names in folder.walk():
        for name in {*names} - _UNSEALED:
            with (parent / name).open("rb") as file:
                path = str((parent / name).relative_to(folder))
                digests[path] = stream_digest(file)
    return digests
