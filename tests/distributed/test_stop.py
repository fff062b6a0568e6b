"""A wish to stop, in one process; that of several is in test_processes.py."""

import signal
import subprocess
import sys

import pytest

import jaxbucket as jb

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_it_stops_before_the_next_step(number):
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


def test_handlers_are_again_what_they_were():
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


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, jaxbucket as jb\n"
        "with jb.StopRequest(jb.Processes()) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print(stop.signal.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still there', flush=True)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert run.stdout == "SIGINT\n"
    assert run.returncode == -signal.SIGINT
