"""Files that several processes write together, in a folder that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.data.lengths.cache import ArrayFile

Files: TypeAlias = Mapping[str | None, ArrayFile]


def write_together(
    what: str,
    files: Files,
    group: ProcessGroup,
    parts_of: Callable[[ArrayFile, int], Sequence[ArrayFile]],
    write: Callable[[Files], None],
    join: Callable[[ArrayFile, Sequence[ArrayFile]], None],
) -> None:
    """Writes the files that do not exist, each process its part of them.

    Args:
      what: what is measured, as a plural.
      files: the files by name, the same in every process.
      group: all participating processes.
      parts_of: function from a file and the number of processes to the file in which
        each process stores its part.
      write: function that writes the files of a process. A single process writes whole
        files.
      join: function that writes a whole file from its parts, and deletes these.

    Raises:
      ValueError: if the files of the processes differ.
    """
    names = " ".join(f"{name} {file.path.name}" for name, file in files.items())
    replies = group.gather("comparing sources", names)
    if len(set(replies)) > 1:
        raise ValueError(
            f"The processes measure different sources: {replies}. Pass the same source "
            "in every process."
        )
    # Checked once by all processes together: a file that appears later may be visible
    # to some of them only.
    exist = "".join(str(int(file.path.exists())) for file in files.values())
    replies = zip(*group.gather(f"finding cached {what}", exist), strict=True)
    missing = {
        name: file
        for (name, file), seen in zip(files.items(), replies, strict=True)
        if "0" in seen
    }
    if not missing:
        return
    if group.count == 1:
        write(missing)
        return
    parts = {name: parts_of(file, group.count) for name, file in missing.items()}
    write({name: files[group.index] for name, files in parts.items()})
    group.gather(f"measuring {what}", "")
    if group.index == 0:
        for name, file in missing.items():
            join(file, parts[name])
    group.gather(f"joining {what}", "")
