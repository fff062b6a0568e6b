"""Trains in every way for the same time, each in a process of its own, side by side."""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any

from live import console
from policies import POLICIES
from rich import box
from rich.console import Console
from rich.table import Table

_POINTS = 8
# What one way has compiled, the next one must not find.
_NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
_WIDTH = 96
_ALIKE = 0.05
_STYLES: dict[str, dict[str, Any]] = {
    "bucketed": {"color": "#0b3c5d", "marker": "o"},
    "pad-to-max": {"color": "#d9a441", "marker": "s", "linestyle": "--"},
    "dynamic": {"color": "#7a7a7a", "marker": "^", "linestyle": ":"},
    "grain-pack": {"color": "#b0413e", "marker": "D", "linestyle": "-."},
}


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: that of the first way that failed, or 0.

    What the ways before it did is shown all the same.
    """
    summaries: dict[str, dict[str, Any]] = {}
    status = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        for policy in POLICIES:
            path = pathlib.Path(folder) / f"{policy}.json"
            # Ended by a signal, it takes the one it waits for with it.
            try:
                status = subprocess.run(
                    _command(args, policy, path),
                    env=os.environ | _NO_CACHE,
                    check=False,
                ).returncode
            except KeyboardInterrupt:
                status = 128 + signal.SIGINT
            if status:
                break
            summaries[policy] = json.loads(path.read_text())
    if summaries:
        _show(summaries, args)
    return status


def _show(summaries: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    # Wide enough for the tables, whatever they are printed to.
    wide = Console(width=max(console.width, _WIDTH), highlight=False)
    wide.print(speed_table(summaries), cost_table(summaries))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(summaries, indent=2) + "\n")
    if args.plot:
        draw(summaries, args.plot)


def _command(args: argparse.Namespace, policy: str, path: pathlib.Path) -> list[str]:
    """This very command for one policy; of options given twice the last one counts."""
    options = [word for word in sys.argv if word != "--compare"]
    output = ["--points", str(_POINTS), "--json", str(path)]
    if args.plot:
        output += ["--plot", str(path.with_suffix(".png"))]
    return [sys.executable, *options, "--policy", policy, *output]


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """What is compared, of one way."""
    train, compile_ = summary["train"], summary["compile"]["train_step"]
    seconds = summary["seconds"]
    running = seconds - compile_["seconds"] - summary["planning"]["seconds"]
    return {
        "shapes": len(summary["buckets"]),
        "compiles": compile_["ahead"] + compile_["later"],
        "compile_seconds": compile_["seconds"],
        "padded_per_real": train["padded_tokens"] / train["real_tokens"],
        "with_compile": train["real_tokens"] / seconds,
        "without_compile": train["real_tokens"] / running,
        "bits_per_byte": summary["held_out"]["bits_per_byte"],
    }


def speed_table(summaries: dict[str, dict[str, Any]]) -> Table:
    seconds = sorted(round(summary["seconds"]) for summary in summaries.values())
    least, most = seconds[0], seconds[-1]
    # Compiling is not cut short.
    how_long = f"{most} s" if most - least <= _ALIKE * most else f"{least} to {most} s"
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"{how_long} each. Real tokens/s with compiling the train step, "
        "and while running only; in\nbrackets, bucketed over this one. Bits per byte "
        "are of the held-out documents.",
        caption_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in (
        *("shapes", "compiles", "compile s", "padded/real"),
        *("real tokens/s", "... running", "bits/byte"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {policy: figures(summary) for policy, summary in summaries.items()}
    best = rows["bucketed"]
    for policy, row in rows.items():
        table.add_row(
            policy,
            *(str(row["shapes"]), str(row["compiles"])),
            *(f"{row['compile_seconds']:.1f}", f"{row['padded_per_real']:.2f}"),
            *(
                f"{row[name]:,.0f} ({best[name] / row[name]:.1f}x)"
                for name in ("with_compile", "without_compile")
            ),
            # JSON has no NaN.
            "diverged"
            if row["bits_per_byte"] is None
            else f"{row['bits_per_byte']:.3f}",
        )
    return table


def cost_table(summaries: dict[str, dict[str, Any]]) -> Table:
    """What a position costs in each shape: attention grows with T."""
    table = Table(
        box=box.SIMPLE_HEAD,
        caption="Median step time over B * T, padding counted.",
        caption_justify="left",
    )
    for name in ("", "B", "T", "steps", "us per position"):
        table.add_column(name, justify="left" if not name else "right")
    for policy, summary in summaries.items():
        # Of the dynamic way's hundreds of shapes each was there but once or twice.
        for use in summary["buckets"] if policy != "dynamic" else ():
            batch_size, seq_len = use["bucket"]
            cost = 1e6 * use["seconds_per_token"]
            table.add_row(
                *(policy, str(batch_size), str(seq_len), str(use["steps"])),
                f"{cost:.0f}",
            )
    return table


def draw(summaries: dict[str, dict[str, Any]], path: str) -> None:
    """Held-out bits per byte against the time of training."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for policy, summary in summaries.items():
        curve = summary["curve"]
        ax.plot(
            [point["seconds"] for point in curve],
            [point["bits_per_byte"] for point in curve],
            label=f"{policy}: {figures(summary)['with_compile']:,.0f} real tokens/s",
            **_STYLES[policy],
        )
    ax.set(
        xlabel="seconds of training, compiling included",
        ylabel="held-out bits per byte",
        xlim=(0, None),
    )
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
