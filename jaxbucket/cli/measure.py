"""The command `jaxbucket measure`: the lengths of the examples of a source."""

from __future__ import annotations

import pathlib

import click
import numpy as np

from jaxbucket.cli.options import json_option
from jaxbucket.cli.outputs import atomic_write, check_outputs, new_figure
from jaxbucket.cli.show import show
from jaxbucket.data.lengths.files import read_lengths
from jaxbucket.data.lengths.summary import summarize_lengths
from jaxbucket.data.lengths.values import UNITS, Measure, Unit

_FILE = click.Path(path_type=pathlib.Path)


@click.command()
@click.argument("source")
@click.option(
    "--column", help="The array, column or field to measure if there are several."
)
@click.option(
    "--unit", type=click.Choice(UNITS), help="The unit in which text is measured."
)
@click.option(
    "--length-fn",
    metavar="MODULE:FUNCTION",
    help="A function that returns the length of an example: a row, line or record.",
)
@click.option("--output", "-o", type=_FILE, help="Write the lengths to this .npy file.")
@click.option(
    "--num-workers",
    type=click.IntRange(min=0),
    default=0,
    help="Number of worker processes for a source from module:function.",
)
@click.option("--plot", type=_FILE, help="Draw a histogram to this file.")
@json_option
def measure(
    source: str,
    column: str | None,
    unit: Unit | None,
    length_fn: str | None,
    output: pathlib.Path | None,
    num_workers: int,
    plot: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Measure the lengths of the examples in SOURCE, for `jaxbucket plan`.

    SOURCE is a file: .npy, .npz, .csv, .tsv, .jsonl, .parquet, .array_record, or text
    with one example per line. Line-based files may be gzipped. Integers are used as
    lengths, lists are measured by their number of elements, and text is measured in
    --unit. SOURCE can also be module:function, a function without arguments that
    returns a random-access source, an array of lengths, or an iterable of examples.
    """
    check_outputs([pathlib.Path(source)], output=output, plot=plot)
    _check_suffix(output)
    counted = unit or "tokens"
    # Check that a plot can be drawn before measuring, which may take hours.
    with new_figure(plot, 8, 6) as figure:
        lengths = _measured(source, column, _measure(unit, length_fn), num_workers)
        if output:
            with atomic_write("--output", output) as file:
                np.save(file, lengths.astype(np.int32))
        if figure:
            from jaxbucket.plan.reports.plots import plot_histogram

            plot_histogram(lengths, figure, unit=counted)
    summary = summarize_lengths(lengths, counted)
    show(as_json, summary.to_dict(), summary)


def _check_suffix(output: pathlib.Path | None) -> None:
    # Other commands tell the format of a file by its suffix.
    if output and output.suffix.lower() != ".npy":
        raise ValueError(
            f"`--output {output}`: lengths are written as .npy. Name the file "
            f"{output.with_suffix('.npy')}."
        )


def _measure(unit: Unit | None, length_fn: str | None) -> Measure:
    if length_fn is None:
        return Measure(unit)
    from jaxbucket.data.lengths.functions import load_function

    return Measure(unit, load_function(length_fn))


def _measured(
    source: str, column: str | None, measure: Measure, num_workers: int
) -> np.ndarray:
    path = pathlib.Path(source)
    # A file may have a colon in its name.
    if not path.exists():
        from jaxbucket.data.lengths.functions import is_function_name, measure_function

        if is_function_name(source):
            return measure_function(source, column, measure, num_workers)
        raise ValueError(
            f"`{source}` does not exist. Pass a file, or a function as module:function."
        )
    if num_workers:
        raise ValueError(
            f"`--num-workers {num_workers}` has no effect on a file, which one process "
            "reads. Remove it, or pass a source as module:function."
        )
    return read_lengths(path, column, measure)
