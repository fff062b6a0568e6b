"""Trains in several processes on a machine whose processors are busy.

    python benchmarks/load.py
    python benchmarks/load.py --steps 100 --processes 2 --json

A thousand steps on four processes, beside twice as many busy processes as there are
processors. No process may be taken for lost, and the batches must be those of one
process alone.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np
import runs

# Rounding adds up over a thousand steps.
LIMIT = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description="Train beside busy processes.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--busy", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        help="seconds without a heartbeat after which a process is lost",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, pathlib.Path(folder))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:28} {value}")
    return 0 if found["same_batches"] and found["loss_difference"] <= LIMIT else 1


def measure(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    runs.write_documents(folder)
    alone, _ = train(args, folder, 1)
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(args.busy)]
    for process in busy:
        process.start()
    try:
        loaded, seconds = train(args, folder, args.processes)
    finally:
        for process in busy:
            process.terminate()
    pairs = zip(alone["losses"], loaded["losses"], strict=True)
    return {
        "steps": loaded["steps"],
        "processes": args.processes,
        "busy_processes": args.busy,
        "processors": os.cpu_count(),
        "timeout_s": args.timeout,
        "seconds": round(seconds, 1),
        "same_batches": loaded["batches_digest"] == alone["batches_digest"],
        # Unlike Python's `max`, numpy's returns NaN if there is one.
        "loss_difference": float(np.max([abs(a - b) for a, b in pairs])),
    }


def spin() -> None:
    while True:
        pass


def train(
    args: argparse.Namespace, folder: pathlib.Path, count: int
) -> tuple[dict[str, Any], float]:
    """Returns the training summary of a run, and its seconds."""
    options = {"--steps": args.steps, "--points": 4, "--timeout": args.timeout}
    start = time.perf_counter()
    summary = runs.train(folder, count, options)
    return summary["train"], time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
