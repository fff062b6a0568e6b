"""Output of the commands: tables, JSON, plots, and files that are written whole."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Any

import click

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.files import complete
from jaxbucket.base.table import Record
from jaxbucket.plan.reports.epoch import Report

# Where the context of a command has the files that it reads.
_INPUTS = "jaxbucket.inputs"
# Lines of text are not longer than this, even if the terminal is wider.
_PAGE = 100


def show(
    form: str | None, numbers: dict[str, Any], *tables: Any, sentence: str = ""
) -> None:
    """Prints numbers as JSON, or as tables.

    Text fits the terminal. A table is never made narrower than its numbers.

    Args:
      form: "json", or "quiet" for tables without explanations of their columns.
      numbers: the values to print as JSON.
      tables: the `rich` tables to print otherwise, or objects with `__rich__`.
      sentence: text below the tables.
    """
    if form == "json":
        click.echo(json.dumps(numbers, indent=2))
        return
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    wide, width = Console(width=1000), min(Console().width, _PAGE)
    blocks: list[Any] = []
    legends: dict[str, None] = {}
    for table in tables:
        found = table.__rich__() if isinstance(table, Record) else table
        for part in getattr(found, "renderables", [found]):
            # A blank line between two tables.
            if isinstance(part, str):
                continue
            caption, part.caption = str(part.caption or ""), None
            # `print` shows them below each table, and a command once, at the end.
            for legend in getattr(table, "legends", ()):
                if legend in caption:
                    legends[legend], caption = None, caption.replace(legend, "")
            blocks += [part, caption.strip()]
    blocks += [*(legends if form != "quiet" else ()), sentence]
    for number, block in enumerate(filter(None, blocks)):
        if number:
            click.echo()
        text, needed = block, 0
        if isinstance(block, str):
            text = Text(block)
        else:
            needed = Measurement.get(wide, wide.options, block).maximum
        Console(highlight=False, width=max(width, needed)).print(text)


def as_dict(plan: BucketPlan, epoch: Report) -> dict[str, Any]:
    """Returns every number of a plan and its epoch."""
    return {
        "plan": json.loads(plan.to_json()),
        "report": epoch.to_dict(),
        "fingerprint": plan.fingerprint,
    }


def draw_plan(figure: Any, plan: BucketPlan, lengths: Any, epoch: Report) -> None:
    """Draws the padding of every example, or the shapes of several sequences.

    The lengths are `[N]` integers, one per row; or sequence name -> `[N]` integers.
    """
    from jaxbucket.plan.reports.plots import plot_plan, plot_shapes

    draw: Any = plot_shapes if plan.sequences else plot_plan
    draw(plan, lengths, figure.subplots(), epoch=epoch)


def note_input(path: Any) -> None:
    """Notes that the command reads this file, for `check_outputs`."""
    taken = click.get_current_context().meta.setdefault(_INPUTS, set())
    taken.add(os.path.realpath(path))


def check_outputs(**outputs: pathlib.Path | None) -> None:
    """Raises a ValueError if an output cannot be written, or conflicts with a file.

    An output must not overwrite an input or another output. This is checked before a
    command does anything, which may take hours.

    Args:
      outputs: the values of the options that name files to write.
    """
    taken = set(click.get_current_context().meta.get(_INPUTS, ()))
    for name, path in outputs.items():
        if path is None:
            continue
        real = os.path.realpath(path)
        written = real if os.path.exists(real) else os.path.dirname(real)
        if real in taken or not os.access(written, os.W_OK):
            raise ValueError(
                f"`{name}={path}` cannot be written, or would overwrite a file that "
                "this command reads or writes. Choose another file, in a folder that "
                "exists."
            )
        taken.add(real)


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Yields a file to write, which replaces the one at `path` once it is complete."""
    path = pathlib.Path(os.path.realpath(path))
    # A pipe or a device cannot be replaced by a file.
    in_place = path.exists() and not path.is_file()
    with contextlib.nullcontext(path) if in_place else complete(path) as draft:
        with draft.open("wb") as file:
            yield file


@contextlib.contextmanager
def new_figure(
    path: pathlib.Path | None, width: float, height: float
) -> Iterator[Any | None]:
    """Yields a figure of this size in inches, and writes it; None without a path."""
    if path is None:
        yield None
        return
    from matplotlib.figure import Figure

    # pyplot would keep a reference to the figure and look for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    # pgf needs TeX, which is rarely installed.
    kinds = figure.canvas.get_supported_filetypes().keys() - {"pgf"}
    kind = path.suffix[1:].lower()
    if kind not in kinds:
        raise ValueError(
            f"`plot={path}` has an unknown suffix. Use one of {sorted(kinds)}."
        )
    yield figure
    with atomic_write(path) as file:
        figure.savefig(file, format=kind, dpi=120)
