"""Trains with several processes on a busy machine.

    python benchmarks/load.py
    python benchmarks/load.py --steps 100 --processes 2 --json

Runs a thousand steps on four processes, alongside two busy processes per core. No
process may be reported as lost, and the batches must equal those of a single process.
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

# Rounding errors accumulate over a thousand steps.
LIMIT = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description="Train on a busy machine.")
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
        results = measure(args, pathlib.Path(folder))
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:28} {value}")
    return 0 if results["same_batches"] and results["loss_difference"] <= LIMIT else 1


def measure(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    runs.write_documents(folder)
    single, _ = train(args, folder, 1)
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(args.busy)]
    for process in busy:
        process.start()
    try:
        loaded, seconds = train(args, folder, args.processes)
    finally:
        for process in busy:
            process.terminate()
    pairs = zip(single["losses"], loaded["losses"], strict=True)
    return {
        "steps": loaded["steps"],
        "processes": args.processes,
        "busy_processes": args.busy,
        "processors": os.cpu_count(),
        "timeout_s": args.timeout,
        "seconds": round(seconds, 1),
        "same_batches": loaded["batches_digest"] == single["batches_digest"],
        # Unlike Python's `max`, numpy's returns NaN if there is one.
        "loss_difference": float(np.max([abs(a - b) for a, b in pairs])),
    }


def spin() -> None:
    while True:
        pass


def train(
    args: argparse.Namespace, folder: pathlib.Path, count: int
) -> tuple[dict[str, Any], float]:
    """Returns the training summary of a run, and its time in seconds."""
    options = {"--steps": args.steps, "--points": 4, "--timeout": args.timeout}
    start = time.perf_counter()
    summary = runs.train(folder, count, options)
    return summary["train"], time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
