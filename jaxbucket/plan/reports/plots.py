"""Pictures of what a plan does and of a run. matplotlib is imported where one is drawn.

Buckets go from dark to light as they grow longer, so that a print in grey tells them
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.base.checks import check_lengths
from jaxbucket.plan.reports.epoch import StepRecord, bucket_uses, report, row_lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_MAX_POINTS = 4096
REAL, PADDING, _OTHER = "#1f4e79", "#f0a04b", "0.88"


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
    real, padded = kept_tokens(plan, lengths)
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
        color=PADDING,
        label=f"padding of this plan: {epoch.padding:.0%}",
    )
    ax.fill_between(share, 0, real, color=REAL, label="real tokens")
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
    real, padded = kept_tokens(plan, lengths)
    padding = padded - real
    edges = np.linspace(0, plan.max_seq_len, bins + 1)
    # Lengths are integers: one at an edge belongs to the bar that ends there.
    bar = np.clip(np.ceil(real * bins / plan.max_seq_len).astype(int) - 1, 0, bins - 1)
    tokens = np.bincount(bar, real, minlength=bins)
    wasted = np.bincount(bar, padding, minlength=bins)
    width = edges[1]
    ax.bar(edges[:-1], tokens, width, align="edge", color=REAL, label="real tokens")
    ax.bar(
        edges[:-1],
        wasted,
        width,
        bottom=tokens,
        align="edge",
        color=PADDING,
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
        figure = new_page(8, 6)
    above, below = figure.subplots(2, 1, sharex=True)
    wide = values[-1] > _WIDE * _length_of_share(values, counts, 0.5)
    edges = _bin_edges(int(values[0]), int(values[-1]) + 1, bins, wide)
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
        figure = new_page(8, 3)
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
        figure = new_page(8, 6)
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


def kept_tokens(plan: BucketPlan, lengths: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
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


def new_page(width: float, height: float) -> Figure:
    """Returns an empty figure, so many inches wide and high."""
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout="constrained")


def _axes() -> Axes:
    return new_page(8, 4).subplots()
