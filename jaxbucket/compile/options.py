"""How a step is compiled: the arguments of `compile_steps`, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_choice
from jaxbucket.base.padding import PadValue
from jaxbucket.compile.build import CompileJob
from jaxbucket.compile.cache_session import CacheSession
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.guard import OnCompile
from jaxbucket.compile.program import Program

Unplanned: TypeAlias = Literal["raise", "longer", "jit"]


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """How to compile: the arguments of `compile_steps`.

    Attributes:
      keep_going: compile the other buckets where one fails, and raise nothing.
      pad_value: what fills batches that are padded to a longer bucket.
    """

    workers: int | None
    opening: tuple[Bucket, ...]
    executables: ExecutableCache | None
    unplanned: Unplanned
    on_compile: OnCompile
    progress: bool
    keep_going: bool = False
    pad_value: PadValue = 0

    def __post_init__(self):
        check_choice("unplanned", self.unplanned, get_args(Unplanned))
        check_choice("on_compile", self.on_compile, get_args(OnCompile))
        if self.unplanned == "jit" and self.on_compile == "raise":
            raise ValueError(
                "`unplanned='jit'` compiles for what is not as planned, and "
                "`on_compile='raise'` forbids it: choose one of them."
            )

    def order(self, buckets: Mapping[Bucket, Any]) -> list[Bucket]:
        """The buckets of the opening first, then the longest.

        Raises:
          ValueError: if one of the opening is not there.
        """
        for bucket in self.opening:
            if bucket not in buckets:
                raise ValueError(
                    f"`opening` names {bucket}, which is not in `specs`: choose from "
                    f"{', '.join(map(str, buckets))}."
                )
        rest = sorted(buckets, key=lambda bucket: bucket.seq_len, reverse=True)
        return list(dict.fromkeys([*self.opening, *rest]))

    def build(self, first: list[Program], others: list[Program]) -> CompileJob:
        """Builds programs; if there is an opening, the others in the background."""
        programs = first + others
        session = self.executables and CacheSession(self.executables, programs)
        job = CompileJob(programs, session, self.workers, keep_going=self.keep_going)
        if self.opening:
            job.build_ahead(len(first))
            return job
        job.build(progress=self.progress)
        job.check()
        return job
