"""Files and folders that appear under their name only once they are complete."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator

_SUFFIX = ".partial"


@contextlib.contextmanager
def complete(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a draft, which replaces `path` at the end of the block.

    If the block fails, the draft is deleted.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.txt"
      >>> with complete(path) as draft:
      ...     _ = draft.write_text("x")
      >>> path.read_text(), len(list(path.parent.iterdir()))
      ('x', 1)

    Args:
      path: a file; or a folder that is missing or empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = new_draft(path)
    try:
        yield draft
        publish(draft, path)
    finally:
        delete(draft)


def new_draft(path: pathlib.Path) -> pathlib.Path:
    """Returns a path beside `path` that no other call returns, in any process."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}{_SUFFIX}")


def publish(draft: pathlib.Path, path: pathlib.Path) -> None:
    """Renames a complete draft, and makes this durable."""
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def sync(path: pathlib.Path) -> None:
    """Flushes a file, or the names in a folder, to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError:
        # Not every file system can flush a folder.
        if not path.is_dir():
            raise
    finally:
        os.close(file)


def delete(path: pathlib.Path) -> None:
    """Deletes a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def drafts(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the drafts of `path` that unfinished calls have left."""
    pattern = f"{glob.escape(path.name)}.{'[0-9a-f]' * 32}{_SUFFIX}"
    return list(path.parent.glob(pattern))
