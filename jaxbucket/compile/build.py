"""Programs on their way to executables: traced in turn, compiled several at a time.

Tracing is Python, and one thread's work; XLA's compiler does not hold Python's lock,
and a pool of threads runs it. All processes take their programs in the same order,
because compilers on GPUs wait for one another.
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
from jaxbucket.compile.events import on_purpose, take_trace
from jaxbucket.compile.jax_settings import is_traced_alike
from jaxbucket.compile.program import Label, Program
from jaxbucket.compile.report import CompileReport, ProgramReport, memory_of
from jaxbucket.compile.xla_cache import without_xla_cache

# XLA's passes go deep; what a thread has by default differs from system to system.
_STACK_BYTES = 64 * 2**20
_MAX_WORKERS = 16
_stack_size = threading.Lock()


class CompileJob(Mapping[Label, Any]):
    """Label -> executable; a look-up waits until it is ready.

    Args:
      programs: what is compiled, in this order.
      session: where executables are loaded from and saved to.
      workers: how many are compiled at a time; by default one for two cores.
      keep_going: build the others where one has failed.

    Attributes:
      seconds_waited: by those who asked for executables, from the first one on.
      failure: what ended it.
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
        # Of an executable and its report.
        self._futures: dict[Label, Future[tuple[Any, ProgramReport]]] = {
            program.label: Future() for program in self._programs
        }
        self._keep_going = keep_going
        self._agreement = session and Agreement.of(
            session.devices, session.all_programs
        )
        self.failure: BaseException | None = None
        self.seconds_waited = 0.0

    def __getitem__(self, label: Label) -> Any:
        future = self._futures[label]
        # What failed in the background is raised at the next step, whatever its bucket.
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
        """What those that are ready have cost, in the order they were given."""
        done = [x for x in self._futures.values() if x.done() and not x.cancelled()]
        return CompileReport(
            tuple(x.result()[1] for x in done if x.exception() is None)
        )

    def failures(self) -> dict[Label, BaseException]:
        """What went wrong so far."""
        errors = {
            label: CancelledError() if x.cancelled() else x.exception()
            for label, x in self._futures.items()
            if x.done()
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
            _exhaust(self._stages(self._programs))

    def build_ahead(self, num_first: int) -> None:
        """Builds the first ones, one after another; the others in the background."""
        with self._waiting():
            for program in self._programs[:num_first]:
                _exhaust(self._stages([program]))
                # What does not compile is raised before anything else is.
                self._futures[program.label].result()
        others = self._programs[num_first:]
        stages = self._stages(others)
        call = with_caller_config()
        if not is_traced_alike(call):
            # In a context that a thread cannot be given: only XLA's work is left to it.
            with self._waiting():
                next(stages)

        def build() -> None:
            try:
                call(_exhaust, stages)
            except BaseException as error:
                # Whoever waits gets the error; this thread has nobody to raise it to.
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
        """Ends the job: what has not begun is cancelled, and whoever waits is told."""
        is_first = self.failure is None
        self.failure = self.failure or error
        # What was heard of another process, all others hear themselves.
        if self._agreement and is_first and not isinstance(error, AgreementError):
            self._agreement.leave(error)

    def _stages(self, programs: Sequence[Program]) -> Iterator[None]:
        """Traces programs up to a `yield`, and then waits until all are compiled.

        Each part may be run by another thread.
        """
        call = with_caller_config()
        pool = ThreadPoolExecutor(self._workers, "compile")

        def trace(program: Program) -> None:
            lowered = self._loaded_or_lowered(program)
            if lowered is not None:
                # It starts its threads as they are needed.
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
        is_over = all(future.done() for future in self._futures.values())
        if self._session is not None and is_over and not self.failures():
            self._session.finish()

    def _cancel(self, programs: Sequence[Program]) -> None:
        """Nobody is to wait for those that are not settled."""
        for program in programs:
            self._futures[program.label].cancel()

    def _attempt(self, program: Program, fn: Callable[..., None], *args: Any) -> None:
        """Calls a function; if it raises, whoever waits for its program is told."""
        future = self._futures[program.label]
        # Threads of a program that is over would keep it alive.
        if not threading.main_thread().is_alive():
            self._fail(RuntimeError("The program ended before all was compiled."))
        if self.failure is not None:
            future.cancel()
            return
        try:
            fn(program, *args)
        except BaseException as error:
            is_of_program = isinstance(error, Exception)
            if is_of_program:
                error.add_note(f"This was `{program.name}` for {program.label}.")
            if not (self._keep_going and is_of_program) or isinstance(
                error, AgreementError
            ):
                self._fail(error)
            elif self._agreement:
                self._agreement.has_nothing(program.label)
            future.set_exception(error)
            if not is_of_program:
                raise

    def _loaded_or_lowered(self, program: Program) -> tuple[Any, ...] | None:
        """Settles a program from its file, or returns what is left to do."""
        if self._settle_from_file(program, "known"):
            return None
        start = time.perf_counter()
        lowered, flops = program.lower()
        # It is compiled in another thread.
        take_trace(program.name)
        seconds = time.perf_counter() - start
        if self._session is not None:
            self._session.note(program, lowered)
            if self._settle_from_file(program, "traced", seconds):
                return None
        return lowered, flops, seconds

    def _settle_from_file(
        self, program: Program, stage: Stage, trace_seconds: float = 0.0
    ) -> bool:
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
        with no_cache, on_purpose():
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
    """One for two cores: XLA's compiler keeps more than one and a half busy."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(cores // 2, _MAX_WORKERS))


@contextlib.contextmanager
def _deep_stacks() -> Iterator[None]:
    """Threads that begin inside have room for XLA."""
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)
