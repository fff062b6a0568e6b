"""The command `jaxbucket fit`: the largest batch sizes that fit into memory."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import click

from jaxbucket.cli.options import (
    NEW,
    POSITIVE,
    form_option,
    load_function,
    recipe_options,
    using_topology,
)
from jaxbucket.cli.output import atomic_write, check_outputs, show


def _seq_lens(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    parts: list[Any] = text.split(",")
    return [POSITIVE.convert(x.strip(), option, context) for x in parts]


@click.command()
@click.option(
    "--seq-lens",
    required=True,
    metavar="T,T,...",
    callback=_seq_lens,
    help="The T for which to find the largest B, such as 128,512,2048.",
)
@click.option(
    "--batch-size-multiple",
    type=POSITIVE,
    help="Make every B a multiple of this; by default the number of devices.",
)
@recipe_options
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Part of the memory to leave free, such as 0.08.",
)
@click.option(
    "--output", "-o", type=NEW, help="Write the batch sizes to this file, as JSON."
)
@form_option
def fit(
    recipe: str,
    seq_lens: list[int],
    topology: str | None,
    num_slices: int,
    output: pathlib.Path | None,
    form: str | None,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Find the largest batch size of each T whose programs fit into memory.

    Programs are compiled and not run. The recipe is called with plans of one shape for
    each T, and with ARGUMENTS, which follow `--`. The output is a budget for `jaxbucket
    plan --max-tokens FILE`. The exit status is 1 if for some T nothing fits.
    """
    check_outputs(output=output)
    from jaxbucket.compile.fit import fit_batch_sizes

    with using_topology(topology, num_slices):
        fitted = fit_batch_sizes(load_function(recipe), seq_lens, *arguments, **options)
    if output:
        with atomic_write(output) as file:
            file.write(f"{fitted.to_json()}\n".encode())
    show(form, fitted.to_dict(), fitted)
    failed = [size.seq_len for size in fitted.sizes if not size.batch_size]
    for seq_len in failed:
        click.echo(
            f"No batch of T = {seq_len} fits. Use more memory, or a smaller "
            "--batch-size-multiple.",
            err=True,
        )
    sys.exit(bool(failed))
