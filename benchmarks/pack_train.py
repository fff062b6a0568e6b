"""Real tokens per second of training with packed rows, padded rows, and the choice.

    python benchmarks/pack_train.py
    python benchmarks/pack_train.py --rounds 3 --steps 100 --max-len 2048 --cost time

Each round runs `end_to_end/run.py` with `--pack never`, `always` and `auto`, one after
the other, so that noise affects all of them alike. It prints the median and the range
over the rounds, without the time to compile.
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
WAYS = ("never", "always", "auto")


def main() -> None:
    args, others = parse_arguments()
    results_of: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    runs = [(number, way) for number in range(args.rounds) for way in WAYS]
    for _, way in track(runs, "Training", transient=True, disable=args.json):
        results_of[way].append(train(way, args.steps, others))
    results = {way: figures(runs) for way, runs in results_of.items()}
    best = max(results["never"]["median"], results["always"]["median"])
    results["auto"]["by_the_better"] = results["auto"]["median"] / best
    if args.json:
        print(json.dumps({"jax": jax.__version__, "ways": results}))
    else:
        show(results)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="Time training with packed rows and with padded ones. Other "
        "options go to benchmarks/end_to_end/run.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of which to take the median"
    )
    parser.add_argument("--steps", type=int, default=150, help="updates of each run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args, others = parser.parse_known_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1.")
    return args, others


def train(way: str, steps: int, others: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.json"
        command = [sys.executable, str(_RUN), "--pack", way, "--steps", str(steps)]
        run = subprocess.run(
            [*command, "--json", str(path), *others],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
        return json.loads(path.read_text())


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = []
    for run in runs:
        compiling = run["compile"]["train_step"]["seconds"]
        seconds = run["seconds"] - compiling - run["planning"]["seconds"]
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
    columns = ("--pack", "rows", "shapes", "padding", "real tokens/s", "from", "to")
    for name in (*columns, "bits/byte"):
        table.add_column(name, justify="left" if name in columns[:2] else "right")
    for way, x in results.items():
        table.add_row(
            *(way, "packed" if x["packed"] else "padded", str(len(x["shapes"]))),
            *(f"{x['padding']:.1%}", f"{x['median']:,.0f}"),
            *(f"{x['least']:,.0f}", f"{x['most']:,.0f}", f"{x['bits_per_byte']:.3f}"),
        )
    console = Console(width=100)
    console.print(table)
    ratio = results["auto"]["by_the_better"]
    console.print(f"auto, relative to the better of the other two: {ratio:.2f}")


if __name__ == "__main__":
    main()
