"""Pictures of what a plan does and of a run. matplotlib is imported where one is drawn.

Buckets go from dark to light as they grow longer, so that a print in grey tells them
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base import Bucket, BucketPlan
from jaxbucket.checks import check_lengths
from jaxbucket.comparison import Comparison
from jaxbucket.curve import PlanCurve
from jaxbucket.stats import StepRecord, bucket_uses, in_unit, report, row_lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_MAX_POINTS = 4096
# Times over the best, beyond which a bar is cut.
_WIDEST = 2.5
_REAL, _PADDING, _OTHER = "#1f4e79", "#f0a04b", "0.88"


def plot_plan(plan: BucketPlan, lengths: ArrayLike, ax: Axes | None = None) -> Axes:
    """Draws every example as a line as long as it is, and the padding behind it.

    Examples stand side by side, the shortest first, so that areas are tokens: real
    ones, the padding that the plan adds, and what the last bucket alone would add.

    Args:
      plan: the shapes.
      lengths: `[N]` integers.
      ax: where to draw; by default a new figure.

    Raises:
      ValueError: for lengths the plan refuses.
    """
    if ax is None:
        ax = _axes()
    real, padded = _tokens(plan, lengths)
    order = np.argsort(real, kind="stable")
    shown = np.linspace(0, len(order) - 1, min(len(order), _MAX_POINTS)).astype(int)
    real, padded = real[order][shown], padded[order][shown]
    share = np.linspace(0, 100, len(shown))
    longest = np.full(len(shown), plan.max_seq_len)
    epoch = report(plan, lengths)
    in_one = 1 - epoch.real_tokens / (epoch.examples * plan.max_seq_len)
    ax.fill_between(
        share,
        padded,
        longest,
        color=_OTHER,
        label=f"padding in one shape: {in_one:.0%}",
    )
    ax.fill_between(
        share,
        real,
        padded,
        color=_PADDING,
        label=f"padding of this plan: {epoch.padding:.0%}",
    )
    ax.fill_between(share, 0, real, color=_REAL, label="real tokens")
    ax.set(
        xlabel="examples, shortest first (%)",
        ylabel="positions",
        title=_shapes(plan.buckets),
        xlim=(0, 100),
        ylim=(0, plan.max_seq_len),
    )
    ax.title.set_fontsize("small")
    ax.legend(loc="upper left")
    return ax


def plot_lengths(
    plan: BucketPlan, lengths: ArrayLike, ax: Axes | None = None, *, bins: int = 64
) -> Axes:
    """Draws a histogram of lengths, weighed by tokens, and the padding on top of it.

    Areas are tokens: below those of the examples of a length, above it the padding
    that takes them to the end of their bucket. Lines are the buckets' ends.

    Args:
      plan: the shapes.
      lengths: `[N]` integers.
      ax: where to draw; by default a new figure.
      bins: bars of the histogram.

    Raises:
      ValueError: for lengths the plan refuses.
    """
    if ax is None:
        ax = _axes()
    real, padded = _tokens(plan, lengths)
    padding = padded - real
    edges = np.linspace(0, plan.max_seq_len, bins + 1)
    # Lengths are integers: one at an edge belongs to the bar that ends there.
    bar = np.clip(np.ceil(real * bins / plan.max_seq_len).astype(int) - 1, 0, bins - 1)
    tokens = np.bincount(bar, real, minlength=bins)
    wasted = np.bincount(bar, padding, minlength=bins)
    width = edges[1]
    ax.bar(edges[:-1], tokens, width, align="edge", color=_REAL, label="real tokens")
    ax.bar(
        edges[:-1],
        wasted,
        width,
        bottom=tokens,
        align="edge",
        color=_PADDING,
        label=f"padding in rows: {wasted.sum() / (tokens.sum() + wasted.sum()):.0%}",
    )
    for number, bucket in enumerate(plan.buckets):
        label = "ends of buckets" if number == 0 else None
        ax.axvline(
            bucket.seq_len, color="0.2", linewidth=0.8, linestyle=":", label=label
        )
    ax.set(xlabel="length", ylabel="tokens", xlim=(0, plan.max_seq_len))
    ax.set_title(_shapes(plan.buckets), fontsize="small")
    ax.legend()
    return ax


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
      ValueError: for lengths that `check_lengths` refuses.
    """
    lengths = check_lengths(lengths)
    plans = comparison.plans
    if figure is None:
        figure = _figure(10, 1.8 + 0.42 * len(plans))
    grid = figure.add_gridspec(
        2, 3, height_ratios=[1, 0.55 * len(plans)], width_ratios=[5, 3, 3]
    )
    ends = figure.add_subplot(grid[1, 0])
    padding = figure.add_subplot(grid[1, 1], sharey=ends)
    cost = figure.add_subplot(grid[1, 2], sharey=ends)
    _draw_tokens(lengths, figure.add_subplot(grid[0, 0], sharex=ends))
    _draw_ends(comparison, ends)
    _draw_padding(comparison, padding)
    _draw_costs(comparison, cost)
    for ax in (padding, cost):
        ax.tick_params(labelleft=False)
    handles, labels = padding.get_legend_handles_labels()
    key = figure.add_subplot(grid[0, 1:])
    key.set_axis_off()
    key.legend(handles, labels, loc="center", ncols=2, frameon=False)
    return figure


def _draw_tokens(lengths: np.ndarray, ax: Axes) -> None:
    # Of lengths over many orders of magnitude, so that the short ones can be seen.
    edges = np.geomspace(lengths.min(), lengths.max() + 1, 129)
    tokens = np.histogram(lengths, edges, weights=lengths)[0]
    ax.fill_between(edges[:-1], tokens, step="post", color=_REAL)
    ax.set(yticks=[], ylim=(0, None), ylabel="tokens")
    ax.tick_params(labelbottom=False)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _draw_ends(comparison: Comparison, ax: Axes) -> None:
    plans = comparison.plans
    for place, compared in enumerate(plans):
        ends = compared.plan.boundaries
        ax.plot(ends, np.full(len(ends), place), "|", color=_REAL, ms=11, mew=1.6)
    longest = max(compared.plan.max_seq_len for compared in plans)
    shortest = min(int(compared.plan.boundaries[0]) for compared in plans)
    ax.set(xscale="log", xlabel="buckets end at (positions)")
    ax.set(ylim=(len(plans) - 0.5, -0.5), xlim=(shortest / 1.5, longest * 1.1))
    ax.set_yticks(
        range(len(plans)), [f"{one.name}, {len(one.plan)} shapes" for one in plans]
    )
    ax.grid(axis="y", alpha=0.3)


def _draw_padding(comparison: Comparison, ax: Axes) -> None:
    reports = [compared.report for compared in comparison.plans]
    places = range(len(reports))
    in_rows = np.array([100 * r.padding_in_rows for r in reports])
    empty = np.array([100 * r.padding_in_empty_rows for r in reports])
    ax.barh(places, in_rows, color=_PADDING, label="padding in rows")
    ax.barh(
        places,
        empty,
        left=in_rows,
        color="white",
        edgecolor=_PADDING,
        hatch="////",
        label="empty rows",
    )
    for place, total in enumerate(in_rows + empty):
        ax.text(total, place, f" {total:.1f}", va="center", fontsize="small")
    ax.set(xlabel="padding of an epoch (%)", xlim=(0, 1.2 * (in_rows + empty).max()))


def _draw_costs(comparison: Comparison, ax: Axes) -> None:
    reports = [compared.report for compared in comparison.plans]
    over = np.array([r.epoch_cost for r in reports]) / reports[0].epoch_cost
    # The bars that matter would vanish beside that of one shape.
    end = min(over.max(), _WIDEST)
    ax.barh(range(len(over)), np.minimum(over, end), color=_REAL)
    for place, epoch in enumerate(reports):
        text = f" {in_unit(epoch.epoch_cost, epoch.cost_unit)}"
        if over[place] > end:
            text += f", {over[place]:.1f}x >"
        ax.text(min(over[place], end), place, text, va="center", fontsize="small")
    ax.set(xlabel=f"an epoch, over that of {comparison.plans[0].name}")
    ax.set_xlim(0, 2 * end)
    ax.axvline(
        comparison.least_cost / reports[0].epoch_cost,
        color="0.2",
        linewidth=0.8,
        linestyle=":",
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
        figure = _figure(8, 4.5)
    left, right = figure.subplots(1, 2)
    points, chosen = curve.points, curve.chosen
    sizes = [point.num_buckets for point in points]
    left.plot(sizes, [100 * point.padding for point in points], "o-", color=_PADDING)
    left.plot(chosen.num_buckets, 100 * chosen.padding, "o", color=_REAL, ms=11)
    left.set(xlabel="shapes", ylabel="padding of an epoch (%)", ylim=(0, None))
    compiling = np.array([point.compile_seconds for point in points])
    running = np.array([curve.num_epochs * point.epoch_seconds for point in points])
    right.bar(sizes, running, color=_REAL, label=f"{curve.num_epochs:g} epochs")
    right.bar(
        sizes,
        compiling,
        bottom=running,
        color=_PADDING,
        label="compiling",
    )
    right.plot(
        chosen.num_buckets,
        chosen.total_seconds,
        "v",
        color="0.2",
        ms=9,
        label=f"{chosen.num_buckets} shapes: {chosen.total_seconds:,.0f} s",
    )
    right.set(xlabel="shapes", ylabel="seconds in all")
    right.set_ylim(0, min((running + compiling).max() * 1.1, 3 * chosen.total_seconds))
    right.legend()
    for ax in (left, right):
        ax.grid(axis="y", alpha=0.3)
    figure.suptitle(curve.reason, fontsize="small", wrap=True)
    return figure
def plot_histogram(
    lengths: ArrayLike,
    figure: Figure | SubFigure | None = None,
    *,
    unit: str = "tokens",
    bins: int = 48,
) -> Figure | SubFigure:
    """Draws how many examples are how long, and how many of all tokens they have.

    Above are the shares of examples and of tokens by length, below both added up, with
    the lengths that a half, 90% and 99% of the examples do not exceed. Lengths that
    spread far are on a logarithmic scale.

    Args:
      lengths: `[N]` integers.
      figure: where to draw; by default a new one.
      unit: what lengths count.
      bins: bars at most.

    Raises:
      ValueError: if there are no lengths, or one is none.
    """
    values, counts = np.unique(check_lengths(lengths), return_counts=True)
    tokens = values.astype(float) * counts
    if figure is None:
        figure = _figure(8, 6)
    above, below = figure.subplots(2, 1, sharex=True)
    wide = values[-1] > _WIDE * _length_of_share(values, counts, 0.5)
    edges = _bin_edges(int(values[0]), int(values[-1]) + 1, bins, wide)
    for name, weights, color, style in (
        ("examples", counts, _REAL, "-"),
        (unit, tokens, _PADDING, "--"),
    ):
        share = 100 * weights / weights.sum()
        bars, _ = np.histogram(values, edges, weights=share)
        look = {"color": color, "linewidth": 2, "label": name}
        above.stairs(bars, edges, fill=name == "examples", **look)
        sums = np.concatenate([[0], np.cumsum(share), [100]])
        ends = np.concatenate([values[:1], values, edges[-1:]])
        below.step(ends, sums, linestyle=style, where="post", **look)
    _mark_shares(below, values, counts)
    _integer_axis(below, wide)
    above.set(ylabel="share in a bar (%)", xlim=(edges[0], edges[-1]))
    above.set_title(f"{counts.sum():,} examples, {int(tokens.sum()):,} {unit}")
    below.set(xlabel=f"length ({unit})", ylabel="share up to a length (%)")
    below.set_ylim(0, 103)
    for ax in (above, below):
        ax.grid(alpha=0.3)
        ax.legend()
    return figure


# A length that is so many times the median would press all others together.
_WIDE = 8


def _bin_edges(low: int, high: int, bins: int, wide: bool) -> np.ndarray:
    """Integers from `low` to `high`: no bar is empty for want of an integer in it."""
    if wide:
        return np.unique(np.geomspace(low, high, bins + 1).round())
    least = -(-(high - low) // bins)
    # The last bar should be as full as the others.
    width = min(range(least, 2 * least), key=lambda width: -(high - low) % width)
    return np.arange(low, high + width, width)


def _length_of_share(values: np.ndarray, counts: np.ndarray, share: float) -> int:
    """The length that this share of all examples does not exceed."""
    below = np.cumsum(counts)
    return int(values[np.searchsorted(below, share * below[-1])])


def _mark_shares(ax: Axes, values: np.ndarray, counts: np.ndarray) -> None:
    for share in (0.5, 0.9, 0.99):
        length = _length_of_share(values, counts, share)
        ax.axvline(length, color="0.2", linewidth=0.8, linestyle=":")
        text = ax.text(length, 4, f"{share:.0%}: {length:,}", rotation=90, ha="right")
        text.set(fontsize="small", bbox={"color": "white", "alpha": 0.8, "pad": 1})


def _integer_axis(ax: Axes, wide: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    if wide:
        ax.set_xscale("log", base=2)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")


def plot_buckets(
    records: Sequence[StepRecord], figure: Figure | SubFigure | None = None
) -> Figure | SubFigure:
    """Draws what each bucket had of a run: its padding, its time, a position's cost.

    Args:
      records: the steps of the run.
      figure: where to draw; by default a new one.

    Raises:
      ValueError: if `records` is empty.
    """
    uses = bucket_uses(_not_empty(records))
    if figure is None:
        figure = _figure(8, 3)
    panels = {
        "padding (%)": [100 * use.padding for use in uses],
        "time (% of the run)": [
            100 * use.seconds / sum(use.seconds for use in uses) for use in uses
        ],
        "time per position (us)": [1e6 * use.seconds_per_token for use in uses],
    }
    colors = _colors([use.bucket for use in uses])
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (title, values) in zip(axes, panels.items(), strict=True):
        ax.barh(range(len(uses)), values, color=[colors[use.bucket] for use in uses])
        ax.set_title(title, fontsize="medium")
        ax.grid(axis="x", alpha=0.3)
    _name_some(axes[0], [str(use.bucket) for use in uses])
    return figure


def plot_run(
    records: Sequence[StepRecord], figure: Figure | SubFigure | None = None
) -> Figure | SubFigure:
    """Draws loss, learning rate and real tokens/s of every step, coloured by bucket.

    Args:
      records: the steps of the run.
      figure: where to draw; by default a new one.

    Raises:
      ValueError: if `records` is empty.
    """
    records = _not_empty(records)
    if figure is None:
        figure = _figure(8, 6)
    buckets = sorted({r.bucket for r in records}, key=lambda b: (b.seq_len, b))
    colors = _colors(buckets)
    panels = {
        "loss (nats per token)": [r.loss for r in records],
        "learning rate": [r.learning_rate for r in records],
        "real tokens/s": [r.real_tokens / r.seconds for r in records],
    }
    axes = figure.subplots(len(panels), 1, sharex=True)
    steps = np.array([r.step for r in records])
    of_bucket = {b: np.array([r.bucket == b for r in records]) for b in buckets}
    shown = buckets if len(buckets) <= _MAX_NAMED else [buckets[0], buckets[-1]]
    for ax, (title, values) in zip(axes, panels.items(), strict=True):
        for bucket in buckets:
            own = of_bucket[bucket]
            label = str(bucket) if bucket in shown else None
            points = np.array(values)[own]
            ax.scatter(steps[own], points, 8, color=colors[bucket], label=label)
        ax.set_ylabel(title)
        ax.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", title="[B, T]")
    return figure


_MAX_NAMED = 16


def _tokens(plan: BucketPlan, lengths: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Of every example or chunk that is kept: its real tokens, and T of its bucket."""
    lengths = row_lengths(plan, check_lengths(lengths))
    index = plan.assign(lengths)
    kept = index >= 0
    if not kept.any():
        raise ValueError(
            "`overlong='drop'` leaves out every example: there is nothing to draw. "
            "Plan with a larger `max_seq_len`."
        )
    real = np.minimum(lengths[kept], plan.max_seq_len)
    return real, plan.boundaries[index[kept]]


def _name_some(ax: Axes, names: list[str]) -> None:
    every = -(-len(names) // _MAX_NAMED)
    ax.set_yticks(range(0, len(names), every), names[::every])
    ax.set_ylabel("[B, T]")


def _colors(buckets: Sequence[Bucket]) -> dict[Bucket, Any]:
    from matplotlib import colormaps

    # Not to the map's end, which is too light on white.
    shades = colormaps["viridis"](np.linspace(0, 0.92, len(buckets)))
    return dict(zip(buckets, shades, strict=True))


def _shapes(buckets: Sequence[Bucket]) -> str:
    if len(buckets) > _MAX_NAMED // 2:
        return f"{len(buckets)} shapes: {buckets[0]} to {buckets[-1]}"
    return f"{len(buckets)} shapes: " + "  ".join(map(str, buckets))


def _not_empty(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    if not len(records):
        raise ValueError("`records` is empty: there is no step to draw.")
    return records


def _figure(width: float, height: float) -> Figure:
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout="constrained")


def _axes() -> Axes:
    return _figure(8, 4).subplots()
