"""The command `jaxbucket report`: an epoch of a plan on a set of lengths."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import click

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.cli.options import (
    EXISTING,
    accumulate_option,
    column_option,
    group_option,
    json_option,
    plot_option,
    read_columns,
    remainder_option,
    unit_option,
)
from jaxbucket.cli.output import as_dict, check_outputs, draw_plan, new_figure, show
from jaxbucket.packing.rows import pack
from jaxbucket.plan.reports.epoch import report as report_of
from jaxbucket.schedule.batch_schedule import BatchSchedule


@click.command()
@click.argument("plan_file", metavar="PLAN", type=EXISTING)
@click.argument("lengths", type=EXISTING)
@remainder_option
@accumulate_option
@group_option
@column_option
@unit_option
@plot_option
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
        plan = read_plan(plan_file)
        rows = read_columns(lengths, columns or plan.sequences)
        if plan.packed:
            seq_lens = [bucket.seq_len for bucket in plan.buckets]
            packing = pack(rows, seq_lens, overlong=plan.overlong)
            epoch = BatchSchedule(plan, rows, packing=packing, **options).report()
            rows = packing.row_lengths
        else:
            epoch = report_of(plan, rows, **options)
        epoch = dataclasses.replace(epoch, unit=unit)
        if figure:
            draw_plan(figure, plan, rows, epoch)
    show(as_json, as_dict(plan, epoch), epoch)


def read_plan(path: pathlib.Path) -> BucketPlan:
    """Returns the plan in a file.

    Raises:
      ValueError: if the file is not a complete plan.
    """
    try:
        return BucketPlan.from_json(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"`{path}` is not a plan that `jaxbucket plan -o` wrote: {error}"
        ) from None
