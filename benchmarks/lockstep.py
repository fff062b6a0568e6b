"""Compares training in every mode, on meshes and processes, with a single device.

    python benchmarks/lockstep.py
    python benchmarks/lockstep.py --steps 50 --processes 2 --json

For each run, prints the largest difference in loss from a single-device run, how often
each shape was compiled, and whether the batches were equal. Then a run with four
processes is asked to stop, and is resumed with two, one and four processes.
"""

import argparse
import json
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

import numpy as np
import runs
from rich.console import Console
from rich.table import Table

LIMIT = 1e-5
MODES = ("jit", "shard_map", "pmap")
# Dropout draws random numbers, which must not depend on the mesh.
MODEL = {
    "--width": 32,
    "--dropout": 0.1,
    "--max-len": 96,
    "--max-tokens": 1536,
    "--num-buckets": 3,
    "--batch-size-multiple": 8,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compare modes, meshes and numbers of processes."
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, pathlib.Path(folder))
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)
    return 0 if all(map(is_same, rows)) else 1


def is_same(summary: dict[str, Any]) -> bool:
    same = summary["same_batches"] and summary["same_shapes"]
    near = summary["loss_difference"] <= LIMIT
    return same and near and not summary["compiled_later"]


def measure(args: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    cases = [
        (count, mode, model_devices)
        for count in args.processes
        # With two devices per process, four devices span two processes.
        for model_devices in (1, 2, 4)
        for mode in MODES
        if model_devices <= count
    ]
    runs.write_documents(folder)
    model = MODEL | {"--steps": args.steps}
    reference = runs.train(folder, 1, model)
    rows = []
    for count, mode, model_devices in cases:
        options = model | {"--mode": mode, "--model-devices": model_devices}
        summary = runs.train(folder, count, options, devices=2)
        rows.append(row(reference, summary, count, 2, mode, model_devices))
        print(rows[-1], file=sys.stderr, flush=True)
    saved = folder / "run"
    stop_midway(folder, saved, model)
    for count in (2, 1, 4):
        copy = folder / f"run of {count}"
        shutil.copytree(saved, copy)
        options = model | {"--checkpoint": copy}
        summary = runs.train(folder, count, options, "--resume", devices=2)
        rows.append(row(reference, summary, count, 2, "jit, resumed", 1))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def stop_midway(
    folder: pathlib.Path, saved: pathlib.Path, options: dict[str, Any]
) -> None:
    """Starts four processes, and asks them to stop after some checkpoints."""
    options = options | {"--checkpoint": saved, "--save-every": 10}
    with runs.start(folder, 4, options) as run:
        while run.poll() is None and not list(saved.glob("[2-9]0")):
            time.sleep(0.01)
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate()
    after = re.search(r"Stopped by SIGTERM after step (\d+)", output or "")
    if run.returncode != 128 + signal.SIGTERM or after is None:
        raise SystemExit(f"The run was not stopped ({run.returncode}): {output}")
    step = int(after[1])
    if not 0 < step < options["--steps"] or not (saved / str(step)).exists():
        raise SystemExit(f"The run stopped after step {step} without a checkpoint.")


def row(
    reference: dict[str, Any],
    summary: dict[str, Any],
    count: int,
    devices: int,
    mode: str,
    model_devices: int,
) -> dict[str, Any]:
    first = summary["train"]["first_step"]
    pairs = zip(
        reference["train"]["losses"][first:], summary["train"]["losses"], strict=True
    )
    return {
        "processes": count,
        "devices_each": devices,
        "mode": mode,
        "model_devices": model_devices,
        "steps": len(summary["train"]["losses"]),
        # Unlike Python's `max`, numpy's returns NaN if there is one.
        "loss_difference": float(np.max([abs(a - b) for a, b in pairs])),
        "same_shapes": summary["compiled"] == reference["compiled"] * count,
        "compiled": summary["compile"]["train_step"]["ahead"],
        "compiled_later": sum(
            one_process["later"] for one_process in summary["compiled"]
        ),
        "same_batches": summary["train"]["batches_digest"]
        == reference["train"]["batches_digest"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for numbers in rows:
        table.add_row(
            *(f"{x:.1e}" if isinstance(x, float) else str(x) for x in numbers.values())
        )
    # Wide enough for the table, regardless of the terminal width.
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
