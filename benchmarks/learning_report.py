"""The table and the plot of the runs of `learning.py`."""

import math
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table


def by_way(runs: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns way -> `[seeds, points]`: bits per byte, less those of the first way.

    Each run is compared with the run of the first way with the same seed. The values of
    the first way itself are not differences.
    """
    bits: dict[str, dict[int, np.ndarray]] = {}
    for run in runs:
        curve = np.array([point["bits_per_byte"] for point in run["curve"]])
        bits.setdefault(run["way"], {})[run["seed"]] = curve
    first = next(iter(bits))
    return {
        way: np.array(
            [
                curve if way == first else curve - bits[first][seed]
                for seed, curve in curves.items()
                if seed in bits[first]
            ]
        )
        for way, curves in bits.items()
    }


def standard_error(values: np.ndarray) -> np.ndarray | None:
    """Returns the standard error of the mean of each column; None for a single row."""
    if len(values) < 2:
        return None
    return values.std(axis=0, ddof=1) / math.sqrt(len(values))


def _means(values: np.ndarray, sign: str) -> list[str]:
    """Returns the mean of each column, with its standard error if there is one."""
    means = [f"{x:{sign}.3f}" for x in values.mean(axis=0)]
    error = standard_error(values)
    if error is None:
        return means
    return [f"{x} ± {e:.3f}" for x, e in zip(means, error, strict=True)]


def more_tokens(values: np.ndarray, first: np.ndarray, steps: list[int]) -> str:
    """Returns how many more tokens a way needs, if losses fall with their logarithm."""
    if values is first or len(steps) < 2:
        return ""
    per_fold = (first[:, -2] - first[:, -1]).mean() / math.log(steps[-1] / steps[-2])
    return f"{math.expm1(values[:, -1].mean() / per_fold):+.0%}"


def show(runs: list[dict[str, Any]]) -> None:
    """Prints the losses of the first way, and the differences of the others from it."""
    bits = by_way(runs)
    first = next(iter(bits))
    steps = [point["step"] for point in runs[0]["curve"]]
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"Held-out bits per byte, and differences from {first!r} of the same "
        "seed: means of the seeds ± standard errors. More tokens: what the way needs "
        f"more than {first!r} to reach the last loss, by interpolation.",
        caption_justify="left",
    )
    table.add_column("way", no_wrap=True)
    names = [f"step {step}" for step in steps]
    for name in ("seeds", *names, "tokens/update", "more tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for way, values in bits.items():
        last = [run["curve"][-1] for run in runs if run["way"] == way]
        size = np.mean([point["tokens"] / point["step"] for point in last])
        table.add_row(
            *(way, str(len(values))),
            *_means(values, "" if way == first else "+"),
            *(f"{size:,.0f}", more_tokens(values, bits[first], steps)),
        )
    Console(width=140, highlight=False).print(table)


def draw(runs: list[dict[str, Any]], path: str) -> None:
    """Draws the differences from the first way over the number of tokens."""
    from matplotlib.figure import Figure

    bits = by_way(runs)
    first = next(iter(bits))
    tokens = [point["tokens"] for point in runs[0]["curve"]]
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.add_subplot()
    ax.axhline(0, color="0.5", linewidth=0.8)
    others = [(way, values) for way, values in bits.items() if way != first]
    for (way, values), marker in zip(others, "osD^vP*X<", strict=False):
        ax.errorbar(
            *(tokens, values.mean(axis=0), standard_error(values)),
            marker=marker,
            capsize=3,
            label=way,
        )
    ax.set_xscale("log")
    ax.set(xlabel="real tokens", ylabel=f"held-out bits per byte, less {first!r}")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=120)
