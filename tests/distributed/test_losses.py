"""How one of several processes is lost, and what the others say of it."""

import re
import time

import pytest

from jaxbucket.distributed.watchdog import EXIT_STATUS

TIMEOUT = 4.0
# What the end of all may take beyond the timeout.
GRACE = 5.0

START = f"""
import ctypes, os, signal, subprocess, sys, threading, time
import numpy as np
import jax
import jaxbucket as jb

processes = jb.Processes(timeout={TIMEOUT})
# Writes when this process ends, which it may not be able to do itself.
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


def sentence(run, index: int) -> str:
    """The last words of one process."""
    words = [x for x in run.lines(index) if x.startswith("jaxbucket: ")]
    assert words, run.output
    return words[-1]


FAULTS = {
    "killed worker": (1, "os.kill(os.getpid(), signal.SIGKILL)", "no sign of life"),
    "killed coordinator": (0, "os.kill(os.getpid(), signal.SIGKILL)", "be reached"),
    "raising worker": (1, "raise KeyError('row 7')", "raised KeyError: 'row 7'"),
}
SLOW_FAULTS = {
    "raising coordinator": (0, "raise KeyError('row 7')", "raised KeyError: 'row 7'"),
    "stopped worker": (1, "os.kill(os.getpid(), signal.SIGSTOP)", "no sign of life"),
    "leaving worker": (1, "sys.exit('bad row')", "raised SystemExit: bad row"),
    "stopped coordinator": (0, "os.kill(os.getpid(), signal.SIGSTOP)", "no sign of"),
    # It holds Python's lock: of its threads none runs, but the store still answers.
    "hung coordinator": (0, "ctypes.PyDLL(None).usleep(10**8)", "no sign of life"),
    "worker that watches no more": (
        1,
        "processes._watchdog._pause = lambda: 1 / 0; time.sleep(100)",
        "raised ZeroDivisionError in its watchdog: division by zero",
    ),
    "coordinator that watches no more": (
        0,
        "processes._watchdog._pause = lambda: 1 / 0; time.sleep(100)",
        "raised ZeroDivisionError in its watchdog: division by zero",
    ),
    "hung worker": (1, "ctypes.PyDLL(None).usleep(10**8)", "no sign of life"),
}


@pytest.mark.parametrize(
    "name",
    [*FAULTS, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in SLOW_FAULTS)],
)
def test_all_end_in_time_and_name_whom_they_lost(launch, tmp_path, name):
    victim, how, why = (FAULTS | SLOW_FAULTS)[name]
    fault = f"""
def fault():
    if processes.index == {victim}:
        open(sys.argv[0] + ".fault", "w").write(f"{{time.time()}} {{os.getpid()}}")
        {how}
"""
    run = launch(START + fault + LOOP, count=3)
    began, pid = (tmp_path / "script.py.fault").read_text().split()
    for index in {0, 1, 2} - {victim}:
        # jax may be faster where process 0 is killed: then it aborts, in its own words.
        aborted = any("Terminating process because" in x for x in run.lines(index))
        if name != "killed coordinator" or not aborted:
            words = sentence(run, index)
            assert f"because process {victim} (" in words and f"pid {pid})" in words
            assert why in words
        path = tmp_path / f"script.py.{index}"
        deadline = time.monotonic() + 5
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert float(path.read_text()) - float(began) < TIMEOUT + GRACE
    if "killed" in name:
        # A launcher sees the one that was lost, or that the others may be restarted.
        assert run.status in (EXIT_STATUS, 128 + 9)
    if "hung" in name:
        # It says where, in time to be ended by nobody.
        assert any("most recent call first" in x for x in run.lines(victim)), run.output
    if "raising" in name or "leaving" in name:
        assert any("row" in line for line in run.lines(victim))
        assert not any("Exception ignored" in line for line in run.lines(victim))


@pytest.mark.exhaustive
def test_one_that_hangs_before_its_first_beat_says_where(launch):
    code = """
with processes:
    if processes.index == 0:
        ctypes.PyDLL(None).usleep(10**8)
    processes.gather("never", "")
"""
    run = launch(START + code)
    assert "because process 0 (" in sentence(run, 1)
    assert any("most recent call first" in x for x in run.lines(0)), run.output


@pytest.mark.exhaustive
def test_one_that_is_lost_while_they_start_ends_the_others(launch):
    # In the place of the store, when jax has connected them and nobody watches yet.
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
    say("in")
"""
    run = launch(START + code, count=3, grace=30)
    assert run.status != 0
    assert run.said(1) == []
    # By jax, which gives it the number alone.
    assert "ended by force" not in run.output


UNWRITABLE = {
    # As on a full disk: what is written, and the folders, which process 0 makes.
    "files": "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "folders": "os.mkdir = full",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victim", "how"), [(0, "files"), (1, "files"), (0, "folders")]
)
def test_one_that_cannot_write_its_checkpoint_ends_all(launch, tmp_path, victim, how):
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
        say("saved")
        if processes.index == {victim}:
            {UNWRITABLE[how]}
        checkpoints.save({{"x": big}}, position(1))
        checkpoints.wait()
"""
    run = launch(START + code, count=2)
    assert run.status != 0
    assert [run.said(0), run.said(1)] == [["saved"]] * 2
    assert re.search(r"raised .*File too large", sentence(run, 1 - victim)), run.output
    assert f"process {victim} (" in sentence(run, 1 - victim)
    assert sorted(x.name for x in (tmp_path / "runs").glob("[0-9]")) == ["0"]


@pytest.mark.exhaustive
def test_a_checkpoint_on_its_way_is_there_at_the_end(launch, tmp_path):
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
def test_a_secondary_error_is_not_blamed_while_the_one_who_judges_is_busy(launch):
    # Process 0 holds Python's lock when the time of the one that was killed runs out.
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
        assert "because process 1 (" in sentence(run, index), run.output
