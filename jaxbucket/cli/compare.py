"""The command `jaxbucket compare`: plans of the same lengths, side by side."""

from __future__ import annotations

import pathlib

import click
import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.cli.options import (
    EXISTING,
    NEW,
    POSITIVE,
    ShapeOptions,
    column_option,
    integers,
    json_option,
    shape_options,
)
from jaxbucket.cli.outputs import check_outputs, new_figure
from jaxbucket.cli.report import read_plan, remainder_option
from jaxbucket.cli.show import show
from jaxbucket.data.lengths.files import read_lengths
from jaxbucket.plan.planner import plan_within
from jaxbucket.plan.remainder import Remainder
from jaxbucket.plan.reports.comparison import compare_plans


@click.command()
@click.argument("lengths", type=EXISTING)
@click.option("--num-buckets", type=POSITIVE, default=8)
@click.option("--boundaries", help="Compare with these, such as 128,256,512, too.")
@click.option("--shapes", help="With these B x T, such as 32x128,16x256, too.")
@click.option(
    "--plan",
    "plan_files",
    metavar="PLAN",
    type=EXISTING,
    multiple=True,
    help="With a plan that `jaxbucket plan -o` wrote, too.",
)
@shape_options
@remainder_option
@column_option
@click.option("--plot", type=NEW, help="Draw them there, side by side.")
@json_option
def compare(
    lengths: pathlib.Path,
    num_buckets: int,
    boundaries: str | None,
    shapes: str | None,
    plan_files: tuple[pathlib.Path, ...],
    shape: ShapeOptions,
    remainder: Remainder,
    column: str | None,
    plot: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Compare what the rules for boundaries, and your own plans, cost on LENGTHS.

    The cheapest epoch comes first. It costs tokens, padding counted, or what --width,
    --per-second, --step-times or --cost-fn say of a step.
    """
    check_outputs([lengths, *plan_files, *shape.inputs], plot=plot)
    with new_figure(plot, 10, 6) as figure:
        measured = read_lengths(lengths, column)
        comparison = compare_plans(
            measured,
            shape.limits(),
            num_buckets=num_buckets,
            others=_others(measured, boundaries, shapes, plan_files, shape),
            remainder=remainder,
        )
        if figure:
            from jaxbucket.plan.reports.comparison_plots import plot_comparison

            plot_comparison(comparison, measured, figure)
    show(as_json, comparison.to_dict(), comparison)


def _others(
    lengths: np.ndarray,
    boundaries: str | None,
    shapes: str | None,
    plan_files: tuple[pathlib.Path, ...],
    shape: ShapeOptions,
) -> dict[str, BucketPlan]:
    others = {path.name: read_plan(path) for path in plan_files}
    if len(others) < len(plan_files):
        names = [path.name for path in plan_files]
        raise ValueError(f"`--plan`: {names} have equal names. Rename one of them.")
    if boundaries is not None:
        ends = integers(boundaries)
        if ends is None:
            raise ValueError(
                f"`--boundaries {boundaries}`: give lengths such as 128,256,512. Every "
                "rule is compared anyway."
            )
        others["given boundaries"] = plan_within(lengths, shape.limits(), 1, ends)
    if shapes is not None:
        others["given shapes"] = shape.fixed_plan(shapes)
    return others
