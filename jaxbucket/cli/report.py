"""The command `jaxbucket report`: an epoch of a plan on a set of lengths."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, get_args

import click

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.policies import GROUPS
from jaxbucket.cli.columns import column_option, read_for_plan
from jaxbucket.cli.options import (
    EXISTING,
    NEW,
    POSITIVE,
    json_option,
    unit_option,
)
from jaxbucket.cli.outputs import check_outputs, new_figure
from jaxbucket.cli.show import as_dict, draw_plan, show
from jaxbucket.plan.flow.remainder import Remainder
from jaxbucket.plan.reports.epoch import report as report_of

remainder_option = click.option(
    "--remainder",
    type=click.Choice(get_args(Remainder)),
    default="cheapest",
    help="What to do with examples that do not fill a batch.",
)


@click.command()
@click.argument("plan_file", metavar="PLAN", type=EXISTING)
@click.argument("lengths", type=EXISTING)
@remainder_option
@click.option("--accumulate", type=POSITIVE, default=1, help="Micro-batches per step.")
@click.option(
    "--group",
    type=click.Choice(GROUPS),
    default="same",
    help="Whether all micro-batches of a step have the same bucket, or may have "
    "different ones.",
)
@column_option
@unit_option
@click.option("--plot", type=NEW, help="Draw the plan to this file.")
@json_option
def report(
    plan_file: pathlib.Path,
    lengths: pathlib.Path,
    columns: tuple[str, ...],
    unit: str,
    plot: pathlib.Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Report the padding and cost of PLAN on LENGTHS.

    PLAN is a file that `jaxbucket plan -o` wrote. LENGTHS may differ from the lengths
    that the plan was made for. Plans written by `jaxbucket plan --pack` may be for
    packed rows; then LENGTHS are packed first. If the plan is for several sequences,
    LENGTHS has a column of the same name for each.
    """
    check_outputs([plan_file, lengths], plot=plot)
    with new_figure(plot, 8, 7) as figure:
        bucket_plan = _first_plan(plan_file, lengths)
        measured = read_for_plan(bucket_plan, lengths, columns)
        rows = measured
        if bucket_plan.packed:
            from jaxbucket.cli.packing import packed_report

            rows, epoch = packed_report(bucket_plan, measured, **options)
        else:
            epoch = report_of(bucket_plan, measured, **options)
        epoch = dataclasses.replace(epoch, unit=unit)
        if figure:
            draw_plan(figure, bucket_plan, rows, epoch)
    show(as_json, as_dict(bucket_plan, epoch), epoch)


def _first_plan(path: pathlib.Path, lengths: pathlib.Path) -> BucketPlan:
    """Returns the plan in the first file.

    Raises:
      ValueError: if it is not a plan; the message says so if the files are swapped.
    """
    try:
        return read_plan(path)
    except ValueError:
        if not _is_plan(lengths):
            raise
    raise ValueError(
        f"`{path}` is not a plan. The plan comes first: `jaxbucket report {lengths} "
        f"{path}`."
    )


def _is_plan(path: pathlib.Path) -> bool:
    try:
        read_plan(path)
    except ValueError:
        return False
    return True


def read_plan(path: pathlib.Path) -> BucketPlan:
    """Returns the plan in a file.

    Raises:
      ValueError: if the file is not a complete plan.
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"`{path}` is not a plan. Pass a file that `jaxbucket plan -o` wrote."
        ) from None
    try:
        return BucketPlan.from_json(text)
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from None
