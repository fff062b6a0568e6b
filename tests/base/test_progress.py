"""Progress bars are shown only on a terminal, and only for slow calls."""

import io
import sys
import threading
import time

import pytest

from jaxbucket.base import progress
from jaxbucket.base.progress import bar_if_slow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def output_of(
    monkeypatch, stream: io.StringIO, seconds: float | None, delay: float
) -> str:
    """Returns the output of a call that takes `seconds`; None waits for the bar."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_DELAY", delay)

    @bar_if_slow("Inner")
    def inner() -> int:
        # Waits for the bar to appear, because the machine may be busy.
        end = time.monotonic() + (60 if seconds is None else seconds)
        while time.monotonic() < end and "Waiting" not in stream.getvalue():
            time.sleep(0.01)
        return threading.active_count()

    @bar_if_slow("Waiting")
    def wait() -> int:
        return inner()

    before = threading.active_count()
    during = wait()
    # rich does not wait for its thread that draws the bar.
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert stream.isatty() or during <= before
    return stream.getvalue()


def test_a_slow_call_shows_one_bar_on_a_terminal(monkeypatch):
    text = output_of(monkeypatch, Terminal(), seconds=None, delay=0.01)
    assert "Waiting" in text and "Inner" not in text


def test_a_quick_call_shows_no_bar(monkeypatch):
    assert output_of(monkeypatch, Terminal(), seconds=0.0, delay=60) == ""


def test_no_bar_is_shown_without_a_terminal(monkeypatch):
    assert output_of(monkeypatch, io.StringIO(), seconds=0.05, delay=0.001) == ""


def test_the_lock_is_released_after_an_exception(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())

    @bar_if_slow("Failing")
    def fail() -> None:
        raise KeyError("x")

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
    assert not progress._bar_lock.locked()
