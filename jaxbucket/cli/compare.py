"""The command `jaxbucket compare`: a comparison of plans for the same lengths."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import click

from jaxbucket.cli.length_options import LENGTHS, read_columns, reading_options
from jaxbucket.cli.limit_options import limit_options
from jaxbucket.cli.options import (
    EXISTING,
    POSITIVE,
    block_sparse_option,
    form_option,
    plot_option,
    remainder_option,
    unit_option,
)
from jaxbucket.cli.output import check_outputs, new_figure, show
from jaxbucket.cli.plan import check_block_sparse, pack_rows
from jaxbucket.cli.report import read_plan
from jaxbucket.packing.planner import PACK_CHOICES
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.reports.comparison import ComparedPlan, compare_plans
from jaxbucket.schedule.batch_schedule import BatchSchedule

# What a model must do to train on packed rows.
_REQUIRES = (
    "Packed rows hold several examples, so attention must use segment ids to stay "
    "within each example, as `jb.segment_attention` does."
)


@click.command()
@click.argument("lengths", type=LENGTHS)
@click.option(
    "--num-buckets", type=POSITIVE, default=8, help="Maximum number of shapes."
)
@click.option(
    "--plan",
    "plan_files",
    metavar="PLAN",
    type=EXISTING,
    multiple=True,
    help="Also compare a plan that `jaxbucket plan -o` wrote; may be repeated.",
)
@click.option(
    "--pack",
    type=click.Choice(PACK_CHOICES),
    default="auto",
    help="Whether to compare packed rows; auto does so if the limits allow it.",
)
@block_sparse_option
@limit_options
@remainder_option
@reading_options
@unit_option
@plot_option
@form_option
def compare(
    lengths: pathlib.Path,
    num_buckets: int,
    plan_files: tuple[pathlib.Path, ...],
    pack: str,
    block_sparse: bool,
    limits: dict[str, Any],
    remainder: Any,
    reading: dict[str, Any],
    unit: str,
    plot: pathlib.Path | None,
    form: str | None,
) -> None:
    """Compare rules for boundaries, packed rows and your own plans on LENGTHS.

    The plan with the cheapest epoch comes first. Costs are tokens, padding included,
    unless --width, --per-second, --step-times or --cost-fn define the cost of a step.
    If you repeat --column, plans have a T for each column.
    """
    check_outputs(plot=plot)
    check_block_sparse(block_sparse, pack)
    with new_figure(plot, 10, 6) as figure:
        measured = read_columns(lengths, **reading)
        comparison = compare_plans(
            measured,
            Limits(**limits),
            num_buckets=num_buckets,
            others={str(path): read_plan(path) for path in plan_files},
            remainder=remainder,
        )
        if pack != "never":
            options = {"num_buckets": num_buckets, "block_sparse": block_sparse}
            try:
                plans = list(_packed_plans(measured, limits, options, remainder))
                comparison = comparison.extended(plans, _REQUIRES)
            except ValueError as error:
                if pack == "always":
                    raise
                note = f"Packed rows are not compared: {error}"
                comparison = comparison.extended((), note)
        comparison = comparison.with_unit(unit)
        if figure:
            from jaxbucket.plan.reports import plots

            figure.set_size_inches(10, plots.comparison_height(comparison))
            plots.plot_comparison(comparison, figure)
    show(form, comparison.to_dict(), comparison)


def _packed_plans(
    lengths: Any, limits: dict[str, Any], options: dict[str, Any], remainder: Any
) -> Iterator[ComparedPlan]:
    """Yields the plans of packed rows with several values of T, and with one."""
    for changes in ({}, {"num_buckets": 1}):
        packed = pack_rows(lengths, limits, pack="always", **options | changes)
        schedule = BatchSchedule(
            packed.plan, lengths, packing=packed.packing, remainder=remainder
        )
        name = "packed, one shape" if changes else "packed"
        yield ComparedPlan(name, packed.plan, schedule.report())
        # One T may be the best choice anyway.
        if len(packed.plan) == 1:
            return
