"""Trains with every batching method for the same time, and compares the results."""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
from live import console
from rich import box
from rich.console import Console
from rich.table import Table

# Each batching method, and the options that select it.
METHODS = {
    "bucketed": ("--policy", "bucketed", "--pack", "never"),
    "packed": ("--policy", "bucketed", "--pack", "always"),
    "auto": ("--policy", "bucketed", "--pack", "auto"),
    "pad-to-max": ("--policy", "pad-to-max", "--pack", "never"),
    "dynamic": ("--policy", "dynamic", "--pack", "never"),
    "grain-pack": ("--policy", "grain-pack", "--pack", "never"),
}
COLUMNS = (
    *("shapes", "compiles", "compile s", "padded/real", "real tokens/s"),
    *("tokens/s, running", "bits/byte"),
)
# The runs of a method, in the order of seeds. Each is the output of `run.py --json`.
Runs = dict[str, list[dict[str, Any]]]

_POINTS = 8
# Runs must not load programs that earlier runs have compiled.
_NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
_WIDTH = 110
_ALIKE = 0.05
# Markers, line styles and lightness differ, so lines are distinguishable in grayscale.
_STYLES: dict[str, dict[str, Any]] = {
    "bucketed": {"color": "#0b3c5d", "marker": "o"},
    "packed": {"color": "#2a7f62", "marker": "P", "linestyle": (0, (6, 2))},
    "auto": {"color": "#8a5fbf", "marker": "x", "linestyle": (0, (3, 1, 1, 1))},
    "pad-to-max": {"color": "#d9a441", "marker": "s", "linestyle": "--"},
    "dynamic": {"color": "#7a7a7a", "marker": "^", "linestyle": ":"},
    "grain-pack": {"color": "#b0413e", "marker": "D", "linestyle": "-."},
}


def run(args: argparse.Namespace) -> int:
    """Returns the exit status of the first run that failed, or 0.

    The results of earlier runs are shown in any case.
    """
    runs: Runs = {}
    status = 0
    # Like Ctrl-C, SIGTERM ends this process and the run that it waits for.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        # Run all methods with a seed before the next seed, because the comparison may
        # be interrupted.
        for seed, method in [(s, w) for s in range(args.seeds) for w in METHODS]:
            path = pathlib.Path(folder) / f"{method}-{seed}.json"
            try:
                status = subprocess.run(
                    _command(args, method, args.seed + seed, path),
                    env=os.environ | _NO_CACHE,
                    check=False,
                ).returncode
            except KeyboardInterrupt:
                status = 128 + signal.SIGINT
            if status:
                break
            runs.setdefault(method, []).append(json.loads(path.read_text()))
    if runs:
        _show(runs, args)
    return status


def _show(runs: Runs, args: argparse.Namespace) -> None:
    # Wide enough for the tables, regardless of the terminal width.
    wide = Console(width=max(console.width, _WIDTH), highlight=False)
    wide.print(speed_table(runs), cost_table(runs))
    if args.markdown:
        # Print without the console, which would wrap the lines.
        print(markdown(runs))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(runs, indent=2) + "\n")
    if args.plot:
        draw(runs, args.plot)


def _command(
    args: argparse.Namespace, method: str, seed: int, path: pathlib.Path
) -> list[str]:
    """Returns this command for one method. The last of repeated options is used."""
    options = [word for word in sys.argv if word not in ("--compare", "--markdown")]
    more = ["--seeds", "1", "--seed", str(seed), "--points", str(_POINTS)]
    more += ["--json", str(path)]
    if args.plot:
        more += ["--plot", str(path.with_suffix(".png"))]
    return [sys.executable, *options, *METHODS[method], *more]


def metrics_of(summary: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics of a run that are compared; NaN if the run diverged."""
    train, compile_ = summary["train"], summary["compile"]["train_step"]
    seconds = summary["seconds"]
    running = seconds - compile_["seconds"] - summary["planning"]["seconds"]
    bits = summary["held_out"]["bits_per_byte"]
    return {
        "shapes": len(summary["buckets"]),
        "compiles": compile_["ahead"] + compile_["later"],
        "compile_seconds": compile_["seconds"],
        "padded_per_real": train["padded_tokens"] / train["real_tokens"],
        "with_compile": train["real_tokens"] / seconds,
        "without_compile": train["real_tokens"] / running,
        "bits_per_byte": np.nan if bits is None else bits,
    }


def over_seeds(runs: Iterable[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns each metric over all runs of a method, as an array."""
    each = [metrics_of(summary) for summary in runs]
    return {name: np.array([one[name] for one in each]) for name in each[0]}


def with_spread(values: np.ndarray, spec: str) -> str:
    """Returns the mean, and half the range if there are several values."""
    if np.isnan(values).any():
        return "diverged"
    spread = f" ± {np.ptp(values) / 2:{spec}}" if len(values) > 1 else ""
    return f"{values.mean():{spec}}{spread}"


def rows(runs: Runs) -> dict[str, list[str]]:
    """Returns the cells of each method, in the order of `COLUMNS`."""
    metrics = {method: over_seeds(summaries) for method, summaries in runs.items()}
    bucketed = metrics["bucketed"]["without_compile"].mean()
    cells = {}
    for method, x in metrics.items():
        running = x["without_compile"].mean()
        cells[method] = [
            f"{x['shapes'].mean():.0f}",
            f"{x['compiles'].mean():.0f}",
            f"{x['compile_seconds'].mean():.1f}",
            f"{x['padded_per_real'].mean():.2f}",
            with_spread(x["with_compile"], ",.0f"),
            f"{running:,.0f} ({bucketed / running:.1f}x)",
            with_spread(x["bits_per_byte"], ".3f"),
        ]
    return cells


def speed_table(runs: Runs) -> Table:
    summaries = [summary for of_method in runs.values() for summary in of_method]
    seconds = sorted(round(summary["seconds"]) for summary in summaries)
    least, most = seconds[0], seconds[-1]
    # Runs do not end during compilation, so their times may differ.
    time = f"{most} s" if most - least <= _ALIKE * most else f"{least} to {most} s"
    num_seeds = max(map(len, runs.values()))
    spread = f"Means of {num_seeds} seeds ± half the range. " if num_seeds > 1 else ""
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"{time} per run. {spread}Real tokens/s include the time to "
        'compile the train step; "running" excludes it. The ratio of "bucketed" to '
        "each method is in parentheses. Bits per byte are measured on held-out "
        "documents.",
        caption_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for method, cells in rows(runs).items():
        table.add_row(method, *cells)
    return table


def markdown(runs: Runs) -> str:
    """Returns the same table as Markdown."""
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    lines += [
        f"| {method} | {' | '.join(cells)} |" for method, cells in rows(runs).items()
    ]
    return "\n".join(lines)


def cost_table(runs: Runs) -> Table:
    """Returns the time per position for each shape."""
    table = Table(
        box=box.SIMPLE_HEAD,
        caption="Median step time divided by B * T, for the first seed.",
        caption_justify="left",
    )
    for name in ("", "B", "T", "steps", "us per position"):
        table.add_column(name, justify="left" if not name else "right")
    for method, (summary, *_) in runs.items():
        # The dynamic method has hundreds of shapes, with one or two steps each.
        for use in summary["buckets"] if method != "dynamic" else ():
            batch_size, seq_len = use["bucket"]
            cost = 1e6 * use["seconds_per_token"]
            table.add_row(
                *(method, str(batch_size), str(seq_len), str(use["steps"])),
                f"{cost:.0f}",
            )
    return table


def draw(runs: Runs, path: str) -> None:
    """Draws held-out bits per byte over training time, as means over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    ax = figure.add_subplot()
    for method, summaries in runs.items():
        # A long compilation may skip a point, but never the last one.
        num_points = min(len(summary["curve"]) for summary in summaries)
        points = np.array(
            [
                [(point["seconds"], point["bits_per_byte"]) for point in curve]
                for curve in (summary["curve"][-num_points:] for summary in summaries)
            ],
            dtype=float,
        )
        seconds, bits = points.mean(axis=0).T
        tokens = over_seeds(summaries)["with_compile"].mean()
        label = f"{method}: {tokens:,.0f} real tokens/s"
        ax.plot(seconds, bits, label=label, **_STYLES[method])
        if len(summaries) > 1:
            low, high = points[..., 1].min(axis=0), points[..., 1].max(axis=0)
            ax.fill_between(
                seconds, low, high, color=_STYLES[method]["color"], alpha=0.15
            )
    ax.set(
        xlabel="seconds of training, including compilation",
        ylabel="held-out bits per byte",
        xlim=(0, None),
    )
    ax.grid(alpha=0.3)
    # Legend handles must be long enough to distinguish the line styles.
    ax.legend(loc="upper right", fontsize="small", handlelength=4)
    figure.savefig(path, dpi=120)
