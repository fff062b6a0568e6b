"""Tests of `StopRequest`, in one process and in several."""

import re
import signal

import pytest

import jaxbucket as jb

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_before_the_next_step(number):
    steps = []
    with jb.StopRequest(jb.Processes()) as stop:
        assert stop.signal is None
        for step in range(10):
            if stop.before(step):
                break
            if step == 3:
                signal.raise_signal(number)
            steps.append(step)
    assert steps == [0, 1, 2, 3]
    assert stop.signal == number


def test_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    with jb.StopRequest(jb.Processes()):
        assert all(
            signal.getsignal(number) != handler
            for number, handler in zip(SIGNALS, before, strict=True)
        )
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(KeyError), jb.StopRequest(jb.Processes()):
        raise KeyError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_second_signal_ends_the_process_immediately(python):
    code = (
        "import os, signal, jaxbucket as jb\n"
        "with jb.StopRequest(jb.Processes()) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print(stop.signal.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still there', flush=True)\n"
    )
    assert python("-c", code, status=-signal.SIGINT).stdout == "SIGINT\n"


@pytest.mark.parametrize("step", [2, 4, 5])
def test_a_skipped_or_repeated_step_is_refused(step):
    with jb.StopRequest(jb.Processes()) as stop:
        assert not stop.before(3) and not stop.before(4)
        if step == 5:
            assert not stop.before(step)
        else:
            with pytest.raises(ValueError, match=f"`step={step}` follows step 4"):
                stop.before(step)


# The loops start at the step of a resumed run, and are up to two steps apart.
LOOP = """
import os, random, signal, time
import numpy as np
import jax
import jaxbucket as jb

FIRST, LAST = 500, {last}
def send_signal():
    if processes.index == {target}:
        os.kill(os.getpid(), signal.{name})
with jb.Processes(timeout=4) as processes:
    mesh = jb.data_mesh()
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    add = jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))
    one = np.ones((1, 4), np.float32)
    x = jax.make_array_from_callback((mesh.size, 4), sharding, lambda index: one)
    {early}
    with jb.StopRequest(processes) as stop:
        for step in range(FIRST, LAST):
            if stop.before(step):
                break
            total = add(x)
            if step % (1 + processes.index) == 0:
                assert float(total) == 4 * mesh.size
            time.sleep(0.003)
            if step == FIRST + 60:
                send_signal()
    record(step, stop.signal and stop.signal.name)
    # The request also stops a later loop.
    with jb.StopRequest(processes) as stop:
        record(stop.before(7))
record("end")
"""


def stopping_step(launch, name: str, target: int, **options) -> int:
    """Returns the step before which all of three processes have stopped."""
    code = LOOP.format(
        **{"name": name, "target": target, "last": 10**6, "early": ""} | options
    )
    run = launch(code, count=3, devices=2)
    assert run.status == 0, run.output
    (first, *others) = (run.recorded(index) for index in range(3))
    assert others == [first, first], run.output
    assert re.fullmatch(rf"\d+ {name}", first[0]), first
    assert first[1:] == ["True", "end"]
    return int(first[0].split()[0])


@pytest.mark.parametrize(
    ("name", "target"),
    [("SIGTERM", 0), pytest.param("SIGINT", 2, marks=pytest.mark.exhaustive)],
)
def test_all_processes_stop_before_the_same_step(launch, name, target):
    assert stopping_step(launch, name, target) > 560


@pytest.mark.exhaustive
def test_a_request_before_the_first_step_stops_before_it(launch):
    # jax checks for SIGTERM once a second.
    early = "send_signal(); time.sleep(3)"
    assert stopping_step(launch, "SIGTERM", 1, early=early) == 500


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_a_request_around_the_first_step_is_not_lost(launch, seed):
    early = (
        f"time.sleep(random.Random({seed}).uniform(0, 0.6)) "
        "if processes.index != 1 else send_signal()"
    )
    step = stopping_step(launch, "SIGTERM", 1, early=early)
    assert 500 <= step < 10**5


@pytest.mark.exhaustive
def test_a_request_in_the_last_step_is_known_to_all_processes(launch):
    assert stopping_step(launch, "SIGINT", 1, last=561) == 560
