"""Ends this process, with a message, when another process of the run is lost.

A collective waits for a process that has died. jax notices this eventually, and aborts
without naming the process. The threads of this module notice first.

Every process writes heartbeats to the store, and puts a failure of its own into them.
Process 0, which hosts the store, reads all heartbeats and copies the first failure into
its own heartbeat, which is the only one that the others read. Because the store is lost
with process 0, the others also hold a connection to it, which the system closes when
process 0 ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxbucket.distributed.exit import exit_now
from jaxbucket.distributed.store import Store

# EX_TEMPFAIL of sysexits.h, "try again later": a launcher may restart the process.
EXIT_STATUS = 75
_BEATS_PER_TIMEOUT = 10
_LONGEST_INTERVAL = 1.0
# If a process holds the GIL for this long, the others have already exited.
_TIMEOUTS_TO_ABORT = 2
# An error often occurs in all processes. Each of them has this long to report its own.
_SECONDS_FOR_OWN_ERROR = 0.5
_SECONDS_TO_PUBLISH = 1.0
_BEATS_TO_DECIDE = 3
_SECONDS_TO_CONNECT = 1.0
# Connections are renewed before jax's service closes them after 60 idle seconds.
_SECONDS_TO_RENEW = 20.0
_MAX_MESSAGE_LENGTH = 500
# The errors of faulthandler if there is no file to print to.
_NO_FILE = AttributeError, OSError, ValueError, RuntimeError


class _Beat(NamedTuple):
    """A heartbeat: its number, and the name and known failure of its process."""

    number: int
    name: str
    failure: str = ""


class Watchdog:
    """Threads that write heartbeats for this process and watch those of others.

    Args:
      store: the store that all processes share.
      name: the host and the pid of this process.
      timeout: seconds without a heartbeat after which a process counts as lost.
      start_timeout: seconds until a process must have written its first heartbeat.
    """

    def __init__(self, store: Store, name: str, timeout: float, start_timeout: float):
        self._store = store
        self._timeout = timeout
        self._interval = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_INTERVAL)
        self._beat = _Beat(0, name)
        peers = [0] if store.index else range(1, store.count)
        self._peers = dict.fromkeys(peers, _Beat(0, "no heartbeat yet"))
        first = time.monotonic() + max(timeout, start_timeout)
        self._deadlines = dict.fromkeys(peers, first)
        # The failure of this process itself.
        self._failure = ""
        self._due = threading.Event()
        self._published = threading.Event()
        self._stopped = threading.Event()
        self._link: socket.socket | None = None
        self._renewal = 0.0
        self._wake, self._waker = socket.socketpair()
        # Not `select.select`, which accepts no file descriptor above 1023.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._enabled_faulthandler = False
        # Setting a key blocks while process 0 is suspended, so it has its own thread.
        self._threads = [
            threading.Thread(target=self._repeat, args=[once], name=name, daemon=True)
            for once, name in (
                (self._watch_once, "jaxbucket watchdog"),
                (self._publish_once, "jaxbucket heartbeats"),
            )
        ]

    def start(self) -> None:
        """Starts the threads."""
        # Not in a thread: a slow name server would delay the first heartbeats.
        if self._store.index:
            self._store.resolve()
        self._enable_faulthandler()
        # This process may hang before its first heartbeat.
        self._restart_abort_timer()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stops the threads. All processes must have agreed to end."""
        self._stopped.set()
        self._waker.send(b"\0")
        self._due.set()
        for thread in self._threads:
            thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._enabled_faulthandler:
            faulthandler.disable()
        self._disconnect()
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def report_failure(self, reason: str) -> None:
        """Reports a failure of this process; returns once the others could read it.

        Args:
          reason: a predicate, which follows "process 3 (host, pid 7)" in the message.
        """
        self._failure = self._name_failure(reason)
        self._waker.send(b"\0")
        self._published.wait(self._interval + _SECONDS_TO_PUBLISH)
        self._linger(2 * _SECONDS_FOR_OWN_ERROR)

    def wait_for_failure(self) -> None:
        """Waits for a report of another lost process, which ends this process.

        Returns if no process is lost.
        """
        time.sleep(self._timeout)
        # Process 0 decides who is lost, and may be busy. Wait until it has read all
        # heartbeats and published the result.
        last = self._beat_of_process_0().number + _BEATS_TO_DECIDE
        while self._beat_of_process_0().number < last:
            time.sleep(self._interval)

    def _beat_of_process_0(self) -> _Beat:
        return self._peers[0] if self._store.index else self._beat

    def _name_failure(self, reason: str) -> str:
        return f"process {self._store.index} ({self._beat.name}) {reason}"

    def _enable_faulthandler(self) -> None:
        """Enables stack traces, for the case that jax aborts this process."""
        # If it is enabled already, it may print to a file of the user's.
        if not faulthandler.is_enabled():
            with contextlib.suppress(*_NO_FILE):
                faulthandler.enable()
                self._enabled_faulthandler = True

    def _repeat(self, once: Callable[[], None]) -> None:
        try:
            while not self._stopped.is_set():
                once()
        except Exception as error:
            # Errors of these threads after `stop` are irrelevant.
            if not self._stopped.is_set():
                self._give_up(error)

    def _watch_once(self) -> None:
        self._restart_abort_timer()
        beats = self._read_beats()
        failure = self._failure or self._find_failure(beats)
        self._publish(failure)
        if failure and not self._failure:
            time.sleep(_SECONDS_FOR_OWN_ERROR)
            if not self._failure:
                self._linger()
                self._end(failure)
        self._pause()

    def _give_up(self, error: Exception) -> None:
        """Ends this process after an error, because it can send no more heartbeats."""
        traceback.print_exception(error)
        reason = describe_error(error, " in its watchdog")
        self._failure = self._failure or self._name_failure(reason)
        self._publish(self._failure)
        self._published.wait(_SECONDS_TO_PUBLISH)
        self._linger(2 * _SECONDS_FOR_OWN_ERROR)
        exit_now(1, f"Process {self._store.index} is exiting: it {reason}")

    def _restart_abort_timer(self) -> None:
        """Has C code print all stacks and exit, unless it is called again in time."""
        with contextlib.suppress(*_NO_FILE):
            faulthandler.dump_traceback_later(
                _TIMEOUTS_TO_ABORT * self._timeout, exit=True, file=sys.stderr
            )

    def _read_beats(self) -> dict[int, _Beat]:
        """Returns the peers' heartbeats; an empty dict if process 0 does not answer."""
        try:
            if self._store.index == 0:
                texts = self._store.read_folder("beats")
            else:
                text = self._store.get("beats/0", self._interval)
                texts = {} if text is None else {"0": text}
        except jax.errors.JaxRuntimeError:
            return {}
        beats = {int(key): _Beat(*json.loads(text)) for key, text in texts.items()}
        return {key: beat for key, beat in beats.items() if key in self._peers}

    def _find_failure(self, beats: dict[int, _Beat]) -> str:
        now = time.monotonic()
        for process, beat in beats.items():
            if beat != self._peers[process]:
                self._peers[process] = beat
                self._deadlines[process] = now + self._timeout
        # A missing heartbeat comes first, because it may explain the others' errors.
        for process, beat in self._peers.items():
            if now > self._deadlines[process] and not beat.failure:
                return (
                    f"no heartbeat from process {process} ({beat.name}) for "
                    f"{self._timeout:g} s"
                )
        return next((x.failure for x in self._peers.values() if x.failure), "")

    def _publish(self, failure: str) -> None:
        # Only process 0 publishes the failures of others.
        failure = self._failure if self._store.index else failure
        self._beat = _Beat(self._beat.number + 1, self._beat.name, failure)
        self._due.set()

    def _publish_once(self) -> None:
        self._due.wait()
        self._due.clear()
        beat = self._beat
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"beats/{self._store.index}", json.dumps(beat))
            if beat.failure:
                self._published.set()

    def _pause(self) -> None:
        """Waits until the next heartbeat is due, or process 0 ends."""
        if self._store.index and time.monotonic() > self._renewal:
            self._connect()
        ready = [key.fileobj for key, _ in self._selector.select(self._interval)]
        if self._wake in ready:
            self._wake.recv(1)
        if self._link in ready and _is_closed(self._link):
            self._disconnect()
            # Report the loss immediately, because jax aborts for the same reason.
            if not self._failure and not self._stopped.is_set():
                name = self._peers[0].name
                self._end(f"lost the connection to process 0 ({name})")

    def _connect(self) -> None:
        self._disconnect()
        self._renewal = time.monotonic() + _SECONDS_TO_RENEW
        self._link = self._store.connect(_SECONDS_TO_CONNECT)
        if self._link is not None:
            self._selector.register(self._link, selectors.EVENT_READ)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None

    def _linger(self, extra_seconds: float = 0.0) -> None:
        """Gives the others time to read the failure before process 0 exits.

        The store ends with process 0, and jax then aborts the remaining processes.
        """
        if self._store.index == 0:
            time.sleep(1.5 * self._interval + extra_seconds)

    def _end(self, failure: str) -> None:
        message = (
            f"Process {self._store.index} is exiting: {failure}. Restart all processes "
            "to resume from the last checkpoint."
        )
        exit_now(EXIT_STATUS, message)


def describe_error(error: BaseException, where: str = "") -> str:
    """Returns an error as a predicate, for `Watchdog.report_failure`."""
    message = " ".join(str(error).split())[:_MAX_MESSAGE_LENGTH]
    return f"raised {type(error).__name__}{where}: {message}"


def _is_closed(connection: socket.socket | None) -> bool:
    try:
        return connection is not None and not connection.recv(4096)
    except OSError:
        return True
