"""A program comes from files in all processes, or in none.

Compilers of several hosts exchange results while they compile: a process with nothing
to compile would keep the others waiting.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import jax

from jaxbucket.compile.cache_key import Devices
from jaxbucket.compile.program import Label
from jaxbucket.distributed.store import Store

# Before a program is traced, and after.
Stage: TypeAlias = Literal["known", "traced"]

_FOLDER = "jaxbucket/compile"
_LEFT = "left"
_TIMEOUT = 600.0
# Signals are not handled during a wait for the store.
_POLL_SECONDS = 0.5
_MAX_ERROR_LENGTH = 500
# How often these processes have compiled together: the same in all of them.
_num_agreements: collections.Counter[tuple[int, ...]] = collections.Counter()


class AgreementError(RuntimeError):
    """The processes cannot continue together, whatever the program."""


class Agreement:
    """The processes that compile the same programs.

    Args:
      processes: their indices, this one's among them.
      programs: a digest of what they compile, the same in all.
    """

    def __init__(self, processes: Sequence[int], programs: str):
        group = tuple(processes)
        _num_agreements[group] += 1
        self._programs = programs
        self._processes = [str(index) for index in group]
        name = "-".join(self._processes)
        self._store = Store(f"{_FOLDER}/{name}/{_num_agreements[group]}")
        self._store.set(f"programs/{self._store.index}", programs)

    @classmethod
    def of(cls, devices: Devices, programs: str) -> Agreement | None:
        """Returns that of the devices' processes; None if this process has them all."""
        processes = sorted({device.process_index for device in devices})
        return cls(processes, programs) if len(processes) > 1 else None

    def all_have(self, label: Label, stage: Stage, is_loaded: bool) -> bool:
        """Returns whether all processes have loaded a program, the same in all.

        Raises:
          AgreementError: if another process has failed, compiles something else or does
            not answer, or the main thread has ended.
        """
        folder = f"{label}/{stage}"
        self._publish(label, stage, is_loaded)
        deadline = time.monotonic() + _TIMEOUT
        while missing := set(self._processes) - set(
            answers := self._store.read_folder(folder)
        ):
            self._check_failures()
            if not threading.main_thread().is_alive():
                raise AgreementError("The program ended before all was compiled.")
            if time.monotonic() > deadline:
                raise AgreementError(
                    f"Process {', '.join(sorted(missing))} did not say within "
                    f"{_TIMEOUT:.0f} s which executables it has."
                )
            self._check_programs()
            self._store.get(f"{folder}/{min(missing)}", _POLL_SECONDS)
        self._check_programs()
        return set(answers.values()) == {"1"}

    def has_nothing(self, label: Label) -> None:
        """Answers for a program that failed: it is not in a file."""
        for stage in get_args(Stage):
            self._publish(label, stage, False)

    def leave(self, error: BaseException) -> None:
        """Ends the others' wait, because this process has failed."""
        # Where the store is lost, so are they.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"failures/{self._store.index}", _summary(error))

    def _publish(self, label: Label, stage: Stage, is_loaded: bool) -> None:
        self._store.set(f"{label}/{stage}/{self._store.index}", str(int(is_loaded)))

    def _check_failures(self) -> None:
        left = Store(_FOLDER).read_folder(_LEFT)
        for process, error in (left | self._store.read_folder("failures")).items():
            if process in self._processes and process != str(self._store.index):
                raise AgreementError(
                    f"Process {process} does not compile any more: {error}"
                )

    def _check_programs(self) -> None:
        for process, programs in self._store.read_folder("programs").items():
            if programs != self._programs:
                raise AgreementError(
                    f"Process {process} compiles other programs than process "
                    f"{self._store.index}. All processes must call `compile_steps` for "
                    "the same steps, in the same order."
                )


def leave_all(error: BaseException) -> None:
    """Ends the wait of all processes, now and later: this one compiles no more."""
    if jax.process_count() > 1:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            store = Store(_FOLDER)
            store.set(f"{_LEFT}/{store.index}", _summary(error))


def _summary(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR_LENGTH]
