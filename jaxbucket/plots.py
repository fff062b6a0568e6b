"""Pictures of what a plan does. matplotlib is imported where one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base import BucketPlan
from jaxbucket.checks import check_lengths
from jaxbucket.stats import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_POINTS = 4096


def plot_plan(plan: BucketPlan, lengths: ArrayLike, ax: Axes | None = None) -> Axes:
    """Draws every example as a line as long as it is, and the padding behind it.

    Examples stand side by side, the shortest first, so that areas are tokens: real
    ones, the padding that the plan adds, and what padding to the longest would add.

    Args:
      plan: the shapes.
      lengths: `[N]` integers.
      ax: where to draw; by default a new figure.

    Raises:
      ValueError: for lengths the plan refuses.
    """
    from matplotlib import pyplot

    if ax is None:
        _, ax = pyplot.subplots(figsize=(8, 4), layout="constrained")
    lengths = check_lengths(lengths)
    index = plan.assign(lengths)
    order = np.argsort(lengths[index >= 0], kind="stable")
    shown = np.linspace(0, len(order) - 1, min(len(order), _MAX_POINTS)).astype(int)
    real = np.minimum(lengths[index >= 0][order][shown], plan.max_seq_len)
    padded = plan.boundaries[index[index >= 0][order][shown]]
    share = np.linspace(0, 100, len(shown))
    longest = np.full(len(shown), plan.max_seq_len)
    epoch = report(plan, lengths)
    to_longest = 1 - epoch.real_tokens / (epoch.examples * plan.max_seq_len)
    ax.fill_between(
        share,
        padded,
        longest,
        color="0.9",
        label=f"padded to the longest: {to_longest:.0%}",
    )
    ax.fill_between(
        share,
        real,
        padded,
        color="tab:orange",
        label=f"padding of this plan: {epoch.padding:.0%}",
    )
    ax.fill_between(share, 0, real, color="tab:blue", label="real tokens")
    ax.set(
        xlabel="examples, shortest first (%)",
        ylabel="positions",
        title=f"{len(plan)} shapes: " + "  ".join(map(str, plan.buckets)),
        xlim=(0, 100),
        ylim=(0, plan.max_seq_len),
    )
    ax.title.set_fontsize("small")
    ax.legend(loc="upper left")
    return ax
