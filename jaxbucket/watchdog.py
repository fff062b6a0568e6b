"""Ends this process, with a sentence, when another one of the run is lost.

A collective waits for ever for a process that died. jax notices in the end, and aborts
without naming it; this notices first.

Every process beats in a key of its own. Process 0, which has the store, watches the
beats; whoever sees that a process is lost says so in one key, the *verdict*, for which
all others wait. Threads of their own do it: the main one may hang in a collective.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import NamedTuple, NoReturn

import jax

from jaxbucket.coordination import Store
from jaxbucket.last_words import before_abort, leave

# "Try again later", as sendmail's sysexits.h has it: what a launcher may restart.
EXIT_STATUS = 75
_VERDICT = "verdict"
_BEATS = "beats"
_SUSPICIONS = "suspicions"
_BEATS_PER_TIMEOUT = 10
_BEATS_UNDER_SUSPICION = 4
_LONGEST_INTERVAL = 1.0
# The store ends with process 0: until then the others may read why.
_SECONDS_TO_READ = 1.0
_SECONDS_TO_FAIL_TOO = 1.0


_SECONDS_TO_ANSWER = 2.0


class Verdict(NamedTuple):
    """Which process was lost, and how.

    Attributes:
      process: its index.
      why: what comes behind "process 3 (host, pid)".
      raised: whether it said so itself.
    """

    process: int
    why: str
    raised: bool = False


class Watchdog:
    """Beats for this process, and waits for a verdict.

    Args:
      store: of the coordination service.
      index: of this process.
      names: what each process is called: its host and its pid.
      timeout: seconds without a beat after which a process is lost.
    """

    def __init__(self, store: Store, index: int, names: list[str], timeout: float):
        self._store = store
        self._index = index
        self._names = names
        self._timeout = timeout
        self._interval = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_INTERVAL)
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._failing = threading.Event()
        self._suspecting = False
        self._abort = before_abort(self._aborting)
        now = time.monotonic()
        self._answered = now
        self._changed = {process: ("", now) for process in range(len(names))}
        self._threads = [
            threading.Thread(target=target, name=f"jaxbucket {name}", daemon=True)
            for name, target in (("beat", self._beat), ("watch", self._watch))
        ]

    def start(self) -> None:
        self._abort.__enter__()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Leaves the others alone from here on; they must be told before."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._abort.__exit__(None, None, None)

    def accuse(self, why: str) -> None:
        """Tells all others that this process is lost."""
        self._failing.set()
        # Without the store the others know already.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._give(Verdict(self._index, why, raised=True))
        if self._index == 0:
            time.sleep(_SECONDS_TO_READ)

    def wait_for_verdict(self) -> None:
        """Does not return if another process is lost: this one is ended meanwhile.

        Where something is wrong already, a few beats that do not come say enough.
        """
        self._suspecting = True
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"{_SUSPICIONS}/{self._index}", "")
        time.sleep(2 * _BEATS_UNDER_SUSPICION * self._interval)

    def _give(self, verdict: Verdict) -> None:
        self._store.claim(_VERDICT, json.dumps(verdict))

    def _beat(self) -> None:
        number = 0
        while not self._over.wait(self._interval):
            number += 1
            try:
                self._store.set(f"{_BEATS}/{self._index}", str(number))
                if self._index == 0:
                    self._judge()
            except jax.errors.JaxRuntimeError:
                # Process 0 does not answer: it is given as much time as any other.
                continue
            self._answered = time.monotonic()

    def _judge(self) -> None:
        """In process 0: gives a verdict where a beat has not come for too long."""
        beats = self._store.below(_BEATS)
        self._suspecting |= bool(self._store.below(_SUSPICIONS))
        now = time.monotonic()
        for process, (before, since) in self._changed.items():
            beat = beats.get(str(process), "")
            if beat != before:
                self._changed[process] = beat, now
            elif now - since > self._patience:
                self._give(Verdict(process, self._silent))

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                verdict = self._store.get(_VERDICT, self._interval)
            except jax.errors.JaxRuntimeError:
                verdict = None
                self._over.wait(self._interval)
            if verdict is not None:
                lost = Verdict(*json.loads(verdict))
                # What made one raise may make all of them do so, each in its own words.
                if not (lost.raised and self._failing.wait(_SECONDS_TO_FAIL_TOO)):
                    self._end(lost)
                return
            if time.monotonic() - self._answered > self._patience:
                self._end(Verdict(0, self._silent))

    def _aborting(self) -> None:
        if self._failing.is_set():
            # The others have ended, as they were told.
            leave(1)
        if not self._store.is_reachable(_SECONDS_TO_ANSWER):
            self._end(Verdict(0, "cannot be reached any more"))
        leave(
            EXIT_STATUS,
            f"process {self._index} is ended by jax, for what it says above. One that "
            "is started twice, under the same JAX_PROCESS_ID, makes it do so.",
        )

    @property
    def _patience(self) -> float:
        if self._suspecting:
            return min(self._timeout, _BEATS_UNDER_SUSPICION * self._interval)
        return self._timeout

    @property
    def _silent(self) -> str:
        return f"has given no sign of life for {self._patience:g} s"

    def _end(self, verdict: Verdict) -> NoReturn:
        with self._ending:
            if self._index == 0:
                time.sleep(_SECONDS_TO_READ)
            process, why, _ = verdict
            leave(
                EXIT_STATUS,
                f"process {self._index} ends, for process {process} "
                f"({self._names[process]}) {why}. Start all of them again, to go on "
                "from the last checkpoint.",
            )
