"""Checks and atomically writes the output files of a command."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator
from typing import IO, Any


def check_outputs(
    inputs: list[pathlib.Path],
    *,
    output: pathlib.Path | None = None,
    plot: pathlib.Path | None = None,
) -> None:
    """Raises a ValueError if an output cannot be written, or conflicts with a file.

    An output must not overwrite an input or another output.

    Args:
      inputs: files that the command reads.
      output: the value of `--output`.
      plot: the value of `--plot`.
    """
    taken = {_resolved(path) for path in inputs}
    for name, path in (("--output", output), ("--plot", plot)):
        if path is None:
            continue
        if _resolved(path) in taken:
            raise ValueError(
                f"`{name} {path}` would overwrite a file that this command reads or "
                "writes. Choose a different file."
            )
        taken.add(_resolved(path))
        _check_writable(name, path)


def _resolved(path: pathlib.Path) -> pathlib.Path:
    # `Path.resolve` raises a RuntimeError on a symlink loop.
    return pathlib.Path(os.path.realpath(path))


def _check_writable(name: str, path: pathlib.Path) -> None:
    folder = _resolved(path).parent
    if not folder.is_dir():
        raise ValueError(
            f"`{name} {path}`: the folder {path.parent} does not exist. Create it, or "
            "choose a different file."
        )
    if path.is_dir():
        raise ValueError(f"`{name} {path}` is a folder. Choose a file in it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"`{name} {path}` cannot be written. Choose a different file.")


@contextlib.contextmanager
def atomic_write(name: str, path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Yields a file to write, which replaces the one at `path` once it is complete.

    Args:
      name: the option, for the error message.
      path: the file.

    Raises:
      ValueError: if the file cannot be written.
    """
    path = _resolved(path)
    # A pipe or a device cannot be replaced by a file.
    in_place = path.exists() and not path.is_file()
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with path.open("wb") if in_place else partial.open("xb") as file:
            yield file
            file.flush()
            if not in_place:
                os.fsync(file.fileno())
        if not in_place:
            if path.exists():
                shutil.copymode(path, partial)
            partial.replace(path)
    except OSError as error:
        raise ValueError(
            f"`{name} {path}` cannot be written: {error.strerror or error}. Choose "
            "a different file, or free some space."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@contextlib.contextmanager
def new_figure(
    path: pathlib.Path | None, width: float, height: float
) -> Iterator[Any | None]:
    """Yields a matplotlib figure and writes it afterwards; yields None without a path.

    Args:
      path: the file of the plot, whose suffix defines the format.
      width: the width of the figure, in inches.
      height: the height of the figure, in inches.

    Raises:
      ValueError: before anything is drawn, if matplotlib is missing or does not write
        this format; afterwards, if the plot cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "`--plot` needs matplotlib: pip install 'jaxbucket[plots]'."
        ) from None
    # pyplot would keep a reference to the figure and look for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    # pgf needs TeX, which is rarely installed.
    kinds = figure.canvas.get_supported_filetypes().keys() - {"pgf"}
    kind = path.suffix[1:].lower()
    if kind not in kinds:
        raise ValueError(
            f"`--plot {path}` has an unknown suffix. Use one of {sorted(kinds)}."
        )
    yield figure
    with atomic_write("--plot", path) as file:
        figure.savefig(file, format=kind, dpi=120)
