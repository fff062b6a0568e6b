"""Loading in other processes; that it changes nothing is in test_invariants.py."""

import pathlib
import re
import subprocess
import sys
import time

import grain
import pytest

from jaxbucket.data import load_in_workers

SCRIPT = """
import os, signal, sys, time
import multiprocessing
import numpy as np
import jaxbucket as jb

class Source:
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.002)
        return {"x": np.full(1 + index % 20, index), "index": np.array(index)}

def job(start):
    lengths = np.array([1 + index % 20 for index in range(400)])
    plan = jb.plan_buckets(lengths, max_tokens=100, num_buckets=3)
    schedule = jb.BatchSchedule(plan, lengths)
    return jb.batch_dataset(Source(), schedule, start_step=start)

if __name__ == "__main__":
    start, victim = int(sys.argv[1]), int(sys.argv[2])
    try:
        for step, batch in enumerate(jb.data.load_in_workers(job(start), 2), start):
            print(step, *batch.features["index"][batch.mask[:, 0]], flush=True)
            if step == victim:
                for worker in multiprocessing.active_children()[:1]:
                    os.kill(worker.pid, signal.SIGKILL)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
"""


def run(script: pathlib.Path, start: int, victim: int) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, script, str(start), str(victim)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("victim", [0, 7])
def test_a_worker_that_is_killed_is_told_and_nothing_is_lost(tmp_path, victim):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    whole = run(script, 0, -1)
    assert whole.returncode == 0, whole.stderr
    lost = run(script, 0, victim)
    assert lost.returncode == 3, lost.stderr
    (number,) = re.findall(r"A worker was lost before element (\d+)", lost.stderr)
    # What came before is right; what comes is asked for by its step.
    lines = lost.stdout.splitlines()
    assert len(lines) == int(number)
    rest = run(script, int(number), -1)
    assert lines + rest.stdout.splitlines() == whole.stdout.splitlines()
    examples = [word for line in whole.stdout.splitlines() for word in line.split()[1:]]
    assert sorted(map(int, examples)) == list(range(400))


LEFT_ALONE = """
import os, signal, time
import multiprocessing
import grain
import jaxbucket as jb

def slowly(number):
    time.sleep(0.2)
    return number

if __name__ == "__main__":
    numbers = grain.MapDataset.range(10**6).map(slowly)
    for number in jb.data.load_in_workers(numbers, 2):
        workers = [worker.pid for worker in multiprocessing.active_children()]
        print(*workers, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LEFT_ALONE)
    output = tmp_path / "output"
    with output.open("w") as file:
        # Not a pipe: workers that stay would keep it open.
        subprocess.run([sys.executable, script], stdout=file, stderr=file, check=False)
    workers = [int(pid) for pid in output.read_text().split("\n")[0].split()]
    assert len(workers) >= 2
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "workers stay"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether it is there, and not only to be waited for."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False
    return state.split()[0] != "Z"


UNGUARDED = {
    "load": """
import grain
import jaxbucket as jb
print("begins")
for number in jb.data.load_in_workers(grain.MapDataset.range(9), 2):
    print(number)
""",
    "measure": """
import jaxbucket as jb
print("begins")
print(jb.measure_lengths([{"x": [1]}] * 9, num_workers=2))
""",
}


@pytest.mark.parametrize("name", UNGUARDED)
def test_a_script_without_a_guard_is_told_once(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED[name])
    output = tmp_path / "output"
    with output.open("w") as file:
        done = subprocess.run(
            [sys.executable, script], stdout=file, stderr=file, timeout=60, check=False
        )
    assert done.returncode == 1
    printed = output.read_text()
    # Once, for the process that was started, and not for any of its workers.
    assert printed.count("Traceback") == printed.count("has no guard") == 1
    assert len(printed.splitlines()) < 30
    assert 'if __name__ == "__main__":\n    ' in printed


def test_something_else_than_a_dataset_is_refused():
    with pytest.raises(ValueError, match="`dataset` is a list, not a `grain.MapDat"):
        load_in_workers([1])  # pyright: ignore


@pytest.mark.parametrize("name", ["num_workers", "num_threads", "buffer_size"])
def test_negative_numbers_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}=-1` must not be negative"):
        load_in_workers(grain.MapDataset.range(3), **{name: -1})


def test_errors_of_the_dataset_are_its_own():
    def fail(number):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        list(load_in_workers(grain.MapDataset.range(3).map(fail), 0))
