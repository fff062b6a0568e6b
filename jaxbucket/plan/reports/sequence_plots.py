"""Plots of a plan for several sequences. matplotlib is imported when one is drawn.

Examples are shades of blue below black lines, so plots are readable in grayscale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.formatting import count_shapes
from jaxbucket.plan.reports.epoch import report
from jaxbucket.plan.reports.epoch_report import Report
from jaxbucket.plan.reports.plots import HATCHED, REAL, new_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The largest number of cells of the histogram on each axis, and of lines in the list.
_MAX_CELLS, _MAX_LINES = 64, 25
# Light enough for black lines.
_FEW, _MANY = "#dbe6f1", "#4a7fb0"
_NOTHING = (
    "`overlong='drop'` leaves out every example, so there is nothing to draw. "
    "Plan with a larger `max_seq_len`."
)


def plot_shapes(
    plan: BucketPlan,
    lengths: Mapping[str, ArrayLike],
    ax: Axes | None = None,
    *,
    epoch: Report | None = None,
) -> Axes:
    """Plots the examples of two sequences and the shapes that hold them.

    Each example is a point, whose coordinates are the lengths of its two sequences, in
    a two-dimensional histogram. Each shape is a rectangle from the origin, numbered at
    the corner: it holds the examples inside. A list names the shapes [B, S x T].

    Args:
      plan: the shapes.
      lengths: sequence name -> `[N]` integers, one per example.
      ax: the axes to draw on; by default those of a new figure.
      epoch: the report whose padding the title shows; by default
        `report(plan, lengths)`.

    Raises:
      ValueError: if the plan has other than two sequences, the lengths are not valid
        for it, or it drops every example.
    """
    if len(plan.sequences) != 2:
        raise ValueError(
            f"`plan` has the sequences {list(plan.sequences)}, but this plot has an "
            "axis for each of two. Use `plot_sequence_padding` for more of them, or "
            "`plot_plan` for examples with one length."
        )
    epoch = epoch or report(plan, lengths)
    kept = plan.kept_lengths(lengths)
    if not len(kept):
        raise ValueError(_NOTHING)
    if ax is None:
        ax = new_page(8, 6).subplots()
    longest = list(plan.max_seq_lens.values())
    _draw_examples(ax, kept, longest)
    for number, (x, y) in enumerate(plan.seq_lens.tolist(), start=1):
        ax.plot([0, x, x], [y, y, 0], color="black", linewidth=0.9)
        box: Any = {"facecolor": "white", "edgecolor": "black", "pad": 1.5}
        place: Any = {"ha": "center", "va": "center", "fontsize": "x-small"}
        ax.text(x, y, str(number), bbox=box | {"linewidth": 0.6}, **place)
    for axis, name in zip((ax.xaxis, ax.yaxis), plan.sequences, strict=True):
        axis.set_label_text(f"{name} ({epoch.unit})")
        axis.set_major_formatter("{x:,.0f}")
    # With room for the numbers at the corners.
    ax.set(xlim=(0, 1.04 * longest[0]), ylim=(0, 1.04 * longest[1]))
    ax.set_title(_title(epoch), fontsize="medium")
    _list_shapes(ax, plan)
    return ax


def _draw_examples(ax: Axes, lengths: np.ndarray, longest: list[int]) -> None:
    """Draws a histogram of `[N, 2]` lengths, in which each cell has integers."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    edges = []
    for end in longest:
        width = -(-end // _MAX_CELLS)
        edges.append(np.arange(0, end + width, width) + 0.5)
    counts, *_ = np.histogram2d(lengths[:, 0], lengths[:, 1], edges)
    shades = LinearSegmentedColormap.from_list("examples", [_FEW, _MANY])
    cells = ax.pcolormesh(
        *edges,
        np.ma.masked_equal(counts.T, 0),
        cmap=shades,
        norm=LogNorm(1, max(counts.max(), 2)),
    )
    figure: Any = ax.get_figure()
    bar = figure.colorbar(cells, ax=ax, location="left", shrink=0.5, aspect=30)
    bar.set_label("examples", fontsize="small")
    bar.ax.yaxis.set_major_formatter("{x:,.0f}")
    bar.ax.tick_params(labelsize="small")
    bar.ax.minorticks_off()


def _title(epoch: Report) -> str:
    shares = epoch.sequence_padding.items()
    each = ", ".join(f"{share:.1%} of {name}" for name, share in shares)
    return f"{count_shapes(len(epoch.buckets))}, {epoch.padding:.1%} padding: {each}"


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


def plot_sequence_padding(epoch: Report, ax: Axes | None = None) -> Axes:
    """Plots the real tokens and the padding of each of several sequences, as bars.

    Args:
      epoch: the report of a plan for several sequences.
      ax: the axes to draw on; by default those of a new figure.

    Raises:
      ValueError: if examples have one length, or there are none.
    """
    if not epoch.sequence_tokens:
        raise ValueError(
            "`epoch` is the report of examples with one length. Use `plot_plan`."
        )
    if not epoch.real_tokens:
        raise ValueError(_NOTHING)
    if ax is None:
        ax = new_page(8, 4).subplots()
    names = list(epoch.sequence_tokens)
    real = np.array(list(epoch.sequence_tokens.values()))
    shares = np.array(list(epoch.sequence_padding.values()))
    padded = real / (1 - shares)
    ax.barh(names, real, color=REAL, label=f"real {epoch.unit}")
    bars = ax.barh(names, padded - real, left=real, label="padding", **HATCHED)
    ax.bar_label(bars, [f"{share:.1%}" for share in shares], padding=4)
    ax.set(xlabel=f"{epoch.unit} per epoch", xlim=(0, 1.12 * padded.max()))
    ax.invert_yaxis()
    ax.locator_params("x", nbins=6)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    shapes = count_shapes(len(epoch.buckets))
    ax.set_title(f"{shapes}, {epoch.padding:.1%} padding", fontsize="medium", pad=24)
    place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
    ax.legend(ncols=2, fontsize="small", frameon=False, borderaxespad=0.2, **place)
    return ax
