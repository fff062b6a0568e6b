"""Plots of lengths, plans and their costs. matplotlib is imported when one is drawn.

Colors differ in brightness and padding is hatched, so plots are readable in grayscale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.table import count_shapes, format_cost
from jaxbucket.plan.chunks import kept_lengths
from jaxbucket.plan.reports.comparison import ComparedPlan, Comparison
from jaxbucket.plan.reports.curve import PlanCurve
from jaxbucket.plan.reports.epoch import Report, report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# The maximum number of examples to draw, of cells of a histogram on each axis, of lines
# of a list of shapes, and of characters of such a list in one line.
_MAX_POINTS, _MAX_CELLS, _MAX_LINES, _MAX_CHARACTERS = 4096, 64, 25, 100
# The length, relative to the best bar, above which a bar is cut off; and the maximum
# number of characters of the name of a plan.
_WIDEST, _LONGEST_NAME = 2.5, 32
# Up to this ratio of the longest T to the shortest, ticks are powers of two.
_FEW_DOUBLINGS = 32
# If the longest length is more than this many medians, a linear axis would squeeze all
# other lengths into a few bars.
_WIDE = 8
REAL, PADDING, _OTHER = "#1f4e79", "#f0a04b", "0.9"
# Light enough for black lines.
_FEW, _MANY = "#dbe6f1", "#4a7fb0"
HATCHED: Any = {
    **{"facecolor": PADDING, "edgecolor": "white"},
    **{"linewidth": 0, "hatch": "////"},
}
_LINE: Any = {"color": "0.2", "linewidth": 0.8, "linestyle": ":"}


def plot_plan(
    plan: BucketPlan,
    lengths: LengthCounts | ArrayLike,
    ax: Axes | None = None,
    *,
    epoch: Report | None = None,
) -> Axes:
    """Plots the length of every example and its padding, as vertical lines.

    The shortest example is on the left. Areas are proportional to numbers of tokens:
    real tokens, padding up to the T of each example's bucket, and padding up to the
    longest T.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, one per example or per packed row; or `LengthCounts`.
      ax: the axes to draw on; by default those of a new figure.
      epoch: the report whose padding the legend shows; by default
        `report(plan, lengths)`.
    """
    ax = ax or new_page(8, 4).subplots()
    epoch = epoch or report(plan.unpacked, lengths)
    if isinstance(lengths, LengthCounts):
        lengths = lengths.spread(_MAX_POINTS)
    kept = kept_lengths(lengths, plan.max_seq_len, plan.overlong)[:, 0]
    real = LengthCounts(kept).spread(_MAX_POINTS)
    padded = plan.boundaries[plan.assign(real)]
    share = np.linspace(0, 100, len(real))
    longest = plan.max_seq_len
    in_one = 1 - epoch.real_tokens / max(epoch.examples * longest, 1)
    total, in_rows, empty = epoch.padding_shares
    padding = f"padding: {total} ({in_rows} in rows, {empty} empty rows)"
    one = {"color": _OTHER, "linewidth": 0, "label": f"with a single T={longest}"}
    one["label"] += f": {in_one:.1%}"
    ax.fill_between(share, 0, real, color=REAL, label=f"real {epoch.unit}")
    ax.fill_between(share, real, padded, label=padding, **HATCHED)
    ax.fill_between(share, padded, longest, **one)
    what = "packed rows" if epoch.packed_examples else "examples"
    ax.set(
        xlabel=f"{what}, shortest first (%)",
        ylabel=f"length ({epoch.unit})",
        xlim=(0, 100),
        ylim=(0, longest),
    )
    ax.yaxis.set_major_formatter("{x:,.0f}")
    names = "  ".join(map(str, plan.buckets))
    if len(names) > _MAX_CHARACTERS:
        names = f"{plan.buckets[0]} to {plan.buckets[-1]}"
    ax.set_title(f"{count_shapes(len(plan))}: {names}", fontsize="small", pad=24)
    _legend_above(ax)
    return ax


def plot_shapes(
    plan: BucketPlan,
    lengths: Mapping[str, ArrayLike],
    ax: Axes | None = None,
    *,
    epoch: Report | None = None,
) -> Axes:
    """Plots the examples of several sequences and the shapes that hold them.

    Each example is a point, whose coordinates are the lengths of its first two
    sequences, in a two-dimensional histogram. Each shape is a rectangle from the
    origin, numbered at the corner: it holds examples inside. A list names the shapes,
    such as [B, S x T].

    Args:
      plan: the shapes.
      lengths: sequence name -> `[N]` integers, one per example.
      ax: the axes to draw on; by default those of a new figure.
      epoch: the report whose padding the title shows; by default
        `report(plan, lengths)`.
    """
    epoch = epoch or report(plan, lengths)
    kept = plan.kept_lengths(lengths)
    ax = ax or new_page(8, 6).subplots()
    longest = list(plan.max_seq_lens.values())[:2]
    _draw_examples(ax, kept, longest)
    for number, (x, y) in enumerate(plan.seq_lens[:, :2].tolist(), start=1):
        ax.plot([0, x, x], [y, y, 0], color="black", linewidth=0.9)
        box: Any = {"facecolor": "white", "edgecolor": "black", "pad": 1.5}
        place: Any = {"ha": "center", "va": "center", "fontsize": "x-small"}
        ax.text(x, y, str(number), bbox=box | {"linewidth": 0.6}, **place)
    for axis, name in zip((ax.xaxis, ax.yaxis), plan.sequences, strict=False):
        axis.set_label_text(f"{name} ({epoch.unit})")
        axis.set_major_formatter("{x:,.0f}")
    # With room for the numbers at the corners.
    ax.set(xlim=(0, 1.04 * longest[0]), ylim=(0, 1.04 * longest[1]))
    shares = epoch.sequence_padding.items()
    each = ", ".join(f"{share:.1%} of {name}" for name, share in shares)
    title = f"{count_shapes(len(plan))}, {epoch.padding:.1%} padding: {each}"
    ax.set_title(title, fontsize="medium")
    _list_shapes(ax, plan)
    return ax


def _draw_examples(ax: Axes, lengths: np.ndarray, longest: list[int]) -> None:
    """Draws a histogram of `[N, Q]` lengths, in which each cell has integers."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    edges = []
    for end in longest:
        width = -(-end // _MAX_CELLS)
        edges.append(np.arange(0, end + width, width) + 0.5)
    counts, *_ = np.histogram2d(lengths[:, 0], lengths[:, 1], edges)
    cells = ax.pcolormesh(
        *edges,
        np.ma.masked_equal(counts.T, 0),
        cmap=LinearSegmentedColormap.from_list("examples", [_FEW, _MANY]),
        norm=LogNorm(1, max(counts.max(), 2)),
    )
    figure: Any = ax.get_figure()
    bar = figure.colorbar(cells, ax=ax, location="left", shrink=0.5, aspect=30)
    bar.set_label("examples", fontsize="small")
    bar.ax.yaxis.set_major_formatter("{x:,.0f}")
    bar.ax.tick_params(labelsize="small")
    bar.ax.minorticks_off()


def _list_shapes(ax: Axes, plan: BucketPlan) -> None:
    """Lists the shapes to the right of the axes, each with its number."""
    lines = [f"    [B, {' × '.join(plan.sequences)}]"]
    for number, bucket in enumerate(plan.buckets, start=1):
        sizes = " × ".join(map(str, plan.seq_lens[number - 1].tolist()))
        lines.append(f"{number:>2}  [{bucket.batch_size}, {sizes}]")
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 2], "    ...", lines[-1]]
    place: Any = {"xy": (1, 1), "xycoords": "axes fraction", "va": "top"}
    offset: Any = {"xytext": (10, 0), "textcoords": "offset points"}
    text = ax.annotate("\n".join(lines), **place, **offset)
    text.set(fontsize="small", family="monospace")


def plot_histogram(
    lengths: ArrayLike,
    figure: Figure | SubFigure | None = None,
    *,
    unit: str = "tokens",
    bins: int = 48,
) -> Figure | SubFigure:
    """Plots the distribution of lengths, by examples and by tokens.

    The upper panel shows the distribution of examples and of tokens over lengths, and
    the lower panel the cumulative distributions, with the lengths that 50%, 90% and 99%
    of the examples do not exceed.
    The scale is logarithmic if the longest example is far longer than the median.

    Args:
      lengths: `[N]` integers.
      figure: the figure to draw on; by default a new one.
      unit: the unit of lengths, such as "bytes".
      bins: the maximum number of bars.
    """
    from matplotlib.ticker import MaxNLocator

    counted = LengthCounts.of(lengths)
    values, counts = counted.lengths, counted.counts
    tokens = values.astype(float) * counts
    figure = figure or new_page(8, 6)
    above, below = figure.subplots(2, 1, sharex=True)
    up_to = values[np.searchsorted(np.cumsum(counts) / counts.sum(), [0.5, 0.9, 0.99])]
    # Edges are integers, so that each bar has an integer.
    low, high = int(values[0]), int(values[-1]) + 1
    is_wide = values[-1] > _WIDE * up_to[0]
    width = -(-(high - low) // bins)
    edges = np.arange(low, high + width, width)
    if is_wide:
        edges = np.unique(np.geomspace(low, high, bins + 1).round())
    for name, weights, color, style in (
        ("examples", counts, REAL, "-"),
        (unit, tokens, PADDING, "--"),
    ):
        share = 100 * weights / weights.sum()
        bars, _ = np.histogram(values, edges, weights=share)
        look = {"color": color, "linewidth": 2, "label": name}
        above.stairs(bars, edges, fill=name == "examples", **look)
        sums = np.concatenate([[0], np.cumsum(share), [100]])
        ends = np.concatenate([values[:1], values, edges[-1:]])
        below.step(ends, sums, linestyle=style, where="post", **look)
    for length in up_to.tolist():
        below.axvline(length, **_LINE)
    median, most, nearly_all = (f"{length:,}" for length in up_to.tolist())
    above.set(ylabel="share per bar (%)", xlim=(edges[0], edges[-1]))
    title = f"{counts.sum():,} examples, {int(tokens.sum()):,} {unit}"
    above.set_title(title, fontsize="medium", pad=24)
    below.set(ylabel="cumulative share (%)", ylim=(0, 103))
    below.set_xlabel(
        f"length ({unit}); 50% of examples up to {median}, 90% up to {most}, "
        f"99% up to {nearly_all}"
    )
    if is_wide:
        below.set_xscale("log", base=2)
    else:
        # Long numbers need more space.
        number = 9 if high < 1_000_000 else 5
        below.xaxis.set_major_locator(MaxNLocator(number, integer=True))
    below.xaxis.set_major_formatter("{x:,.0f}")
    for ax in (above, below):
        ax.grid(alpha=0.3)
        _legend_above(ax)
    return figure


def plot_comparison(
    comparison: Comparison, figure: Figure | SubFigure | None = None
) -> Figure | SubFigure:
    """Plots the ends of every plan's buckets, its padding and its cost.

    If examples have several sequences, T is the sum of their T.

    Args:
      comparison: the plans.
      figure: the figure to draw on; by default a new one of `comparison_height`.
    """
    figure = figure or new_page(10, comparison_height(comparison))
    ends, padding, cost = figure.subplots(1, 3, sharey=True, width_ratios=[5, 3, 3])
    _draw_ends(comparison, ends)
    _draw_padding(comparison, padding)
    _draw_costs(comparison, cost)
    handles = [h for ax in (padding, cost) for h in ax.get_legend_handles_labels()[0]]
    place: Any = {"loc": "outside upper right", "ncols": 3, "frameon": False}
    figure.legend(handles=handles, fontsize="small", **place)
    return figure


def comparison_height(comparison: Comparison) -> float:
    """Returns the height in inches of a figure that fits all plans."""
    return 1.3 + 0.42 * len(comparison.plans)


def _draw_ends(comparison: Comparison, ax: Axes) -> None:
    plans = comparison.plans
    for index, compared in enumerate(plans):
        ends = compared.plan.tokens_per_row
        ax.plot(ends, np.full(len(ends), index), "|", color=REAL, ms=11, mew=1.6)
    longest = max(x.plan.buckets[-1].tokens_per_row for x in plans)
    shortest = min(x.plan.buckets[0].tokens_per_row for x in plans)
    what = "sum of all T" if plans[0].plan.sequences else "T"
    ax.set_xscale("log")
    if longest < _FEW_DOUBLINGS * shortest:
        # A short axis may contain no power of 10.
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_minor_formatter("")
    ax.set(xlabel=f"{what} of the shapes ({comparison.unit})")
    ax.set(ylim=(len(plans) - 0.5, -0.5), xlim=(shortest / 1.5, longest * 1.1))
    ax.set_yticks(range(len(plans)), [_name(compared) for compared in plans])
    ax.grid(axis="y", alpha=0.3)


def _name(compared: ComparedPlan) -> str:
    """Returns the name of a plan, without its middle if it is too long for a plot."""
    name, half = compared.name, _LONGEST_NAME // 2 - 1
    if len(name) > _LONGEST_NAME:
        name = f"{name[:half]}...{name[-half:]}"
    # matplotlib reads formulas between dollar signs.
    name = name.replace("$", r"\$")
    return f"{name}, {count_shapes(len(compared.plan))}"


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
        text = ax.text(end, index, f"{over[index]:,.2f}x > ", color="white")
        text.set(ha="right", va="center", fontsize="small")
    ax.set(xlabel="relative cost", xlim=(0, 1.05 * end))
    unit = comparison.unit
    _label_bars(ax, [format_cost(r.epoch_cost, r.cost_unit, unit) for r in reports])
    if comparison.least_cost is not None:
        least = comparison.least_cost / reports[0].epoch_cost
        # A white line under the dotted line keeps it visible on dark bars.
        ax.axvline(least, color="white", linewidth=2)
        label = "lower bound, one example per row"
        ax.axvline(least, color="black", linewidth=1, linestyle=":", label=label)


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
    figure = figure or new_page(8, 4.5)
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
    # Few shapes may take so long that the other bars look equal next to theirs.
    right.set_ylim(0, min(total.max() * 1.1, 3 * chosen.total_seconds))
    right.yaxis.set_major_formatter("{x:,g}")
    _legend_above(right)
    for ax in (left, right):
        ax.grid(axis="y", alpha=0.3)
        ax.locator_params("x", integer=True)
    figure.suptitle(curve.reason, fontsize="small", wrap=True)
    return figure


def _legend_above(ax: Axes) -> None:
    place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
    ax.legend(ncols=3, fontsize="small", frameon=False, borderaxespad=0.2, **place)


def new_page(width: float, height: float) -> Figure:
    """Returns an empty figure of this width and height in inches."""
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout="constrained")
