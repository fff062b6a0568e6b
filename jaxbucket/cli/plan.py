"""The command `jaxbucket plan`: shapes for lengths, in any of the ways to choose."""

from __future__ import annotations

import pathlib
from typing import Any

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
from jaxbucket.cli.outputs import atomic_write, check_outputs, new_figure
from jaxbucket.cli.show import as_dict, draw_plan, show
from jaxbucket.data.lengths.files import read_lengths
from jaxbucket.plan.curve import PlanCurve, plan_curve
from jaxbucket.plan.planner import RULES, plan_within
from jaxbucket.plan.reports.epoch import report

_AUTO = "auto"


@click.command()
@click.argument("lengths", type=EXISTING)
@click.option(
    "--num-buckets",
    help="Shapes at most, 8 by default; auto weighs them against compiling.",
)
@click.option(
    "--boundaries",
    help=f"{', '.join(RULES)}, or lengths such as 128,256,512; optimal by default.",
)
@click.option("--shapes", help="Fixed B x T, such as 32x128,16x256, instead.")
@click.option(
    "--compile-seconds",
    type=float,
    help="Time to compile one shape, with --num-buckets auto.",
)
@click.option(
    "--num-epochs",
    type=float,
    help="Epochs for which shapes are used, with --num-buckets auto; 1 by default.",
)
@click.option(
    "--max-buckets",
    type=POSITIVE,
    help="Shapes at most, with --num-buckets auto; 32 by default.",
)
@shape_options
@column_option
@click.option("--output", "-o", type=NEW, help="Write the plan there, as JSON.")
@click.option("--plot", type=NEW, help="Draw the plan there, and how it was chosen.")
@json_option
def plan(
    lengths: pathlib.Path,
    num_buckets: str | None,
    boundaries: str | None,
    shapes: str | None,
    compile_seconds: float | None,
    num_epochs: float | None,
    max_buckets: int | None,
    shape: ShapeOptions,
    column: str | None,
    output: pathlib.Path | None,
    plot: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Plan shapes for LENGTHS: a file of any kind that `jaxbucket measure` reads."""
    check_outputs([lengths, *shape.inputs], output=output, plot=plot)
    if shapes is not None:
        shape.check_free()
    auto = {
        "--compile-seconds": compile_seconds,
        "--num-epochs": num_epochs,
        "--max-buckets": max_buckets,
    }
    _check_one_way(shapes, boundaries, num_buckets, auto)
    curve = None
    with new_figure(plot, 8, 11 if num_buckets == _AUTO else 7) as figure:
        measured = read_lengths(lengths, column)
        if num_buckets == _AUTO:
            curve = plan_curve(
                measured,
                shape.limits(),
                compile_seconds=compile_seconds,
                num_epochs=1 if num_epochs is None else num_epochs,
                max_buckets=max_buckets or 32,
            )
            chosen = curve.chosen.plan
        elif shapes is not None:
            chosen = shape.fixed_plan(shapes)
        else:
            size = 8 if num_buckets is None else _number(num_buckets)
            chooser = "optimal" if boundaries is None else _chooser(boundaries)
            chosen = plan_within(measured, shape.limits(), size, chooser)
        epoch = report(chosen, measured, accumulate=shape.accumulate)
        if figure:
            _draw(figure, chosen, measured, curve)
    if output:
        with atomic_write("--output", output) as file:
            file.write(f"{chosen.to_json()}\n".encode())
    numbers = as_dict(chosen, epoch)
    if curve:
        show(as_json, numbers | {"curve": curve.to_dict()}, curve, epoch)
    else:
        show(as_json, numbers, epoch)


def _check_one_way(
    shapes: str | None,
    boundaries: str | None,
    num_buckets: str | None,
    auto: dict[str, Any],
) -> None:
    """Raises a ValueError for options that would be without effect."""
    is_auto = num_buckets == _AUTO
    ways = {
        "--shapes": shapes,
        "--boundaries": boundaries,
        "--num-buckets": num_buckets,
    }
    used = [name for name, value in ways.items() if value is not None]
    listed = boundaries is not None and integers(boundaries) is not None
    if len(used) > 1 and (used[0] == "--shapes" or is_auto or listed):
        raise ValueError(f"{used[0]} and {used[1]} are two ways: leave out one.")
    for name, value in auto.items():
        if value is not None and not is_auto:
            raise ValueError(f"`{name}` says nothing without `--num-buckets {_AUTO}`.")


def _number(text: str) -> int:
    numbers = integers(text) or [0]
    if len(numbers) > 1 or numbers[0] < 1:
        raise ValueError(
            f"`--num-buckets {text}`: give a positive integer, or {_AUTO}."
        )
    return numbers[0]


def _chooser(text: str) -> Any:
    if ":" in text:
        from jaxbucket.data.lengths.functions import load_function

        return load_function(text)
    return integers(text) or text


def _draw(
    figure: Any, plan: BucketPlan, lengths: np.ndarray, curve: PlanCurve | None
) -> None:
    if curve is None:
        draw_plan(figure, plan, lengths)
        return
    from jaxbucket.plan.reports.comparison_plots import plot_curve

    above, below = figure.subfigures(2, 1, height_ratios=[4, 7])
    plot_curve(curve, above)
    draw_plan(below, plan, lengths)
