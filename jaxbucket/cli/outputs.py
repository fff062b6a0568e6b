"""Files that a command writes: never what it reads, and whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator
from typing import IO, Any


def check_outputs(
    inputs: list[pathlib.Path], outputs: dict[str, pathlib.Path | None]
) -> None:
    """Raises a ValueError if a file cannot be written, or would be written over.

    Nothing that is written may be what is read, or what else is written.

    Args:
      inputs: files that are read.
      outputs: files that are written, by the option that names each, if any does.
    """
    taken = {_resolved(path) for path in inputs}
    for name, path in outputs.items():
        if path is None:
            continue
        if _resolved(path) in taken:
            raise ValueError(
                f"`{name} {path}` would overwrite what this command reads or writes. "
                "Name another file."
            )
        taken.add(_resolved(path))
        _check_writable(name, path)


def _resolved(path: pathlib.Path) -> pathlib.Path:
    # `Path.resolve` raises a RuntimeError where a link leads to itself.
    return pathlib.Path(os.path.realpath(path))


def _check_writable(name: str, path: pathlib.Path) -> None:
    folder = _resolved(path).parent
    if not folder.is_dir():
        raise ValueError(
            f"`{name} {path}`: there is no folder {path.parent}. Make it, or name "
            "another file."
        )
    if path.is_dir():
        raise ValueError(f"`{name} {path}` is a folder. Name a file in it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"`{name} {path}` cannot be written. Name another file.")


@contextlib.contextmanager
def written_whole(name: str, path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Gives a file to write; it is this one once all is in it.

    Raises:
      ValueError: if it cannot be written.
    """
    path = _resolved(path)
    # A pipe or a device is no file that another could take the place of.
    whole = path.exists() and not path.is_file()
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with path.open("wb") if whole else partial.open("xb") as file:
            yield file
            file.flush()
            if not whole:
                os.fsync(file.fileno())
        if not whole:
            if path.exists():
                shutil.copymode(path, partial)
            partial.replace(path)
    except OSError as error:
        raise ValueError(
            f"`{name} {path}` cannot be written: {error.strerror or error}. Name "
            "another file, or make room."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def new_figure(name: str, path: pathlib.Path, width: float, height: float) -> Any:
    """Returns a figure of matplotlib that `save_figure` can write there.

    Raises:
      ValueError: if there is no matplotlib, or it has no such kind of picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"`{name}` needs matplotlib: pip install 'jaxbucket[plots]'."
        ) from None
    # Not by pyplot, which would keep it, and look for a screen.
    figure = Figure(figsize=(width, height), layout="constrained")
    # TeX, which pgf is written by, is seldom there.
    kinds = figure.canvas.get_supported_filetypes().keys() - {"pgf"}
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(
            f"`{name} {path}`: a picture is one of {sorted(kinds)}. Name it .png."
        )
    return figure


def save_figure(figure: Any, name: str, path: pathlib.Path) -> None:
    """Writes a picture.

    Raises:
      ValueError: if it cannot be written.
    """
    with written_whole(name, path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=120)
