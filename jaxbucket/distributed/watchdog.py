"""Ends this process, with a sentence, when another one of the run is lost.

A collective waits for a process that died. jax notices in the end, and aborts without
naming it; this thread notices first.

Every process writes a beat into the store, in which a failure of its own may stand.
Process 0, which has the store, reads all beats, and repeats in its own the first failure
it finds; all others read that one beat. Because the store is lost with process 0, they
also hold a connection to it, which the system closes whenever it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import select
import socket
import sys
import threading
import time
from typing import NamedTuple, NoReturn

import jax

from jaxbucket.distributed.exit import exit_now
from jaxbucket.distributed.store import Store

# "Try again later", as sendmail's sysexits.h has it: what a launcher may restart.
EXIT_STATUS = 75
_BEATS = "beats"
_BEATS_PER_TIMEOUT = 10
_LONGEST_INTERVAL = 1.0
# A process that holds Python's lock for so long is lost to the others.
_TIMEOUTS_TO_HANG = 2
# What made one process raise may make all of them do so, each in its own words.
_SECONDS_TO_FAIL_TOO = 1.0
_SECONDS_TO_CONNECT = 1.0
# jax's service closes a connection that says nothing, but not so soon.
_SECONDS_TO_RENEW = 20.0
_SECONDS_TO_PUBLISH = 1.0
_MAX_BYTES = 4096


class PeerFailure(NamedTuple):
    """Which process was lost, and how.

    Attributes:
      process: its index.
      name: its host and its pid.
      reason: what follows "process 3 (host, pid 7)".
      raised: whether it said so itself.
    """

    process: int
    name: str
    reason: str
    raised: bool = False


class _Beat(NamedTuple):
    number: int
    name: str
    failure: PeerFailure | None = None


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
        self._index = store.index
        self._timeout = timeout
        self._interval = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_INTERVAL)
        self._beat = _Beat(0, name)
        peers = range(1, store.count) if self._index == 0 else [0]
        self._peers = dict.fromkeys(peers, _Beat(0, ""))
        first = time.monotonic() + max(timeout, start_timeout)
        self._deadlines = dict.fromkeys(peers, first)
        self._own_failure: PeerFailure | None = None
        self._published = threading.Event()
        self._failing = threading.Event()
        self._over = threading.Event()
        self._link: socket.socket | None = None
        self._renewal = 0.0
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, name="jaxbucket watchdog", daemon=True
        )

    def start(self) -> None:
        # It may hang before its first beat.
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """Leaves the others alone from here on; all must have agreed on it."""
        self._over.set()
        self._waker.send(b"\0")
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        for connection in (self._wake, self._waker, self._link):
            if connection is not None:
                connection.close()

    def report_failure(self, reason: str) -> None:
        """Tells the others that this process is lost; returns when they could read it.

        Args:
          reason: what follows "process 3 (host, pid 7)".
        """
        self._own_failure = PeerFailure(self._index, self._beat.name, reason, True)
        self._failing.set()
        self._waker.send(b"\0")
        self._published.wait(self._interval + _SECONDS_TO_PUBLISH)
        if self._index == 0:
            self._linger()

    def wait_for_failure(self) -> None:
        """Returns only if no other process is lost: otherwise this one is ended."""
        # A beat is read, its lack is seen, and that is read, each one interval later.
        time.sleep(self._timeout + 3 * self._interval)

    def _run(self) -> None:
        while not self._over.is_set():
            self._arm()
            beats = self._read_beats()
            failure = self._own_failure or self._find_failure(beats)
            # Setting a key waits for ever where process 0 is stopped.
            if beats or self._index == 0:
                self._publish(failure)
            if failure is not None and failure != self._own_failure:
                self._end(failure)
            self._pause()

    def _arm(self) -> None:
        """Has this process ended from C, with all stacks, if no beat follows."""
        # There may be no file to print to.
        with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
            faulthandler.dump_traceback_later(
                _TIMEOUTS_TO_HANG * self._timeout, exit=True, file=sys.stderr
            )

    def _read_beats(self) -> dict[int, _Beat]:
        """The beats that process 0 has and this one reads, so far as it answers."""
        try:
            if self._index == 0:
                texts = self._store.below(_BEATS)
            else:
                text = self._store.get(f"{_BEATS}/0", self._interval)
                texts = {} if text is None else {"0": text}
        except jax.errors.JaxRuntimeError:
            # It may be away for a moment; otherwise it will not beat.
            return {}
        return {int(x): _parse(texts[x]) for x in texts if int(x) in self._peers}

    def _find_failure(self, beats: dict[int, _Beat]) -> PeerFailure | None:
        now = time.monotonic()
        for process, beat in beats.items():
            if beat != self._peers[process]:
                self._peers[process] = beat
                self._deadlines[process] = now + self._timeout
        # One that is silent may be what made others raise.
        for process, beat in self._peers.items():
            if now > self._deadlines[process] and beat.failure is None:
                reason = f"has given no sign of life for {self._timeout:g} s"
                return PeerFailure(process, beat.name, reason)
        return next((x.failure for x in self._peers.values() if x.failure), None)

    def _publish(self, failure: PeerFailure | None) -> None:
        # Only process 0 speaks of others.
        published = failure if self._index == 0 else self._own_failure
        number = self._beat.number + 1
        self._beat = self._beat._replace(number=number, failure=published)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"{_BEATS}/{self._index}", json.dumps(self._beat))
            if published is not None:
                self._published.set()

    def _pause(self) -> None:
        """Waits for the next beat, or for process 0 to end."""
        if self._index and time.monotonic() > self._renewal:
            self._connect()
        connections = [x for x in (self._wake, self._link) if x is not None]
        ready, _, _ = select.select(connections, [], [], self._interval)
        if self._wake in ready:
            self._wake.recv(_MAX_BYTES)
        if self._link in ready and not self._over.is_set() and _is_closed(self._link):
            # At once: jax aborts for the same reason, without naming anyone.
            name = self._peers[0].name
            self._end(PeerFailure(0, name, "cannot be reached any more"))

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._store.connect(_SECONDS_TO_CONNECT)
        self._renewal = time.monotonic() + _SECONDS_TO_RENEW

    def _end(self, failure: PeerFailure) -> NoReturn | None:
        if failure.raised and self._failing.wait(_SECONDS_TO_FAIL_TOO):
            return
        if self._index == 0:
            self._linger()
        exit_now(
            EXIT_STATUS,
            f"process {self._index} ends because process {failure.process} "
            f"({failure.name}) {failure.reason}. Start all of them again, to go on "
            "from the last checkpoint.",
        )

    def _linger(self) -> None:
        """The store ends with process 0: until then the others may read why."""
        time.sleep(1.5 * self._interval)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(_MAX_BYTES)
    except OSError:
        return True


def _parse(text: str) -> _Beat:
    number, name, failure = json.loads(text)
    return _Beat(number, name, failure and PeerFailure(*failure))
