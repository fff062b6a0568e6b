"""The command `jaxbucket plan`: shapes for a set of lengths."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import click

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.lengths import Lengths
from jaxbucket.cli.budget import unused_budget
from jaxbucket.cli.columns import (
    check_several,
    column_option,
    one_length_only,
    read_columns,
    several_limits,
)
from jaxbucket.cli.options import (
    EXISTING,
    NEW,
    POSITIVE,
    ShapeOptions,
    block_sparse_option,
    integers,
    json_option,
    shape_options,
    unit_option,
)
from jaxbucket.cli.outputs import atomic_write, check_outputs, new_figure
from jaxbucket.cli.packing import check_packable, plan_rows, reason
from jaxbucket.cli.show import as_dict, draw_plan, show
from jaxbucket.packing.packed_plan import PACK_CHOICES, Pack, PackedPlan
from jaxbucket.plan.curve import PlanCurve
from jaxbucket.plan.curve_search import plan_curve
from jaxbucket.plan.joint_plan import plan_sequences
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.planner import RULES, plan_within
from jaxbucket.plan.reports.epoch import Report, report
from jaxbucket.plan.sequence_limits import SequenceLimits

_AUTO = "auto"


@click.command()
@click.argument("lengths", type=EXISTING)
@click.option(
    "--num-buckets",
    help="Maximum number of shapes, 8 by default; auto balances compile time against "
    "padding.",
)
@click.option(
    "--boundaries",
    help=f"{', '.join(RULES)}, or values of T such as 128,256,512; the default "
    "is optimal.",
)
@click.option(
    "--shapes", help="Use exactly these shapes B x T, for example 32x128,16x256."
)
@click.option(
    "--pack",
    type=click.Choice(PACK_CHOICES),
    default="never",
    help="Pack several examples into each row; auto packs if that costs less, or only "
    "a little more.",
)
@click.option(
    "--mixing",
    type=click.FloatRange(0, 1),
    help="With --pack: how much more rows may cost, as a share, if their batches mix "
    "lengths; the default is 0.01.",
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
    help="Number of epochs of the run, for --num-buckets auto; the default is 1.",
)
@click.option(
    "--max-buckets",
    type=POSITIVE,
    help="Maximum number of shapes to try, for --num-buckets auto; the default is 32.",
)
@shape_options
@column_option
@unit_option
@click.option("--output", "-o", type=NEW, help="Write the plan to this file, as JSON.")
@click.option("--plot", type=NEW, help="Draw the plan to this file.")
@json_option
def plan(
    lengths: pathlib.Path,
    num_buckets: str | None,
    boundaries: str | None,
    shapes: str | None,
    pack: Pack,
    mixing: float | None,
    block_sparse: bool,
    compile_seconds: float | None,
    num_epochs: float | None,
    max_buckets: int | None,
    shape: ShapeOptions,
    columns: tuple[str, ...],
    unit: str,
    output: pathlib.Path | None,
    plot: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Plan shapes for LENGTHS.

    LENGTHS is a file of any kind that `jaxbucket measure` reads. If you repeat
    --column, each column is a sequence with lengths of its own. A plan has shapes
    (B, T): batches of B rows of T tokens. If you use --pack, call
    `jb.packing.pack(lengths, [bucket.seq_len for bucket in plan.buckets],
    overlong=plan.overlong)` in the training job to fill the rows.
    """
    check_outputs([lengths, *shape.inputs], output=output, plot=plot)
    if len(columns) > 1:
        check_several(columns, one_length_only(boundaries, shapes), shape)
    else:
        shape.check_one_length()
    if shapes is not None:
        shape.check_free()
    auto = {
        "--compile-seconds": compile_seconds,
        "--num-epochs": num_epochs,
        "--max-buckets": max_buckets,
    }
    _check_choice(shapes, boundaries, num_buckets, auto)
    needs_pack = {"--mixing": mixing is not None, "--block-sparse": block_sparse}
    _check_pack(pack, needs_pack, shape, shapes, boundaries, num_buckets)
    with new_figure(plot, 8, 11 if num_buckets == _AUTO else 7) as figure:
        size = 8 if num_buckets in (None, _AUTO) else _number(num_buckets)
        measured: Any = read_columns(lengths, columns)
        limits = several_limits(shape, columns) if len(columns) > 1 else None
        if num_buckets == _AUTO:
            chosen = _by_curve(measured, limits or shape.limits(), shape, auto)
        elif pack != "never":
            options = {} if mixing is None else {"mixing": mixing}
            within = limits or shape.limits()
            packed = plan_rows(measured, within, size, pack, block_sparse, **options)
            chosen = _packed(measured, packed)
        elif limits:
            made = plan_sequences(measured, limits, size)
            chosen = _Chosen(made, measured, shape.accumulate)
        elif shapes is not None:
            chosen = _Chosen(shape.fixed_plan(shapes), measured, shape.accumulate)
        else:
            chooser = "optimal" if boundaries is None else _chooser(boundaries)
            made = plan_within(measured, shape.limits(), size, chooser)
            chosen = _Chosen(made, measured, shape.accumulate)
        epoch = dataclasses.replace(chosen.epoch, unit=unit)
        if figure:
            _draw(figure, chosen, epoch)
    if output:
        with atomic_write("--output", output) as file:
            file.write(f"{chosen.plan.to_json()}\n".encode())
    numbers, notes = as_dict(chosen.plan, epoch), []
    if len(columns) < 2:
        unused = None
        if shapes is None:
            unused = unused_budget(chosen.plan, shape.limits(), epoch)
        if unused:
            notes.append(unused.sentence(unit))
        numbers["unused_budget"] = unused and unused.to_dict(unit)
    tables: list[Any] = [epoch]
    if chosen.curve:
        numbers["curve"] = chosen.curve.to_dict()
        tables.insert(0, chosen.curve)
    if chosen.packed:
        why = reason(chosen.packed, unit)
        with_unit = dataclasses.replace(chosen.packed, report=epoch)
        numbers["packing"] = with_unit.to_dict() | {"reason": why}
        notes.append(why)
    show(as_json, numbers, *tables, sentence="\n".join(notes))


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """A plan, and how it was chosen.

    Attributes:
      plan: the shapes.
      rows: the lengths of its rows, packed or not; by column if there are several.
      accumulate: micro-batches per step.
      curve: the plans of other numbers of shapes, if these were compared.
      packed: the comparison of packed and padded rows, if these were compared.
    """

    plan: BucketPlan
    rows: Any
    accumulate: int = 1
    curve: PlanCurve | None = None
    packed: PackedPlan | None = None

    @functools.cached_property
    def epoch(self) -> Report:
        if self.packed:
            return self.packed.report
        return report(self.plan, self.rows, accumulate=self.accumulate)


def _by_curve(
    lengths: Lengths,
    limits: Limits | SequenceLimits,
    shape: ShapeOptions,
    auto: dict[str, Any],
) -> _Chosen:
    num_epochs = auto["--num-epochs"]
    curve = plan_curve(
        lengths,
        limits,
        compile_seconds=auto["--compile-seconds"],
        num_epochs=1 if num_epochs is None else num_epochs,
        max_buckets=auto["--max-buckets"] or 32,
    )
    return _Chosen(curve.chosen.plan, lengths, shape.accumulate, curve)


def _packed(lengths: Lengths, packed: PackedPlan) -> _Chosen:
    rows = lengths if packed.packing is None else packed.packing.row_lengths
    return _Chosen(packed.plan, rows, packed=packed)


def _check_pack(
    pack: Pack,
    needs_pack: dict[str, bool],
    shape: ShapeOptions,
    shapes: str | None,
    boundaries: str | None,
    num_buckets: str | None,
) -> None:
    """Raises a ValueError for options that contradict `--pack` or need it."""
    if pack == "never":
        for name, given in needs_pack.items():
            if given:
                raise ValueError(
                    f"`{name}` requires `--pack`. Remove it, or add `--pack auto`."
                )
        return
    others = {
        "--shapes": shapes is not None,
        "--boundaries": boundaries is not None,
        f"--num-buckets {_AUTO}": num_buckets == _AUTO,
    }
    check_packable(pack, shape, [name for name, given in others.items() if given])


def _check_choice(
    shapes: str | None,
    boundaries: str | None,
    num_buckets: str | None,
    auto: dict[str, Any],
) -> None:
    """Raises a ValueError for options that contradict each other or have no effect."""
    is_auto = num_buckets == _AUTO
    choices = {
        "--shapes": shapes,
        "--boundaries": boundaries,
        "--num-buckets": num_buckets,
    }
    used = [name for name, value in choices.items() if value is not None]
    listed = boundaries is not None and integers(boundaries) is not None
    if len(used) > 1 and (used[0] == "--shapes" or is_auto or listed):
        raise ValueError(
            f"`{used[0]}` and `{used[1]}` both define the shapes. Remove one of them."
        )
    for name, value in auto.items():
        if value is not None and not is_auto:
            raise ValueError(
                f"`{name}` requires `--num-buckets {_AUTO}`. Add it, or remove "
                f"`{name}`."
            )


def _number(text: str) -> int:
    numbers = integers(text) or [0]
    if len(numbers) > 1 or numbers[0] < 1:
        raise ValueError(
            f"`--num-buckets {text}` is not a positive integer. Pass a positive "
            f"integer, or {_AUTO}."
        )
    return numbers[0]


def _chooser(text: str) -> Any:
    if ":" in text:
        from jaxbucket.data.lengths.functions import load_function

        return load_function(text)
    return integers(text) or text


def _draw(figure: Any, chosen: _Chosen, epoch: Report) -> None:
    if chosen.curve is None:
        draw_plan(figure, chosen.plan, chosen.rows, epoch)
        return
    from jaxbucket.plan.reports.comparison_plots import plot_curve

    above, below = figure.subfigures(2, 1, height_ratios=[4, 7])
    plot_curve(chosen.curve, above)
    draw_plan(below, chosen.plan, chosen.rows, epoch)
