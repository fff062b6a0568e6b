"""What all processes must have, for any of them to take it from a file.

Compilers of several hosts share what they found out; one that had nothing to compile
would keep the others waiting.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax

from jaxbucket.compile.keys import Devices, digest
from jaxbucket.compile.programs import Label
from jaxbucket.coordination import Store

# Before a program is traced, and after.
Stage: TypeAlias = Literal["known", "traced"]
_STAGES: tuple[Stage, ...] = ("known", "traced")

_SECONDS_FOR_AN_ANSWER = 600
# Signals are not heard while the store is waited for.
_SECONDS_AT_A_TIME = 0.5
_MAX_WORDS = 500
# How often the same programs were compiled: the same in all processes.
_times: collections.Counter[str] = collections.Counter()


class Agreement:
    """The processes that compile the same programs.

    Args:
      processes: their indices, this one's among them.
      name: what they compile, in words that are the same in all.
    """

    def __init__(self, processes: Sequence[int], name: str):
        _times[name] += 1
        self._store = Store(f"jaxbucket/compile/{name}/{_times[name]}")
        self._processes = [str(index) for index in processes]

    @classmethod
    def of(cls, devices: Devices, programs: Any) -> Agreement | None:
        """Returns that of all who have the devices; none if this process has all."""
        processes = sorted({device.process_index for device in devices})
        return cls(processes, digest(programs)) if len(processes) > 1 else None

    def all_have(self, label: Label, stage: Stage, found: bool) -> bool:
        """Asks the same of all processes; the answer is the same in all.

        Raises:
          RuntimeError: if another process has failed.
          TimeoutError: if one does not come.
        """
        folder = f"{label}/{stage}"
        self._say(folder, found)
        deadline = time.monotonic() + _SECONDS_FOR_AN_ANSWER
        while missing := set(self._processes) - set(self._store.below(folder)):
            self._check_failures()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Process {', '.join(sorted(missing))} did not say within "
                    f"{_SECONDS_FOR_AN_ANSWER} s which executables it has. All "
                    "processes must compile the same steps."
                )
            self._store.get(f"{folder}/{min(missing)}", _SECONDS_AT_A_TIME)
        return set(self._store.below(folder).values()) == {"1"}

    def has_nothing(self, label: Label) -> None:
        """Says of a program that failed that no file of it will do."""
        for stage in _STAGES:
            self._say(f"{label}/{stage}", False)

    def leave(self, error: BaseException) -> None:
        """Has all others end, for this process has failed."""
        said = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_WORDS]
        # Where the store is lost, so are they.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.set(f"failures/{self._store.index}", said)

    def _say(self, folder: str, found: bool) -> None:
        self._store.set(f"{folder}/{self._store.index}", str(int(found)))

    def _check_failures(self) -> None:
        for process, said in self._store.below("failures").items():
            raise RuntimeError(f"Process {process} does not compile any more: {said}")
