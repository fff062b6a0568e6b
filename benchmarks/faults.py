"""Kills, stops or fails processes of a training run at random moments.

    python benchmarks/faults.py
    python benchmarks/faults.py --faults 3 --processes 2 --json

After each fault, all other processes must end within the timeout and five seconds, each
with a message that names the lost process. The run is resumed in another number of
processes until it is complete. Its batches must be those of a run without faults.
Linux only, because it finds the processes in /proc.
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

GRACE = 5.0
STEPS = 300
# A signal makes the process raise at its next line of Python, wherever it is.
FAILING = f"""
import runpy, signal, sys
def fail(number, frame):
    raise RuntimeError("asked to fail")
signal.signal(signal.SIGUSR1, fail)
sys.path.insert(0, {str(runs.RUN.parent)!r})
runpy.run_path({str(runs.RUN)!r}, run_name="__main__")
"""
FAULTS = {
    "killed": (signal.SIGKILL, "no heartbeat|lost the connection"),
    "stopped": (signal.SIGSTOP, "no heartbeat"),
    "raised": (signal.SIGUSR1, r"raised \w+: .*asked to fail"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Lose processes at random moments.")
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
        found = measure(args, pathlib.Path(folder))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    rows_pass = all(row["all_named"] and row["in_time"] for row in found["faults"])
    return 0 if rows_pass and all(found["same_batches"]) else 1


def measure(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    draw = random.Random(args.seed)
    runs.write_documents(folder)
    end(args, folder, 1, "whole")
    want = digest(folder, "whole")
    faults, same = [], []
    while len(faults) < args.faults:
        name = f"run {len(same)}"
        while len(faults) < args.faults and not (folder / f"{name}.json").exists():
            row = lose_one(args, folder, name, draw)
            if row:
                faults.append(row)
                print(f"{len(faults):3d} {row}", file=sys.stderr, flush=True)
        if not (folder / f"{name}.json").exists():
            end(args, folder, draw.choice(args.processes), name)
        same.append(digest(folder, name) == want)
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


def lose_one(
    args: argparse.Namespace, folder: pathlib.Path, name: str, draw: random.Random
) -> dict[str, Any] | None:
    """Starts a run and loses a process. None if the run ended before that."""
    count = draw.choice(args.processes)
    kind, victim = draw.choice(list(FAULTS)), draw.randrange(count)
    number, why = FAULTS[kind]
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
        # The run had ended before the fault.
        return None
    said = (folder / "output").read_text()
    lost = rf"(?=.*({why})).* process {victim} \("
    sentence = rf"jaxbucket: Process (\d+) is exiting:{lost}"
    named = {int(found[1]) for found in re.finditer(sentence, said)}
    if not passed or named != set(pids) - {victim}:
        print(said, file=sys.stderr)
    return {
        "processes": count,
        "fault": kind,
        "victim": victim,
        "after_step": newest(folder / name),
        "slowest_end_s": slowest,
        "in_time": passed,
        "all_named": named == set(pids) - {victim},
    }


def newest(folder: pathlib.Path) -> int:
    """Returns the newest saved step, or 0."""
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=0)


def processes_of(launcher: int) -> dict[int, int]:
    """Returns the pid of each process that still runs, by its index."""
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    found = {}
    for pid in map(int, children.split()):
        if is_running(pid):
            environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
            match = re.search(rb"JAX_PROCESS_ID=(\d+)", environment)
            if match:
                found[int(match[1])] = pid
    return found


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.split()[0] not in "ZX"


def show(found: dict[str, Any]) -> None:
    table = Table()
    for name in found["faults"][0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in found["faults"]:
        values = (f"{x:.1f}" if isinstance(x, float) else str(x) for x in row.values())
        table.add_row(*values)
    # Wide enough for the table, whatever it is printed to.
    console = Console(width=100)
    console.print(table)
    same = found["same_batches"]
    console.print(
        f"Timeout {found['timeout']:g} s. {sum(same)} of {len(same)} runs had the "
        "batches of one without faults."
    )


if __name__ == "__main__":
    sys.exit(main())
