"""The checked options of `compile_steps`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from jaxbucket.base.bucket import Bucket
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
    """The options of `compile_steps`, which documents most of them.

    Attributes:
      keep_going: whether to compile the remaining buckets if one fails, and to raise no
        error.
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
                "`unplanned='jit'` compiles batches that are not in the plan, "
                "which `on_compile='raise'` forbids. Change one of them."
            )

    def order(self, buckets: Mapping[Bucket, Any]) -> list[Bucket]:
        """Returns the opening buckets, and then the others, the longest first.

        Raises:
          ValueError: if `opening` names an unknown bucket.
        """
        for bucket in self.opening:
            if bucket not in buckets:
                raise ValueError(
                    f"`opening` names {bucket}, which is not in `specs`. Choose from "
                    f"{', '.join(map(str, buckets))}."
                )

        def size(bucket: Bucket) -> tuple[int, int, str]:
            # The name makes the order of ties the same in all processes.
            return bucket.tokens_per_row, bucket.batch_size, str(bucket)

        rest = sorted(buckets, key=size, reverse=True)
        return list(dict.fromkeys([*self.opening, *rest]))

    def build(self, first: list[Program], others: list[Program]) -> CompileJob:
        """Builds all programs; `others` in the background if there is an opening."""
        programs = first + others
        session = self.executables and CacheSession(self.executables, programs)
        job = CompileJob(programs, session, self.workers, keep_going=self.keep_going)
        if self.opening:
            job.build_ahead(len(first))
            return job
        job.build(progress=self.progress)
        job.check()
        return job
