"""The distribution of each metric of a data set, as a table or a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxbucket.plan.reports.plots import REAL
from jaxbucket.schedule.difficulty_index import DifficultyIndex

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BARS = 48
# If the maximum is more than this many medians, the axis is logarithmic.
_WIDE = 8
_MARKS = {"50%": "median", "90%": "p90", "99%": "p99"}


@dataclasses.dataclass(frozen=True)
class MetricSummary:
    """Summary statistics of a metric. The percentiles are not interpolated.

    Attributes:
      examples: number of examples.
      dtype: dtype of the values.
      min: minimum value.
      p10: 10th percentile.
      median: median value.
      p90: 90th percentile.
      p99: 99th percentile.
      max: maximum value.
      mean: mean value.
    """

    examples: int
    dtype: str
    min: float
    p10: float
    median: float
    p90: float
    p99: float
    max: float
    mean: float

    @classmethod
    def of(cls, index: DifficultyIndex) -> MetricSummary:
        """Returns the summary of the metric by which an index is sorted."""
        size, values = len(index), index.difficulty

        def percentile(percent: int) -> Any:
            return values[index.examples[max(-(-size * percent // 100) - 1, 0)]].item()

        return cls(
            examples=size,
            dtype=values.dtype.name,
            min=percentile(0),
            p10=percentile(10),
            median=percentile(50),
            p90=percentile(90),
            p99=percentile(99),
            max=percentile(100),
            mean=float(values.mean(dtype=np.float64)),
        )


@dataclasses.dataclass(frozen=True)
class MetricReport:
    """Summary statistics of several metrics, by name."""

    metrics: Mapping[str, MetricSummary]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the fields of each summary as plain Python values."""
        return {name: dataclasses.asdict(x) for name, x in self.metrics.items()}

    def __rich__(self) -> Any:
        """Returns a `rich` table with a row for each metric."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        columns = ("min", "p10", "median", "p90", "p99", "max", "mean")
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("metric", justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        for name, summary in self.metrics.items():
            values = [_formatted(getattr(summary, column)) for column in columns]
            table.add_row(Text(name), *values)
        return table


def _formatted(value: float) -> str:
    if isinstance(value, int) or 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def plot_metrics(indexes: Mapping[str, DifficultyIndex], figure: Figure) -> None:
    """Plots a histogram of each metric, with the median and two percentiles.

    An axis is logarithmic if the maximum is far greater than the median.

    Args:
      indexes: the index of each metric, by name.
      figure: the figure to draw on.
    """
    axes = figure.subplots(len(indexes), squeeze=False)[:, 0]
    for ax, (name, index) in zip(axes, indexes.items(), strict=True):
        summary = MetricSummary.of(index)
        edges, wide = _bin_edges(summary)
        bars, _ = np.histogram(index.difficulty, edges)
        ax.stairs(100 * bars / len(index), edges, fill=True, color=REAL)
        ax.set(xlabel=name, ylabel="share per bar (%)", xlim=(edges[0], edges[-1]))
        if wide:
            ax.set_xscale("log")
        _mark_percentiles(ax, summary)
        ax.grid(alpha=0.3)
        ax.set_title(f"{len(index):,} examples", fontsize="medium")


def _bin_edges(summary: MetricSummary) -> tuple[np.ndarray, bool]:
    """Returns the edges of the bars, and whether they grow by a constant factor."""
    low, high = summary.min, summary.max
    is_integer = np.dtype(summary.dtype).kind == "i"
    if is_integer:
        high += 1
    elif low == high:
        low, high = low - 0.5, high + 0.5
    wide = low > 0 and high > _WIDE * summary.median
    spaced = np.geomspace if wide else np.linspace
    edges = spaced(low, high, _BARS + 1, dtype=np.float64)
    return (np.unique(edges.round()) if is_integer else edges), wide


def _mark_percentiles(ax: Axes, summary: MetricSummary) -> None:
    # One above the other, because the values may be close or equal.
    for height, (label, field) in zip((0.92, 0.8, 0.68), _MARKS.items(), strict=True):
        value = getattr(summary, field)
        ax.axvline(value, color="0.2", linewidth=0.8, linestyle=":")
        # Place the text on the side of the line with more space.
        x = (ax.transScale + ax.transLimits).transform((value, 1))[0]
        text = ax.text(value, height, f" {label}: {_formatted(value)} ")
        text.set_transform(ax.get_xaxis_transform())
        text.set(ha="left" if x < 0.5 else "right", fontsize="small")
        text.set_bbox({"color": "white", "alpha": 0.8, "pad": 1})
