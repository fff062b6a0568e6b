"""Small runs of `end_to_end/run.py` with several processes, for other benchmarks."""

import json
import os
import pathlib
import subprocess
import sys
from typing import IO, Any

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "scripts" / "launch_local.py"
RUN = ROOT / "benchmarks" / "end_to_end" / "run.py"
# A long grace period, because the benchmarks test how processes end on their own.
_GRACE = 3600
_SMALL = {
    "--width": 16,
    "--layers": 1,
    "--max-len": 64,
    "--max-tokens": 512,
    "--num-buckets": 2,
    "--batch-size-multiple": 4,
    "--lr": 1e-3,
}


def write_documents(folder: pathlib.Path) -> None:
    lines = [f"{n} " + "to be or not " * (n * n % 9) for n in range(400)]
    text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (folder / "data.jsonl").write_text(text)


def start(
    folder: pathlib.Path,
    count: int,
    options: dict[str, Any],
    *flags: str,
    devices: int = 1,
    program: tuple[object, ...] = (RUN,),
    output: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Starts a run with `count` processes on the documents of the folder.

    A run loads the programs that earlier runs have compiled.
    """
    all_options = {"--data": folder / "data.jsonl", **_SMALL, **options}
    command = [
        *(sys.executable, LAUNCH, "-n", count, "-d", devices, "--grace", _GRACE, "--"),
        *(sys.executable, *program, *flags),
        *(word for option in all_options.items() for word in option),
    ]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        list(map(str, command)),
        env=os.environ | cache,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(
    folder: pathlib.Path, count: int, options: dict[str, Any], *flags: str, **more: Any
) -> dict[str, Any]:
    """Starts a run, waits for it, and returns its summary."""
    summary = folder / "summary.json"
    summary.unlink(missing_ok=True)
    with start(folder, count, options | {"--json": summary}, *flags, **more) as run:
        output, _ = run.communicate()
    if run.returncode:
        raise SystemExit(f"{count} processes, {options}: {output}")
    return json.loads(summary.read_text())
