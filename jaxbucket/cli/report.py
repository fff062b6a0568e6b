"""The command `jaxbucket report`: what a plan costs on other lengths."""

from __future__ import annotations

import pathlib
from typing import Any, get_args

import click

from jaxbucket.base.buckets import GROUPS, BucketPlan
from jaxbucket.cli.options import EXISTING, NEW, POSITIVE, column_option, json_option
from jaxbucket.cli.outputs import check_outputs, new_figure, save_figure
from jaxbucket.cli.show import as_dict, draw_plan, show_json, show_tables
from jaxbucket.data.lengths.files import read_lengths
from jaxbucket.plan.remainder import Remainder
from jaxbucket.plan.reports.epoch import report as report_of

remainder_option = click.option(
    "--remainder",
    type=click.Choice(get_args(Remainder)),
    default="cheapest",
    show_default=True,
    help="What becomes of examples that fill no batch.",
)


@click.command()
@click.argument("plan_file", metavar="PLAN", type=EXISTING)
@click.argument("lengths", type=EXISTING)
@remainder_option
@click.option(
    "--accumulate",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Micro-batches of a step.",
)
@click.option(
    "--group",
    type=click.Choice(GROUPS),
    default="same",
    show_default=True,
    help="Whether those have one bucket.",
)
@column_option
@click.option("--plot", type=NEW, help="Draw the plan there.")
@json_option
def report(
    plan_file: pathlib.Path,
    lengths: pathlib.Path,
    column: str | None,
    plot: pathlib.Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Report what PLAN, written by `jaxbucket plan -o`, costs on other LENGTHS."""
    check_outputs([plan_file, lengths], {"--plot": plot})
    figure = plot and new_figure("--plot", plot, 8, 7)
    made = read_plan(plan_file)
    measured = read_lengths(lengths, column)
    epoch = report_of(made, measured, **options)
    if plot:
        draw_plan(figure, made, measured)
        save_figure(figure, "--plot", plot)
    if as_json:
        show_json(as_dict(made, epoch))
    else:
        show_tables(epoch)


def read_plan(path: pathlib.Path) -> BucketPlan:
    """Returns the plan that a file holds.

    Raises:
      ValueError: if it is truncated or foreign.
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"`{path}` is no text file.") from None
    try:
        return BucketPlan.from_json(text)
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from None
