"""Ends this process, with a sentence, when another one of the run is lost.

A collective waits for ever for a process that died. jax notices in the end, and aborts
without naming it; this notices first.

Every process beats in a key of its own. Process 0, which has the store, watches all
others, and they watch it; whoever sees that a process is lost says so in one key, the
*verdict*, for which all others wait. Threads of their own do it: the main one may hang
in a collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import sys
import threading
import time
from typing import NamedTuple, NoReturn

import jax

from jaxbucket.distributed.exit import before_abort, leave, speak
from jaxbucket.distributed.store import Store

# "Try again later", as sendmail's sysexits.h has it: what a launcher may restart.
EXIT_STATUS = 75
_VERDICT = "verdict"
_BEATS = "beats"
_BEATS_PER_TIMEOUT = 10
# Who holds Python's lock for so long is lost to the others, and does not come back.
_TIMEOUTS_TO_HANG = 2
_LONGEST_INTERVAL = 1.0
_INTERVALS_TO_JUDGE = 2
# The store ends with process 0: until then the others may read why.
_SECONDS_TO_READ = 1.0
# A store whose process was stopped does not answer.
_SECONDS_TO_TELL = 1.0
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


class _Beat(NamedTuple):
    """What a process last wrote, and since when it is the same."""

    text: str
    since: float


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
        self._lost: Verdict | None = None
        self._abort = before_abort(self._before_abort)
        watched = range(1, len(names)) if index == 0 else [0]
        self._beats = dict.fromkeys(watched, _Beat("", time.monotonic()))
        self._threads = [
            threading.Thread(target=target, name=f"jaxbucket {name}", daemon=True)
            for name, target in (("beat", self._beat), ("watch", self._watch))
        ]

    def start(self) -> None:
        self._abort.__enter__()
        # It may hang before its first beat.
        self._arm()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Leaves the others alone from here on; they must be told before."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._abort.__exit__(None, None, None)

    def accuse(self, why: str) -> None:
        """Tells all others that this process is lost."""
        self._failing.set()
        self._tell(Verdict(self._index, why, raised=True))
        if self._index == 0:
            time.sleep(_SECONDS_TO_READ)

    def wait_for_verdict(self) -> None:
        """Does not return if another process is lost: this one is ended meanwhile.

        Process 0 may be too busy to judge. Whoever has not beaten in all this time is
        lost, whoever sees it.
        """
        before = self._all_beats()
        # A beat may have been due, and held up for as long as that.
        time.sleep(self._timeout + self._interval)
        now = self._all_beats()
        for process in sorted(set(before) - {self._index}):
            if now.get(process) == before[process]:
                why = f"has given no sign of life for {self._timeout:g} s"
                self._tell(Verdict(process, why))
                # What was told is what this process ends with.
                time.sleep(self._timeout)
        if not before:
            # Process 0 has not answered: that is judged a little later.
            time.sleep(_INTERVALS_TO_JUDGE * self._interval)

    def _all_beats(self) -> dict[int, str]:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return {int(who): x for who, x in self._store.below(_BEATS).items()}
        return {}

    def _tell(self, verdict: Verdict) -> None:
        def give() -> None:
            # Without the store the others know already.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._store.claim(_VERDICT, json.dumps(verdict))

        teller = threading.Thread(target=give, daemon=True)
        teller.start()
        teller.join(_SECONDS_TO_TELL)

    def _beat(self) -> None:
        number = 0
        while not self._over.wait(self._interval):
            number += 1
            self._arm()
            # Where process 0 does not answer, that is seen by its beats.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._store.set(f"{_BEATS}/{self._index}", str(number))

    def _arm(self) -> None:
        """Has this process ended from C, with all stacks, if no beat follows."""
        # There may be no file to print to.
        with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
            faulthandler.dump_traceback_later(
                _TIMEOUTS_TO_HANG * self._timeout, exit=True, file=sys.stderr
            )

    def _watch(self) -> None:
        while not self._over.is_set():
            self._lost = lost = self._verdict() or self._judge()
            if lost is not None:
                # What made one raise may make all of them do so, each in its own words.
                if not (lost.raised and self._failing.wait(_SECONDS_TO_FAIL_TOO)):
                    self._end(lost)
                return

    def _verdict(self) -> Verdict | None:
        """Waits a while for one."""
        try:
            verdict = self._store.get(_VERDICT, self._interval)
        except jax.errors.JaxRuntimeError:
            self._over.wait(self._interval)
            return None
        return Verdict(*json.loads(verdict)) if verdict is not None else None

    def _judge(self) -> Verdict | None:
        """Finds a process whose beats do not come, and tells the others."""
        beats = self._read()
        now = time.monotonic()
        for process, (before, since) in self._beats.items():
            text = beats.get(process, before)
            if text != before:
                self._beats[process] = _Beat(text, now)
            # A beat may have been due when it fell silent.
            elif now - since > self._timeout + self._interval:
                why = f"has given no sign of life for {now - since:.1f} s"
                verdict = Verdict(process, why)
                self._tell(verdict)
                return verdict
        return None

    def _read(self) -> dict[int, str]:
        """The beats of those that this process watches, so far as they can be read."""
        if self._index == 0:
            return self._all_beats()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            beat = self._store.get(f"{_BEATS}/0", self._interval)
            return {} if beat is None else {0: beat}
        return {}

    def _before_abort(self) -> None:
        if self._failing.is_set():
            # The others have ended, as they were told.
            leave(1)
        if self._lost is not None:
            self._end(self._lost)
        if not self._store.is_reachable(_SECONDS_TO_ANSWER):
            self._end(Verdict(0, "cannot be reached any more"))
        self.accuse("aborted, for what it printed")
        speak(f"process {self._index} aborts, for what is said above.")

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
