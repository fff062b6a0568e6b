"""Kills or suspends processes of a training run, or makes them raise, at random times.

    python benchmarks/faults.py
    python benchmarks/faults.py --faults 3 --processes 2 --json

After each fault, all other processes must end within the timeout and 15 seconds, and
the output of each, jax's or ours, must name the lost process. The run is resumed with a
random number of processes until it is complete. Its batches must equal the batches of a
run without faults. The benchmark requires Linux, because it finds the processes in
/proc.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import runs
from rich.console import Console
from rich.table import Table

GRACE = 15.0
STEPS = 300
# A signal makes the process raise at the next line of Python that it runs.
FAILING = f"""
import runpy, signal, sys
def fail(number, frame):
    raise RuntimeError("asked to fail")
signal.signal(signal.SIGUSR1, fail)
sys.path.insert(0, {str(runs.RUN.parent)!r})
runpy.run_path({str(runs.RUN)!r}, run_name="__main__")
"""
FAULTS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "raised": signal.SIGUSR1,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill processes at random times.")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        help="seconds without a heartbeat after which a process is lost",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(args, pathlib.Path(folder))
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)
    rows_pass = all(row["named"] and row["in_time"] for row in results["faults"])
    return 0 if rows_pass and all(results["same_batches"]) else 1


def measure(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    draw = random.Random(args.seed)
    runs.write_documents(folder)
    end(args, folder, 1, "whole")
    expected = digest(folder, "whole")
    faults, same = [], []
    while len(faults) < args.faults:
        name = f"run {len(same)}"
        while len(faults) < args.faults and not (folder / f"{name}.json").exists():
            row = run_with_fault(args, folder, name, draw)
            if row:
                faults.append(row)
                print(f"{len(faults):3d} {row}", file=sys.stderr, flush=True)
        if not (folder / f"{name}.json").exists():
            end(args, folder, draw.choice(args.processes), name)
        same.append(digest(folder, name) == expected)
    return {"timeout": args.timeout, "faults": faults, "same_batches": same}


def start(
    args: argparse.Namespace, folder: pathlib.Path, count: int, name: str
) -> subprocess.Popen[str]:
    options = {
        "--steps": STEPS,
        "--timeout": args.timeout,
        "--json": folder / f"{name}.json",
        "--checkpoint": folder / name,
        "--save-every": 5,
    }
    with (folder / "output").open("w") as output:
        return runs.start(
            folder, count, options, "--resume", program=("-c", FAILING), output=output
        )


def end(args: argparse.Namespace, folder: pathlib.Path, count: int, name: str) -> None:
    run = start(args, folder, count, name)
    if run.wait():
        raise SystemExit((folder / "output").read_text())


def digest(folder: pathlib.Path, name: str) -> str:
    summary = json.loads((folder / f"{name}.json").read_text())
    return summary["train"]["batches_digest"]


def run_with_fault(
    args: argparse.Namespace, folder: pathlib.Path, name: str, draw: random.Random
) -> dict[str, Any] | None:
    """Starts a run and kills a process; returns None if the run ended before that."""
    count = draw.choice(args.processes)
    kind, victim = draw.choice(list(FAULTS)), draw.randrange(count)
    number = FAULTS[kind]
    step = newest(folder / name) + draw.choice((5, 10))
    run = start(args, folder, count, name)
    while newest(folder / name) < step:
        if run.poll() is not None:
            if run.returncode:
                raise SystemExit((folder / "output").read_text())
            return None
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.3))
    pids = processes_of(run.pid)
    if len(pids) < count:
        run.wait()
        return None
    began = time.monotonic()
    os.kill(pids[victim], number)
    seconds = {}
    while len(seconds) < count - 1 and time.monotonic() - began < 4 * args.timeout:
        for index, pid in pids.items():
            if index != victim and index not in seconds and not is_running(pid):
                seconds[index] = time.monotonic() - began
        time.sleep(0.01)
    run.terminate()
    for pid in pids.values():
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    run.wait()
    slowest = max(seconds.values()) if len(seconds) == count - 1 else None
    passed = slowest is not None and slowest < args.timeout + GRACE
    if passed and (folder / f"{name}.json").exists():
        # The run ended before the fault.
        return None
    printed = (folder / "output").read_text()
    named = all(
        names("\n".join(re.findall(rf"^\[{i}\] (.*)", printed, re.M)), victim)
        for i in set(pids) - {victim}
    )
    if not passed or not named:
        print(printed, file=sys.stderr)
    return {
        "processes": count,
        "fault": kind,
        "victim": victim,
        "after_step": newest(folder / name),
        "slowest_end_s": slowest,
        "in_time": passed,
        "named": named,
    }


def names(output: str, victim: int) -> bool:
    """Returns whether the output names a lost process."""
    # jax names its service instead of process 0, which runs it.
    of_jax = "remote target coordination_service|RPC: /xla.coordination"
    if victim:
        of_jax = rf"unhealthy[^:]*:\n{victim}\b"
    return bool(re.search(f"process {victim} raised|{of_jax}", output))


def newest(folder: pathlib.Path) -> int:
    """Returns the newest saved step, or 0."""
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=0)


def processes_of(launcher: int) -> dict[int, int]:
    """Returns the pid of each process that is still running, by its index."""
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    pids = {}
    for pid in map(int, children.split()):
        if is_running(pid):
            environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
            match = re.search(rb"JAX_PROCESS_ID=(\d+)", environment)
            if match:
                pids[int(match[1])] = pid
    return pids


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.split()[0] not in "ZX"


def show(results: dict[str, Any]) -> None:
    table = Table()
    for name in results["faults"][0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in results["faults"]:
        values = (f"{x:.1f}" if isinstance(x, float) else str(x) for x in row.values())
        table.add_row(*values)
    # Wide enough for the table, regardless of the terminal width.
    console = Console(width=100)
    console.print(table)
    same = results["same_batches"]
    console.print(
        f"Timeout {results['timeout']:g} s. {sum(same)} of {len(same)} runs had the "
        "same batches as a run without faults."
    )


if __name__ == "__main__":
    sys.exit(main())
