"""The command `jaxbucket precompile`: compile a plan before the job starts."""

from __future__ import annotations

import math
import pathlib
import sys

import click

from jaxbucket.cli.options import EXISTING, POSITIVE, json_option
from jaxbucket.cli.output import show
from jaxbucket.cli.report import read_plan

_FOLDER = click.Path(file_okay=False, path_type=pathlib.Path)


@click.command()
@click.option(
    "--recipe",
    required=True,
    metavar="MODULE:FUNCTION",
    help="A function of the plan that returns (step_fn, state, specs), or a dict "
    "whose values are such triples.",
)
@click.option(
    "--plan",
    type=EXISTING,
    required=True,
    help="The plan that `jaxbucket plan -o` wrote.",
)
@click.option(
    "--cache", type=_FOLDER, help="Store the executables in this folder, for the job."
)
@click.option(
    "--key",
    default="",
    show_default=False,
    help="The `executables_key` of the job, if it passes one.",
)
@click.option(
    "--xla-cache", type=_FOLDER, help="Also fill jax's compilation cache here."
)
@click.option(
    "--memory-gb",
    type=click.FloatRange(min=0, min_open=True),
    help="Fail if a program needs more than this memory per device, in GB (1e9 "
    "bytes), or if its memory use is unknown.",
)
@click.option(
    "--workers",
    type=POSITIVE,
    help="Number of programs to compile in parallel. Defaults to half the number of "
    "cores.",
)
@json_option
@click.argument("arguments", nargs=-1)
def precompile(
    recipe: str,
    plan: pathlib.Path,
    cache: pathlib.Path | None,
    key: str,
    xla_cache: pathlib.Path | None,
    memory_gb: float | None,
    workers: int | None,
    as_json: bool,
    arguments: tuple[str, ...],
) -> None:
    """Compile every shape of a plan for the devices of this machine.

    For a job of several processes, start as many of this command, in the same way. The
    recipe is called with the plan and with ARGUMENTS, the arguments of the job, which
    follow `--`. The exit status is 1 if a program does not compile, needs more than
    --memory-gb, or cannot be stored in --cache.
    """
    shapes = read_plan(plan)
    from jaxbucket.cli.options import load_function
    from jaxbucket.compile.executables import make_writable, use_xla_cache
    from jaxbucket.compile.recipes import precompile
    from jaxbucket.distributed.processes import Processes

    function = load_function(recipe)
    with Processes() as processes:
        if xla_cache is not None:
            make_writable(xla_cache)
            use_xla_cache(xla_cache)
        done = precompile(
            function,
            shapes,
            *arguments,
            executables=cache,
            executables_key=key,
            workers=workers,
        )
    peaks = {f"{p.name} {p.label}": p.peak_bytes for p in done.report.programs}
    limit = math.inf if memory_gb is None else memory_gb * 1e9
    # Memory that is unknown is above any limit.
    above = [x for x, peak in peaks.items() if limit < (peak or math.inf)]
    not_kept = [
        f"{p.name} {p.label}" for p in done.report.programs if cache and not p.file
    ]
    checked = {"cache": cache and str(cache), "above": above, "not_kept": not_kept}
    if processes.index == 0:
        show(as_json, checked | done.to_dict(), done.report)
    for name, error in done.failures.items():
        click.echo(f"{name}: {error}", err=True)
    for name in above:
        click.echo(
            f"{name} needs more than --memory-gb {memory_gb:g}, or its memory use is "
            "unknown. Increase --memory-gb, or plan with a smaller --max-tokens.",
            err=True,
        )
    for name in not_kept:
        click.echo(
            f"{name} could not be stored in {cache}, so the job will compile it again.",
            err=True,
        )
    if done.failures or above or not_kept:
        sys.exit(1)
