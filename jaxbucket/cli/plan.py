"""The command `jaxbucket plan`: shapes for lengths, by any of the ways there are."""

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
from jaxbucket.cli.outputs import check_outputs, new_figure, save_figure, written_whole
from jaxbucket.cli.show import as_dict, draw_plan, show_json, show_tables
from jaxbucket.data.lengths.files import read_lengths
from jaxbucket.plan.buckets import RULES, plan_within
from jaxbucket.plan.curve import PlanCurve, plan_curve
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
@click.option("--shapes", help="Given B x T, such as 32x128,16x256, instead.")
@click.option(
    "--compile-seconds", type=float, help="Of one shape, with --num-buckets auto."
)
@click.option(
    "--num-epochs",
    type=float,
    help="For which shapes are used, with --num-buckets auto; 1 by default.",
)
@click.option(
    "--max-buckets",
    type=POSITIVE,
    help="Shapes looked at, with --num-buckets auto; 32 by default.",
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
    check_outputs([lengths, *shape.inputs], {"--output": output, "--plot": plot})
    if shapes is not None:
        shape.check_free()
    _check_one_way(
        {"--shapes": shapes, "--boundaries": boundaries, "--num-buckets": num_buckets},
        {
            "--compile-seconds": compile_seconds,
            "--num-epochs": num_epochs,
            "--max-buckets": max_buckets,
        },
    )
    figure = plot and new_figure("--plot", plot, 8, 11 if num_buckets == _AUTO else 7)
    measured = read_lengths(lengths, column)
    curve = None
    if num_buckets == _AUTO:
        curve = plan_curve(
            measured,
            shape.limits(),
            compile_seconds=compile_seconds,
            num_epochs=1 if num_epochs is None else num_epochs,
            max_buckets=max_buckets or 32,
        )
        made = curve.chosen.plan
    elif shapes is not None:
        made = shape.given(shapes)
    else:
        size = 8 if num_buckets is None else _number(num_buckets)
        chooser = "optimal" if boundaries is None else _chooser(boundaries)
        made = plan_within(measured, shape.limits(), size, chooser)
    epoch = report(made, measured, accumulate=shape.kept["accumulate"])
    if plot:
        _draw(figure, made, measured, curve)
        save_figure(figure, "--plot", plot)
    if output:
        with written_whole("--output", output) as file:
            file.write(f"{made.to_json()}\n".encode())
    if as_json:
        numbers = as_dict(made, epoch)
        show_json(numbers | {"curve": curve.to_dict()} if curve else numbers)
    else:
        show_tables(*([curve] if curve else []), epoch)


def _check_one_way(ways: dict[str, Any], of_auto: dict[str, Any]) -> None:
    """Nothing that is said may be without effect."""
    auto = ways["--num-buckets"] == _AUTO
    given = [name for name, value in ways.items() if value is not None]
    own = integers(ways["--boundaries"] or "auto") is not None
    if len(given) > 1 and (given[0] == "--shapes" or auto or own):
        raise ValueError(f"{given[0]} and {given[1]} are two ways: leave out one.")
    idle = [name for name, value in of_auto.items() if value is not None]
    if idle and not auto:
        raise ValueError(f"`{idle[0]}` says nothing without `--num-buckets {_AUTO}`.")


def _number(text: str) -> int:
    found = integers(text)
    if found is None or len(found) != 1 or found[0] < 1:
        raise ValueError(
            f"`--num-buckets {text}`: give a positive integer, or {_AUTO}."
        )
    return found[0]


def _chooser(text: str) -> Any:
    found = integers(text)
    if found is None and ":" in text:
        from jaxbucket.data.lengths.functions import load_function

        return load_function(text)
    return text if found is None else found


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
