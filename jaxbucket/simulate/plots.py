"""A plot of simulated epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxbucket.plan.reports.plots import new_page
from jaxbucket.simulate.simulation import PARTS, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# As many colors as parts, which differ in brightness, too.
_COLORS = ("#0b5394", "#6fa8dc", "#93c47d", "#8e7cc3", "#bf9000", "#cc4125", "#444444")
# Steps that are averaged for a line.
_WINDOW = 8


def plot_simulation(simulation: Simulation, figure: Figure | None = None) -> Figure:
    """Plots the parts of every epoch, and what its steps train on.

    Lines are means over neighboring steps, so that buckets do not hide them. They are
    drawn on `figure`, by default on a new one.
    """
    figure = figure or new_page(10, 8)
    epochs = simulation.epochs.values()
    has_rates = any("learning_rate" in epoch.steps for epoch in epochs)
    names = ["tokens", *["learning_rate"] * has_rates]
    axes = figure.subplots(1 + len(names), 1)
    _draw_parts(simulation, axes[0])
    for name, ax in zip(names, axes[1:], strict=True):
        for label, epoch in simulation.epochs.items():
            _draw_line(ax, label, epoch.steps, name)
        label = "real tokens per step" if name == "tokens" else "learning rate"
        ax.set(xlabel="step", ylabel=label, ylim=(0, None))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.grid(alpha=0.3)
    axes[1].legend(fontsize="small", frameon=False)
    return figure


def _draw_parts(simulation: Simulation, ax: Axes) -> None:
    """Draws a bar for each epoch, divided into its parts."""
    epochs = list(simulation.epochs.values())
    left, places = np.zeros(len(epochs)), range(len(epochs))
    for (part, meaning), color in zip(PARTS.items(), _COLORS, strict=True):
        hours = np.array([epoch.parts[part] for epoch in epochs]) / 3600
        if hours.any():
            ax.barh(places, hours, left=left, color=color, label=f"{part}: {meaning}")
        left += hours
    ax.set(xlabel="hours per epoch", ylim=(len(epochs) - 0.4, -0.6))
    ax.set_yticks(places, [name.replace("$", r"\$") for name in simulation.epochs])
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}
    ax.legend(fontsize="small", frameon=False, **place)


def _draw_line(ax: Axes, label: str, steps: dict[str, np.ndarray], name: str) -> None:
    if name not in steps:
        return
    size = min(_WINDOW, len(steps["step"]))
    mean = np.ones(size) / size
    lines = [np.convolve(steps[key], mean, "valid") for key in ("step", name)]
    ax.plot(*lines, label=label.replace("$", r"\$"))
