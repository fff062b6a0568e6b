"""Tests of `Processes`: a single process, and real ones that agree and end together."""

import math
import re
import socket

import jax
import pytest

import jaxbucket as jb
from jaxbucket.distributed.store import read_settings

TIMEOUT = 4.0

START = f"""
import ctypes, os, signal, sys, threading, time
import numpy as np
import jax
import jaxbucket as jb

processes = jb.Processes(timeout={TIMEOUT})
"""


# A single process


@pytest.mark.parametrize("settings", [(), ("127.0.0.1:1", 1, 0)])
def test_a_single_process_agrees_with_itself_and_starts_no_service(settings):
    with jb.Processes(*settings) as processes:
        assert (processes.index, processes.count) == (0, 1)
        assert processes.gather("x", "mine") == ["mine"]
        processes.check_agreement(position(), jb.data_mesh())
    assert not jax.distributed.is_initialized()


def test_an_error_leaves_the_context():
    with pytest.raises(KeyError, match="mine"), jb.Processes():
        raise KeyError("mine")


def position() -> jb.data.DataPosition:
    source = [{"x": [1, 2]}, {"x": [3]}]
    plan = jb.plan_buckets([2, 1], max_tokens=4)
    return jb.batch_dataset(source, jb.BatchSchedule(plan, [2, 1])).position(0)


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        (("host:1", 2, None), "process_id"),
        ((None, 2, 0), "coordinator_address"),
        (("host:1", 2, 2), "process_id"),
        (("host:1", 0, 0), "process_id"),
        (("host:1", 2, "x"), "process_id"),
        (("host:1", "x", 0), "num_processes"),
        (("host:port", 2, 0), "coordinator_address"),
        ({"timeout": 0}, "timeout"),
        ({"start_timeout": math.inf}, "start_timeout"),
    ],
)
def test_invalid_settings_are_refused(given, argument):
    args, options = ((), given) if isinstance(given, dict) else (given, {})
    with pytest.raises(ValueError, match=f"`{argument}\\b"):
        jb.Processes(*args, **options)


def test_settings_from_the_environment_are_checked(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    with pytest.raises(ValueError, match="`num_processes='3'`"):
        jb.Processes()


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, (None, 4, None)),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        # The batch script of a job, or a shell in it, is not one of its tasks.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, None),
    ],
)
def test_the_tasks_of_a_slurm_step_are_counted(monkeypatch, variables, settings):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read_settings(None, None, None) == settings
    assert read_settings("host:1", 2, 1) == ("host:1", 2, 1)


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        message = f"`coordinator_address='{address}'`: cannot listen on this port"
        with pytest.raises(ValueError, match=message), jb.Processes(address, 2, 0):
            pass


# Several processes


# What one process changes -> the message in all of them.
DIFFERENCES = {
    "if i == 2: seed = 5": "schedule seed is 0 in processes 0 and 1, 5 in process 2",
    "if i == 0: seed = 5": "schedule seed is 0 in processes 1 and 2, 5 in process 0",
    "if i == 1: size = 11": "data examples is 12 in processes 0 and 2, 11 in",
    "if i == 1: lengths[0] = 4": "data tokens is 30 in processes 0 and 2, 31 in",
    "if i == 1: lengths[:2] = 1, 3": "data fingerprint is .* in processes 0 and 2, ",
    "if i == 1: max_tokens = 20": "plan max tokens is 16 in processes 0 and 2, 20",
    "start = i": "step is 0 in process 0, 1 in process 1, 2 in process 2",
    "order = 1 if i else -1": r"mesh devices is \[0, .*\] in processes 1 and 2, \[",
    "if i == 2: extra['lr'] = 1.0": "lr is 0.1 in processes 0 and 1, 1.0 in process 2",
    "if i == 2: extra.clear()": "lr is 0.1 in processes 0 and 1, null in process 2",
    "if i: jax.config.update('jax_default_matmul_precision', 'highest')": (
        'jax_default_matmul_precision is "highest" in processes 1 and 2, "None" in'
    ),
    "if i: module.__version__ = 'x'": 'jaxbucket is "x" in processes 1 and 2, "0.* in',
    # The order of a dict does not matter.
    "extra = {'o': dict([('a', 1), ('b', 2)][::1 - 2 * (i == 1)])}": "agreed",
    "": "agreed",
}
TOGETHER = """
from jaxbucket.distributed import processes as module

def agree(change):
    module.__version__ = jb.__version__
    jax.config.update("jax_default_matmul_precision", None)
    fields = dict(
        i=processes.index, module=module, jax=jax, seed=0, size=12,
        lengths=[3, 1, 2, 4] * 3, extra={"lr": 0.1}, max_tokens=16, start=0, order=1,
    )
    exec(change, fields)
    lengths = fields["lengths"][:fields["size"]]
    source = [{"x": np.arange(n)} for n in lengths]
    plan = jb.plan_buckets([3, 1, 2, 4], max_tokens=fields["max_tokens"])
    schedule = jb.BatchSchedule(plan, lengths, seed=fields["seed"])
    position = jb.batch_dataset(source, schedule).position(fields["start"])
    mesh = jb.data_mesh(jax.devices()[::fields["order"]])
    try:
        processes.check_agreement(position, mesh, fields["extra"])
        record("agreed")
    except ValueError as error:
        record(error)

def handle(number, frame):
    record("handler")
signal.signal(signal.SIGTERM, handle)

with processes:
    for change in DIFFERENCES:
        agree(change)
    record(processes.count, processes.gather("x", "abc"[processes.index]))
    record(processes.gather("x", str(processes.index)))
    processes.gather("y", "")
    record(processes.store.read_folder("x/0/values"))
    # Each process has its own folder, under the same relative path.
    if BUSY:
        os.mkdir(FOLDER + str(processes.index))
        os.chdir(FOLDER + str(processes.index))
        try:
            jb.Checkpoints("runs", processes=processes)
        except ValueError as error:
            record(error)
    # A process in which Python is busy several times in a row is not lost.
    for _ in range(BUSY):
        if processes.index == 1:
            ctypes.PyDLL(None).usleep(int(TIMEOUT / 2 * 1e6))
        processes.gather("turn", "")
    # A process that waits for others handles signals.
    if processes.index == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            processes.gather("never", "")
        except KeyboardInterrupt:
            record("interrupted")
    processes.gather("go", "")
    time.sleep(LATE if processes.index == 1 else 0)
signal.raise_signal(signal.SIGTERM)
if processes.index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
# After the context, the loss of a process does not end the others.
time.sleep(REST)
record("end")
"""


@pytest.mark.parametrize(
    ("busy", "late", "rest"),
    [
        (0, 0, 1),
        # Longer than others wait without a message, and than jax tolerates.
        pytest.param(3, 1.5 * TIMEOUT, 4 * TIMEOUT, marks=pytest.mark.exhaustive),
    ],
)
def test_processes_agree_gather_values_and_end_together(
    launch, tmp_path, busy, late, rest
):
    code = TOGETHER.replace("DIFFERENCES", repr(list(DIFFERENCES)))
    code = code.replace("TIMEOUT", str(TIMEOUT)).replace("BUSY", str(busy))
    code = code.replace("FOLDER", repr(str(tmp_path / "folder")))
    code = code.replace("LATE", str(late)).replace("REST", str(rest))
    run = launch(START + code, count=3, grace=30)
    count = len(DIFFERENCES)
    lines = [run.recorded(index) for index in range(3)]
    assert lines[1][:count] == lines[2][:count] == lines[0][:count], run.output
    for line, message in zip(lines[0], DIFFERENCES.values(), strict=False):
        start = "" if message == "agreed" else "The processes do not agree: .*"
        assert re.match(start + message, line), line
    gathered = ["3 ['a', 'b', 'c']", "['0', '1', '2']", "{}"]
    assert [x[count : count + 3] for x in lines] == [gathered] * 3, run.output
    for line in (x.pop(count + 3) for x in lines if busy):
        assert "processes 1 and 2 cannot see the files that process 0 writes" in line
    assert lines[1][count + 3 :] == ["interrupted", "handler"]
    for index in (0, 2):
        assert lines[index][count + 3 :] == ["handler", "end"], run.output
        hint = f"has waited {TIMEOUT:g} s at 'end' for process 1."
        assert (hint in run.output) == (late > 0)


@pytest.mark.exhaustive
def test_different_numbers_of_processes_are_refused(launch):
    # jax itself accepts them.
    code = """
import os
import jaxbucket as jb
os.environ["JAX_NUM_PROCESSES"] = str(2 + int(os.environ["JAX_PROCESS_ID"]))
with jb.Processes(timeout=4):
    record("in")
"""
    run = launch(code)
    assert run.status == 1
    assert run.recorded(1) == []
    assert "`num_processes` is 2 in process 0, 3 in process 1" in run.output


CONNECTED = """
import os, signal, time
import jax
jax.distributed.initialize(
    os.environ.pop("JAX_COORDINATOR_ADDRESS"),
    int(os.environ.pop("JAX_NUM_PROCESSES")),
    int(os.environ["JAX_PROCESS_ID"]),
)
import jaxbucket as jb
# Processes that the user has connected stay connected after a context.
for _ in range(2):
    with jb.Processes(timeout=4) as processes:
        record(processes.index, processes.gather("x", ""))
"""


@pytest.mark.exhaustive
def test_processes_that_are_connected_already_need_no_settings(launch):
    run = launch(CONNECTED, count=2)
    assert run.status == 0, run.output
    assert [run.recorded(i) for i in range(2)] == [
        [f"{i} ['', '']"] * 2 for i in range(2)
    ]
