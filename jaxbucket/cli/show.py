"""Output of the commands: tables, JSON and plots of plans."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.reports.epoch import Report

_PAGE = 100
_WIDEST = 1000


def show(
    as_json: bool, numbers: dict[str, Any], *tables: Any, sentence: str = ""
) -> None:
    """Prints numbers as JSON, or as tables.

    Outside of a terminal, text is wrapped at 100 characters. A table is never made
    narrower than its numbers, even if the terminal is.

    Args:
      as_json: whether to print JSON.
      numbers: the values to print as JSON.
      tables: the `rich` tables to print otherwise.
      sentence: text below the tables.
    """
    if as_json:
        click.echo(json.dumps(numbers, indent=2))
        return
    from rich.console import Console
    from rich.text import Text

    # Not `Console.is_terminal`, which is also true under FORCE_COLOR.
    width = Console().width if sys.stdout.isatty() else _PAGE
    for number, table in enumerate(tables):
        if number:
            click.echo()
        needed = Console(width=_WIDEST).measure(table.__rich__()).maximum
        Console(highlight=False, width=max(width, needed)).print(table)
    if sentence:
        click.echo()
        Console(highlight=False, width=width).print(Text(sentence))


def as_dict(plan: BucketPlan, epoch: Report) -> dict[str, Any]:
    """Returns every number of a plan and its epoch."""
    return {
        "plan": json.loads(plan.to_json()),
        "report": epoch.to_dict(),
        "fingerprint": plan.fingerprint,
    }


def draw_plan(figure: Any, plan: BucketPlan, lengths: Any, epoch: Report) -> None:
    """Draws a plan twice: as a histogram of its tokens, and example by example.

    The shapes of two sequences are drawn over their examples, and the padding of more
    sequences as bars.

    Args:
      figure: the figure to draw on.
      plan: the shapes.
      lengths: `[N]` integers, one per row; or sequence name -> `[N]` integers.
      epoch: the report of the plan.
    """
    if plan.sequences:
        from jaxbucket.plan.reports.sequence_plots import (
            plot_sequence_padding,
            plot_shapes,
        )

        if len(plan.sequences) == 2:
            plot_shapes(plan, lengths, figure.subplots(), epoch=epoch)
        else:
            plot_sequence_padding(epoch, figure.subplots())
        return
    from jaxbucket.plan.reports.plots import plot_lengths, plot_plan

    above, below = figure.subplots(2, 1)
    plot_lengths(plan, lengths, above, epoch=epoch)
    plot_plan(plan, lengths, below, epoch=epoch).set_title("")
