"""Draws the pictures of README.md and of the tutorial, from Python's standard library.

python scripts/draw_docs.py docs/assets
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from typing import TYPE_CHECKING

import matplotlib
import numpy as np

import jaxbucket as jb
from jaxbucket.plan.reports.plots import plot_plan
from jaxbucket.simulate.plots import plot_simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
import documents

ROOT = pathlib.Path(__file__).parents[1]
# As distinct in brightness as in hue.
COLORS = ["#1f4e79", "#e08a2e", "#5b9a8b", "#7f9bd1", "#a0527f", "#b59a3c"]
PADDING = "0.88"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the pages.")
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxbucket"
    draw_plan().savefig(folder / "plan.png", dpi=120)
    draw_epochs().savefig(folder / "simulated.png", dpi=100)
    # The quick start, up to its plan.
    _, _, code = (ROOT / "README.md").read_text().partition("```python\n")
    names: dict = {}
    exec(code.partition("mesh = ")[0], names)
    lengths, plan = names["lengths"], names["plan"]
    pictures = {
        "rows": draw_rows(plan, lengths),
        "packed": draw_packed(names["source"], lengths, names["limits"]),
        "steps": draw_steps(plan, lengths),
    }
    for name, figure in pictures.items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def draw_plan() -> Figure:
    """Draws the plan of the standard library's functions."""
    lengths = jb.measure_lengths(documents.load().train)
    plan = jb.plan_buckets(
        lengths,
        max_tokens=65_536,
        num_buckets=6,
        batch_size_multiple=8,
        seq_len_multiple=64,
        max_seq_len=4096,
        overlong="truncate",
    )
    # The documents are bytes, and each byte is a token.
    epoch = dataclasses.replace(jb.report(plan, lengths), unit="bytes")
    return plot_plan(plan, lengths, epoch=epoch).figure.get_figure(root=True)


def draw_epochs() -> Figure:
    """Draws epochs of a billion examples on 1,024 hosts."""
    lengths = jb.LengthCounts({128: 700_000_000, 512: 250_000_000, 4096: 50_000_000})
    limits = jb.Limits(max_tokens=2**27, batch_size_multiple=4096)
    plans = {
        name: jb.plan.plan_within(lengths, limits, num_buckets=number)
        for name, number in (("three shapes", 3), ("one shape", 1))
    }
    cluster = jb.simulate.Cluster(
        num_hosts=1024,
        devices_per_host=4,
        step_seconds=jb.plan.TransformerCost(4096, 32, flops_per_second=8e17),
        skew=0.02,
        compile_seconds=60,
        hours_between_faults=20_000,
        restart_seconds=300,
        checkpoint_seconds=20,
    )
    return plot_simulation(jb.simulate.simulate(plans, lengths, cluster))


def new_figure(height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, columns, figsize=(8, height), squeeze=False, layout="constrained"
    )
    for ax in axes[0]:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def draw_rows(plan: jb.BucketPlan, lengths: np.ndarray) -> Figure:
    """Draws examples in their order, then sorted into the buckets of the plan."""
    figure, axes = new_figure(3.4, 2)
    some = lengths[:: len(lengths) // 60][:60]
    buckets = plan.assign(some)
    by_bucket = np.lexsort([some, buckets])
    for ax, order, widths in [
        (axes[0], np.arange(len(some)), np.full(len(some), max(plan.boundaries))),
        (axes[1], by_bucket, np.asarray(plan.boundaries)[buckets]),
    ]:
        y = np.arange(len(some))
        ax.barh(y, widths[order], 1, color=PADDING)
        colors = [COLORS[bucket] for bucket in buckets[order]]
        ax.barh(y, some[order], 0.75, color=colors)
        share = 1 - some.sum() / widths.sum()
        ax.set(ylim=(len(some), -1), yticks=[], xlabel="tokens")
        ax.set_title(f"{share:.0%} of these rows are padding", fontsize=10)
    axes[0].set_ylabel("examples, as in the source")
    axes[1].set_ylabel("examples, by bucket")
    for bucket, seq_len in enumerate(plan.boundaries):
        rows = np.flatnonzero(buckets[by_bucket] == bucket)
        if len(rows):
            x, y = seq_len + 6, rows.mean()
            axes[1].text(x, y, f"T = {seq_len}", va="center", fontsize=8)
    return figure


def draw_packed(source: list, lengths: np.ndarray, limits: dict) -> Figure:
    """Draws the examples in some rows of a packed batch."""
    choice = jb.plan_packing(lengths, pack="always", **limits)
    schedule = jb.BatchSchedule(choice.plan, lengths, packing=choice.packing, seed=0)
    ids = jb.batch_dataset(source, schedule)[0].segment_ids["tokens"]
    ids = ids[ids.max(axis=1) > 1][:8]
    figure, (ax,) = new_figure(2.3)
    for y, row in enumerate(ids):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        ends = np.append(starts[1:], len(row))
        for start, end in zip(starts, ends, strict=True):
            segment = int(row[start])
            color = COLORS[segment % len(COLORS)] if segment else PADDING
            ax.barh(y, end - start, 0.8, start, color=color, edgecolor="w", lw=0.8)
            if end - start > len(row) / 40:
                dark = color in (COLORS[0], COLORS[4])
                text = str(segment)
                at = (start + end) / 2, y
                white = "w" if dark else "k"
                ax.text(*at, text, ha="center", va="center", fontsize=8, color=white)
    ax.set(ylim=(len(ids) - 0.5, -0.5), xlim=(0, ids.shape[1]))
    ax.set(xlabel="position in the row", ylabel="rows", yticks=[])
    return figure


def draw_steps(plan: jb.BucketPlan, lengths: np.ndarray) -> Figure:
    """Draws the bucket of each of the first steps."""
    schedule = jb.BatchSchedule(plan, lengths, seed=0)
    figure, (ax,) = new_figure(2.1)
    shapes = list(plan.buckets)
    for step in range(120):
        bucket = shapes.index(schedule[step].bucket)
        ax.bar(step, 0.8, 0.8, bucket - 0.4, color=COLORS[bucket])
    ax.set(xlabel="step", ylabel="shape of the batch", xlim=(-1, 120))
    ax.set_yticks(range(len(shapes)), [str(shape) for shape in shapes])
    return figure


if __name__ == "__main__":
    main()
