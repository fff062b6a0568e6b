"""Pictures of several plans: those of a comparison, and those of a curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.plan.curve import PlanCurve
from jaxbucket.plan.formatting import count_shapes, in_unit
from jaxbucket.plan.reports.comparison import Comparison
from jaxbucket.plan.reports.plots import PADDING, REAL, new_page, row_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Times over the best, beyond which a bar is cut.
_WIDEST = 2.5


def plot_comparison(
    comparison: Comparison,
    lengths: ArrayLike,
    figure: Figure | SubFigure | None = None,
) -> Figure | SubFigure:
    """Draws where the buckets of every plan end, what they pad, and what it costs.

    Above stands where the tokens are: their histogram by length.

    Args:
      comparison: of plans for the lengths.
      lengths: `[N]` integers.
      figure: where to draw; by default a new one.

    Raises:
      ValueError: for lengths that the plans refuse.
    """
    plans = comparison.plans
    real, _ = row_tokens(plans[0].plan, lengths)
    if figure is None:
        figure = new_page(10, 1.8 + 0.42 * len(plans))
    grid = figure.add_gridspec(
        2, 3, height_ratios=[1, 0.55 * len(plans)], width_ratios=[5, 3, 3]
    )
    ends = figure.add_subplot(grid[1, 0])
    padding = figure.add_subplot(grid[1, 1], sharey=ends)
    cost = figure.add_subplot(grid[1, 2], sharey=ends)
    _draw_tokens(real, figure.add_subplot(grid[0, 0], sharex=ends))
    _draw_ends(comparison, ends)
    _draw_padding(comparison, padding)
    _draw_costs(comparison, cost)
    for ax in (padding, cost):
        ax.tick_params(labelleft=False)
    handles = [h for ax in (padding, cost) for h in ax.get_legend_handles_labels()[0]]
    key = figure.add_subplot(grid[0, 1:])
    key.set_axis_off()
    key.legend(handles=handles, loc="center", ncols=3, frameon=False)
    return figure


def _draw_tokens(lengths: np.ndarray, ax: Axes) -> None:
    # Of lengths over many orders of magnitude, so that the short ones can be seen.
    lengths = lengths.astype(np.int64)
    edges = np.geomspace(lengths.min(), lengths.max() + 1, 129)
    tokens = np.histogram(lengths, edges, weights=lengths)[0]
    ax.fill_between(edges[:-1], tokens, step="post", color=REAL)
    # Those that are cut to one length would flatten all others.
    highest = 1.3 * np.sort(tokens)[-2] or None
    ax.set(yticks=[], ylim=(0, highest), ylabel="tokens")
    ax.tick_params(labelbottom=False)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _draw_ends(comparison: Comparison, ax: Axes) -> None:
    plans = comparison.plans
    for place, compared in enumerate(plans):
        ends = compared.plan.boundaries
        ax.plot(ends, np.full(len(ends), place), "|", color=REAL, ms=11, mew=1.6)
    longest = max(compared.plan.max_seq_len for compared in plans)
    shortest = min(int(compared.plan.boundaries[0]) for compared in plans)
    ax.set(xscale="log", xlabel="buckets end at (positions)")
    ax.set(ylim=(len(plans) - 0.5, -0.5), xlim=(shortest / 1.5, longest * 1.1))
    names = [f"{one.name}, {count_shapes(len(one.plan))}" for one in plans]
    ax.set_yticks(range(len(plans)), names)
    ax.grid(axis="y", alpha=0.3)


def _draw_padding(comparison: Comparison, ax: Axes) -> None:
    reports = [compared.report for compared in comparison.plans]
    places = range(len(reports))
    in_rows = np.array([100 * r.padding_in_rows for r in reports])
    empty = np.array([100 * r.padding_in_empty_rows for r in reports])
    ax.barh(places, in_rows, color=PADDING, label="padding in rows")
    hatched: Any = {"color": "white", "edgecolor": PADDING, "hatch": "////"}
    ax.barh(places, empty, left=in_rows, label="empty rows", **hatched)
    for place, total in enumerate(in_rows + empty):
        ax.text(total, place, f" {total:.1f}", va="center", fontsize="small")
    ax.set(xlabel="padding of an epoch (%)", xlim=(0, 1.2 * (in_rows + empty).max()))


def _draw_costs(comparison: Comparison, ax: Axes) -> None:
    reports = [compared.report for compared in comparison.plans]
    over = np.array([r.epoch_cost for r in reports]) / reports[0].epoch_cost
    # The bars that matter would vanish beside that of one shape.
    end = min(over.max(), _WIDEST)
    ax.barh(range(len(over)), np.minimum(over, end), color=REAL)
    for place, epoch in enumerate(reports):
        text = f" {in_unit(epoch.epoch_cost, epoch.cost_unit)}"
        if over[place] > end:
            text += f", {over[place]:.1f}x >"
        ax.text(min(over[place], end), place, text, va="center", fontsize="small")
    ax.set(xlabel=f"epoch, over {comparison.plans[0].name}")
    ax.set_xlim(0, 2 * end)
    ax.axvline(
        comparison.least_cost / reports[0].epoch_cost,
        color="0.2",
        linewidth=0.8,
        linestyle=":",
        label="full batches",
    )


def plot_curve(
    curve: PlanCurve, figure: Figure | SubFigure | None = None
) -> Figure | SubFigure:
    """Draws what more shapes save an epoch, what they cost to compile, and the best.

    Args:
      curve: of `plan_curve`.
      figure: where to draw; by default a new one.
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
    right.bar(sizes, compiling, bottom=running, color=PADDING, label="compiling")
    label = f"{count_shapes(chosen.num_buckets)}: {chosen.total_seconds:,.0f} s"
    mark = {"color": "0.2", "ms": 9, "label": label}
    right.plot(chosen.num_buckets, chosen.total_seconds, "v", **mark)
    right.set(xlabel="shapes", ylabel="seconds in all")
    right.set_ylim(0, min((running + compiling).max() * 1.1, 3 * chosen.total_seconds))
    right.legend()
    for ax in (left, right):
        ax.grid(axis="y", alpha=0.3)
    figure.suptitle(curve.reason, fontsize="small", wrap=True)
    return figure
