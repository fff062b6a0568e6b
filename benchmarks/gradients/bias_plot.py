"""A plot of the bias and the noise of buckets. matplotlib is imported when it is drawn.

Colors differ in brightness and bars in hatching, so it is readable in grayscale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from bias_report import BucketBias

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_NOISE: Any = {"color": "#1f4e79", "label": "noise within a bucket"}
_BIAS: Any = {
    **{"facecolor": "#f0a04b", "edgecolor": "white", "hatch": "////"},
    **{"linewidth": 0, "label": "bias of the bucket"},
}


def plot_bias(bias: BucketBias, figure: Figure | SubFigure | None = None) -> Any:
    """Plots the variance of updates: by bucket, and for several ways to batch.

    Args:
      bias: the measurement.
      figure: the figure to draw on; by default a new one.

    Returns:
      The figure.
    """
    if figure is None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _plot_buckets(bias, left)
    _plot_ways(bias, right)
    return figure


def _plot_buckets(bias: BucketBias, ax: Axes) -> None:
    places = np.arange(len(bias.buckets))
    noise = np.array([bucket.noise for bucket in bias.buckets])
    # An estimate near zero may be negative, which cannot be drawn.
    biases = np.maximum([bucket.bias for bucket in bias.buckets], 0)
    errors = [bucket.bias_error for bucket in bias.buckets]
    ax.bar(places, noise, **_NOISE)
    ax.bar(places, biases, bottom=noise, **_BIAS)
    ax.errorbar(places, noise + biases, errors, fmt="none", ecolor="0.2", capsize=3)
    labels = [str(bucket.bucket) for bucket in bias.buckets]
    ax.set_xticks(places, labels, rotation=45, ha="right")
    label = "bucket [B, T]"
    if bias.left_out:
        label += f", without {bias.left_out_share:.1%} of the steps"
    ax.set(xlabel=label, ylabel="gradient variance / |mean|²")
    ax.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _plot_ways(bias: BucketBias, ax: Axes) -> None:
    places = np.arange(len(bias.ways))
    names = [way.name for way in bias.ways]
    noise = bias.ways[-1].one
    for offset, height, values, hatch in (
        (-0.2, 0.38, [way.one for way in bias.ways], ""),
        (0.2, 0.38, [way.several for way in bias.ways], "...."),
    ):
        ax.barh(
            *(places + offset, values, height),
            color="#1f4e79" if not hatch else "#9db8d2",
            edgecolor="white",
            hatch=hatch,
            label="10 updates" if hatch else "one update",
        )
    ax.axvline(noise, color="0.2", linewidth=0.8, linestyle=":")
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.set(xlabel="variance of updates / |mean gradient|²")
    ax.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
