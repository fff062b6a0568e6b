"""Ends this process, with a sentence, when another one of the run is lost.

A collective waits for a process that died. jax notices in the end, and aborts without
naming it; this thread notices first.

Every process writes a beat into the store, in which a failure of its own may stand.
Process 0, which has the store, reads all beats, and repeats in its own the first
failure it finds; all others read that one beat. Because the store is lost with process
0, they also hold a connection to it, which the system closes whenever it ends.
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
from typing import NamedTuple

import jax

from jaxbucket.distributed.exit import exit_now
from jaxbucket.distributed.store import Store

# "Try again later", as sendmail's sysexits.h has it: what a launcher may restart.
EXIT_STATUS = 75
_BEATS_PER_TIMEOUT = 10
_LONGEST_INTERVAL = 1.0
# A process that holds Python's lock for so long is lost to the others.
_TIMEOUTS_TO_HANG = 2
# What made one process raise may make all of them do so, each in its own words.
_SECONDS_TO_FAIL_TOO = 0.5
_SECONDS_TO_PUBLISH = 1.0
_BEATS_TO_JUDGE = 3
_SECONDS_TO_CONNECT = 1.0
# jax's service closes a connection that says nothing after 60 s.
_SECONDS_TO_RENEW = 20.0
_MAX_MESSAGE = 500
# Of faulthandler, where there is no file to print to.
_NO_FILE = AttributeError, OSError, ValueError, RuntimeError


class _Beat(NamedTuple):
    """What a process last wrote: its name, and the failure that it knows of."""

    number: int
    name: str
    failure: str = ""


class Watchdog:
    """A thread that beats for this process, and watches the beats of others.

    Args:
      store: of the coordination service.
      name: the host and the pid of this process.
      timeout: seconds without a beat after which a process is lost.
      start_timeout: seconds that a process has until its first beat.
    """

    def __init__(self, store: Store, name: str, timeout: float, start_timeout: float):
        self._store = store
        self._timeout = timeout
        self._interval = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_INTERVAL)
        self._beat = _Beat(0, name)
        peers = [0] if store.index else range(1, store.count)
        self._peers = dict.fromkeys(peers, _Beat(0, "no beat yet"))
        first = time.monotonic() + max(timeout, start_timeout)
        self._deadlines = dict.fromkeys(peers, first)
        # Of this process, as it says itself.
        self._failure = ""
        self._published = threading.Event()
        self._over = threading.Event()
        self._link: socket.socket | None = None
        self._renewal = 0.0
        self._wake, self._waker = socket.socketpair()
        # `select.select` takes no descriptor from 1024 on.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._enabled_faulthandler = False
        self._thread = threading.Thread(
            target=self._run, name="jaxbucket watchdog", daemon=True
        )

    def start(self) -> None:
        # By the thread, it would keep the first beats from being written.
        if self._store.index:
            self._store.resolve()
        self._enable_faulthandler()
        # It may hang before its first beat.
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """Leaves the others alone from here on; all must have agreed on it."""
        self._over.set()
        self._waker.send(b"\0")
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._enabled_faulthandler:
            faulthandler.disable()
        self._disconnect()
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def report_failure(self, reason: str) -> None:
        """Tells the others that this process is lost; returns when they could read it.

        Args:
          reason: what follows "process 3 (host, pid 7)".
        """
        self._failure = self._name_failure(reason)
        self._waker.send(b"\0")
        self._published.wait(self._interval + _SECONDS_TO_PUBLISH)
        self._linger(2 * _SECONDS_TO_FAIL_TOO)

    def wait_for_failure(self) -> None:
        """Returns only if no other process is lost: otherwise this one is ended."""
        time.sleep(self._timeout)
        # Process 0 judges, which may be busy: until it has looked and told it.
        last = self._judge().number + _BEATS_TO_JUDGE
        while self._judge().number < last:
            time.sleep(self._interval)

    def _judge(self) -> _Beat:
        return self._peers[0] if self._store.index else self._beat

    def _name_failure(self, reason: str) -> str:
        return f"process {self._store.index} ({self._beat.name}) {reason}"

    def _enable_faulthandler(self) -> None:
        """jax may abort a process that hangs, which then says where."""
        # Whoever has enabled it may have given it a file.
        if not faulthandler.is_enabled():
            with contextlib.suppress(*_NO_FILE):
                faulthandler.enable()
                self._enabled_faulthandler = True

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._watch_once()
        except Exception as error:
            # After the end the others are left alone, whatever happens.
            if not self._over.is_set():
                self._give_up(error)

    def _watch_once(self) -> None:
        self._arm()
        beats = self._read_beats()
        failure = self._failure or self._find_failure(beats)
        # Setting a key waits for ever where process 0 is stopped.
        if beats or self._store.index == 0:
            self._publish(failure)
        if failure and not self._failure:
            time.sleep(_SECONDS_TO_FAIL_TOO)
            if not self._failure:
                self._linger()
                self._end(failure)
        self._pause()

    def _give_up(self, error: Exception) -> None:
        """Ends this process by an error of this thread, before its silence does."""
        traceback.print_exception(error)
        reason = describe_error(error, " in its watchdog")
        self._failure = self._failure or self._name_failure(reason)
        with contextlib.suppress(Exception):
            self._publish(self._failure)
        self._linger(2 * _SECONDS_TO_FAIL_TOO)
        exit_now(1, f"process {self._store.index} ends because it {reason}")

    def _arm(self) -> None:
        """Has this process ended from C, with all stacks, if no beat follows."""
        with contextlib.suppress(*_NO_FILE):
            faulthandler.dump_traceback_later(
                _TIMEOUTS_TO_HANG * self._timeout, exit=True, file=sys.stderr
            )

    def _read_beats(self) -> dict[int, _Beat]:
        """Returns the beats of the peers, or nothing where process 0 is silent."""
        try:
            if self._store.index == 0:
                texts = self._store.below("beats")
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
        # One that is silent may be what made others raise.
        for process, beat in self._peers.items():
            if now > self._deadlines[process] and not beat.failure:
                return (
                    f"process {process} ({beat.name}) has given no sign of life for "
                    f"{self._timeout:g} s"
                )
        return next((x.failure for x in self._peers.values() if x.failure), "")

    def _publish(self, failure: str) -> None:
        # Only process 0 speaks of others.
        failure = self._failure if self._store.index else failure
        self._beat = _Beat(self._beat.number + 1, self._beat.name, failure)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"beats/{self._store.index}", json.dumps(self._beat))
            if failure:
                self._published.set()

    def _pause(self) -> None:
        """Waits for the next beat, or for process 0 to end."""
        if self._store.index and time.monotonic() > self._renewal:
            self._connect()
        ready = [key.fileobj for key, _ in self._selector.select(self._interval)]
        if self._wake in ready:
            self._wake.recv(1)
        if self._link in ready and _is_closed(self._link):
            self._disconnect()
            # At once: jax aborts for the same reason, without naming anyone.
            if not self._failure and not self._over.is_set():
                name = self._peers[0].name
                self._end(f"process 0 ({name}) cannot be reached any more")

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

    def _linger(self, longer: float = 0.0) -> None:
        """The store ends with process 0: until then the others may read why, and end.

        jax aborts those that have not, without naming anyone.
        """
        if self._store.index == 0:
            time.sleep(1.5 * self._interval + longer)

    def _end(self, failure: str) -> None:
        sentence = (
            f"process {self._store.index} ends because {failure}. Start all of them "
            "again, to go on from the last checkpoint."
        )
        exit_now(EXIT_STATUS, sentence)


def describe_error(error: BaseException, where: str = "") -> str:
    """Returns what follows the name of a process in `report_failure`."""
    message = " ".join(str(error).split())[:_MAX_MESSAGE]
    return f"raised {type(error).__name__}{where}: {message}"


def _is_closed(connection: socket.socket | None) -> bool:
    try:
        return connection is not None and not connection.recv(4096)
    except OSError:
        return True
