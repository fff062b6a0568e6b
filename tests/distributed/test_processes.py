"""Real processes: what they agree on, how they stop, and how one is lost."""

import os
import re
import socket
import subprocess
import sys
import time

import jax
import pytest

import jaxbucket as jb
from jaxbucket.distributed.watchdog import EXIT_STATUS

TIMEOUT = 4.0
# What the issue of a lost process may take beyond the timeout.
GRACE = 5.0

START = f"""
import ctypes, json, os, signal, sys, threading, time
import numpy as np
import jax
import jaxbucket as jb

processes = jb.Processes(timeout={TIMEOUT})
"""

# A loop of collectives, in which each process waits for all others.
LOOP = """
with processes:
    mesh = jb.data_mesh()
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    add = jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))
    one = np.ones((1, 4), np.float32)
    x = jax.make_array_from_callback((mesh.size, 4), sharding, lambda index: one)
    with jb.StopRequest(processes) as stop:
        for step in range(STEPS):
            if stop.before(step):
                break
            total = add(x)
            if step % (1 + processes.index) == 0:
                assert float(total) == 4 * mesh.size
            time.sleep(0.003)
            if step == 60:
                fault()
    say("left", step, stop.signal and stop.signal.name)
say("end")
"""


def sentence(run, index: int) -> str:
    """The last words of one process."""
    found = [x for x in run.lines(index) if x.startswith("jaxbucket: ")]
    assert found, run.output
    return found[-1]


# One process


def test_alone_there_is_nothing_to_agree_on():
    with jb.Processes() as processes:
        assert (processes.index, processes.count) == (0, 1)
        assert processes.gather("x", "mine") == ["mine"]
        processes.check_agreement(position(), jb.data_mesh())
    assert not jax.distributed.is_initialized()


def test_one_of_one_starts_no_service():
    with jb.Processes("127.0.0.1:1", 1, 0) as processes:
        assert processes.count == 1
    assert not jax.distributed.is_initialized()


def test_an_error_passes_through():
    with pytest.raises(KeyError, match="mine"), jb.Processes():
        raise KeyError("mine")


def position() -> jb.DataPosition:
    source = [{"x": [1, 2]}, {"x": [3]}]
    plan = jb.plan_buckets([2, 1], max_tokens=4)
    return jb.batch_dataset(source, jb.BatchSchedule(plan, [2, 1])).position(0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host:1", 2, None), "`process_id` is missing, .*set JAX_PROCESS_ID"),
        ((None, 2, 0), "`coordinator_address` is missing"),
        (("host:1", 2, 2), "`process_id=2` must be from 0 to `num_processes=2` - 1"),
        (("host:1", 0, 0), "`process_id=0` must be from 0 to `num_processes=0` - 1"),
        (("host:1", 2, "x"), "`process_id='x'` is not an integer"),
        (("host", 2, 0), "`coordinator_address='host'`: make it host:port"),
        (("host:port", 2, 0), "`coordinator_address='host:port'`: make it host:port"),
        (("host:0", 2, 0), "`coordinator_address='host:0'`: .* port from 1 to 65535"),
        (("host:70000", 2, 0), "`coordinator_address='host:70000'`: make it host:port"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        jb.Processes(*given)


def test_settings_of_the_environment_are_checked(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    with pytest.raises(ValueError, match="`coordinator_address` is missing"):
        jb.Processes()
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1")
    monkeypatch.setenv("JAX_PROCESS_ID", "two")
    with pytest.raises(ValueError, match="`process_id='two'` is not an integer"):
        jb.Processes()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_no_time_to_start_is_refused(timeout):
    with pytest.raises(ValueError, match="`start_timeout=.*` must be positive"):
        jb.Processes(start_timeout=timeout)


@pytest.mark.parametrize("timeout", [0, -1, 1.9, float("nan")])
def test_a_timeout_that_is_too_short_is_refused(timeout):
    with pytest.raises(ValueError, match="`timeout=.*` must be at least 2 s"):
        jb.Processes(timeout=timeout)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = f"port {port} cannot be listened to .*Choose another"
        with (
            pytest.raises(ValueError, match=message),
            jb.Processes(f"127.0.0.1:{port}", 2, 0),
        ):
            pass


# Several


def test_they_hear_one_another_in_order(launch):
    code = """
with processes:
    say(processes.index, processes.count, processes.gather("x", "abc"[processes.index]))
    say(processes.gather("x", str(processes.index)))
    processes.gather("y", "")
    say(processes.store.below("x/0"))
"""
    run = launch(START + code, count=3)
    assert run.status == 0, run.output
    for index in range(3):
        assert run.said(index) == [
            f"{index} 3 ['a', 'b', 'c']",
            "['0', '1', '2']",
            # What all have read is no longer kept.
            "{}",
        ]


def test_who_does_not_come_is_named(launch):
    code = """
with processes:
    if processes.index != 1:
        try:
            processes.gather("lunch", "", timeout=1)
        except TimeoutError as error:
            say(error)
    processes.gather("rest", "")
"""
    run = launch(START + code, count=3)
    assert run.status == 0, run.output
    for index in (0, 2):
        (line,) = run.said(index)
        assert line.startswith("process 1 did not come to 'lunch' within 1 s")


# What one process has otherwise -> what all of them say.
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
    "if i: room.__version__ = 'x'": 'jaxbucket is "x" in processes 1 and 2, "0.* in',
    # The order in which a dict was filled is no difference.
    "extra = {'o': dict([('a', 1), ('b', 2)][::1 - 2 * (i == 1)])}": "agreed",
    "": "agreed",
}
AGREEMENT = """
from jaxbucket.distributed import processes as room

def agree(differ):
    room.__version__ = jb.__version__
    jax.config.update("jax_default_matmul_precision", None)
    fields = dict(
        i=processes.index, room=room, jax=jax, seed=0, size=12,
        lengths=[3, 1, 2, 4] * 3, extra={"lr": 0.1}, max_tokens=16, start=0, order=1,
    )
    exec(differ, fields)
    lengths = fields["lengths"][:fields["size"]]
    source = [{"x": np.arange(n)} for n in lengths]
    plan = jb.plan_buckets([3, 1, 2, 4], max_tokens=fields["max_tokens"])
    schedule = jb.BatchSchedule(plan, lengths, seed=fields["seed"])
    position = jb.batch_dataset(source, schedule).position(fields["start"])
    mesh = jb.data_mesh(jax.devices()[::fields["order"]])
    try:
        processes.check_agreement(position, mesh, fields["extra"])
        say("agreed")
    except ValueError as error:
        say(error)

with processes:
    for differ in DIFFERENCES:
        agree(differ)
"""


def test_whoever_differs_is_named_by_all(launch):
    code = AGREEMENT.replace("DIFFERENCES", repr(list(DIFFERENCES)))
    run = launch(START + code, count=3)
    assert run.status == 0, run.output
    told, *others = (run.said(index) for index in range(3))
    # The same sentences everywhere.
    assert others == [told, told]
    for line, message in zip(told, DIFFERENCES.values(), strict=True):
        start = "" if message == "agreed" else "The processes do not agree: .*"
        assert re.match(start + message, line), line


def test_those_who_do_not_agree_end_each_with_the_sentence(launch):
    code = (
        AGREEMENT.replace("DIFFERENCES", "[]")
        + """
    processes.check_agreement(position, jb.data_mesh(), {"mine": processes.index})
"""
    )
    code = code.replace(
        "with processes:",
        """
plan = jb.plan_buckets([1], max_tokens=1)
position = jb.batch_dataset([{"x": [1]}], jb.BatchSchedule(plan, [1])).position(0)
with processes:""",
    )
    run = launch(START + code, count=3)
    assert run.status == 1
    for index in range(3):
        (line,) = [x for x in run.lines(index) if x.startswith("ValueError: ")]
        assert "mine is 0 in process 0, 1 in process 1, 2 in process 2" in line


def test_they_stop_before_the_same_step(launch):
    for victim, name in ((0, "SIGTERM"), (2, "SIGINT")):
        fault = f"""
STEPS = 10**6
def fault():
    if processes.index == {victim}:
        os.kill(os.getpid(), signal.{name})
"""
        run = launch(START + fault + LOOP, count=3, devices=2)
        assert run.status == 0, run.output
        (first, end), *others = (run.said(index)[-2:] for index in range(3))
        assert re.fullmatch(rf"left \d+ {name}", first) and end == "end"
        assert others == [[first, end]] * 2


def test_one_run_after_another_has_its_own_wishes(launch):
    twice = """
# Connected by somebody else, they stay so from one context to the next.
count, index = (int(os.environ[f"JAX_{x}"]) for x in ("NUM_PROCESSES", "PROCESS_ID"))
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], count, index)
for phase in range(2):
    with jb.Processes(timeout=4) as processes:
        for again in range(2):
            with jb.StopRequest(processes) as stop:
                for step in range(10**6):
                    if stop.before(step):
                        break
                    processes.gather("step", "")
                    if step == 5 and processes.index == again:
                        os.kill(os.getpid(), signal.SIGTERM)
            say(phase, again, step, stop.signal.name)
"""
    run = launch(START + twice, count=2)
    assert run.status == 0, run.output
    assert run.said(0) == run.said(1)
    ends = [line.split() for line in run.said(0)]
    assert [end[:2] for end in ends] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert all(int(end[2]) >= 5 and end[3] == "SIGTERM" for end in ends)


def test_a_wish_that_comes_with_the_last_step_is_known_to_all(launch):
    fault = """
STEPS = 61
def fault():
    if processes.index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
"""
    run = launch(START + fault + LOOP, count=3)
    assert run.status == 0, run.output
    assert [run.said(i) for i in range(3)] == [["left 60 SIGTERM", "end"]] * 3


def test_they_leave_together_whenever_wishes_come(launch):
    # Before the loop, in it, as it ends and after it, in some or in all of them.
    code = """
import random
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with processes:
    draw = random.Random(processes.index)
    for phase in range(30):
        wish = threading.Timer(
            draw.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGTERM)
        )
        with jb.StopRequest(processes) as stop:
            if draw.random() < 0.5:
                wish.start()
            for step in range(5):
                if stop.before(step):
                    break
                processes.gather("step", "")
                time.sleep(draw.uniform(0, 0.02))
        say(phase, step, stop.signal)
        wish.cancel()
        if wish.ident:
            wish.join()
"""
    run = launch(START + code, count=3)
    assert run.status == 0, run.output
    assert len(run.said(0)) == 30
    assert run.said(1) == run.said(2) == run.said(0)
    wishes = {line.split()[-1] for line in run.said(0)}
    assert len(wishes) == 2, wishes


def test_they_end_together_though_one_is_late(launch):
    fault = """
STEPS = 61
def fault():
    pass
"""
    late = LOOP.replace(
        'say("left"', f'time.sleep(processes.index * {TIMEOUT})\n    say("left"'
    )
    run = launch(START + fault + late, count=3)
    assert run.status == 0, run.output
    assert [run.said(index)[-1] for index in range(3)] == ["end"] * 3


FAULTS = {
    "killed worker": (1, "os.kill(os.getpid(), signal.SIGKILL)", "no sign of life"),
    "stopped worker": (1, "os.kill(os.getpid(), signal.SIGSTOP)", "no sign of life"),
    "raising worker": (1, "raise KeyError('row 7')", "raised KeyError: 'row 7'"),
    "leaving worker": (1, "sys.exit('bad row')", "raised SystemExit: bad row"),
    "killed coordinator": (0, "os.kill(os.getpid(), signal.SIGKILL)", "be reached"),
    "stopped coordinator": (0, "os.kill(os.getpid(), signal.SIGSTOP)", "no sign of"),
    "raising coordinator": (0, "raise KeyError('row 7')", "raised KeyError: 'row 7'"),
    # It holds Python's lock: of its threads none runs, but the store still answers.
    "hung coordinator": (0, "ctypes.PyDLL(None).usleep(10**8)", "no sign of life"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_all_end_in_time_and_name_whom_they_lost(launch, tmp_path, name):
    victim, how, why = FAULTS[name]
    # Each writes when it ends, by a watcher of its own, for some cannot do so.
    fault = f"""
STEPS = 10**6
def fault():
    if processes.index == {victim}:
        open(sys.argv[0] + ".fault", "w").write(f"{{time.time()}} {{os.getpid()}}")
        {how}
"""
    watched = """
import subprocess
subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.02)
open(sys.argv[2], "w").write(str(time.time()))
''', str(os.getpid()), sys.argv[0] + "." + os.environ["JAX_PROCESS_ID"]],
start_new_session=True)
"""
    run = launch(START + watched + fault + LOOP, count=3)
    began, pid = (tmp_path / "script.py.fault").read_text().split()
    for index in {0, 1, 2} - {victim}:
        words = sentence(run, index)
        assert f"process {victim} (" in words and f"pid {pid})" in words
        assert why in words
        path = tmp_path / f"script.py.{index}"
        deadline = time.monotonic() + 5
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert float(path.read_text()) - float(began) < TIMEOUT + GRACE
    if "hung" in name:
        # It says where, in time to be ended by nobody.
        assert any("most recent call first" in x for x in run.lines(victim)), run.output
    if "raising" in name or "leaving" in name:
        assert any("row" in line for line in run.lines(victim))
        assert not any("Exception ignored" in line for line in run.lines(victim))


def test_one_that_hangs_before_its_first_beat_says_where(launch):
    code = """
with jb.Processes(timeout=2) as processes:
    if processes.index == 0:
        ctypes.PyDLL(None).usleep(10**8)
    processes.gather("never", "")
"""
    run = launch(START.replace("processes = ", "# ") + code)
    assert "because process 0 (" in sentence(run, 1)
    assert any("most recent call first" in x for x in run.lines(0)), run.output


LOST_AT_THE_START = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "raising": "raise KeyError('row 7')",
}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", LOST_AT_THE_START)
def test_one_that_is_lost_while_they_start_is_named(launch, victim, how):
    # In the place of the store, when jax has connected them and nobody watches yet.
    code = f"""
from jaxbucket.distributed import processes as room
class Store(room.Store):
    def __init__(self, folder):
        say(os.getpid())
        if os.environ["JAX_PROCESS_ID"] == "{victim}":
            {LOST_AT_THE_START[how]}
        super().__init__(folder)
room.Store = Store
with processes:
    say("in")
"""
    run = launch(START + code, count=3)
    assert run.status != 0
    (pid,) = run.said(victim)
    for index in {0, 1, 2} - {victim}:
        assert run.said(index)[1:] == []
        words = sentence(run, index)
        assert f"process {victim} (" in words and f"pid {pid})" in words
        assert "ended while they started" in words


UNWRITABLE = {
    # As on a full disk: what is written, and the folders, which process 0 makes.
    "files": "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "folders": "os.mkdir = full",
}


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


def test_whoever_waits_long_says_for_whom(launch):
    code = f"""
with processes:
    time.sleep(3 * {TIMEOUT} if processes.index == 1 else 0)
"""
    run = launch(START + code, count=3)
    assert run.status == 0
    for index in (0, 2):
        assert "has waited 8 s at 'end' for process 1." in sentence(run, index)


def test_who_waits_for_others_hears_a_signal(launch):
    code = """
with processes:
    if processes.index == 0:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            processes.gather("never", "")
        except KeyboardInterrupt:
            say("heard")
        processes.store.set("go", "")
    processes.store.get("go", 60)
    if processes.index == 0:
        os._exit(3)
    processes.gather("never", "")
"""
    run = launch(START + code, count=2)
    assert run.said(0) == ["heard"], run.output


def test_a_checkpoint_on_its_way_is_there_at_the_end(launch, tmp_path):
    code = f"""
plan = jb.plan_buckets([4], max_tokens=8)
dataset = jb.batch_dataset([{{"x": np.arange(4)}}] * 8, jb.BatchSchedule(plan, [4] * 8))
with processes:
    state = {{"x": jb.replicate(np.ones(2_000_000), jb.data_mesh())}}
    checkpoints = jb.Checkpoints({str(tmp_path / "runs")!r}, processes=processes)
    checkpoints.save(state, dataset.position(3))
    # Neither closed nor waited for.
try:
    with jb.Processes():
        pass
except ValueError as error:
    say(error)
"""
    run = launch(START + code, count=2)
    assert run.status == 0, run.output
    assert (tmp_path / "runs" / "3" / "state").exists()
    for index in range(2):
        assert run.said(index)[0].startswith("`Processes` was entered before, and jax")


def test_after_the_context_each_takes_its_time(launch):
    code = f"""
with processes:
    pass
if processes.index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
# Longer than jax takes to miss one.
time.sleep(4 * {TIMEOUT})
say("end")
"""
    run = launch(START + code, count=2, grace=30)
    assert run.said(0) == ["end"], run.output


def test_an_echo_is_not_blamed_while_the_one_who_judges_is_busy(launch):
    # Process 0 holds Python's lock when the time of the one that was killed runs out.
    fault = f"""
STEPS = 10**6
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


def test_a_store_that_is_away_for_a_moment_does_not_hold_up_a_wish(launch):
    code = """
from jaxbucket.distributed.store import Store
get, calls = Store.get, []
def away(self, key, timeout):
    if processes.index and key.startswith("stop request") and len(calls) < 3:
        calls.append(key)
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")
    return get(self, key, timeout)
Store.get = away
with processes, jb.StopRequest(processes) as stop:
    for step in range(1000):
        if stop.before(step):
            break
        processes.gather("step", "")
        time.sleep(0.01)
        if step == 20 and processes.index == 0:
            os.kill(os.getpid(), signal.SIGTERM)
say(len(calls), step, stop.signal.name)
"""
    run = launch(START + code, count=2)
    assert run.status == 0, run.output
    (own,), (other,) = run.said(0), run.said(1)
    assert own.split()[1:] == other.split()[1:]
    assert other.startswith("3 ") and int(other.split()[1]) < 999


CONNECTED = """
import os, signal, time
import jax
jax.distributed.initialize(
    os.environ.pop("JAX_COORDINATOR_ADDRESS"),
    int(os.environ.pop("JAX_NUM_PROCESSES")),
    int(os.environ["JAX_PROCESS_ID"]),
)
import jaxbucket as jb
with jb.Processes(timeout=4) as processes:
    say(processes.index, processes.count)
    FAULT
"""


def test_who_has_connected_them_needs_no_settings(launch):
    run = launch(CONNECTED.replace("FAULT", "pass"), count=2)
    assert run.status == 0, run.output
    assert [run.said(index) for index in range(2)] == [["0 2"], ["1 2"]]


def test_a_signal_is_heard_though_jax_has_been_connected_before(launch):
    fault = """
    if processes.index:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
    say("slept")
"""
    run = launch(CONNECTED.replace("    FAULT\n", fault), count=2, grace=8)
    # It ends at once, as it would without jax, and the other one because of it.
    assert "slept" not in run.said(0) + run.said(1), run.output
    assert "because process 1 (" in sentence(run, 0)


def test_others_end_with_the_status_that_says_try_again(launch):
    code = """
with processes:
    if processes.index == 1:
        os._exit(0)
    processes.gather("never", "", timeout=1000)
"""
    run = launch(START + code, count=2)
    assert run.status == EXIT_STATUS
    assert "process 1 (" in sentence(run, 0)


def test_busy_python_is_not_lost(launch):
    # Held for half of the timeout, three times in a row.
    code = f"""
with processes:
    for _ in range(3):
        if processes.index == 1:
            ctypes.PyDLL(None).usleep(int({TIMEOUT} / 2 * 1e6))
        processes.gather("turn", "")
    say("end")
"""
    run = launch(START + code, count=2)
    assert run.status == 0, run.output
    assert [run.said(index) for index in range(2)] == [["end"]] * 2


JOIN = """
import sys, time
import jaxbucket as jb
address, count, index, seconds = sys.argv[1], *map(int, sys.argv[2:])
with jb.Processes(address, count, index, timeout=3, start_timeout=30) as processes:
    print("in", flush=True)
    time.sleep(seconds)
print("end", flush=True)
"""


def join(address: str, process: str) -> subprocess.Popen[str]:
    """A process, given as "count index seconds"."""
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, address, *process.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_processes_that_expect_other_numbers_are_told_so():
    address = free_address()
    for run in [join(address, process) for process in ("2 0 0", "3 1 0")]:
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 1
        assert "`num_processes` is 2 in process 0, 3 in process 1" in out


def test_whoever_is_too_many_is_told_so_and_the_run_goes_on():
    address = free_address()
    first = [join(address, process) for process in ("2 0 20", "2 1 20")]
    assert [run.stdout and run.stdout.readline() for run in first] == ["in\n"] * 2
    # One of a larger run, and another run at the same address.
    others = {
        "3 2 0": "waits for no process.* process 2 .* is one too many",
        "2 1 0": "waits for no process.* process 1 .* is one too many",
        "2 0 0": "cannot be listened to .*Choose another",
    }
    for run, message in [(join(address, x), others[x]) for x in others]:
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 1
        assert re.search(message, out), out
    for run in first:
        assert run.communicate(timeout=60)[0] == "end\n"
        assert run.returncode == 0
