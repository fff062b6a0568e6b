"""Makes all processes load a program from their files, or all of them compile it.

The compilers of several hosts exchange results while they compile. A process that does
not compile would keep the others waiting.
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

# The stage of a lookup: before or after the program is traced.
Stage: TypeAlias = Literal["known", "traced"]

_FOLDER = "jaxbucket/compile"
_LEFT = "left"
_TIMEOUT = 600.0
# Python handles no signals while it waits for the store.
_POLL_SECONDS = 0.5
_MAX_ERROR_LENGTH = 500
# How many times a group of processes has compiled together, the same in all of them.
_num_agreements: collections.Counter[tuple[int, ...]] = collections.Counter()


class AgreementError(RuntimeError):
    """The processes cannot continue compiling together, which affects all programs."""


class Agreement:
    """The processes that compile the same programs.

    Args:
      processes: the indices of the processes, including this one.
      programs: a digest of the programs, which must be the same in all processes.
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
    def for_devices(cls, devices: Devices, programs: str) -> Agreement | None:
        """Returns the agreement of the devices' processes; None for one process."""
        processes = sorted({device.process_index for device in devices})
        return cls(processes, programs) if len(processes) > 1 else None

    def all_have(self, label: Label, stage: Stage, is_loaded: bool) -> bool:
        """Returns whether all processes have loaded a program.

        Args:
          label: the label of the program.
          stage: when the processes looked for the executable.
          is_loaded: whether this process has loaded it.

        Raises:
          AgreementError: if another process has failed, compiles different programs or
            does not answer, or if the main thread has ended.
        """
        folder = f"{label}/{stage}"
        self._publish(label, stage, is_loaded)
        deadline = time.monotonic() + _TIMEOUT
        while missing := set(self._processes) - set(
            answers := self._store.read_folder(folder)
        ):
            self._check_failures()
            if not threading.main_thread().is_alive():
                raise AgreementError(
                    "The main thread ended before all programs were compiled."
                )
            if time.monotonic() > deadline:
                raise AgreementError(
                    f"Process {', '.join(sorted(missing))} did not report within "
                    f"{_TIMEOUT:.0f} s which executables it has loaded."
                )
            self._check_programs()
            self._store.get(f"{folder}/{min(missing)}", _POLL_SECONDS)
        self._check_programs()
        return set(answers.values()) == {"1"}

    def report_missing(self, label: Label) -> None:
        """Reports that this process has not loaded a program, because it failed."""
        for stage in get_args(Stage):
            self._publish(label, stage, False)

    def report_failure(self, error: BaseException) -> None:
        """Reports that this process has failed, so that the others stop waiting."""
        # If the store is lost, so are the other processes.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"failures/{self._store.index}", _summary(error))

    def _publish(self, label: Label, stage: Stage, is_loaded: bool) -> None:
        self._store.set(f"{label}/{stage}/{self._store.index}", str(int(is_loaded)))

    def _check_failures(self) -> None:
        failures = Store(_FOLDER).read_folder(_LEFT)
        failures |= self._store.read_folder("failures")
        for process, error in failures.items():
            if process in self._processes and process != str(self._store.index):
                raise AgreementError(
                    f"Process {process} has stopped compiling: {error}"
                )

    def _check_programs(self) -> None:
        for process, programs in self._store.read_folder("programs").items():
            if programs != self._programs:
                raise AgreementError(
                    f"Process {process} compiles different programs from process "
                    f"{self._store.index}. Call `compile_steps` for the same steps, in "
                    "the same order, in all processes."
                )


def report_failure_to_all(error: BaseException) -> None:
    """Reports to all processes, now and later, that this one has stopped compiling."""
    if jax.process_count() > 1:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            store = Store(_FOLDER)
            store.set(f"{_LEFT}/{store.index}", _summary(error))


def _summary(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR_LENGTH]
