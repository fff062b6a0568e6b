"""Examples with several lengths in the commands: one `--column` for each sequence."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.cli.options import ShapeOptions
from jaxbucket.data.lengths.files import read_lengths
from jaxbucket.plan.sequence_limits import SequenceLimits


def _check_columns(
    _: click.Context, __: click.Parameter, columns: tuple[str, ...]
) -> tuple[str, ...]:
    for column in columns:
        if columns.count(column) > 1:
            raise click.BadParameter(f"{column!r} is given twice. Remove one of them.")
    return columns


column_option = click.option(
    "--column",
    "columns",
    metavar="NAME",
    multiple=True,
    callback=_check_columns,
    help="The array, column or field to read if the file has several. Repeat it for "
    "examples with several sequences, for example --column source --column target.",
)


def one_column(columns: Sequence[str], what: str, remedy: str) -> str | None:
    """Returns the column if there is one, where examples must have one length.

    Args:
      columns: the values of `--column`.
      what: the start of the message, up to "examples with one length".
      remedy: what else the user can do, as the start of a sentence.

    Raises:
      ValueError: if there are several columns.
    """
    if len(columns) > 1:
        raise ValueError(
            f"{what} examples with one length, but `--column` names {list(columns)}. "
            f"{remedy}, or pass one `--column`."
        )
    return columns[0] if columns else None


_NEEDS_COST_FN = "Use `--cost-fn` with a function of B and a mapping from column to T"


def one_length_only(boundaries: str | None, shapes: str | None) -> dict[str, str]:
    """Returns the options that several columns do not allow, with a remedy for each."""
    remedies = {}
    if boundaries is not None:
        remedies[f"--boundaries {boundaries}"] = (
            "Call `jb.plan_buckets` with a list of mappings from column to T"
        )
    if shapes is not None:
        remedies[f"--shapes {shapes}"] = (
            "Call `jb.BucketPlan.from_shapes` with a mapping from column to T for each "
            "shape"
        )
    return remedies


def check_several(
    columns: Sequence[str], given: Mapping[str, str], shape: ShapeOptions
) -> None:
    """Raises a ValueError for options that require examples with one length.

    Args:
      columns: the values of `--column`, at least two.
      given: such options, as they were given, and the remedy for each.
      shape: the limits of shapes, and the cost of a step.
    """
    costs = {
        f"--{name.replace('_', '-')}": _NEEDS_COST_FN
        for name, value in shape.cost_values.items()
        if value is not None and name not in ("cost_fn", "per_second")
    }
    for option, remedy in {**given, **costs}.items():
        raise ValueError(
            f"`{option}` requires examples with one length, but `--column` names "
            f"{list(columns)}. {remedy}, or remove `{option}`."
        )


def several_limits(shape: ShapeOptions, columns: Sequence[str]) -> SequenceLimits:
    """Returns the limits of shapes for several columns, with the cost of a step.

    Raises:
      ValueError: if `--max-tokens` is missing or a list, or a value is out of range.
    """
    budget: Any = shape.max_tokens
    if isinstance(budget, list):
        raise ValueError(
            f"`--max-tokens {shape.limit_values['max_tokens']}` is a list of budgets, "
            "one for each T. With several columns, pass one number, or a function of a "
            "mapping from column to T as module:function."
        )
    values = {**shape.limit_values, "max_tokens": budget, "cost_fn": shape.cost_fn}
    names = tuple(sorted(columns))
    return SequenceLimits(sequences=names, max_ratio=shape.max_ratio, **values)


def read_columns(path: pathlib.Path, columns: Sequence[str]) -> Any:
    """Returns the lengths in a file, `[N]`; by name if there are several columns.

    Args:
      path: the file of lengths.
      columns: the values of `--column`.
    """
    lengths = read_lengths(path, columns)
    if len(columns) > 1:
        return dict(zip(columns, lengths, strict=True))
    return lengths[0]


def read_for_plan(plan: BucketPlan, path: pathlib.Path, columns: Sequence[str]) -> Any:
    """Returns the lengths in a file as `read_columns` does, for the given plan.

    Args:
      plan: the shapes.
      path: the file of lengths.
      columns: the values of `--column`; by default the sequences of the plan.

    Raises:
      ValueError: if the columns are not the sequences of the plan.
    """
    names = list(plan.sequences)
    if not names:
        one_column(columns, "The plan is for", "Plan the same columns")
    elif columns and sorted(columns) != names:
        raise ValueError(
            f"`--column` names {list(columns)}, but the plan has the sequences "
            f"{names}. Name the same columns, or none."
        )
    return read_columns(path, names or columns)
