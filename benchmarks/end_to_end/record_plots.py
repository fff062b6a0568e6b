"""Plots of a run. matplotlib is imported when one is drawn.

Longer buckets are lighter, so that they can be told apart in grayscale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from records import StepRecord, bucket_stats

from jaxbucket.base.bucket import Bucket
from jaxbucket.plan.reports.plots import new_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# The maximum number of buckets that are named.
_MAX_NAMED = 16


def plot_buckets(
    records: Sequence[StepRecord], figure: Figure | SubFigure | None = None
) -> Figure | SubFigure:
    """Plots the padding, the time and the cost per position of each bucket in a run.

    Args:
      records: the steps of the run.
      figure: the figure to draw on; by default a new one.

    Raises:
      ValueError: if `records` is empty.
    """
    stats = bucket_stats(_check_not_empty(records))
    if figure is None:
        figure = new_page(8, 3)
    seconds = sum(x.seconds for x in stats)
    panels = {
        "padding (%)": [100 * x.padding for x in stats],
        "time (% of the run)": [100 * x.seconds / seconds for x in stats],
        "time per position (us)": [1e6 * x.seconds_per_token for x in stats],
    }
    colors = _colors([x.bucket for x in stats])
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (title, values) in zip(axes, panels.items(), strict=True):
        ax.barh(range(len(stats)), values, color=[colors[x.bucket] for x in stats])
        ax.set_title(title, fontsize="medium")
        ax.set_xlim(left=0)
        ax.grid(axis="x", alpha=0.3)
    _name_some(axes[0], [str(x.bucket) for x in stats])
    return figure


def plot_run(
    records: Sequence[StepRecord], figure: Figure | SubFigure | None = None
) -> Figure | SubFigure:
    """Plots the loss, learning rate and real tokens/s of every step, by bucket.

    Args:
      records: the steps of the run.
      figure: the figure to draw on; by default a new one.

    Raises:
      ValueError: if `records` is empty.
    """
    records = _check_not_empty(records)
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
            chosen = of_bucket[bucket]
            label = str(bucket) if bucket in shown else None
            points = np.array(values)[chosen]
            ax.scatter(steps[chosen], points, 8, color=colors[bucket], label=label)
        ax.set_ylabel(title)
        ax.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", title="[B, T]")
    return figure


def _name_some(ax: Axes, names: list[str]) -> None:
    stride = -(-len(names) // _MAX_NAMED)
    size = "small" if len(names) <= _MAX_NAMED // 2 else "x-small"
    ax.set_yticks(range(0, len(names), stride), names[::stride], fontsize=size)
    ax.set_ylabel("[B, T]")


def _colors(buckets: Sequence[Bucket]) -> dict[Bucket, Any]:
    from matplotlib import colormaps

    # Skip the end of the color map, which is too light on a white background.
    shades = colormaps["viridis"](np.linspace(0, 0.92, len(buckets)))
    return dict(zip(buckets, shades, strict=True))


def _check_not_empty(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    if not len(records):
        raise ValueError(
            "`records` is empty, so there is no step to draw. Pass at least one."
        )
    return records
