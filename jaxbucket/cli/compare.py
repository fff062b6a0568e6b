"""The command `jaxbucket compare`: a comparison of plans for the same lengths."""

from __future__ import annotations

import pathlib
from typing import Any

import click
import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.cli.columns import (
    check_several,
    column_option,
    one_length_only,
    read_columns,
    several_limits,
)
from jaxbucket.cli.options import (
    EXISTING,
    NEW,
    POSITIVE,
    ShapeOptions,
    block_sparse_option,
    integers,
    json_option,
    shape_options,
    unit_option,
)
from jaxbucket.cli.outputs import check_outputs, new_figure
from jaxbucket.cli.packing import with_packed_rows
from jaxbucket.cli.report import read_plan, remainder_option
from jaxbucket.cli.show import show
from jaxbucket.packing.packed_plan import PACK_CHOICES, Pack
from jaxbucket.plan.flow.remainder import Remainder
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.planner import plan_within
from jaxbucket.plan.reports.compare import compare_plans
from jaxbucket.plan.sequence_limits import SequenceLimits


@click.command()
@click.argument("lengths", type=EXISTING)
@click.option(
    "--num-buckets", type=POSITIVE, default=8, help="Maximum number of shapes per plan."
)
@click.option(
    "--boundaries",
    help="Also compare a plan with these values of T, for example 128,256,512.",
)
@click.option(
    "--shapes",
    help="Also compare a plan with these shapes B x T, for example 32x128,16x256.",
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
@shape_options
@remainder_option
@column_option
@unit_option
@click.option("--plot", type=NEW, help="Draw the comparison to this file.")
@json_option
def compare(
    lengths: pathlib.Path,
    num_buckets: int,
    boundaries: str | None,
    shapes: str | None,
    plan_files: tuple[pathlib.Path, ...],
    pack: Pack,
    block_sparse: bool,
    shape: ShapeOptions,
    remainder: Remainder,
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
    limits = _limits(columns, boundaries, shapes, shape)
    check_outputs([lengths, *plan_files, *shape.inputs], plot=plot)
    with new_figure(plot, 10, 6) as figure:
        measured: Any = read_columns(lengths, columns)
        comparison = compare_plans(
            measured,
            limits,
            num_buckets=num_buckets,
            others=_others(measured, boundaries, shapes, plan_files, shape, columns),
            remainder=remainder,
        )
        comparison = with_packed_rows(
            comparison,
            measured,
            limits,
            shape,
            pack=pack,
            block_sparse=block_sparse,
            remainder=remainder,
        ).with_unit(unit)
        if figure:
            from jaxbucket.plan.reports.comparison_plots import (
                comparison_height,
                plot_comparison,
            )

            figure.set_size_inches(10, comparison_height(comparison))
            plot_comparison(comparison, measured, figure)
    show(as_json, comparison.to_dict(), comparison)


def _limits(
    columns: tuple[str, ...],
    boundaries: str | None,
    shapes: str | None,
    shape: ShapeOptions,
) -> Limits | SequenceLimits:
    """Returns the limits, after checking that the columns allow all options."""
    if len(columns) < 2:
        shape.check_one_length()
        return shape.limits()
    check_several(columns, one_length_only(boundaries, shapes), shape)
    return several_limits(shape, columns)


def _others(
    lengths: np.ndarray,
    boundaries: str | None,
    shapes: str | None,
    plan_files: tuple[pathlib.Path, ...],
    shape: ShapeOptions,
    columns: tuple[str, ...],
) -> dict[str, BucketPlan]:
    others = {path.name: read_plan(path) for path in plan_files}
    if len(others) < len(plan_files):
        names = [path.name for path in plan_files]
        raise ValueError(
            f"`--plan` has files of the same name: {names}. Rename one of them."
        )
    for path, plan in zip(plan_files, others.values(), strict=True):
        if list(plan.sequences) != (sorted(columns) if len(columns) > 1 else []):
            raise ValueError(
                f"`--plan {path}` has the sequences {list(plan.sequences)}, but "
                f"`--column` names {list(columns)}. Name the same columns, or pass it "
                "to `jaxbucket report`."
            )
        if plan.packed:
            raise ValueError(
                f"`--plan {path}` is for packed rows, which `--pack always` compares. "
                "Remove it."
            )
    if boundaries is not None:
        ends = integers(boundaries)
        if ends is None:
            raise ValueError(
                f"`--boundaries {boundaries}` is not a list of lengths. Pass values of "
                "T such as 128,256,512. All rules are always compared."
            )
        others["given boundaries"] = plan_within(lengths, shape.limits(), 1, ends)
    if shapes is not None:
        others["given shapes"] = shape.fixed_plan(shapes)
    return others
