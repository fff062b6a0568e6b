"""How commands show a plan: as a table, as JSON, as a picture."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.reports.epoch import Report

_PAGE = 100
_WIDEST = 1000


def show_tables(*tables: Any) -> None:
    """Prints what `rich` draws, as wide as a page where there is no terminal.

    In a terminal too narrow for a table its lines are wrapped, and no number is cut.
    """
    from rich.console import Console

    # Not `Console.is_terminal`, which believes FORCE_COLOR.
    width = Console().width if sys.stdout.isatty() else _PAGE
    for table in tables:
        needed = Console(width=_WIDEST).measure(table.__rich__()).maximum
        Console(highlight=False, width=max(width, needed)).print(table)


def as_dict(plan: BucketPlan, epoch: Report) -> dict[str, Any]:
    """Every number of a plan and its epoch."""
    return {
        "plan": json.loads(plan.to_json()),
        "report": epoch.to_dict(),
        "fingerprint": plan.fingerprint,
    }


def show_json(numbers: dict[str, Any]) -> None:
    """Prints numbers as JSON."""
    click.echo(json.dumps(numbers, indent=2))


def draw_plan(figure: Any, plan: BucketPlan, lengths: np.ndarray) -> None:
    """The plan from both sides: by tokens of each length, and example by example."""
    from jaxbucket.plan.reports.plots import plot_lengths, plot_plan

    above, below = figure.subplots(2, 1)
    plot_lengths(plan, lengths, above)
    plot_plan(plan, lengths, below).set_title("")
