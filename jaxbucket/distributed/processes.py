"""Connects the processes of a run, checks that they agree, and ends them together."""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import json
import math
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxbucket.base.position import DataPosition
from jaxbucket.base.version import __version__
from jaxbucket.distributed.differences import differences, list_processes
from jaxbucket.distributed.environment import Settings, read_settings
from jaxbucket.distributed.exit import exit_now, print_to_stderr
from jaxbucket.distributed.store import Store
from jaxbucket.distributed.watchdog import Watchdog, describe_error

# jax's settings that change the numbers or the collectives of a program.
_CONFIG = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion"),
)
# Numbers the contexts of this process. A context has the same number in all processes,
# because each of them enters as many as the others.
_context_numbers = itertools.count()
_MIN_TIMEOUT = 2.0
# jax aborts without naming the lost process, so its timeout is longer than ours. The
# factor is large because jax may notice a loss after half of its timeout.
_JAX_TIMEOUT_FACTOR = 4
_TIMEOUTS_TO_HINT = 2
_SECONDS_TO_EXIT = 5.0
_SECONDS_FOR_WATCHDOG = 0.2
# Python handles no signals while it waits for the store.
_SECONDS_BETWEEN_SIGNALS = 0.5
# The status codes of errors that the loss of another process may cause.
_SECONDARY_ERRORS = {
    *("ABORTED", "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED"),
    *("FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE", "UNKNOWN"),
}


class Processes:
    """The processes of a run: a context manager around everything that it does.

    If a process is killed or suspended, or raises an error within the context, all
    others exit within `timeout` and a few seconds, with a message that names it. The
    process that raises exits within 5 s after the error has left the context, even if
    the error is caught there. SIGTERM is jax's preemption notice, which `StopRequest`
    handles. A single process runs as it would without the context.

    A process that hangs while it holds the GIL prints its stacks with
    `faulthandler.dump_traceback_later`. Python has only one such timer per process, so
    do not set it within the context.

    Example:
      >>> with Processes() as processes:
      ...     print(processes.index, processes.count)
      0 1

    Args:
      coordinator_address: host:port of process 0. This argument and the next two are
        passed to `jax.distributed.initialize`, unless it has been called before, as it
        must be on TPU pods. They default to the environment variables
        JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and in a step of
        several SLURM tasks to these tasks. Otherwise there is a single process.
      num_processes: the number of processes.
      process_id: the index of this process.
      timeout: seconds without a heartbeat after which a process counts as lost. It must
        be the same in all processes, and longer than any call that keeps Python from
        running its other threads.
      start_timeout: seconds to wait, on entering, for all processes to start. After
        that, jax aborts the waiting processes.

    Attributes:
      index: the index of this process.
      count: the number of processes.
      store: the key-value store that the processes share; only set if `count` > 1.

    Raises:
      ValueError: if one of the first three arguments is missing or invalid, or if a
        timeout is too short or not finite. On entering, if the port is in use,
        `num_processes` differs between processes, or an earlier context has already
        connected this process.
    """

    index: int = 0
    count: int = 1
    store: Store
    _has_disconnected = False

    def __init__(
        self,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        *,
        timeout: float = 60.0,
        start_timeout: float = 300.0,
    ):
        _check_timeouts(timeout, start_timeout)
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._settings = None
        # If the processes are connected already, the settings are not needed.
        if not jax.distributed.is_initialized():
            settings = coordinator_address, num_processes, process_id
            self._settings = read_settings(*settings)
        self._calls: collections.Counter[str] = collections.Counter()
        self._watchdog: Watchdog | None = None
        self._owns_connection = False
        self._callbacks: list[Callable[[], None]] = []

    def __enter__(self) -> Processes:
        if self._settings and self._settings.num_processes > 1:
            self._connect(self._settings)
        if jax.distributed.is_initialized():
            self.store = Store(f"jaxbucket/{next(_context_numbers)}")
            self.index, self.count = self.store.index, self.store.count
        if self.count > 1:
            self._start()
        return self

    def _connect(self, settings: Settings) -> None:
        if Processes._has_disconnected:
            raise ValueError(
                "`Processes` was entered before, and jax connects a process only once. "
                "Use one context for the whole program, or call "
                "`jax.distributed.initialize` yourself, which stays connected."
            )
        if settings.process_id == 0:
            _check_port(settings.coordinator_address)
        jax.distributed.initialize(
            *settings,
            initialization_timeout=math.ceil(self._start_timeout),
            heartbeat_timeout_seconds=_JAX_TIMEOUT_FACTOR * math.ceil(self._timeout),
        )
        self._owns_connection = True

    def _start(self) -> None:
        name = f"{socket.gethostname()}, pid {os.getpid()}"
        watchdog = Watchdog(self.store, name, self._timeout, self._start_timeout)
        self._watchdog = watchdog
        watchdog.start()
        try:
            if self.index == 0:
                self.store.set("count", str(self.count))
            count = self.store.get("count", self._start_timeout)
            if count != str(self.count):
                raise ValueError(
                    f"`num_processes` is {count} in process 0, {self.count} in process "
                    f"{self.index}. Pass the same number to all processes."
                )
        except BaseException as error:
            self._fail(watchdog, error)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if self._watchdog is None:
            return
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._fail(self._watchdog, error)
            return
        try:
            for callback in self._callbacks:
                callback()
            self.gather("end", "")
        except BaseException as late_error:
            self._fail(self._watchdog, late_error)
            raise
        self._watchdog.stop()
        if self._owns_connection:
            # jax would do this at exit, but the processes may exit at different times.
            jax.distributed.shutdown()
            Processes._has_disconnected = True
            _restore_sigterm_handler()

    def _fail(self, watchdog: Watchdog, error: BaseException) -> None:
        """Reports an error that leaves the context, and has this process exit soon."""
        # A normal exit waits: jax for the other processes, threads for collectives.
        code = error.code if isinstance(error, SystemExit) else 1
        status = code if isinstance(code, int) else 1
        atexit.register(exit_now, status)
        self._report(watchdog, error)
        timer = threading.Timer(_SECONDS_TO_EXIT, exit_now, (status,))
        timer.daemon = True
        timer.start()

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Registers a function to call before this process leaves the context.

        Functions are called in the order in which they were registered. They are not
        called if an error leaves the context, or in a single process.

        Args:
          callback: a function without arguments.
        """
        self._callbacks.append(callback)

    def fail(self, error: BaseException) -> None:
        """Ends this process, and therefore all others. Any thread may call it.

        It is meant for an error in a background thread, such as one that writes a file
        that the other processes wait for. A single process continues.

        Args:
          error: an exception whose type and message are reported to the others. If the
            loss of another process may have caused it, this process first waits
            `timeout` seconds for that loss to be reported.
        """
        if self._watchdog is not None:
            reason = self._report(self._watchdog, error)
            exit_now(1, f"Process {self.index} is exiting: it {reason}")

    def _report(self, watchdog: Watchdog, error: BaseException) -> str:
        """Reports an error of this process to the others; returns its description."""
        if _may_be_secondary(error):
            # If process 0 is lost, jax aborts soon. Leave the time to the watchdog.
            time.sleep(_SECONDS_FOR_WATCHDOG)
            # Printed now, because this process may exit before the error is raised.
            traceback.print_exception(error)
            print_to_stderr(
                f"Process {self.index} raised an error that the loss of another "
                f"process may have caused. It waits {self._timeout:g} s for a report "
                "of that loss."
            )
            with contextlib.suppress(KeyboardInterrupt):
                watchdog.wait_for_failure()
        reason = describe_error(error)
        watchdog.report_failure(reason)
        return reason

    def gather(self, name: str, value: str) -> list[str]:
        """Returns the values of all processes, in their order. All must call it.

        It waits until every process has called it, or one is lost. After a long wait it
        prints a message that names the missing processes.

        Example:
          >>> with Processes() as processes:
          ...     processes.gather("seed", "7")
          ['7']

        Args:
          name: the purpose of the call, used in messages.
          value: the value of this process.
        """
        if self.count == 1:
            return [value]
        number = self._calls[name]
        self._calls[name] += 1
        folder = f"{name}/{number}"
        self.store.set(f"{folder}/values/{self.index}", value)
        if self.store.increment(f"{folder}/arrived") == self.count:
            self.store.set(f"{folder}/complete", "")
        # A lost process is reported before this hint is printed.
        hint_time = time.monotonic() + _TIMEOUTS_TO_HINT * self._timeout
        while self.store.get(f"{folder}/complete", _SECONDS_BETWEEN_SIGNALS) is None:
            if time.monotonic() > hint_time:
                hint_time = math.inf
                self._name_missing(name, self.store.read_folder(f"{folder}/values"))
        values = self.store.read_folder(f"{folder}/values")
        if number and self.index == 0:
            # Every process has read the previous values, because it has come here.
            self.store.delete(f"{name}/{number - 1}")
        return [values[str(index)] for index in range(self.count)]

    def _name_missing(self, name: str, values: Mapping[str, str]) -> None:
        missing = [x for x in range(self.count) if str(x) not in values]
        seconds = _TIMEOUTS_TO_HINT * self._timeout
        if missing:
            print_to_stderr(
                f"Process {self.index} has waited {seconds:g} s at {name!r} for "
                f"{list_processes(missing)}. If all processes are waiting, one of them "
                "has left a loop before the others."
            )

    def check_agreement(
        self,
        position: DataPosition,
        mesh: Mesh,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Checks that all processes are about to run the same job. All must call it.

        Example:
          >>> import jaxbucket as jb
          >>> plan = jb.plan_buckets([2, 1], max_tokens=4)
          >>> schedule = jb.BatchSchedule(plan, [2, 1])
          >>> dataset = jb.batch_dataset([{"x": [1, 2]}, {"x": [3]}], schedule)
          >>> with Processes() as processes:
          ...     mesh = jb.data_mesh()
          ...     processes.check_agreement(dataset.position(0), mesh, {"lr": 0.1})

        Args:
          position: the starting position of this process, from
            `BatchDataset.position`: its step, plan, data and schedule.
          mesh: the mesh that this process uses.
          extra: further fields that must be equal, serializable as JSON.

        Raises:
          ValueError: in every process, if they differ. The message names the fields
            that differ, and the processes.
        """
        config = {
            "version of jaxbucket": __version__,
            "version of jax": jax.__version__,
            **{name: str(getattr(jax.config, name)) for name in _CONFIG},
            "mesh axes": list(mesh.shape.items()),
            "mesh devices": [device.id for device in mesh.devices.flat],
            "step": position.step,
            **_prefixed("plan", position.plan),
            **_prefixed("data", position.data),
            **_prefixed("schedule", position.schedule),
            **dict(extra or {}),
        }
        texts = self.gather("agreement", json.dumps(config, sort_keys=True))
        phrases = list(differences([json.loads(text) for text in texts]))
        if phrases:
            raise ValueError(
                f"The processes do not agree: {'; '.join(phrases)}. Start all of "
                "them with the same arguments, data and package versions."
            )


def _check_timeouts(timeout: float, start_timeout: float) -> None:
    if not timeout >= _MIN_TIMEOUT:
        raise ValueError(
            f"`timeout={timeout}` must be at least {_MIN_TIMEOUT:g} s, so that a busy "
            "process does not count as lost."
        )
    if not start_timeout > 0:
        raise ValueError(
            f"`start_timeout={start_timeout}` must be positive. It is the time in "
            "seconds in which all processes must start."
        )
    times = {"timeout": timeout, "start_timeout": start_timeout}
    for name, value in times.items():
        if math.isinf(value):
            raise ValueError(
                f"`{name}={value}` must be finite. Pass a number of seconds, such as "
                f"`{name}=86400` for a day."
            )


def _check_port(address: str) -> None:
    """Raises a ValueError if the port is not free, because jax may crash then."""
    try:
        socket.create_server(("", int(address.rpartition(":")[2]))).close()
    except OSError as error:
        raise ValueError(
            f"`coordinator_address={address!r}`: cannot listen on this port "
            f"({error.strerror}). Choose a different port."
        ) from None


def _prefixed(part: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part} {name.replace('_', ' ')}": x for name, x in fields.items()}


def _restore_sigterm_handler() -> None:
    """Reinstalls Python's SIGTERM handler, which jax has replaced by its own in C."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _may_be_secondary(error: BaseException | None) -> bool:
    """Returns whether the loss of another process may have caused an error here.

    jax raises such errors with one of two types; the text starts with a status code.
    """
    seen: set[int] = set()
    # Two errors can be each other's cause.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
            if str(error).partition(":")[0] in _SECONDARY_ERRORS:
                return True
        error = error.__cause__ or error.__context__
    return False
