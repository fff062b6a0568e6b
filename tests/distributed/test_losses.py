"""Tests that kill one of several processes, and check the messages of the others."""

import re
import time

import pytest

from jaxbucket.distributed.watchdog import EXIT_STATUS

TIMEOUT = 4.0
# Seconds that the exit of all processes may take beyond the timeout.
GRACE = 5.0

START = f"""
import ctypes, os, signal, subprocess, sys, threading, time
import numpy as np
import jax
import jaxbucket as jb

processes = jb.Processes(timeout={TIMEOUT})
# Writes the end time of the process from outside, because a killed process cannot.
subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.02)
open(sys.argv[2], "w").write(str(time.time()))
''', str(os.getpid()), sys.argv[0] + "." + os.environ["JAX_PROCESS_ID"]],
start_new_session=True)
"""

# A loop of collectives, in which each process waits for all others.
LOOP = """
with processes:
    mesh = jb.data_mesh()
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    add = jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))
    one = np.ones((1, 4), np.float32)
    x = jax.make_array_from_callback((mesh.size, 4), sharding, lambda index: one)
    for step in range(10**6):
        total = add(x)
        if step % (1 + processes.index) == 0:
            assert float(total) == 4 * mesh.size
        time.sleep(0.003)
        if step == 60:
            fault()
"""


def last_message(run, index: int) -> str:
    """Returns the last message of one process."""
    messages = [x for x in run.lines(index) if x.startswith("jaxbucket: ")]
    assert messages, run.output
    return messages[-1]


FAULTS = {
    "killed worker": (1, "os.kill(os.getpid(), signal.SIGKILL)", "no heartbeat"),
}
SLOW_FAULTS = {
    "raising worker": (1, "raise KeyError('row 7')", "raised KeyError: 'row 7'"),
    "killed coordinator": (0, "os.kill(os.getpid(), signal.SIGKILL)", "lost the"),
    "stopped worker": (1, "os.kill(os.getpid(), signal.SIGSTOP)", "no heartbeat"),
    "stopped coordinator": (0, "os.kill(os.getpid(), signal.SIGSTOP)", "no heart"),
    # Holds Python's lock, so that no Python thread runs, but the store still answers.
    "hung coordinator": (0, "ctypes.PyDLL(None).usleep(10**8)", "no heartbeat"),
    "worker with a failing watchdog": (
        1,
        "processes._watchdog._pause = lambda: 1 / 0; time.sleep(100)",
        "raised ZeroDivisionError in its watchdog: division by zero",
    ),
}


@pytest.mark.parametrize(
    "name",
    [*FAULTS, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in SLOW_FAULTS)],
)
def test_all_processes_exit_in_time_and_name_the_lost_one(launch, tmp_path, name):
    victim, action, reason = (FAULTS | SLOW_FAULTS)[name]
    fault = f"""
def fault():
    if processes.index == {victim}:
        open(sys.argv[0] + ".fault", "w").write(f"{{time.time()}} {{os.getpid()}}")
        {action}
"""
    run = launch(START + fault + LOOP, count=3)
    start, pid = (tmp_path / "script.py.fault").read_text().split()
    for index in {0, 1, 2} - {victim}:
        # If process 0 is killed, jax may be faster, and aborts with its own message.
        aborted = any("Terminating process because" in x for x in run.lines(index))
        if name != "killed coordinator" or not aborted:
            message = last_message(run, index)
            assert f" process {victim} (" in message and f"pid {pid})" in message
            assert reason in message
        path = tmp_path / f"script.py.{index}"
        deadline = time.monotonic() + 5
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert float(path.read_text()) - float(start) < TIMEOUT + GRACE
    if "killed" in name:
        # The status of the lost process, or the one that asks for a restart.
        assert run.status in (EXIT_STATUS, 128 + 9)
    if "hung" in name:
        # It prints its stacks before the launcher ends it, unless jax ends it first.
        ends = ("most recent call first", "detected fatal errors")
        lines = run.lines(victim)
        assert any(end in line for end in ends for line in lines), run.output
    if "raising" in name or "leaving" in name:
        assert any("row" in line for line in run.lines(victim))
        assert not any("Exception ignored" in line for line in run.lines(victim))


@pytest.mark.exhaustive
def test_a_coordinator_suspended_between_two_calls_of_the_store_is_named(launch):
    code = """
def fault():
    if processes.index == 0:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGSTOP)
    # Process 1 still writes heartbeats, as if it had just read those of process 0.
    read = processes._watchdog._read_beats
    last = {}
    processes._watchdog._read_beats = lambda: last.update(read()) or last
"""
    run = launch(START + code + LOOP, count=2)
    message = last_message(run, 1)
    assert "no heartbeat from process 0 (" in message


@pytest.mark.exhaustive
def test_a_hang_before_the_first_heartbeat_prints_the_stacks(launch):
    code = """
with processes:
    if processes.index == 0:
        ctypes.PyDLL(None).usleep(10**8)
    processes.gather("never", "")
"""
    run = launch(START + code)
    assert " process 0 (" in last_message(run, 1)
    assert any("most recent call first" in x for x in run.lines(0)), run.output


@pytest.mark.exhaustive
def test_a_loss_during_the_start_ends_the_others(launch):
    # Between the connection by jax and the start of the watchdogs.
    code = """
from jaxbucket.distributed import processes as module
class Store(module.Store):
    def __init__(self, folder):
        jax.experimental.multihost_utils.distributed.global_state.client.wait_at_barrier(
            "connected", 10_000
        )
        if os.environ["JAX_PROCESS_ID"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(folder)
module.Store = Store
import jax.experimental.multihost_utils
with processes:
    record("in")
"""
    run = launch(START + code, count=3, grace=30)
    assert run.status != 0
    assert run.recorded(1) == []
    # jax ends them, and reports only the index of the lost process.
    assert "are killed: " not in run.output


UNWRITABLE = {
    # As on a full disk: files, and folders, which process 0 creates.
    "files": "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "folders": "os.mkdir = full",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victim", "obstacle"),
    [
        (1, "files"),
        (0, "folders"),
    ],
)
def test_a_failed_checkpoint_ends_all_processes(launch, tmp_path, victim, obstacle):
    code = f"""
import resource
def full(*args, **kwargs):
    raise OSError(27, "File too large")
source = [{{"x": np.arange(4)}}] * 8
schedule = jb.BatchSchedule(jb.plan_buckets([4], max_tokens=8), [4] * 8)
position = jb.batch_dataset(source, schedule).position
with processes:
    mesh = jb.data_mesh()
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    ones = np.ones((1, 50_000), np.float32)
    big = jax.make_array_from_callback((2, 50_000), sharding, lambda index: ones)
    with jb.Checkpoints({str(tmp_path / "runs")!r}, processes=processes) as checkpoints:
        checkpoints.save({{"x": big}}, position(0))
        checkpoints.wait()
        record("saved")
        if processes.index == {victim}:
            {UNWRITABLE[obstacle]}
        checkpoints.save({{"x": big}}, position(1))
        checkpoints.wait()
"""
    run = launch(START + code, count=2)
    assert run.status != 0
    assert [run.recorded(0), run.recorded(1)] == [["saved"]] * 2
    message = last_message(run, 1 - victim)
    assert re.search(r"raised .*File too large", message), run.output
    assert f"process {victim} (" in message
    assert sorted(x.name for x in (tmp_path / "runs").glob("[0-9]")) == ["0"]


@pytest.mark.exhaustive
def test_an_unfinished_checkpoint_is_completed_at_the_end(launch, tmp_path):
    code = f"""
plan = jb.plan_buckets([4], max_tokens=8)
dataset = jb.batch_dataset([{{"x": np.arange(4)}}] * 8, jb.BatchSchedule(plan, [4] * 8))
with processes:
    state = {{"x": jb.sharding.replicate(np.ones(2_000_000), jb.data_mesh())}}
    checkpoints = jb.Checkpoints({str(tmp_path / "runs")!r}, processes=processes)
    checkpoints.save(state, dataset.position(3))
    # Neither closed nor waited for.
"""
    run = launch(START + code, count=2)
    assert run.status == 0, run.output
    assert (tmp_path / "runs" / "3" / "state").exists()


@pytest.mark.exhaustive
def test_a_secondary_error_is_not_blamed_while_process_0_is_busy(launch):
    # Process 0 holds Python's lock when the timeout of the killed process ends.
    fault = f"""
def hold():
    time.sleep({TIMEOUT} - 0.5)
    ctypes.PyDLL(None).usleep(int(0.7 * {TIMEOUT} * 1e6))
def fault():
    if processes.index == 0:
        threading.Thread(target=hold, daemon=True).start()
    if processes.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    run = launch(START + fault + LOOP, count=4, grace=3 * TIMEOUT)
    for index in (0, 2, 3):
        assert " process 1 (" in last_message(run, index), run.output
