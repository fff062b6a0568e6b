"""Tests that kill one of several processes, and check the messages of the others."""

import re
import time

import pytest

TIMEOUT = 4.0
# Seconds that the exit of all processes may take beyond the timeout.
GRACE = 15.0

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


FAULTS = {
    "killed worker": (1, "os.kill(os.getpid(), signal.SIGKILL)"),
    "raising worker": (1, "raise KeyError('row 7')"),
    "killed coordinator": (0, "os.kill(os.getpid(), signal.SIGKILL)"),
    "raising coordinator": (0, "raise KeyError('row 7')"),
    "stopped worker": (1, "os.kill(os.getpid(), signal.SIGSTOP)"),
    "stopped coordinator": (0, "os.kill(os.getpid(), signal.SIGSTOP)"),
}


def names(run, index: int, victim: int) -> bool:
    """Returns whether the output of a process says which one was lost."""
    output = "\n".join(run.lines(index))
    # jax names the service instead of process 0, which runs it.
    of_jax = "remote target coordination_service|RPC: /xla.coordination"
    if victim:
        of_jax = rf"unhealthy[^:]*:\s*\S*\b{victim}\b"
    return bool(re.search(f"process {victim} raised|{of_jax}", output))


@pytest.mark.parametrize(
    "name",
    [
        "killed worker",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in [*FAULTS][1:]),
    ],
)
def test_all_processes_exit_in_time_and_name_the_lost_one(launch, tmp_path, name):
    victim, action = FAULTS[name]
    fault = f"""
def fault():
    if processes.index == {victim}:
        open(sys.argv[0] + ".fault", "w").write(str(time.time()))
        {action}
"""
    run = launch(START + fault + LOOP, count=3, grace=15)
    start = float((tmp_path / "script.py.fault").read_text())
    others = {0, 1, 2} - {victim}
    for index in others:
        path = tmp_path / f"script.py.{index}"
        deadline = time.monotonic() + 5
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert float(path.read_text()) - start < TIMEOUT + GRACE
    assert all(names(run, index, victim) for index in others), run.output
    if "raising" in name:
        assert any("row" in line for line in run.lines(victim))
        assert not any("Exception ignored" in line for line in run.lines(victim))


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
    message = rf"process {victim} raised .*File too large"
    assert re.search(message, "\n".join(run.lines(victim))), run.output
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
