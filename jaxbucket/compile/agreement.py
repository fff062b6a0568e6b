"""What all processes must have, for any of them to take it from a file.

Compilers of several hosts share what they found out; one that had nothing to compile
would keep the others waiting.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax

from jaxbucket.compile.cache_key import Devices
from jaxbucket.compile.program import Label
from jaxbucket.distributed.store import Store

# Before a program is traced, and after.
Stage: TypeAlias = Literal["known", "traced"]
_STAGES: tuple[Stage, ...] = ("known", "traced")

_FOLDER = "jaxbucket/compile"
_LEFT = "left"
_SECONDS_FOR_AN_ANSWER = 600
# Signals are not heard while the store is waited for.
_SECONDS_AT_A_TIME = 0.5
_MAX_WORDS = 500
# How often these processes have compiled together: the same in all of them.
_times: collections.Counter[tuple[int, ...]] = collections.Counter()


class AgreementError(RuntimeError):
    """The processes cannot go on together: it is of no single program."""


class Agreement:
    """The processes that compile the same programs.

    Args:
      processes: their indices, this one's among them.
      programs: what they compile, in words that are the same in all.
    """

    def __init__(self, processes: Sequence[int], programs: str):
        group = tuple(processes)
        _times[group] += 1
        self._programs = programs
        self._processes = [str(index) for index in group]
        name = "-".join(self._processes)
        self._store = Store(f"{_FOLDER}/{name}/{_times[group]}")

    @classmethod
    def of(cls, devices: Devices, programs: str) -> Agreement | None:
        """Returns that of all who have the devices; none if this process has all."""
        processes = sorted({device.process_index for device in devices})
        return cls(processes, programs) if len(processes) > 1 else None

    def all_have(self, label: Label, stage: Stage, found: bool) -> bool:
        """Asks the same of all processes; the answer is the same in all.

        Raises:
          AgreementError: if another process has failed, compiles something else or does
            not come, or the program is over.
        """
        folder = f"{label}/{stage}"
        self._say(label, stage, found)
        deadline = time.monotonic() + _SECONDS_FOR_AN_ANSWER
        while missing := set(self._processes) - set(
            answers := self._store.below(folder)
        ):
            self._check_failures()
            if not threading.main_thread().is_alive():
                raise AgreementError("The program ended before all was compiled.")
            if time.monotonic() > deadline:
                raise AgreementError(
                    f"Process {', '.join(sorted(missing))} did not say within "
                    f"{_SECONDS_FOR_AN_ANSWER} s which executables it has."
                )
            self._check_programs()
            self._store.get(f"{folder}/{min(missing)}", _SECONDS_AT_A_TIME)
        self._check_programs()
        return set(answers.values()) == {"1"}

    def has_nothing(self, label: Label) -> None:
        """Says of a program that failed that no file of it will do."""
        for stage in _STAGES:
            self._say(label, stage, False)

    def leave(self, error: BaseException) -> None:
        """Has all others end, for this process has failed."""
        # Where the store is lost, so are they.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"failures/{self._store.index}", _said(error))

    def _say(self, label: Label, stage: Stage, found: bool) -> None:
        self._store.set(f"programs/{self._store.index}", self._programs)
        self._store.set(f"{label}/{stage}/{self._store.index}", str(int(found)))

    def _check_failures(self) -> None:
        left = Store(_FOLDER).below(_LEFT)
        for process, said in (left | self._store.below("failures")).items():
            if process in self._processes and process != str(self._store.index):
                raise AgreementError(
                    f"Process {process} does not compile any more: {said}"
                )

    def _check_programs(self) -> None:
        for process, programs in self._store.below("programs").items():
            if programs != self._programs:
                raise AgreementError(
                    f"Process {process} compiles other programs than process "
                    f"{self._store.index}. All processes must call `compile_steps` for "
                    "the same steps, in the same order."
                )


def leave_all(error: BaseException) -> None:
    """Has whoever waits for this process end, now and later: it compiles no more."""
    if jax.process_count() > 1:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            store = Store(_FOLDER)
            store.set(f"{_LEFT}/{store.index}", _said(error))


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_WORDS]
