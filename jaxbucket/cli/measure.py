"""The command `jaxbucket measure`: the lengths of the examples of a source."""

from __future__ import annotations

import pathlib
import sys
from typing import IO, Any

import click
import numpy as np

from jaxbucket.base.checks import check_lengths
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.table import number_table
from jaxbucket.cli.length_options import read_columns, reading_options
from jaxbucket.cli.options import NEW, Input, form_option, load_function, plot_option
from jaxbucket.cli.output import atomic_write, check_outputs, new_figure, show
from jaxbucket.data.length_files import UNITS, Unit
from jaxbucket.data.measure import measure_lengths


@click.command()
@click.argument("source", type=Input(exists=False, path_type=str))
@reading_options
@click.option(
    "--unit", type=click.Choice(UNITS), help="The unit in which text is measured."
)
@click.option(
    "--output",
    "-o",
    type=NEW,
    help="Write the lengths to this .npy file, or .npz for several columns.",
)
@click.option(
    "--num-workers",
    type=click.IntRange(min=0),
    default=0,
    help="Number of worker processes for a source from module:function.",
)
@plot_option
@form_option
def measure(
    source: str,
    reading: dict[str, Any],
    unit: Unit | None,
    output: pathlib.Path | None,
    num_workers: int,
    plot: pathlib.Path | None,
    form: str | None,
) -> None:
    """Measure the lengths of the examples in SOURCE, for `jaxbucket plan`.

    SOURCE is a file: .npy, .npz, .csv, .tsv, .json, .jsonl or .parquet; or - for
    standard input, whose format is recognized. Tables of text may be compressed.
    Integers are used as lengths, lists are measured by their number of elements, text
    is measured in --unit, and other numbers need a --scale. SOURCE can also be
    module:function, a function without arguments that returns a random-access source of
    examples, or an array of lengths. If you repeat --column, all columns are measured
    in one pass.
    """
    check_outputs(output=output, plot=plot)
    if unit and reading["measure"]:
        raise ValueError(f"`unit={unit}` and `length_fn` both measure. Pass only one.")
    columns = reading["columns"]
    suffix = ".npz" if len(columns) > 1 else ".npy"
    if output and output.suffix.lower() != suffix:
        raise ValueError(
            f"`output={output}` must end with {suffix}, by which other commands tell "
            "the format."
        )
    names = columns or ("",)
    # Check that a plot can be drawn before measuring, which may take hours.
    with new_figure(plot, 8, 6 * len(names)) as figure:
        if unit:
            reading["measure"] = unit
        found = _measured(source, reading, num_workers)
        lengths = {name: found[name] if columns[1:] else found for name in names}
        if output:
            with atomic_write(output) as file:
                _save(file, lengths)
        if figure:
            _draw(figure, lengths, unit or "tokens")
    summaries = {name: summarize(values) for name, values in lengths.items()}
    numbers: Any = summaries if columns[1:] else summaries[names[0]]
    show(form, numbers, _table(summaries, unit or "tokens"))


def _measured(source: str, reading: dict[str, Any], num_workers: int) -> Any:
    """Returns lengths, `[N]`; by name if there are several columns."""
    path = pathlib.Path(source)
    # A file may have a colon in its name.
    if path.exists() or ":" not in source:
        lengths = read_columns(path, **reading)
        if isinstance(lengths, LengthCounts):
            raise ValueError(
                f"`{source}` has counts of lengths, which are measured already. Pass "
                "it to `jaxbucket plan`."
            )
        return lengths
    columns = reading["columns"]
    if reading["measure"] or reading["scales"]:
        raise ValueError(
            "`unit`, `length_fn` and `scale` are for files. Return lengths from "
            f"{source}."
        )
    examples = load_function(source)()
    if isinstance(examples, np.ndarray):
        if columns:
            raise ValueError(f"`column={columns}`, but {source} returns an array.")
        return check_lengths(examples)
    options: Any = {"num_workers": num_workers, "progress": sys.stderr.isatty()}
    sequences = {name: [name] for name in columns} if columns[1:] else columns or None
    return measure_lengths(examples, sequences=sequences, **options)


def _save(file: IO[bytes], lengths: dict[str, np.ndarray]) -> None:
    arrays: Any = {name: values.astype(np.int32) for name, values in lengths.items()}
    if len(arrays) == 1:
        np.save(file, next(iter(arrays.values())))
    else:
        np.savez(file, **arrays)


def _draw(figure: Any, lengths: dict[str, np.ndarray], unit: str) -> None:
    from jaxbucket.plan.reports.plots import plot_histogram

    panels = figure.subfigures(len(lengths), 1, squeeze=False)[:, 0]
    for panel, (name, values) in zip(panels, lengths.items(), strict=True):
        plot_histogram(values, panel, unit=unit)
        panel.suptitle(name)


def summarize(lengths: np.ndarray) -> dict[str, Any]:
    """Returns statistics of lengths; percentiles are not interpolated."""
    shares = {"median": 50, "p90": 90, "p99": 99}
    points = np.percentile(lengths, [*shares.values()], method="inverted_cdf")
    return {
        "examples": len(lengths),
        "total": int(lengths.sum(dtype=np.int64)),
        "mean": float(lengths.mean()),
        "min": int(lengths.min()),
        **dict(zip(shares, map(int, points), strict=True)),
        "max": int(lengths.max()),
        "distinct": len(np.unique(lengths)),
    }


def _table(summaries: dict[str, dict[str, Any]], unit: str) -> Any:
    columns = list(summaries.values())
    rows = (
        (
            row,
            *(f"{x[row]:,.1f}" if row == "mean" else f"{x[row]:,}" for x in columns),
        )
        for row in columns[0]
    )
    return number_table([f"lengths in {unit}", *summaries], rows, "")
