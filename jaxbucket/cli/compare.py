"""The command `jaxbucket compare`: a comparison of plans for the same lengths."""

from __future__ import annotations

import pathlib
from typing import Any

import click

from jaxbucket.cli.options import (
    EXISTING,
    block_sparse_option,
    column_option,
    json_option,
    limit_options,
    num_buckets_option,
    plot_option,
    read_columns,
    remainder_option,
    unit_option,
)
from jaxbucket.cli.output import check_outputs, new_figure, show
from jaxbucket.cli.plan import pack_rows, parse_size
from jaxbucket.cli.report import read_plan, report_packed
from jaxbucket.packing.packed_plan import PACK_CHOICES
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.reports.compare import compare_plans
from jaxbucket.plan.reports.comparison import ComparedPlan, Comparison

# What a model must do to train on packed rows.
_REQUIRES = (
    "Packed rows hold several examples, so attention must use segment ids to stay "
    "within each example, as `jb.segment_attention` does."
)


@click.command()
@click.argument("lengths", type=EXISTING)
@num_buckets_option
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
@column_option
@unit_option
@plot_option
@json_option
def compare(
    lengths: pathlib.Path,
    num_buckets: str,
    plan_files: tuple[pathlib.Path, ...],
    pack: str,
    block_sparse: bool,
    limits: dict[str, Any],
    remainder: Any,
    columns: tuple[str, ...],
    unit: str,
    plot: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Compare rules for boundaries, packed rows and your own plans on LENGTHS.

    The plan with the cheapest epoch comes first. Costs are tokens, padding included,
    unless --width, --per-second, --step-times or --cost-fn define the cost of a step.
    If you repeat --column, plans have a T for each column.
    """
    check_outputs([lengths, *plan_files], plot=plot)
    size = parse_size(num_buckets)
    with new_figure(plot, 10, 6) as figure:
        measured = read_columns(lengths, columns)
        comparison = compare_plans(
            measured,
            Limits(**limits),
            num_buckets=size,
            others={str(path): read_plan(path) for path in plan_files},
            remainder=remainder,
        )
        if pack != "never":
            packed = {"num_buckets": size, "block_sparse": block_sparse}
            comparison = _with_packed(
                comparison, measured, limits, packed, pack == "always", remainder
            )
        comparison = comparison.with_unit(unit)
        if figure:
            from jaxbucket.plan.reports import plots

            figure.set_size_inches(10, plots.comparison_height(comparison))
            plots.plot_comparison(comparison, figure)
    show(as_json, comparison.to_dict(), comparison)


def _with_packed(
    comparison: Comparison,
    lengths: Any,
    limits: dict[str, Any],
    options: dict[str, Any],
    required: bool,
    remainder: Any,
) -> Comparison:
    """Returns the comparison with packed rows, for several values of T and for one.

    A note says why they are missing if packing does not support the limits and is not
    required.
    """
    plans = []
    try:
        for name, size in (
            ("packed", options["num_buckets"]),
            ("packed, one shape", 1),
        ):
            # One T may be the best choice anyway.
            if not plans or len(plans[0].plan) > 1:
                choice = {**options, "num_buckets": size, "pack": "always"}
                packed: Any = pack_rows(lengths, limits, **choice)
                epoch = report_packed(
                    packed.plan, lengths, packed.packing, remainder=remainder
                )
                plans.append(ComparedPlan(name, packed.plan, epoch))
    except ValueError as error:
        if required:
            raise
        return comparison.extended((), f"Packed rows are not compared: {error}")
    return comparison.extended(plans, _REQUIRES)
