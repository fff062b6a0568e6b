"""The command `jaxbucket`: plans, reports and pictures, without a line of Python."""

from __future__ import annotations

import json
import pathlib
from typing import Any, get_args

import click
import numpy as np

from jaxbucket.base import GROUPS, OVERLONG, BucketPlan
from jaxbucket.length_files import read_lengths
from jaxbucket.measure_command import measure
from jaxbucket.outputs import check_outputs, new_figure, save_figure
from jaxbucket.plan import plan_buckets
from jaxbucket.remainder import Remainder
from jaxbucket.stats import report

_POSITIVE = click.IntRange(min=1)
_EXISTING = click.Path(exists=True, dir_okay=False, path_type=pathlib.Path)
_NEW = click.Path(dir_okay=False, writable=True, path_type=pathlib.Path)


class _SaidErrors(click.Group):
    """Ends with the sentence of an error, where Python would show its stack."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_SaidErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jaxbucket")
def main() -> None:
    """Shape buckets for training on variable-length data in JAX."""


main.add_command(measure)


@main.command()
@click.argument("lengths", type=_EXISTING)
@click.option("--max-tokens", type=_POSITIVE, required=True, help="B * T at most.")
@click.option("--num-buckets", type=_POSITIVE, default=8, show_default=True)
@click.option("--batch-size-multiple", type=_POSITIVE, default=1, show_default=True)
@click.option("--seq-len-multiple", type=_POSITIVE, default=1, show_default=True)
@click.option("--max-seq-len", type=_POSITIVE, help="T of the last bucket.")
@click.option(
    "--boundaries",
    default="optimal",
    show_default=True,
    help="optimal, quantile, geometric, or lengths such as 128,256,512.",
)
@click.option(
    "--overlong",
    type=click.Choice(OVERLONG),
    default="error",
    show_default=True,
    help="What happens to longer examples.",
)
@click.option("--column", help="Which array, column or field, if several.")
@click.option("--output", "-o", type=_NEW, help="Write the plan there, as JSON.")
@click.option("--plot", type=_NEW, help="Draw the plan there.")
@click.option("--json", "as_json", is_flag=True, help="Print every number as JSON.")
def plan(
    lengths: pathlib.Path,
    column: str | None,
    boundaries: str,
    output: pathlib.Path | None,
    plot: pathlib.Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan shapes for LENGTHS: a file of any kind that `jaxbucket measure` reads."""
    check_outputs([lengths], {"--output": output, "--plot": plot})
    measured = read_lengths(lengths, column)
    made = plan_buckets(measured, boundaries=_boundaries(boundaries), **options)
    if plot:
        _draw(made, measured, plot)
    if output:
        output.write_text(made.to_json() + "\n")
    _show(made, measured, as_json)


@main.command(name="report")
@click.argument("plan_file", metavar="PLAN", type=_EXISTING)
@click.argument("lengths", type=_EXISTING)
@click.option(
    "--remainder",
    type=click.Choice(get_args(Remainder)),
    default="cheapest",
    show_default=True,
    help="What becomes of examples that fill no batch.",
)
@click.option(
    "--accumulate",
    type=_POSITIVE,
    default=1,
    show_default=True,
    help="Micro-batches of a step.",
)
@click.option(
    "--group",
    type=click.Choice(GROUPS),
    default="same",
    show_default=True,
    help="Whether those have one bucket.",
)
@click.option("--column", help="Which array, column or field, if several.")
@click.option("--plot", type=_NEW, help="Draw the plan there.")
@click.option("--json", "as_json", is_flag=True, help="Print every number as JSON.")
def report_(
    plan_file: pathlib.Path,
    lengths: pathlib.Path,
    column: str | None,
    plot: pathlib.Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Report what PLAN, written by `jaxbucket plan -o`, costs on other LENGTHS."""
    check_outputs([plan_file, lengths], {"--plot": plot})
    made = BucketPlan.from_json(_read_text(plan_file))
    measured = read_lengths(lengths, column)
    if plot:
        _draw(made, measured, plot)
    _show(made, measured, as_json, **options)


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"`{path}` is no text file.") from None


def _boundaries(text: str) -> Any:
    parts = text.split(",")
    if all(part.strip().isdecimal() for part in parts):
        return [int(part) for part in parts]
    return text


def _show(plan: BucketPlan, lengths: np.ndarray, as_json: bool, **options: Any) -> None:
    epoch = report(plan, lengths, **options)
    if as_json:
        both = {"plan": json.loads(plan.to_json()), "report": epoch.to_dict()}
        click.echo(json.dumps({**both, "fingerprint": plan.fingerprint}, indent=2))
    else:
        from rich.console import Console

        Console(highlight=False).print(epoch)


def _draw(plan: BucketPlan, lengths: np.ndarray, path: pathlib.Path) -> None:
    """The plan from both sides: by tokens of each length, and example by example."""
    figure = new_figure("--plot", path, 8, 7)
    from jaxbucket.plots import plot_lengths, plot_plan

    above, below = figure.subplots(2, 1)
    plot_lengths(plan, lengths, above)
    plot_plan(plan, lengths, below).set_title("")
    save_figure(figure, "--plot", path)
