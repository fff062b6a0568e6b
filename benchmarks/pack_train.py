"""Measures real tokens per second with packed rows, padded rows and `--pack auto`.

    python benchmarks/pack_train.py
    python benchmarks/pack_train.py --rounds 3 --steps 100 --max-len 2048 --cost time

Each round runs `end_to_end/run.py` with `--pack never`, `always` and `auto` in turn, so
that noise affects all of them equally. The benchmark prints the median and the range
over the rounds, excluding compile time.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

_RUN = pathlib.Path(__file__).parent / "end_to_end" / "run.py"
METHODS = ("never", "always", "auto")


def main() -> None:
    args, others = parse_arguments()
    results_of: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    runs = [(number, method) for number in range(args.rounds) for method in METHODS]
    for _, method in track(runs, "Training", transient=True, disable=args.json):
        results_of[method].append(train(method, args.steps, others))
    results = {method: summarize(runs) for method, runs in results_of.items()}
    best = max(results["never"]["median"], results["always"]["median"])
    results["auto"]["by_the_better"] = results["auto"]["median"] / best
    if args.json:
        print(json.dumps({"jax": jax.__version__, "ways": results}))
    else:
        show(results)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="Time training with packed and with padded rows. Other options "
        "are passed to benchmarks/end_to_end/run.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds; medians are reported"
    )
    parser.add_argument(
        "--steps", type=int, default=150, help="number of steps per run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args, others = parser.parse_known_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1.")
    return args, others


def train(method: str, steps: int, others: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.json"
        command = [sys.executable, str(_RUN), "--pack", method, "--steps", str(steps)]
        run = subprocess.run(
            [*command, "--json", str(path), *others],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
        return json.loads(path.read_text())


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = []
    for run in runs:
        compile_seconds = run["compile"]["train_step"]["seconds"]
        seconds = run["seconds"] - compile_seconds - run["planning"]["seconds"]
        speeds.append(run["train"]["real_tokens"] / seconds)
    (*_, run) = runs
    return {
        "median": float(np.median(speeds)),
        "least": min(speeds),
        "most": max(speeds),
        "shapes": run["plan"]["buckets"],
        "packed": run["epoch"]["packed_examples"] > 0,
        "padding": run["epoch"]["padding"],
        "bits_per_byte": run["held_out"]["bits_per_byte"],
    }


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE, title="Training by benchmarks/end_to_end/run.py")
    columns = ("--pack", "rows", "shapes", "padding", "real tokens/s", "min", "max")
    for name in (*columns, "bits/byte"):
        table.add_column(name, justify="left" if name in columns[:2] else "right")
    for method, x in results.items():
        table.add_row(
            *(method, "packed" if x["packed"] else "padded", str(len(x["shapes"]))),
            *(f"{x['padding']:.1%}", f"{x['median']:,.0f}"),
            *(f"{x['least']:,.0f}", f"{x['most']:,.0f}", f"{x['bits_per_byte']:.3f}"),
        )
    console = Console(width=100)
    console.print(table)
    ratio = results["auto"]["by_the_better"]
    console.print(f"auto, relative to the better of the other two: {ratio:.2f}")


if __name__ == "__main__":
    main()
