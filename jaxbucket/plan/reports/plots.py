"""Plots of lengths and of a plan. matplotlib is imported when one is drawn.

Colors differ in brightness and padding is hatched, so plots are readable in grayscale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths
from jaxbucket.plan.formatting import count_shapes
from jaxbucket.plan.reports.epoch import Report, report, row_lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# The maximum number of examples to draw, and of characters of a list of shapes.
_MAX_POINTS, _MAX_CHARACTERS = 4096, 100
REAL, PADDING, _OTHER = "#1f4e79", "#f0a04b", "0.9"
HATCHED: Any = {
    **{"facecolor": PADDING, "edgecolor": "white"},
    **{"linewidth": 0, "hatch": "////"},
}
_LINE: Any = {"color": "0.2", "linewidth": 0.8, "linestyle": ":"}


def plot_plan(
    plan: BucketPlan,
    lengths: ArrayLike,
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
      lengths: `[N]` integers, one per example or per packed row.
      ax: the axes to draw on; by default those of a new figure.
      epoch: the report whose padding the legend shows; by default
        `report(plan, lengths)`.

    Raises:
      ValueError: if the lengths are not valid for the plan.
    """
    if ax is None:
        ax = _axes()
    epoch = epoch or report(plan.unpacked, lengths)
    real, padded = row_tokens(plan, lengths)
    order = np.argsort(real, kind="stable")
    shown = np.linspace(0, len(order) - 1, min(len(order), _MAX_POINTS)).astype(int)
    real, padded = real[order][shown], padded[order][shown]
    share = np.linspace(0, 100, len(shown))
    longest = np.full(len(shown), plan.max_seq_len)
    in_one = 1 - epoch.real_tokens / max(epoch.examples * plan.max_seq_len, 1)
    other: Any = {"color": _OTHER, "linewidth": 0}
    areas: Any = (
        (np.zeros(len(real)), real, {"color": REAL}, f"real {epoch.unit}"),
        (real, padded, HATCHED, _padding_label(epoch)),
        (
            padded,
            longest,
            other,
            f"with a single T={plan.max_seq_len}: {in_one:.1%}",
        ),
    )
    for low, high, style, label in areas:
        ax.fill_between(share, low, high, label=label, **style)
    what = "packed rows" if epoch.packed_examples else "examples"
    ax.set(
        xlabel=f"{what}, shortest first (%)",
        ylabel=f"length ({epoch.unit})",
        xlim=(0, 100),
        ylim=(0, plan.max_seq_len),
    )
    ax.yaxis.set_major_formatter("{x:,.0f}")
    _add_title(ax, plan.buckets)
    return ax


def plot_lengths(
    plan: BucketPlan,
    lengths: ArrayLike,
    ax: Axes | None = None,
    *,
    bins: int = 64,
    epoch: Report | None = None,
) -> Axes:
    """Plots a histogram of lengths, weighted by tokens, with padding on top of it.

    Areas are proportional to numbers of tokens: the tokens of the examples of a length,
    and above them the padding up to the T of their bucket. Dotted lines
    mark the ends of buckets.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, one per example or per packed row.
      ax: the axes to draw on; by default those of a new figure.
      bins: the number of bars.
      epoch: the report whose padding the legend shows; by default
        `report(plan, lengths)`.

    Raises:
      ValueError: if the lengths are not valid for the plan.
    """
    if ax is None:
        ax = _axes()
    epoch = epoch or report(plan.unpacked, lengths)
    real, padded = row_tokens(plan, lengths)
    edges = np.linspace(0, plan.max_seq_len, bins + 1)
    # Lengths are integers: one at an edge belongs to the bar that ends there.
    bar = np.clip(np.ceil(real * bins / plan.max_seq_len).astype(int) - 1, 0, bins - 1)
    tokens = np.bincount(bar, real, minlength=bins)
    padding = np.bincount(bar, padded - real, minlength=bins)
    bars: Any = {"x": edges[:-1], "width": edges[1], "align": "edge"}
    hatched = bars | HATCHED | {"label": _padding_label(epoch)}
    ax.bar(height=tokens, color=REAL, label=f"real {epoch.unit}", **bars)
    ax.bar(height=padding, bottom=tokens, **hatched)
    for number, end in enumerate(plan.boundaries):
        ax.axvline(end, **_LINE, label="ends of buckets" if number == 0 else None)
    what = "length of a packed row" if epoch.packed_examples else "length"
    ax.set(
        xlabel=f"{what} ({epoch.unit})",
        ylabel=f"{epoch.unit} per bar",
        # With room for the line at the end of the last bucket.
        xlim=(0, 1.01 * plan.max_seq_len),
    )
    ax.locator_params("x", nbins=_num_ticks(plan.max_seq_len))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    _add_title(ax, plan.buckets)
    return ax


def _padding_label(epoch: Report) -> str:
    """Returns the legend entry for padding, with the numbers of the summary."""
    total, in_rows, empty = epoch.padding_shares
    return f"padding: {total} ({in_rows} in rows, {empty} empty rows)"


def _add_title(ax: Axes, buckets: Sequence[Bucket]) -> None:
    """Writes the shapes and the legend above the axes, where they cover nothing."""
    ax.set_title(_shapes(buckets), fontsize="small", pad=24)
    _legend_above(ax)


def _legend_above(ax: Axes) -> None:
    place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
    ax.legend(ncols=3, fontsize="small", frameon=False, borderaxespad=0.2, **place)


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

    Raises:
      ValueError: if there are no lengths, or one is not a positive integer.
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
    above.set(ylabel="share per bar (%)", xlim=(edges[0], edges[-1]))
    _integer_axis(below, wide)
    title = f"{counts.sum():,} examples, {int(tokens.sum()):,} {unit}"
    above.set_title(title, fontsize="medium", pad=24)
    below.set(xlabel=f"length ({unit})", ylabel="cumulative share (%)")
    below.set_ylim(0, 103)
    _mark_shares(below, values, counts)
    for ax in (above, below):
        ax.grid(alpha=0.3)
        _legend_above(ax)
    return figure


# If the longest length is more than this many medians, a linear axis would squeeze all
# other lengths into a few bars.
_WIDE = 8


def _bin_edges(low: int, high: int, bins: int, wide: bool) -> np.ndarray:
    """Returns integer edges from `low` to `high`, so that each bar has an integer."""
    if wide:
        return np.unique(np.geomspace(low, high, bins + 1).round())
    span = high - low
    # The smallest width for each number of bars, from `bins` down to about half of it.
    widths = [-(-span // number) for number in range(bins, 0, -1)]
    widths = [width for width in widths if width < 2 * widths[0]]
    # The last bar should be about as wide as the others.
    width = min(widths, key=lambda width: -span % width)
    return np.arange(low, high + width, width)


def _length_of_share(values: np.ndarray, counts: np.ndarray, share: float) -> int:
    """Returns the length that this share of all examples does not exceed."""
    below = np.cumsum(counts)
    return int(values[np.searchsorted(below, share * below[-1])])


def _mark_shares(ax: Axes, values: np.ndarray, counts: np.ndarray) -> None:
    # One above the other, because the lengths may be close or equal.
    for height, share in ((5, 0.5), (17, 0.9), (29, 0.99)):
        length = _length_of_share(values, counts, share)
        ax.axvline(length, **_LINE)
        # Place the text on the side of the line with more space.
        x = (ax.transScale + ax.transLimits).transform((length, 1))[0]
        text = ax.text(length, height, f" {share:.0%}: {length:,} ")
        text.set(ha="left" if x < 0.5 else "right", fontsize="small")
        text.set_bbox({"color": "white", "alpha": 0.8, "pad": 1})


def _integer_axis(ax: Axes, wide: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    if wide:
        ax.set_xscale("log", base=2)
    else:
        nbins = _num_ticks(ax.get_xlim()[1])
        ax.xaxis.set_major_locator(MaxNLocator(nbins, integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")


def _num_ticks(longest: float) -> int:
    """Returns the maximum number of ticks; long numbers need more space."""
    return 9 if longest < 1_000_000 else 5


def row_tokens(plan: BucketPlan, lengths: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns the real tokens and T of each row, without dropped examples.

    Raises:
      ValueError: if the lengths are not valid for the plan, or it drops all of them.
    """
    lengths = row_lengths(plan, check_lengths(lengths))
    index = plan.assign(lengths)
    has_bucket = index >= 0
    if not has_bucket.any():
        raise ValueError(
            "`overlong='drop'` leaves out every example, so there is nothing to draw. "
            "Plan with a larger `max_seq_len`."
        )
    real = np.minimum(lengths[has_bucket], plan.max_seq_len)
    return real, plan.boundaries[index[has_bucket]]


def _shapes(buckets: Sequence[Bucket]) -> str:
    names = "  ".join(map(str, buckets))
    if len(names) > _MAX_CHARACTERS:
        names = f"{buckets[0]} to {buckets[-1]}"
    return f"{count_shapes(len(buckets))}: {names}"


def new_page(width: float, height: float) -> Figure:
    """Returns an empty figure of this width and height in inches."""
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout="constrained")


def _axes() -> Axes:
    return new_page(8, 4).subplots()
