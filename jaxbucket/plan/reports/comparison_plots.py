"""Plots of several plans: a comparison, and a curve over the number of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.lengths import Lengths, total_lengths
from jaxbucket.plan.curve import PlanCurve
from jaxbucket.plan.formatting import count_shapes, format_cost
from jaxbucket.plan.reports.comparison import (
    ONE_SHAPE,
    OPTIMAL,
    ComparedPlan,
    Comparison,
)
from jaxbucket.plan.reports.plots import HATCHED, PADDING, REAL, new_page, row_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# The length, relative to the best bar, above which a bar is cut off; and the maximum
# number of characters of the name of a plan.
_WIDEST, _LONGEST_NAME = 2.5, 32
# Up to this ratio of the longest T to the shortest, ticks are powers of two.
_FEW_DOUBLINGS = 32


def plot_comparison(
    comparison: Comparison,
    lengths: Lengths,
    figure: Figure | SubFigure | None = None,
) -> Figure | SubFigure:
    """Plots the ends of every plan's buckets, its padding and its cost.

    A histogram above the ends shows how the tokens are spread over lengths.

    If examples have several sequences, T is the sum of their T.

    Args:
      comparison: a comparison of plans for the lengths.
      lengths: `[N]` integers, or sequence name -> `[N]` integers.
      figure: the figure to draw on; by default a new one of `comparison_height`.

    Raises:
      ValueError: if the lengths are not valid for the plans.
    """
    plans = comparison.plans
    real = _real_tokens(comparison[OPTIMAL].plan, lengths)
    if figure is None:
        figure = new_page(10, comparison_height(comparison))
    grid = figure.add_gridspec(
        2, 3, height_ratios=[1, 0.55 * len(plans)], width_ratios=[5, 3, 3]
    )
    ends = figure.add_subplot(grid[1, 0])
    padding = figure.add_subplot(grid[1, 1], sharey=ends)
    cost = figure.add_subplot(grid[1, 2], sharey=ends)
    tokens = figure.add_subplot(grid[0, 0], sharex=ends)
    _draw_tokens(real, tokens, comparison.unit)
    _draw_ends(comparison, ends)
    _draw_padding(comparison, padding)
    _draw_costs(comparison, cost)
    for ax in (padding, cost):
        ax.tick_params(labelleft=False)
    handles = [h for ax in (padding, cost) for h in ax.get_legend_handles_labels()[0]]
    key = figure.add_subplot(grid[0, 1:])
    key.set_axis_off()
    key.legend(handles=handles, loc="center", ncols=2, frameon=False, fontsize="small")
    return figure


def _real_tokens(plan: BucketPlan, lengths: Lengths) -> np.ndarray:
    """Returns the real tokens of each row."""
    if isinstance(lengths, Mapping):
        return total_lengths(plan.kept_lengths(lengths))
    return row_tokens(plan, lengths)[0]


def comparison_height(comparison: Comparison) -> float:
    """Returns the height in inches of a figure that fits all plans."""
    return 1.8 + 0.42 * len(comparison.plans)


def _draw_tokens(lengths: np.ndarray, ax: Axes, unit: str) -> None:
    # Lengths may span many orders of magnitude, so the bars widen with the length.
    lengths = lengths.astype(np.int64)
    edges = np.geomspace(lengths.min(), lengths.max() + 1, 129)
    tokens = np.histogram(lengths, edges, weights=lengths)[0]
    ax.fill_between(edges[:-1], tokens, step="post", color=REAL)
    # The bar of all truncated examples would flatten the others.
    highest = 1.3 * np.sort(tokens)[-2] or None
    ax.set(yticks=[], ylim=(0, highest), ylabel=unit)
    ax.tick_params(which="both", labelbottom=False)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _draw_ends(comparison: Comparison, ax: Axes) -> None:
    plans = comparison.plans
    for index, compared in enumerate(plans):
        ends = [bucket.tokens_per_row for bucket in compared.plan.buckets]
        ax.plot(ends, np.full(len(ends), index), "|", color=REAL, ms=11, mew=1.6)
    longest = max(x.plan.buckets[-1].tokens_per_row for x in plans)
    shortest = min(x.plan.buckets[0].tokens_per_row for x in plans)
    what = "sum of all T" if plans[0].plan.sequences else "T"
    ax.set(xscale="log", xlabel=f"{what} of the shapes ({comparison.unit})")
    ax.set(ylim=(len(plans) - 0.5, -0.5), xlim=(shortest / 1.5, longest * 1.1))
    if longest < _FEW_DOUBLINGS * shortest:
        # A short axis may contain no power of 10.
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_minor_formatter("")
    ax.set_yticks(range(len(plans)), [_name(compared) for compared in plans])
    ax.grid(axis="y", alpha=0.3)


def _name(compared: ComparedPlan) -> str:
    if compared.name.endswith(ONE_SHAPE):
        return compared.name
    return f"{_short(compared.name)}, {count_shapes(len(compared.plan))}"


def _short(name: str) -> str:
    """Returns a name, without its middle if it is too long for a plot."""
    half = _LONGEST_NAME // 2 - 1
    if len(name) > _LONGEST_NAME:
        name = f"{name[:half]}...{name[-half:]}"
    # matplotlib reads formulas between dollar signs.
    return name.replace("$", r"\$")


def _draw_padding(comparison: Comparison, ax: Axes) -> None:
    reports = [compared.report for compared in comparison.plans]
    indices = range(len(reports))
    in_rows = np.array([100 * r.padding_in_rows for r in reports])
    empty = np.array([100 * r.padding_in_empty_rows for r in reports])
    ax.barh(indices, in_rows, label="padding in rows", **HATCHED)
    hollow: Any = {"color": "white", "edgecolor": PADDING}
    ax.barh(indices, empty, left=in_rows, label="padding in empty rows", **hollow)
    ax.set(xlabel="padding (%)", xlim=(0, None))
    _label_bars(ax, [f"{r.padding:.1%}" for r in reports])


def _draw_costs(comparison: Comparison, ax: Axes) -> None:
    reports = [compared.report for compared in comparison.plans]
    over = np.array([r.epoch_cost for r in reports]) / reports[0].epoch_cost
    # The bar of a single shape may be so long that the others look equal next to it.
    end = min(over.max(), _WIDEST)
    ax.barh(range(len(over)), np.minimum(over, end), color=REAL)
    for index in np.flatnonzero(over > end).tolist():
        ax.text(end, index, f"{over[index]:,.2f}x > ", color="white", **_INSIDE)
    ax.set(xlabel="relative cost", xlim=(0, 1.05 * end))
    unit = comparison.unit
    _label_bars(ax, [format_cost(r.epoch_cost, r.cost_unit, unit) for r in reports])
    if comparison.least_cost is None:
        return
    least = comparison.least_cost / reports[0].epoch_cost
    # A white line under the dotted line keeps it visible on dark bars.
    ax.axvline(least, color="white", linewidth=2)
    dots: Any = {"color": "black", "linewidth": 1, "linestyle": ":"}
    ax.axvline(least, label="lower bound, one example per row", **dots)


_INSIDE: Any = {"ha": "right", "va": "center", "fontsize": "small"}


def _label_bars(ax: Axes, labels: list[str]) -> None:
    """Writes the number of each bar to the right of the axes, where there is room."""
    to_the_right = ax.get_yaxis_transform()
    for index, label in enumerate(labels):
        text = ax.text(1.02, index, label, transform=to_the_right)
        text.set(va="center", fontsize="small")


def plot_curve(
    curve: PlanCurve, figure: Figure | SubFigure | None = None
) -> Figure | SubFigure:
    """Plots padding and total time by the number of shapes, and marks the best one.

    Args:
      curve: the curve that `plan_curve` returns.
      figure: the figure to draw on; by default a new one.
    """
    if figure is None:
        figure = new_page(8, 4.5)
    left, right = figure.subplots(1, 2)
    points, chosen = curve.points, curve.chosen
    sizes = [point.num_buckets for point in points]
    left.plot(sizes, [100 * point.padding for point in points], "o-", color=PADDING)
    left.plot(chosen.num_buckets, 100 * chosen.padding, "o", color=REAL, ms=11)
    left.set(xlabel="shapes", ylabel="padding of an epoch (%)", ylim=(0, None))
    compiling = np.array([point.compile_seconds for point in points])
    running = np.array([curve.num_epochs * point.epoch_seconds for point in points])
    right.bar(sizes, running, color=REAL, label=f"{curve.num_epochs:g} epochs")
    right.bar(sizes, compiling, bottom=running, label="compiling", **HATCHED)
    label = (
        f"{count_shapes(chosen.num_buckets)}: {format_cost(chosen.total_seconds, 's')}"
    )
    mark: Any = {"color": "0.2", "mec": "white", "ms": 10, "label": label}
    right.plot(chosen.num_buckets, chosen.total_seconds, "v", **mark)
    right.set(xlabel="shapes", ylabel="total time (s)")
    total = running + compiling
    top = min(total.max() * 1.1, 3 * chosen.total_seconds)
    right.set_ylim(0, top)
    right.yaxis.set_major_formatter("{x:,g}")
    for size, seconds in zip(sizes, total.tolist(), strict=True):
        if seconds > top:
            text = right.text(
                size, top, f"{format_cost(seconds, 's')} > ", color="white"
            )
            text.set(rotation=90, ha="center", va="top", fontsize="small")
    place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
    right.legend(ncols=3, fontsize="small", frameon=False, **place)
    for ax in (left, right):
        ax.grid(axis="y", alpha=0.3)
        ax.locator_params("x", integer=True)
    figure.suptitle(curve.reason, fontsize="small", wrap=True)
    return figure
