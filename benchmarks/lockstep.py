"""Trains in every mode, over meshes and processes, and compares with one device.

    python benchmarks/lockstep.py
    python benchmarks/lockstep.py --steps 50 --processes 2 --json

For each run: the largest difference of a step's loss from that of one process with one
device, the shapes that were compiled and how often, and whether the batches were the
same. Then a run of four processes is asked to stop, and resumed in two, one and four.
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


def is_same(found: dict[str, Any]) -> bool:
    same = found["same_batches"] and found["same_shapes"]
    near = found["loss_difference"] <= LIMIT
    return same and near and not found["compiled_later"]


def measure(args: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    cases = [
        (count, mode, model_devices)
        for count in args.processes
        # With two devices in each process, four of them span two processes.
        for model_devices in (1, 2, 4)
        for mode in MODES
        if model_devices <= count
    ]
    runs.write_documents(folder)
    model = MODEL | {"--steps": args.steps}
    one = runs.train(folder, 1, model)
    rows = []
    for count, mode, model_devices in cases:
        options = model | {"--mode": mode, "--model-devices": model_devices}
        found = runs.train(folder, count, options, devices=2)
        rows.append(row(one, found, count, 2, mode, model_devices))
        print(rows[-1], file=sys.stderr, flush=True)
    saved = folder / "run"
    stop_on_the_way(folder, saved, model)
    for count in (2, 1, 4):
        copy = folder / f"run of {count}"
        shutil.copytree(saved, copy)
        options = model | {"--checkpoint": copy}
        found = runs.train(folder, count, options, "--resume", devices=2)
        rows.append(row(one, found, count, 2, "jit, resumed", 1))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def stop_on_the_way(
    folder: pathlib.Path, saved: pathlib.Path, options: dict[str, Any]
) -> None:
    """Starts four processes, and asks them to stop after some checkpoints."""
    options = options | {"--checkpoint": saved, "--save-every": 10}
    with runs.start(folder, 4, options) as run:
        while run.poll() is None and not list(saved.glob("[2-9]0")):
            time.sleep(0.01)
        run.send_signal(signal.SIGTERM)
        said, _ = run.communicate()
    after = re.search(r"Stopped by SIGTERM after step (\d+)", said or "")
    if run.returncode != 128 + signal.SIGTERM or after is None:
        raise SystemExit(f"The run was not stopped ({run.returncode}): {said}")
    step = int(after[1])
    if not 0 < step < options["--steps"] or not (saved / str(step)).exists():
        raise SystemExit(f"The run stopped after step {step} without a checkpoint.")


def row(
    one: dict[str, Any],
    found: dict[str, Any],
    count: int,
    devices: int,
    mode: str,
    model_devices: int,
) -> dict[str, Any]:
    first = found["train"]["first_step"]
    pairs = zip(one["train"]["losses"][first:], found["train"]["losses"], strict=True)
    return {
        "processes": count,
        "devices_each": devices,
        "mode": mode,
        "model_devices": model_devices,
        "steps": len(found["train"]["losses"]),
        # Unlike Python's `max`, numpy's returns NaN if there is one.
        "loss_difference": float(np.max([abs(a - b) for a, b in pairs])),
        "same_shapes": found["compiled"] == one["compiled"] * count,
        "compiled": found["compile"]["train_step"]["ahead"],
        "compiled_later": sum(
            one_process["later"] for one_process in found["compiled"]
        ),
        "same_batches": found["train"]["batches_digest"]
        == one["train"]["batches_digest"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for numbers in rows:
        table.add_row(
            *(f"{x:.1e}" if isinstance(x, float) else str(x) for x in numbers.values())
        )
    # Wide enough for the table, whatever it is printed to.
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
