"""The command `jaxbucket measure`: the lengths of the examples of a source."""

from __future__ import annotations

import pathlib
import zipfile
from collections.abc import Sequence
from typing import IO

import click
import numpy as np

from jaxbucket.cli.columns import column_option
from jaxbucket.cli.options import json_option
from jaxbucket.cli.outputs import atomic_write, check_outputs, new_figure
from jaxbucket.cli.show import show
from jaxbucket.data.lengths.files import read_lengths
from jaxbucket.data.lengths.summary import SequenceSummary, summarize_lengths
from jaxbucket.data.lengths.values import UNITS, Measure, Unit

_FILE = click.Path(path_type=pathlib.Path)


@click.command()
@click.argument("source")
@column_option
@click.option(
    "--unit", type=click.Choice(UNITS), help="The unit in which text is measured."
)
@click.option(
    "--length-fn",
    metavar="MODULE:FUNCTION",
    help="A function that returns the length of an example: a row, line or record.",
)
@click.option(
    "--output",
    "-o",
    type=_FILE,
    help="Write the lengths to this .npy file, or .npz for several columns.",
)
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
    columns: tuple[str, ...],
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
    --unit. If you repeat --column, all columns are measured in one pass.
    SOURCE can also be module:function, a function without arguments that
    returns a random-access source, an array of lengths, or an iterable of examples.
    """
    check_outputs([pathlib.Path(source)], output=output, plot=plot)
    _check_suffix(output, columns)
    counted = unit or "tokens"
    # Check that a plot can be drawn before measuring, which may take hours.
    names = columns or (None,)
    with new_figure(plot, 8, 6 * len(names)) as figure:
        rule = _measure(unit, length_fn)
        measured = _measured(source, columns, rule, num_workers)
        lengths = dict(zip(names, measured, strict=True))
        if output:
            with atomic_write("--output", output) as file:
                _save(file, measured, columns)
        if figure:
            from jaxbucket.plan.reports.plots import plot_histogram

            panels = figure.subfigures(len(names), 1, squeeze=False)[:, 0]
            for panel, (name, values) in zip(panels, lengths.items(), strict=True):
                plot_histogram(values, panel, unit=counted)
                if len(names) > 1:
                    panel.suptitle(name)
    summaries = {str(x): summarize_lengths(y, counted) for x, y in lengths.items()}
    summary = SequenceSummary(summaries)
    if len(names) == 1:
        (summary,) = summaries.values()
    show(as_json, summary.to_dict(), summary)


def _check_suffix(output: pathlib.Path | None, columns: Sequence[str]) -> None:
    # Other commands tell the format of a file by its suffix.
    suffix, what = ".npy", "lengths"
    if len(columns) > 1:
        suffix, what = ".npz", "several columns"
    if output and output.suffix.lower() != suffix:
        raise ValueError(
            f"`--output {output}`: {what} are written as {suffix}. Name the file "
            f"{output.with_suffix(suffix)}."
        )


def _save(file: IO[bytes], lengths: list[np.ndarray], columns: Sequence[str]) -> None:
    """Writes one array as .npy, or several as .npz."""
    arrays = [array.astype(np.int32) for array in lengths]
    if len(arrays) == 1:
        np.save(file, arrays[0])
        return
    # `numpy.savez` refuses some names, such as "file".
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in zip(columns, arrays, strict=True):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array)


def _measure(unit: Unit | None, length_fn: str | None) -> Measure:
    if length_fn is None:
        return Measure(unit)
    from jaxbucket.data.lengths.functions import load_function

    return Measure(unit, load_function(length_fn))


def _measured(
    source: str, columns: Sequence[str], measure: Measure, num_workers: int
) -> list[np.ndarray]:
    path = pathlib.Path(source)
    # A file may have a colon in its name.
    if not path.exists():
        from jaxbucket.data.lengths.functions import is_function_name, measure_function

        if is_function_name(source):
            return measure_function(source, columns, measure, num_workers)
        raise ValueError(
            f"`{source}` does not exist. Pass a file, or a function as module:function."
        )
    if num_workers:
        raise ValueError(
            f"`--num-workers {num_workers}` has no effect on a file, which one process "
            "reads. Remove it, or pass a source as module:function."
        )
    return read_lengths(path, columns, measure)
