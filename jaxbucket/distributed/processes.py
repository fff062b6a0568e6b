"""Several processes that train as one: they agree, they stop and they end together."""

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

# What of jax's configuration makes for other numbers, or other collectives.
_CONFIG = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion"),
)
# Every process enters as often as the others.
_entered = itertools.count()
_MIN_TIMEOUT = 2.0
# jax aborts without naming anyone: later than we do, then. It may do so in half of it,
# because a process beats so often.
_JAX_TIMEOUTS = 4
_TIMEOUTS_TO_WAIT = 2
_SECONDS_TO_FAIL = 5.0
_SECONDS_TO_NAME = 0.2
# Python hears no signal while the store is waited for.
_SECONDS_BETWEEN_SIGNALS = 0.5
_SECONDARY_ERRORS = {
    *("ABORTED", "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED"),
    *("FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE", "UNKNOWN"),
}


class Processes:
    """The processes of a run; a context around all that it does.

    Within it, a process that is killed, stopped or raises makes all others end, within
    `timeout` and a few seconds, with a sentence that names it. So does the one that
    raises, within 5 s of the error that leaves the context, caught or not. SIGTERM is
    jax's preemption notice, which `StopRequest` hears. A single process is left alone.

    To see one that hangs with Python's lock held it takes
    `faulthandler.dump_traceback_later`, of which a process has one.

    Example:
      >>> with Processes() as processes:
      ...     print(processes.index, processes.count)
      0 1

    Args:
      coordinator_address: host:port of process 0. It, and the next two, are given to
        `jax.distributed.initialize`, unless that was called before, as it is where a
        cluster tells them (SLURM, TPU pods). By default the environment's
        JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; without these
        there is one process.
      num_processes: how many there are.
      process_id: which of them this is.
      timeout: seconds without a sign of life after which a process is lost, the same
        in all. Longer than any call that keeps Python from running its other threads.
      start_timeout: seconds to wait, on entering, for all processes to come; jax aborts
        those that have waited in vain.

    Attributes:
      index: of this process.
      count: of all.
      store: what they write to one another; only where they are several.

    Raises:
      ValueError: if some of the three are missing or wrong, or a timeout is too short
        or not finite; on entering, if the port is in use, `num_processes` is not the
        same in all, or an earlier context has connected this process.
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
        # Whoever has connected the processes has had settings of their own.
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
            self.store = Store(f"jaxbucket/{next(_entered)}")
            self.index, self.count = self.store.index, self.store.count
        if self.count > 1:
            self._start()
        return self

    def _connect(self, settings: Settings) -> None:
        if Processes._has_disconnected:
            raise ValueError(
                "`Processes` was entered before, and jax connects a process only once: "
                "keep one context around all, or call `jax.distributed.initialize`, "
                "which stays."
            )
        if settings.process_id == 0:
            _check_port(settings.coordinator_address)
        jax.distributed.initialize(
            *settings,
            initialization_timeout=math.ceil(self._start_timeout),
            heartbeat_timeout_seconds=_JAX_TIMEOUTS * math.ceil(self._timeout),
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
                    f"{self.index}. Give all of them the same."
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
        except BaseException as late:
            self._fail(self._watchdog, late)
            raise
        self._watchdog.stop()
        if self._owns_connection:
            # Or jax would do it when they exit, and each may take its time until then.
            jax.distributed.shutdown()
            Processes._has_disconnected = True
            _return_sigterm()

    def _fail(self, watchdog: Watchdog, error: BaseException) -> None:
        """Tells the others of an error that leaves the context, and ends in time."""
        # jax would wait for the others on its way out, and threads for collectives.
        code = error.code if isinstance(error, SystemExit) else 1
        status = code if isinstance(code, int) else 1
        atexit.register(exit_now, status)
        self._report(watchdog, error)
        late = threading.Timer(_SECONDS_TO_FAIL, exit_now, (status,))
        late.daemon = True
        late.start()

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls a function at the end of the context, before this process leaves it.

        Args:
          callback: called without arguments, in the order of the calls of `at_end`;
            not where an error leaves the context, nor in a single process.
        """
        self._callbacks.append(callback)

    def fail(self, error: BaseException) -> None:
        """Ends this process, from any thread, and so all others.

        For an error that no other thread would hear of in time, such as of a file that
        is written beside the loop, for which all others wait. A single process goes on.

        Args:
          error: whose type and message the others are told. If it may come from the
            loss of another process, they have `timeout` seconds to name that one.
        """
        if self._watchdog is not None:
            reason = self._report(self._watchdog, error)
            exit_now(1, f"process {self.index} ends because it {reason}")

    def _report(self, watchdog: Watchdog, error: BaseException) -> str:
        """Tells the others of an error of this process; returns in which words."""
        if _may_be_secondary(error):
            # Where process 0 is lost, jax aborts in a moment: the watchdog needs it.
            time.sleep(_SECONDS_TO_NAME)
            # Printed now, because this process may be ended before it is raised.
            traceback.print_exception(error)
            print_to_stderr(
                f"process {self.index} has met what the loss of another one may cause, "
                f"and waits {self._timeout:g} s to hear of one."
            )
            with contextlib.suppress(KeyboardInterrupt):
                watchdog.wait_for_failure()
        reason = describe_error(error)
        watchdog.report_failure(reason)
        return reason

    def gather(self, name: str, value: str) -> list[str]:
        """Returns the values of all processes, in order. All of them have to call it.

        It waits until all are here, or one is lost. A message names those that let the
        others wait for long.

        Example:
          >>> with Processes() as processes:
          ...     processes.gather("seed", "7")
          ['7']

        Args:
          name: what it is for, as messages name it.
          value: that of this process.
        """
        if self.count == 1:
            return [value]
        number = self._calls[name]
        self._calls[name] += 1
        folder = f"{name}/{number}"
        self.store.set(f"{folder}/values/{self.index}", value)
        if self.store.increment(f"{folder}/arrived") == self.count:
            self.store.set(f"{folder}/complete", "")
        # Later than one that is lost is named.
        hint = time.monotonic() + _TIMEOUTS_TO_WAIT * self._timeout
        while self.store.get(f"{folder}/complete", _SECONDS_BETWEEN_SIGNALS) is None:
            if time.monotonic() > hint:
                hint = math.inf
                self._name_missing(name, self.store.below(f"{folder}/values"))
        values = self.store.below(f"{folder}/values")
        if number and self.index == 0:
            # Whoever is here has read what was there before.
            self.store.delete(f"{name}/{number - 1}")
        return [values[str(index)] for index in range(self.count)]

    def _name_missing(self, name: str, values: Mapping[str, str]) -> None:
        missing = [x for x in range(self.count) if str(x) not in values]
        seconds = _TIMEOUTS_TO_WAIT * self._timeout
        if missing:
            print_to_stderr(
                f"process {self.index} has waited {seconds:g} s at {name!r} for "
                f"{list_processes(missing)}. Where they wait for it, too, one of them "
                "has left a loop before the others."
            )

    def check_agreement(
        self,
        position: DataPosition,
        mesh: Mesh,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Checks that all processes are about to do the same. All have to call it.

        Example:
          >>> import jaxbucket as jb
          >>> plan = jb.plan_buckets([2, 1], max_tokens=4)
          >>> schedule = jb.BatchSchedule(plan, [2, 1])
          >>> dataset = jb.batch_dataset([{"x": [1, 2]}, {"x": [3]}], schedule)
          >>> with Processes() as processes:
          ...     mesh = jb.data_mesh()
          ...     processes.check_agreement(dataset.position(0), mesh, {"lr": 0.1})

        Args:
          position: where each of them begins, from `BatchDataset.position`: its step,
            plan, data and schedule.
          mesh: what each of them runs on.
          extra: what else must be the same, for JSON.

        Raises:
          ValueError: in every process, if they differ; it names who and in what.
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
                "them with the same arguments, data and packages."
            )


def _check_timeouts(timeout: float, start_timeout: float) -> None:
    if not timeout >= _MIN_TIMEOUT:
        raise ValueError(
            f"`timeout={timeout}` must be at least {_MIN_TIMEOUT:g} s: a process "
            "that is only busy is not lost."
        )
    if not start_timeout > 0:
        raise ValueError(
            f"`start_timeout={start_timeout}` must be positive: so many seconds "
            "may pass between the first process and the last."
        )
    times = {"timeout": timeout, "start_timeout": start_timeout}
    for name, value in times.items():
        if math.isinf(value):
            raise ValueError(
                f"`{name}={value}` must be finite, because jax counts its seconds: "
                f"give a number, such as `{name}=86400` for a day."
            )


def _check_port(address: str) -> None:
    """Because jax may crash where it cannot listen to the port."""
    try:
        socket.create_server(("", int(address.rpartition(":")[2]))).close()
    except OSError as error:
        raise ValueError(
            f"`coordinator_address={address!r}`: its port cannot be listened to "
            f"({error.strerror}). Choose another."
        ) from None


def _prefixed(part: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part} {name.replace('_', ' ')}": x for name, x in fields.items()}


def _return_sigterm() -> None:
    """Installs Python's handler again: jax has put one of C over it, which stays."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _may_be_secondary(error: BaseException | None) -> bool:
    """Whether it may be what a lost process causes in a collective of this one.

    jax gives it as one error or the other; its text begins with the status code.
    """
    seen: set[int] = set()
    # Errors can be each other's cause.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
            if str(error).partition(":")[0] in _SECONDARY_ERRORS:
                return True
        error = error.__cause__ or error.__context__
    return False
