"""The command `jaxbucket precompile`: compile a plan before the job starts."""

from __future__ import annotations

import math
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from jaxbucket.base.table import bytes_text
from jaxbucket.cli.options import (
    EXISTING,
    form_option,
    load_function,
    recipe_options,
    using_topology,
)
from jaxbucket.cli.output import show
from jaxbucket.cli.report import read_plan

if TYPE_CHECKING:
    from jaxbucket.compile.report import ProgramReport

_FOLDER = click.Path(file_okay=False, path_type=pathlib.Path)


@click.command()
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
@recipe_options
@form_option
def precompile(
    recipe: str,
    plan: pathlib.Path,
    cache: pathlib.Path | None,
    key: str,
    xla_cache: pathlib.Path | None,
    topology: str | None,
    num_slices: int,
    memory_bytes: float | None,
    workers: int | None,
    form: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Compile every shape of a plan, for the devices of this machine or for others.

    For a job of several processes, start as many of this command, in the same way. With
    --topology, nothing is stored, and one process compiles for all hosts. The recipe is
    called with the plan and with ARGUMENTS, the arguments of the job, which follow
    `--`. The exit status is 1 if a program does not compile, needs more than
    --memory-gb, or cannot be stored in --cache.
    """
    shapes = read_plan(plan)
    if topology and (cache or xla_cache):
        raise ValueError(
            "`topology` is for reports: executables for absent devices are not stored. "
            "Leave out `--cache` and `--xla-cache`."
        )
    from jaxbucket.compile.absent import default_devices, memory_limit
    from jaxbucket.compile.executables import make_writable, use_xla_cache
    from jaxbucket.compile.recipes import precompile
    from jaxbucket.distributed.processes import Processes

    function = load_function(recipe)
    with Processes() as processes, using_topology(topology, num_slices):
        if xla_cache is not None:
            make_writable(xla_cache)
            use_xla_cache(xla_cache)
        start = time.perf_counter()
        report, failures = precompile(
            function,
            shapes,
            *arguments,
            executables=cache,
            executables_key=key,
            workers=workers,
        )
        seconds = time.perf_counter() - start
        device = default_devices()[0]
        if memory_bytes is None and device.platform != "tpu":
            memory_bytes = memory_limit(device)
    limit = math.inf if memory_bytes is None else memory_bytes
    # Memory that is unknown is above any limit.
    above = [p for p in report.programs if limit < (p.peak_bytes or math.inf)]
    not_kept = [f"{p.name} {p.label}" for p in report.programs if cache and not p.file]
    if processes.index == 0:
        numbers = {
            "cache": cache and str(cache),
            "above": [f"{p.name} {p.label}" for p in above],
            "not_kept": not_kept,
            "programs": report.to_dict(),
            "failures": failures,
            "seconds": seconds,
        }
        show(form, numbers, report)
    problems = [*_problems(failures, above, limit, not_kept, cache)]
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        sys.exit(1)


def _problems(
    failures: dict[str, str],
    above: list[ProgramReport],
    limit: float,
    not_kept: list[str],
    cache: pathlib.Path | None,
) -> Iterator[str]:
    """Yields what is wrong with each program, and what to do about it."""
    for name, error in failures.items():
        yield f"{name}: {error}"
    for p in above:
        yield (
            f"{p.name} {p.label} needs {_missing(p.peak_bytes, limit)}. Find a "
            "--max-tokens that fits with `jaxbucket fit`, with this T in --seq-lens, "
            "or increase --memory-gb."
        )
    for name in not_kept:
        yield (
            f"{name} could not be stored in {cache}, so the job will compile it again."
        )


def _missing(peak: int | None, limit: float) -> str:
    """Returns how much memory a program needs, and what it lacks."""
    if peak is None:
        return "an unknown amount of memory"
    more = bytes_text(peak - limit)
    return f"{bytes_text(peak)}, {more} more than {bytes_text(limit)}"
