"""The command `jaxbucket report`: an epoch of a plan on a set of lengths."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import click

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.table import number_table
from jaxbucket.cli.length_options import LENGTHS, read_columns, reading_options
from jaxbucket.cli.options import (
    EXISTING,
    POSITIVE,
    accumulate_option,
    form_option,
    group_option,
    plot_option,
    remainder_option,
    unit_option,
)
from jaxbucket.cli.output import as_dict, check_outputs, draw_plan, new_figure, show
from jaxbucket.packing.rows import pack
from jaxbucket.plan.devices import row_shard_shares
from jaxbucket.plan.reports.epoch import report as report_of
from jaxbucket.schedule.batch_schedule import BatchSchedule


@click.command()
@click.argument("plan_file", metavar="PLAN", type=EXISTING)
@click.argument("lengths", type=LENGTHS)
@remainder_option
@accumulate_option
@group_option
@reading_options
@unit_option
@click.option(
    "--tokens-per-device",
    type=POSITIVE,
    metavar="TOKENS",
    help="Also show how many tokens are in rows that do not fit on one device.",
)
@plot_option
@form_option
def report(
    plan_file: pathlib.Path,
    lengths: pathlib.Path,
    reading: dict[str, Any],
    unit: str,
    tokens_per_device: int | None,
    plot: pathlib.Path | None,
    form: str | None,
    **options: Any,
) -> None:
    """Report the padding and cost of PLAN on LENGTHS.

    PLAN is a file that `jaxbucket plan -o` wrote. LENGTHS may differ from the lengths
    that the plan was made for. Plans written by `jaxbucket plan --pack` may be for
    packed rows; then LENGTHS are packed first. If the plan is for several sequences,
    LENGTHS has a column of the same name for each.
    """
    check_outputs(plot=plot)
    with new_figure(plot, 8, 7) as figure:
        plan = read_plan(plan_file)
        reading["columns"] = reading["columns"] or plan.sequences
        rows = read_columns(lengths, **reading)
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
    numbers, tables = as_dict(plan, epoch), [epoch]
    if tokens_per_device is not None:
        totals: Any = sum(rows.values()) if isinstance(rows, Mapping) else rows
        shares = row_shard_shares(totals, tokens_per_device)
        numbers["row_shards"] = shares
        tables.append(_shares_table(shares, tokens_per_device))
    show(form, numbers, *tables)


def _shares_table(shares: list[dict[str, float]], tokens: int) -> Any:
    """Returns a table of `row_shard_shares`."""
    # What is cut off if rows are on fewer devices than a line says.
    cut_off = ["", *(f"{row['cut_off']:.1%}" for row in shares)]
    rows = (
        (f"{row['devices']}", f"{row['examples']:.1%}", f"{row['tokens']:.1%}", lost)
        for row, lost in zip(shares, cut_off, strict=False)
    )
    columns = ("devices", "examples", "tokens", "cut off with fewer")
    caption = f"Devices that a row needs, with {tokens:,} tokens each"
    return number_table(columns, rows, caption)


def read_plan(path: pathlib.Path) -> BucketPlan:
    """Returns the plan in a file."""
    try:
        return BucketPlan.from_json(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"`{path}` is not a plan that `jaxbucket plan -o` wrote: {error}"
        ) from None
