"""The command `jaxbucket simulate`: the time of an epoch on a cluster."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click
import numpy as np

from jaxbucket.cli.length_options import LENGTHS, read_columns, reading_options
from jaxbucket.cli.limit_options import step_time_options
from jaxbucket.cli.options import (
    EXISTING,
    POSITIVE,
    accumulate_option,
    form_option,
    group_option,
    load_function,
    plot_option,
    remainder_option,
)
from jaxbucket.cli.output import check_outputs, new_figure, note_input, show
from jaxbucket.cli.report import read_plan
from jaxbucket.plan.costs import CostFn
from jaxbucket.simulate.cluster import Cluster
from jaxbucket.simulate.epoch import simulate as simulate_plans

_SECONDS = click.FloatRange(min=0)


class _Measured(click.ParamType):
    """A number, or a file of measured values, as a JSON array."""

    name = "number or file"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return float(value)
        except ValueError:
            pass
        try:
            note_input(value)
            return np.asarray(json.loads(pathlib.Path(value).read_text("utf-8")))
        except (OSError, ValueError) as error:
            self.fail(f"{value} is no number, and no JSON array in a file: {error}")


@click.command()
@click.argument("lengths", type=LENGTHS)
@click.argument("plan_files", metavar="PLAN...", type=EXISTING, nargs=-1, required=True)
@click.option("--num-hosts", type=POSITIVE, default=1, help="Number of hosts.")
@click.option(
    "--devices-per-host", type=POSITIVE, default=1, help="Number of devices of each."
)
@step_time_options
@click.option(
    "--skew",
    type=_Measured(),
    default=0.0,
    help="How the time of a step varies between hosts: the standard deviation of its "
    "logarithm, or a file of measured factors.",
)
@click.option(
    "--row-seconds",
    type=_Measured(),
    default=0.0,
    help="Time to load a row on a host, in seconds, or a file of measured times.",
)
@click.option(
    "--compile-seconds", type=_SECONDS, default=0.0, help="Time to compile one shape."
)
@click.option(
    "--hours-between-faults",
    type=_Measured(),
    help="Mean hours until a host fails, or a file of measured hours.",
)
@click.option(
    "--restart-seconds", type=_SECONDS, default=0.0, help="Time of a restart."
)
@click.option(
    "--checkpoint-seconds",
    type=_SECONDS,
    default=0.0,
    help="Time for which training waits while a checkpoint is written.",
)
@click.option(
    "--checkpoint-steps",
    type=POSITIVE,
    help="Steps between two checkpoints. By default the number that loses least.",
)
@click.option(
    "--learning-rate",
    metavar="MODULE:FUNCTION",
    help="A schedule of optax, or the result of `scale_schedule`.",
)
@click.option("--seed", type=int, default=0, help="Seed of the schedule.")
@click.option(
    "--order",
    type=click.Choice(["spread", "shuffled"]),
    default="spread",
    help="Order of the schedule.",
)
@remainder_option
@accumulate_option
@group_option
@reading_options
@plot_option
@form_option
def simulate(
    lengths: pathlib.Path,
    plan_files: tuple[pathlib.Path, ...],
    reading: dict[str, Any],
    step_seconds: CostFn | None,
    learning_rate: str | None,
    seed: int,
    order: Any,
    remainder: Any,
    accumulate: int,
    group: Any,
    plot: pathlib.Path | None,
    form: str | None,
    **machines: Any,
) -> None:
    """Predict the time of an epoch of each PLAN on a cluster.

    LENGTHS are those of all examples, or a JSON object of how many examples have each
    length, such as {"128": 7000000000, "512": 3000000000}. Step times are the costs of
    the plans, if these are in seconds, unless --per-second, --width, --step-times,
    --cost-fn or --programs define them.
    """
    check_outputs(plot=plot)
    with new_figure(plot, 10, 8) as figure:
        simulation = simulate_plans(
            {str(path): read_plan(path) for path in plan_files},
            read_columns(lengths, **reading),
            Cluster(step_seconds=step_seconds, **machines),
            learning_rate=learning_rate and load_function(learning_rate),
            seed=seed,
            order=order,
            remainder=remainder,
            accumulate=accumulate,
            group=group,
        )
        if figure:
            from jaxbucket.simulate.plots import plot_simulation

            plot_simulation(simulation, figure)
    show(form, simulation.to_dict(), simulation)
