"""The launcher: processes that find one another, and that it leaves none of."""

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
    """What the first lines of so many processes say."""
    assert run.stdout is not None
    lines = [run.stdout.readline() for _ in range(count)]
    return [int(line.split()[1]) for line in lines]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # What nobody has waited for yet is no longer running either.
    state = pathlib.Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def assert_all_end(numbers: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, numbers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_each_process_is_told_which_it_is_and_its_lines_are_told_apart():
    code = (
        "import os; names = 'COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID'\n"
        "told = [os.environ[f'JAX_{name}'] for name in names]\n"
        "print(*told, os.environ['XLA_FLAGS'])"
    )
    out, error = launch(code, "-n", 3, "-d", 5).communicate(timeout=60)
    assert error == ""
    addresses = set()
    for index, line in enumerate(sorted(out.splitlines())):
        found = re.fullmatch(rf"\[{index}\] (127.0.0.1:\d+) 3 {index} .*=5", line)
        assert found, line
        addresses.add(found[1])
    assert len(addresses) == 1


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("os._exit(0)", 0),
        ("os._exit(7 if i == '1' else 0)", 7),
        ("os.kill(os.getpid(), 9) if i == '1' else 0", 137),
    ],
)
def test_the_status_is_that_of_the_first_that_failed(ends, status):
    code = f"import os; i = os.environ['JAX_PROCESS_ID']; {ends}"
    run = launch(code, "-n", 3)
    run.communicate(timeout=60)
    assert run.returncode == status


def test_those_that_outlive_a_failure_are_ended_after_a_grace():
    code = (
        "import os, time\nif os.environ['JAX_PROCESS_ID'] == '1': os._exit(7)\n" + SLEEP
    )
    run = launch(code, "-n", 3, "--grace", 0.5)
    others = pids(run, 2)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 7
    assert "0.5 s after one failed, 0, 2 still ran: ended by force" in error
    assert_all_end(others)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_handed_on(number):
    run = launch(SLEEP, "-n", 2)
    children = pids(run, 2)
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode in (128 + number, 1)
    assert_all_end(children)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child of its parent")
def test_none_is_left_where_the_launcher_is_killed():
    run = launch(SLEEP, "-n", 2)
    children = pids(run, 2)
    run.kill()
    run.communicate(timeout=60)
    assert_all_end(children)


def test_where_nobody_reads_any_more_all_are_asked_to_end():
    chatty = "import os; print(os.getpid(), flush=True)\nwhile True: print('x' * 999)"
    run = launch(chatty, "-n", 2)
    children = pids(run, 1)
    with run:
        assert run.stdout is not None
        run.stdout.close()
        assert run.wait(timeout=60) == 128 + signal.SIGTERM
    assert_all_end(children)


def test_what_cannot_be_started_is_refused():
    command = [sys.executable, str(LAUNCH), "-n", "2", "--", "no-such-program"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "no-such-program is no program" in run.stderr
