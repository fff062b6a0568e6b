"""Loading batches in worker processes."""

import pathlib
import re
import runpy
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
    offset = 5
    return jb.batch_dataset(
        Source(), schedule, start_step=start,
        transform=lambda x, rng: x | {"noise": offset + rng.random(len(x["x"]))},
    )

def line(step, batch):
    examples = batch.features["index"][batch.mask[:, 0]].tolist()
    return f"{step} {examples} {batch.features['noise'].tobytes().hex()}"

if __name__ == "__main__":
    try:
        for step, batch in enumerate(jb.data.load_in_workers(job(0), 2, num_threads=3)):
            print(line(step, batch), flush=True)
            if step == 7:
                for worker in multiprocessing.active_children()[:1]:
                    os.kill(worker.pid, signal.SIGKILL)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
"""


def test_workers_load_the_same_batches_and_a_killed_worker_is_reported(
    tmp_path, python
):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    here = runpy.run_path(str(script))
    expected = [here["line"](step, batch) for step, batch in enumerate(here["job"](0))]
    run = python(script, status=3)
    lines = run.stdout.splitlines()
    (number,) = map(int, re.findall(r"died before element (\d+)", run.stderr))
    # The batches before the failure are right, and a new run continues after them.
    assert lines == expected[:number] and 7 < number < len(expected)
    rest = [here["line"](number + i, x) for i, x in enumerate(here["job"](number))]
    assert rest == expected[number:]


PARENT = """
import os, signal, time
import multiprocessing
import grain
import jaxbucket as jb

def slow(number):
    time.sleep(0.2)
    return number

if __name__ == "__main__":
    numbers = grain.MapDataset.range(10**6).map(slow)
    for number in jb.data.load_in_workers(numbers, 2):
        workers = [worker.pid for worker in multiprocessing.active_children()]
        print(*workers, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.exhaustive
def test_workers_exit_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    output = tmp_path / "output"
    with output.open("w") as file:
        # Not a pipe, because surviving workers would keep it open.
        subprocess.run([sys.executable, script], stdout=file, stderr=file, check=False)
    workers = [int(pid) for pid in output.read_text().split("\n")[0].split()]
    assert len(workers) >= 2
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "workers stay"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Returns whether a process runs and is not a zombie."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False
    return state.split()[0] != "Z"


UNGUARDED = """
import jaxbucket as jb
print(jb.measure_lengths([{"x": [1]}] * 9, num_workers=2))
"""


@pytest.mark.exhaustive
def test_a_missing_main_guard_ends_with_an_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    output = tmp_path / "output"
    with output.open("w") as file:
        done = subprocess.run(
            [sys.executable, script], stdout=file, stderr=file, timeout=200, check=False
        )
    assert done.returncode == 1
    assert 'no `if __name__ == "__main__":` guard' in output.read_text()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="`dataset`"):
        load_in_workers([1])  # pyright: ignore
    with pytest.raises(ValueError, match="`num_workers=-1`"):
        load_in_workers(grain.MapDataset.range(3), -1)


def test_errors_of_the_dataset_are_raised_unchanged():
    def fail(number):
        raise RuntimeError("disk failure")

    with pytest.raises(RuntimeError, match="disk failure"):
        list(load_in_workers(grain.MapDataset.range(3).map(fail), 0))


class OfTwo(Exception):
    """Cannot be unpickled, because pickle passes one argument."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def test_an_error_that_cannot_be_pickled_is_raised():
    def fail(index):
        raise OfTwo("gone", 2)

    dataset = grain.MapDataset.range(4).map(fail)
    with pytest.raises(RuntimeError, match="OfTwo: gone"):
        list(load_in_workers(dataset, num_workers=1))
