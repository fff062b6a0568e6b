"""Builds executables: traces programs in turn, and compiles several at a time.

Tracing is Python code, which one thread runs. XLA's compiler releases the GIL, so
a pool of threads runs it. All processes build their programs in the same order, because
compilers for GPUs wait for one another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from jaxbucket.base.checks import check_positive
from jaxbucket.base.progress import progress_bar
from jaxbucket.compile.agreement import Agreement, AgreementError, Stage
from jaxbucket.compile.cache_session import CacheSession
from jaxbucket.compile.caller_config import with_caller_config
from jaxbucket.compile.events import allow_compiles, take_trace
from jaxbucket.compile.jax_settings import is_traced_alike
from jaxbucket.compile.program import Label, Program
from jaxbucket.compile.report import CompileReport, ProgramReport, memory_of
from jaxbucket.compile.xla_cache import without_xla_cache

# XLA's passes recurse deeply, and the default stack size depends on the system.
_STACK_BYTES = 64 * 2**20
_MAX_WORKERS = 16
_stack_size = threading.Lock()


class CompileJob(Mapping[Label, Any]):
    """A mapping: label -> executable. A look-up waits until the executable is ready.

    Args:
      programs: the programs, in the order in which they are built.
      session: loads executables from files, and saves them.
      workers: the number of programs to compile at the same time; defaults to half the
        number of CPU cores.
      keep_going: whether to build the remaining programs if one fails.

    Attributes:
      seconds_waited: the total time that callers have waited for executables.
      failure: the error that ended the job, if there was one.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        session: CacheSession | None = None,
        workers: int | None = None,
        *,
        keep_going: bool = False,
    ):
        if workers is not None:
            check_positive("workers", workers)
        self._programs = list(programs)
        self._session = session
        self._workers = workers or _default_workers()
        # Each result is an executable and its report.
        self._futures: dict[Label, Future[tuple[Any, ProgramReport]]] = {
            program.label: Future() for program in self._programs
        }
        self._keep_going = keep_going
        self._agreement = session and Agreement.for_devices(
            session.devices, session.all_programs
        )
        self.failure: BaseException | None = None
        self.seconds_waited = 0.0

    def __getitem__(self, label: Label) -> Any:
        future = self._futures[label]
        # An error in the background is raised at the next step of any bucket.
        self.check()
        if not future.done():
            with self._waiting(), contextlib.suppress(Exception, CancelledError):
                future.exception()
        self.check()
        return future.result()[0]

    def __iter__(self) -> Iterator[Label]:
        return iter(self._futures)

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def report(self) -> CompileReport:
        """The report of the programs that are ready, in the order of the job."""
        done = [x for x in self._futures.values() if x.done() and not x.cancelled()]
        return CompileReport(
            tuple(x.result()[1] for x in done if x.exception() is None)
        )

    def failures(self) -> dict[Label, BaseException]:
        """Returns the errors so far."""
        errors = {
            label: CancelledError() if x.cancelled() else x.exception()
            for label, x in self._futures.items()
            if x.done()
        }
        return {label: error for label, error in errors.items() if error is not None}

    def check(self) -> None:
        """Raises the error that ended the job, if there was one."""
        if self.failure is not None:
            raise self.failure

    def build(self, *, progress: bool) -> None:
        """Builds all programs; returns when they are ready or have failed."""
        with self._waiting(), progress_bar(progress) as bar:
            name = self._programs[0].name
            task = bar.add_task(f"Compiling {name}", total=len(self._programs))
            for future in self._futures.values():
                future.add_done_callback(lambda _: bar.advance(task))
            _exhaust(self._stages(self._programs))

    def build_ahead(self, num_first: int) -> None:
        """Builds the first programs one by one, and the others in the background."""
        with self._waiting():
            for program in self._programs[:num_first]:
                _exhaust(self._stages([program]))
                # Raises the program's error before the next one is built.
                self._futures[program.label].result()
        others = self._programs[num_first:]
        stages = self._stages(others)
        call = with_caller_config()
        if not is_traced_alike(call):
            # The caller's context cannot be passed to a thread, so trace here, and only
            # leave XLA's work to the thread.
            with self._waiting():
                next(stages)

        def build() -> None:
            try:
                call(_exhaust, stages)
            except BaseException as error:
                # Waiting callers raise the error. Nobody would see it in this thread.
                self._fail(error)
                self._cancel(others)

        threading.Thread(target=build, name="compile ahead").start()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_waited += time.perf_counter() - start

    def _fail(self, error: BaseException) -> None:
        """Ends the job with an error, and reports it to the other processes."""
        is_first = self.failure is None
        self.failure = self.failure or error
        # An error of another process is known to all of them already.
        if self._agreement and is_first and not isinstance(error, AgreementError):
            self._agreement.report_failure(error)

    def _stages(self, programs: Sequence[Program]) -> Iterator[None]:
        """Traces all programs, yields, and then waits until they are compiled.

        The two parts may be run by different threads.
        """
        call = with_caller_config()
        pool = ThreadPoolExecutor(self._workers, "compile")

        def trace(program: Program) -> None:
            lowered = self._loaded_or_lowered(program)
            if lowered is not None:
                # The pool starts its threads when they are needed.
                with _deep_stacks():
                    pool.submit(call, self._attempt, program, self._compile, *lowered)

        try:
            for program in programs:
                self._attempt(program, trace)
            yield
            pool.shutdown()
        except BaseException as error:
            self._fail(error)
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            self._cancel(programs)
        has_ended = all(future.done() for future in self._futures.values())
        if self._session is not None and has_ended and not self.failures():
            self._session.finish()

    def _cancel(self, programs: Sequence[Program]) -> None:
        """Cancels the futures that are not done, so that nobody waits for them."""
        for program in programs:
            self._futures[program.label].cancel()

    def _attempt(self, program: Program, fn: Callable[..., None], *args: Any) -> None:
        """Calls a function, and stores its error in the future of the program."""
        future = self._futures[program.label]
        # If the main thread has ended, these threads would keep the process alive.
        if not threading.main_thread().is_alive():
            self._fail(
                RuntimeError("The main thread ended before all programs were compiled.")
            )
        if self.failure is not None:
            future.cancel()
            return
        try:
            fn(program, *args)
        except BaseException as error:
            is_of_program = isinstance(error, Exception)
            if is_of_program:
                error.add_note(
                    f"Raised while compiling `{program.name}` for {program.label}."
                )
            if not (self._keep_going and is_of_program) or isinstance(
                error, AgreementError
            ):
                self._fail(error)
            elif self._agreement:
                self._agreement.report_missing(program.label)
            future.set_exception(error)
            if not is_of_program:
                raise

    def _loaded_or_lowered(self, program: Program) -> tuple[Any, ...] | None:
        """Loads a program from its file, or returns the arguments of `_compile`."""
        if self._load(program, "known"):
            return None
        start = time.perf_counter()
        lowered, flops = program.lower()
        # Discarded, because the program is compiled in a different thread.
        take_trace(program.name)
        seconds = time.perf_counter() - start
        if self._session is not None:
            self._session.record(program, lowered)
            if self._load(program, "traced", seconds):
                return None
        return lowered, flops, seconds

    def _load(self, program: Program, stage: Stage, trace_seconds: float = 0.0) -> bool:
        """Loads a program from its file; returns whether all processes could do so."""
        if self._session is None:
            return False
        loaded = self._session.load(program)
        is_loaded = loaded is not None
        if self._agreement:
            is_loaded = self._agreement.all_have(program.label, stage, is_loaded)
        if loaded is None or not is_loaded:
            return False
        executable, report = loaded
        report = dataclasses.replace(report, trace_seconds=trace_seconds)
        self._futures[program.label].set_result((executable, report))
        return True

    def _compile(
        self, program: Program, lowered: Any, flops: int | None, trace_seconds: float
    ) -> None:
        session, start = self._session, time.perf_counter()
        is_on_cpu = session is not None and session.platform == "cpu"
        no_cache = without_xla_cache() if is_on_cpu else contextlib.nullcontext()
        with no_cache, allow_compiles():
            executable = lowered.compile()
        report = ProgramReport(
            program.name,
            str(program.label),
            "compiled",
            trace_seconds,
            time.perf_counter() - start,
            0.0,
            flops=flops,
            **memory_of(executable),  # pyright: ignore
        )
        if session is not None:
            report = session.save(program, executable, report)
        self._futures[program.label].set_result((executable, report))


def _exhaust(stages: Iterator[None]) -> None:
    for _ in stages:
        pass


def _default_workers() -> int:
    """Returns half the number of cores, because a compilation uses about two."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(cores // 2, _MAX_WORKERS))


@contextlib.contextmanager
def _deep_stacks() -> Iterator[None]:
    """Gives threads that start in a `with` block a stack large enough for XLA."""
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)
