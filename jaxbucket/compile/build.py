"""Programs on their way to executables: traced in turn, compiled several at a time.

Tracing is Python, and one thread's work; XLA's compiler leaves Python alone, and a pool
of threads runs it. Every process of several takes its programs in the same order, for
compilers on GPUs wait for one another.
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
from jaxbucket.compile.context import with_caller_config
from jaxbucket.compile.events import own_compile, take_trace
from jaxbucket.compile.program import Label, Program
from jaxbucket.compile.report import CompileReport, ProgramReport, memory_of
from jaxbucket.compile.settings import is_traced_alike
from jaxbucket.compile.xla_cache import without_xla_cache

# XLA's passes go deep; what a thread has by default differs from system to system.
_STACK_BYTES = 64 * 2**20
_MOST_WORKERS = 16
_stack_size = threading.Lock()


class CompileJob(Mapping[Label, Any]):
    """Label -> executable, which is waited for where it is not ready.

    Args:
      programs: what is compiled, in this order.
      start: where executables are looked for and kept.
      workers: how many are compiled at a time; by default one for two cores.
      keep_going: build the others where one has failed.

    Attributes:
      seconds_waited: by those who asked for executables, from the first one on.
      failure: what ended it.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        start: CacheSession | None = None,
        workers: int | None = None,
        *,
        keep_going: bool = False,
    ):
        if workers is not None:
            check_positive("workers", workers)
        self._programs = list(programs)
        self._start = start
        self._workers = workers or _default_workers()
        self._futures: dict[Label, Future[Any]] = {
            p.label: Future() for p in self._programs
        }
        self._reports: dict[Label, ProgramReport] = {}
        self._stopped = threading.Event()
        self._keep_going = keep_going
        self._agreement = start and Agreement.of(start.devices, start.all_programs)
        self.failure: BaseException | None = None
        self.seconds_waited = 0.0

    def __getitem__(self, label: Label) -> Any:
        future = self._futures[label]
        # What failed in the background is told at the next step, whatever its bucket.
        self.check()
        if not future.done():
            with self._waiting(), contextlib.suppress(Exception, CancelledError):
                future.exception()
        self.check()
        return future.result()

    def __iter__(self) -> Iterator[Label]:
        return iter(self._futures)

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def report(self) -> CompileReport:
        """What those that are ready have cost, in the order they were given."""
        return CompileReport(
            tuple(self._reports[x] for x in self._futures if x in self._reports)
        )

    def failures(self) -> dict[Label, BaseException]:
        """What went wrong so far."""
        done = {label: x for label, x in self._futures.items() if x.done()}
        errors = {
            label: CancelledError() if x.cancelled() else x.exception()
            for label, x in done.items()
        }
        return {label: error for label, error in errors.items() if error is not None}

    def check(self) -> None:
        """Raises what has ended it, if anything has."""
        if self.failure is not None:
            raise self.failure

    def build(self, *, progress: bool) -> None:
        """Builds all, and returns when all are ready or have failed."""
        with self._waiting(), progress_bar(progress) as bar:
            name = self._programs[0].name
            task = bar.add_task(f"Compiling {name}", total=len(self._programs))
            for future in self._futures.values():
                future.add_done_callback(lambda _: bar.advance(task))
            self._build(self._programs)

    def build_ahead(self, alone: int) -> None:
        """Builds the first ones, one after another; the others in the background."""
        with self._waiting():
            for program in self._programs[:alone]:
                self._build([program])
                # What does not compile is told before anything else is.
                self._futures[program.label].result()
        rest = self._programs[alone:]
        stages = self._stages(rest)
        call = with_caller_config()
        if not is_traced_alike(call):
            # In a context that a thread cannot be given: only XLA's work is left to it.
            with self._waiting():
                next(stages)

        def build() -> None:
            try:
                call(_run, stages)
            except BaseException as error:
                # Of no use to this thread: whoever waits is told.
                self._fail(error)
                self._give_up(rest)

        threading.Thread(target=build, name="compile ahead").start()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_waited += time.perf_counter() - start

    def stop(self) -> None:
        """Leaves what has not begun."""
        self._stopped.set()

    def _fail(self, error: BaseException) -> None:
        """Leaves what has not begun, and tells all who wait."""
        is_first = self.failure is None
        self.failure = self.failure or error
        self.stop()
        # What was heard of another process, all others hear themselves.
        if self._agreement and is_first and not isinstance(error, AgreementError):
            self._agreement.leave(error)

    def _build(self, programs: Sequence[Program]) -> None:
        _run(self._stages(programs))

    def _stages(self, programs: Sequence[Program]) -> Iterator[None]:
        """Traces programs up to a `yield`, and then waits until all are compiled.

        Each part may be run by another thread.
        """
        call = with_caller_config()

        def trace(program: Program) -> None:
            lowered = self._loaded_or_lowered(program)
            if lowered is not None:
                # It starts its threads as they are needed.
                with _deep_stacks():
                    pool.submit(call, self._settling, program, self._compile, *lowered)

        pool = ThreadPoolExecutor(self._workers, "compile")
        try:
            for program in programs:
                self._settling(program, trace)
            yield
            pool.shutdown()
        except BaseException as error:
            # Whoever waits is told, also of what ends a thread without a word.
            self._fail(error)
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            self._give_up(programs)
        is_over = all(future.done() for future in self._futures.values())
        if self._start is not None and is_over and not self.failures():
            self._start.finish()

    def _give_up(self, programs: Sequence[Program]) -> None:
        """Nobody is to wait for those that are not settled."""
        for program in programs:
            self._futures[program.label].cancel()

    def _settling(
        self, program: Program, fn: Callable[..., None], *details: Any
    ) -> None:
        """Whatever happens in a function, who waits for its program is told."""
        future = self._futures[program.label]
        # Threads of a program that is over would keep it alive.
        if not threading.main_thread().is_alive():
            self._fail(RuntimeError("The program ended before all was compiled."))
        if self._stopped.is_set():
            future.cancel()
            return
        try:
            fn(program, *details)
        except Exception as error:
            error.add_note(f"This was `{program.name}` for {program.label}.")
            if isinstance(error, AgreementError) or not self._keep_going:
                self._fail(error)
            elif self._agreement:
                self._agreement.has_nothing(program.label)
            future.set_exception(error)
        except BaseException as error:
            self._fail(error)
            future.set_exception(error)
            raise

    def _loaded_or_lowered(self, program: Program) -> tuple[Any, ...] | None:
        """Settles a program from its file, or returns what is left to do."""
        if self._settle_by_file(program, "known"):
            return None
        start = time.perf_counter()
        lowered, flops = program.lower()
        # It is compiled in another thread.
        take_trace(program.name)
        seconds = time.perf_counter() - start
        if self._start is not None:
            self._start.note(program, lowered)
            if self._settle_by_file(program, "traced", seconds):
                return None
        return lowered, flops, seconds

    def _settle_by_file(
        self, program: Program, stage: Stage, trace_seconds: float = 0.0
    ) -> bool:
        if self._start is None:
            return False
        found = self._start.load(program)
        if self._agreement and not self._agreement.all_have(
            program.label, stage, found is not None
        ):
            return False
        if found is None:
            return False
        executable, report = found
        report = dataclasses.replace(report, trace_seconds=trace_seconds)
        self._settle(program, executable, report)
        return True

    def _compile(
        self, program: Program, lowered: Any, flops: int | None, trace_seconds: float
    ) -> None:
        start = time.perf_counter()
        with self._no_other_cache(), own_compile():
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
        if self._start is not None:
            report = self._start.save(program, executable, report)
        self._settle(program, executable, report)

    def _no_other_cache(self) -> contextlib.AbstractContextManager[None]:
        if self._start is not None and self._start.platform == "cpu":
            return without_xla_cache()
        return contextlib.nullcontext()

    def _settle(self, program: Program, executable: Any, report: ProgramReport) -> None:
        self._reports[program.label] = report
        self._futures[program.label].set_result(executable)


def _run(stages: Iterator[None]) -> None:
    for _ in stages:
        pass


def _default_workers() -> int:
    # XLA's compiler itself keeps more than one and a half cores busy.
    return max(1, min(_num_cores() // 2, _MOST_WORKERS))


def _num_cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _deep_stacks() -> Iterator[None]:
    """Threads that begin inside have room for XLA."""
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)
