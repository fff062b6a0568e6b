"""Tests of the launcher: its processes find each other, and none outlives it."""

import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

LAUNCH = pathlib.Path(__file__).parents[2] / "scripts" / "launch_local.py"


def launch(code: str, *options: object) -> subprocess.Popen[str]:
    command = [sys.executable, LAUNCH, *options, "--", sys.executable, "-c", code]
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(run: subprocess.Popen[str], count: int) -> list[int]:
    """Returns the first process ids that `count` processes print."""
    assert run.stdout is not None
    # Other lines are about processes that failed.
    words = (line.split()[1] for line in run.stdout)
    return list(itertools.islice(map(int, filter(str.isdecimal, words)), count))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended, too.
    state = pathlib.Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def assert_all_end(numbers: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, numbers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_processes_know_their_index_and_their_lines_are_prefixed():
    code = (
        "import os; names = 'COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID'\n"
        "settings = [os.environ[f'JAX_{name}'] for name in names]\n"
        "print(*settings, os.environ['XLA_FLAGS'])"
    )
    out, error = launch(code, "-n", 3, "-d", 5).communicate(timeout=60)
    assert error == ""
    addresses = set()
    for index, line in enumerate(sorted(out.splitlines())):
        match = re.fullmatch(rf"\[{index}\] (127.0.0.1:\d+) 3 {index} .*=5", line)
        assert match, line
        addresses.add(match[1])
    assert len(addresses) == 1


@pytest.mark.parametrize(
    ("action", "status"),
    [
        ("os._exit(0)", 0),
        ("os._exit(7 if i == '1' else 0)", 7),
        ("os.kill(os.getpid(), 9) if i == '1' else 0", 137),
    ],
)
def test_the_status_is_that_of_the_first_failed_process(action, status):
    code = f"import os; i = os.environ['JAX_PROCESS_ID']; {action}"
    run = launch(code, "-n", 3)
    run.communicate(timeout=60)
    assert run.returncode == status


def test_a_line_is_printed_for_each_process_that_failed():
    code = (
        "import os, sys; i = os.environ['JAX_PROCESS_ID']\n"
        "print(i, end='', flush=True)\n"
        "{'0': lambda: os.kill(os.getpid(), 9), '1': lambda: sys.exit(75),\n"
        " '2': lambda: None, '3': lambda: os.kill(os.getpid(), 15)}[i]()"
    )
    out, _ = launch(code, "-n", 4).communicate(timeout=60)
    assert sorted(out.splitlines()) == [
        *("[0] 0", "[0] was killed by SIGKILL"),
        *("[1] 1", "[1] exited with status 75"),
        "[2] 2",
        *("[3] 3", "[3] was killed by SIGTERM"),
    ]


def test_processes_that_outlive_a_failure_are_killed():
    code = (
        "import os, time\nif os.environ['JAX_PROCESS_ID'] == '1': os._exit(7)\n" + SLEEP
    )
    run = launch(code, "-n", 3, "--grace", 0.5)
    others = pids(run, 2)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 7
    assert "0.5 s after a process failed" in error and "are killed: 0, 2." in error
    assert_all_end(others)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded(number):
    run = launch(SLEEP, "-n", 2)
    children = pids(run, 2)
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode in (128 + number, 1)
    assert_all_end(children)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prctl")
def test_processes_end_if_the_launcher_is_killed():
    run = launch(SLEEP, "-n", 2)
    children = pids(run, 2)
    run.kill()
    run.communicate(timeout=60)
    assert_all_end(children)
