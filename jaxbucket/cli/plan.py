"""The command `jaxbucket plan`: shapes for a set of lengths."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pathlib
from typing import Any, cast

import click

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.cli.length_options import LENGTHS, read_columns, reading_options
from jaxbucket.cli.limit_options import limit_options
from jaxbucket.cli.options import (
    NEW,
    POSITIVE,
    block_sparse_option,
    form_option,
    integer,
    load,
    plot_option,
    unit_option,
)
from jaxbucket.cli.output import (
    as_dict,
    atomic_write,
    check_outputs,
    draw_plan,
    new_figure,
    show,
)
from jaxbucket.packing.planner import PACK_CHOICES, PackedPlan, plan_packing
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.planner import RULES, plan_within
from jaxbucket.plan.reports.curve import PlanCurve, plan_curve
from jaxbucket.plan.reports.epoch import report


def _number(context: click.Context, option: click.Parameter, text: Any) -> Any:
    """Returns the value of `--num-buckets`: an integer, "auto" or None."""
    is_number = text not in ("auto", None)
    return POSITIVE.convert(text, option, context) if is_number else text


@click.command()
@click.argument("lengths", type=LENGTHS)
@click.option(
    "--num-buckets",
    callback=_number,
    help="Maximum number of shapes, 8 by default; or auto to balance compile time "
    "against padding.",
)
@click.option(
    "--boundaries",
    default="optimal",
    help=f"{', '.join(RULES)}; values of T such as 128,256,512; or module:list.",
)
@click.option(
    "--pack",
    type=click.Choice(PACK_CHOICES),
    default="never",
    help="Pack several examples into each row; auto packs if that costs less, or only "
    "a little more.",
)
@block_sparse_option
@click.option(
    "--compile-seconds",
    type=float,
    help="Time to compile one shape in seconds, for --num-buckets auto.",
)
@click.option(
    "--num-epochs",
    type=float,
    default=1.0,
    help="Number of epochs of the run, for --num-buckets auto.",
)
@limit_options
@reading_options
@unit_option
@click.option("--output", "-o", type=NEW, help="Write the plan to this file, as JSON.")
@plot_option
@form_option
def plan(
    lengths: pathlib.Path,
    reading: dict[str, Any],
    unit: str,
    output: pathlib.Path | None,
    plot: pathlib.Path | None,
    form: str | None,
    **options: Any,
) -> None:
    """Plan shapes for LENGTHS.

    LENGTHS is a file of any kind that `jaxbucket measure` reads. If you repeat
    --column, each column is a sequence with lengths of its own. A plan has shapes
    (B, T): batches of B rows of T tokens. If you use --pack, call
    `jb.packing.pack(lengths, [x.seq_len for x in plan.buckets],
    overlong=plan.overlong)` in the training job to fill the rows.
    """
    check_outputs(output=output, plot=plot)
    is_auto = options["num_buckets"] == "auto"
    with new_figure(plot, 8, 11 if is_auto else 7) as figure:
        rows = read_columns(lengths, **reading)
        made, curve, packed = _planned(rows, **options)
        if packed:
            epoch = packed.report
            rows = packed.packing.row_lengths if packed.packing else rows
        else:
            epoch = report(made, rows, accumulate=options["limits"]["accumulate"])
        epoch = dataclasses.replace(epoch, unit=unit)
        if figure:
            below = figure
            if curve:
                from jaxbucket.plan.reports.plots import plot_curve

                above, below = figure.subfigures(2, 1, height_ratios=[4, 7])
                plot_curve(curve, above)
            draw_plan(below, made, rows, epoch)
    if output:
        with atomic_write(output) as file:
            file.write(f"{made.to_json()}\n".encode())
    numbers, sentence = as_dict(made, epoch), ""
    tables: list[Any] = [epoch]
    if curve:
        numbers["curve"] = curve.to_dict()
        tables.insert(0, curve)
    if packed:
        sentence = packed.reason
        numbers["packing"] = packed.to_dict() | {"reason": sentence}
    show(form, numbers, *tables, sentence=sentence)


def _planned(
    lengths: Any,
    *,
    num_buckets: Any,
    boundaries: str,
    pack: Any,
    block_sparse: bool,
    compile_seconds: Any,
    num_epochs: float,
    limits: dict[str, Any],
) -> tuple[BucketPlan, PlanCurve | None, PackedPlan | None]:
    """Returns the plan that the options ask for."""
    given = [pack != "never", boundaries != "optimal", num_buckets == "auto"]
    if sum(given) > 1:
        raise ValueError(
            "`pack`, `boundaries` and `num_buckets=auto` each define the shapes. Pass "
            "only one of them, or pack rows of given T in Python, by `jb.packing.pack`."
        )
    rule = _boundaries(boundaries)
    if num_buckets and not isinstance(rule, str):
        raise ValueError(
            f"`num_buckets={num_buckets}`, but `boundaries` lists all shapes. Leave "
            "out one of the two."
        )
    check_block_sparse(block_sparse, pack)
    if num_buckets != "auto" and (compile_seconds, num_epochs) != (None, 1):
        raise ValueError(
            "`compile_seconds` and `num_epochs` require `num_buckets=auto`. Add "
            "`--num-buckets auto`."
        )
    if num_buckets == "auto":
        curve = plan_curve(
            lengths,
            Limits(**limits),
            compile_seconds=compile_seconds,
            num_epochs=num_epochs,
        )
        return curve.chosen.plan, curve, None
    num_buckets = num_buckets or 8
    if pack != "never":
        options: Any = {"num_buckets": num_buckets, "pack": pack}
        packed = pack_rows(lengths, limits, block_sparse=block_sparse, **options)
        return packed.plan, None, packed
    made = plan_within(
        lengths,
        Limits(**limits),
        num_buckets=num_buckets,
        boundaries=cast(Any, rule),
    )
    return made, None, None


def check_block_sparse(block_sparse: bool, pack: str) -> None:
    """Raises a ValueError if an option of packed rows would have no effect."""
    if block_sparse and pack == "never":
        raise ValueError("`block_sparse` requires `pack`. Add `--pack auto`.")


def pack_rows(lengths: Any, limits: dict[str, Any], **options: Any) -> PackedPlan:
    """Returns the plan of `plan_packing` within the limits of the options."""
    known = inspect.signature(plan_packing).parameters
    changed = {x: y for x, y in limits.items() if y != getattr(Limits, x, None)}
    for name in changed.keys() - known.keys():
        raise ValueError(
            f"`{name}={limits[name]}` is not for packed rows. Pass `--pack never`."
        )
    return plan_packing(lengths, **changed, **options)


def _boundaries(text: str) -> Any:
    """Returns the value of `--boundaries`: a rule, or a list of T."""
    if ":" in text:
        return load(text, "list")
    with contextlib.suppress(ValueError):
        return [*map(integer, text.split(","))]
    return text
