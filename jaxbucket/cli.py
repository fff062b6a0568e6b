"""The command `jaxbucket`: plans, reports and pictures, without a line of Python."""

from __future__ import annotations

import json
import pathlib
from typing import Any, get_args

import click
import numpy as np

from jaxbucket.base import GROUPS, OVERLONG, BucketPlan
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
@click.option("--column", help="Which array of an .npz file.")
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
    """Plan shapes for LENGTHS: an .npy or .npz file, or text with one on each line."""
    _check_outputs([lengths], {"--output": output, "--plot": plot})
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
@click.option("--column", help="Which array of an .npz file.")
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
    _check_outputs([plan_file, lengths], {"--plot": plot})
    made = BucketPlan.from_json(_read_text(plan_file))
    measured = read_lengths(lengths, column)
    if plot:
        _draw(made, measured, plot)
    _show(made, measured, as_json, **options)


def _check_outputs(
    inputs: list[pathlib.Path], outputs: dict[str, pathlib.Path | None]
) -> None:
    """Nothing that is written may be what is read, or what else is written."""
    taken = {path.resolve() for path in inputs}
    for name, path in outputs.items():
        if path and path.resolve() in taken:
            raise ValueError(
                f"`{name} {path}` would overwrite what this command reads or writes. "
                "Name another file."
            )
        taken |= {path.resolve()} if path else set()


def read_lengths(path: pathlib.Path, column: str | None) -> np.ndarray:
    """Returns the lengths in a file, `[N]`.

    Raises:
      ValueError: if the file is none of the kinds it may be, is cut, or has several
        arrays and `column` names none of them.
    """
    if path.suffix in (".npy", ".npz"):
        try:
            with path.open("rb") as file:
                loaded = np.load(file)
                # Whatever the file is called.
                arrays = dict(loaded) if hasattr(loaded, "files") else {"": loaded}
        except Exception as error:
            # Whatever comes to mind to a parser that is given other bytes.
            raise ValueError(f"`{path}` is no whole numpy file: {error}.") from None
        return _column(path, arrays, column)
    if column is not None:
        raise ValueError(f"`{path}` is no .npz file: no `--column`.")
    words = _read_text(path).split()
    try:
        return np.array([int(word) for word in words], np.int64)
    except (ValueError, OverflowError):
        raise ValueError(
            f"`{path}` is no .npy or .npz file, and not text with one integer on each "
            "line."
        ) from None


def _column(
    path: pathlib.Path, arrays: dict[str, np.ndarray], column: str | None
) -> np.ndarray:
    names = list(arrays)
    if names == [""] and column is not None:
        raise ValueError(f"`{path}` has one array, without a name: no `--column`.")
    if column is None and len(names) == 1:
        column = names[0]
    if column not in names:
        raise ValueError(f"`{path}` has {names}: name one of them by `--column`.")
    return arrays[column]


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
    try:
        import matplotlib
    except ImportError:
        raise click.ClickException(
            "`--plot` needs matplotlib: pip install 'jaxbucket[plots]'."
        ) from None
    from jaxbucket.plots import plot_lengths, plot_plan

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1)
    plot_lengths(plan, lengths, above)
    plot_plan(plan, lengths, below).set_title("")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise click.ClickException(f"`--plot {path}`: {error}.") from None
