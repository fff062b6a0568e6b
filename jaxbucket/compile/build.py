"""Builds executables: traces programs in turn, and compiles several at a time.

Tracing is Python code, which one thread runs. XLA's compiler releases the GIL, so that
a pool of threads runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_positive
from jaxbucket.base.progress import progress_bar
from jaxbucket.compile.absent import Device, is_absent
from jaxbucket.compile.executables import Executables, without_xla_cache
from jaxbucket.compile.report import (
    CompileReport,
    ProgramReport,
    costs_of,
    count_flops,
    devices_of,
)

# A bucket, or the name of a phase that all buckets share.
Label: TypeAlias = Bucket | str

# XLA's passes recurse deeply, and the default stack size depends on the system.
_STACK_BYTES = 64 * 2**20
_MAX_WORKERS = 16


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """The options of `compile_steps`, which documents most of them.

    Attributes:
      keep_going: whether to compile the remaining buckets if one fails, and to raise no
        error.
    """

    workers: int | None = None
    executables: str | os.PathLike[str] | None = None
    executables_key: str = ""
    progress: bool = True
    keep_going: bool = False

    def __post_init__(self):
        if self.workers is not None:
            check_positive("workers", self.workers)
        if "://" in os.fspath(self.executables or ""):
            raise ValueError(
                f"`executables={self.executables!r}` must be a folder on a file "
                "system. Mount remote storage to use it."
            )


@dataclasses.dataclass(frozen=True)
class Program:
    """A function together with the shapes of its arguments.

    Attributes:
      label: its bucket or phase.
      fn: a jitted function.
      args: the arguments, or their shapes, dtypes and shardings.
    """

    label: Label
    fn: Any
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.fn, "__name__", "step")


class Build:
    """Builds programs, in the given order.

    Attributes:
      executables: label -> executable.
      failures: label, as in reports -> the error of tracing or compiling it.
      report: the report of all programs that did not fail.
      seconds: the time that it took to build all programs.
    """

    def __init__(self, programs: Sequence[Program], options: CompileOptions):
        start = time.perf_counter()
        self._keep_going = options.keep_going
        self.executables: dict[Label, Any] = {}
        self.failures: dict[str, Exception] = {}
        self._reports: dict[Label, ProgramReport] = {}
        self._files = None
        if options.executables is not None:
            args = [program.args for program in programs]
            key = options.executables_key
            self._files = Executables(options.executables, key, args)
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(progress_bar(options.progress))
            task = bar.add_task(f"Compiling {programs[0].name}", total=len(programs))
            self._advance = lambda: bar.advance(task)
            if self._files is not None and self._files.platform == "cpu":
                stack.enter_context(without_xla_cache())
            stack.callback(threading.stack_size, threading.stack_size(_STACK_BYTES))
            self._pool = ThreadPoolExecutor(options.workers or _default_workers())
            # An interruption leaves this block before all programs are compiled.
            stack.callback(self._pool.shutdown, cancel_futures=True)
            for program in programs:
                self._start(program)
            self._pool.shutdown()
        if self._has_ended():
            raise next(iter(self.failures.values()))
        if self._files is not None:
            self._files.explain_miss()
        labels = [program.label for program in programs]
        self.report = CompileReport(
            tuple(self._reports[x] for x in labels if x in self._reports)
        )
        self.seconds = time.perf_counter() - start

    def _start(self, program: Program) -> None:
        """Traces a program, and loads its executable or starts to compile it."""
        if self._has_ended():
            return
        with self._noting_failure(program), _as_default(devices_of(program.args)):
            start = time.perf_counter()
            if hasattr(program.fn, "trace"):
                traced = program.fn.trace(*program.args)
                lowered, flops = traced.lower(), count_flops(traced.jaxpr)
            else:
                # Of `jax.pmap`.
                lowered, flops = program.fn.lower(*program.args), None
            report = ProgramReport(
                program.name,
                str(program.label),
                trace_seconds=time.perf_counter() - start,
                flops=flops,
            )
            path = loaded = None
            if self._files is not None:
                path = self._files.path(lowered)
                loaded = self._files.load(path, lowered, report)
            if loaded is not None:
                self._keep(program.label, *loaded)
            else:
                self._pool.submit(self._compile, program, lowered, path, report)

    def _compile(
        self,
        program: Program,
        lowered: Any,
        path: pathlib.Path | None,
        report: ProgramReport,
    ) -> None:
        if self._has_ended():
            return
        with self._noting_failure(program):
            start = time.perf_counter()
            executable = lowered.compile()
            report = dataclasses.replace(
                report,
                compile_seconds=time.perf_counter() - start,
                **costs_of(executable, program.args),
            )
            if self._files is not None and path is not None:
                report = self._files.save(path, lowered, executable, report)
            self._keep(program.label, executable, report)

    def _has_ended(self) -> bool:
        return bool(self.failures) and not self._keep_going

    def _keep(self, label: Label, executable: Any, report: ProgramReport) -> None:
        self.executables[label], self._reports[label] = executable, report
        self._advance()

    @contextlib.contextmanager
    def _noting_failure(self, program: Program) -> Iterator[None]:
        """Stores an error of the `with` block, with a note that names the bucket."""
        try:
            yield
        except Exception as error:
            error.add_note(
                f"Raised while compiling `{program.name}` for {program.label}."
            )
            self.failures[str(program.label)] = error


def _as_default(devices: Sequence[Device]) -> contextlib.AbstractContextManager[Any]:
    """Makes an absent GPU the default device, which Tokamax chooses kernels for."""
    if devices and devices[0].platform == "gpu" and is_absent(devices[0]):
        return jax.default_device(devices[0])
    return contextlib.nullcontext()


def _default_workers() -> int:
    """Returns half the number of cores, because a compilation uses about two."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(cores // 2, _MAX_WORKERS))
