"""The processes of a run: they connect, exchange strings, agree, and end together."""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from jaxbucket.base.checks import check_float
from jaxbucket.base.position import DataPosition
from jaxbucket.base.version import __version__
from jaxbucket.distributed.store import Store, connect, read_settings

# jax's settings that change the numbers or the collectives of a program.
_CONFIG = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion"),
)
_MAX_LISTED = 8
# Numbers the contexts of this process. A context has the same number in all processes,
# because each of them enters as many as the others.
_context_numbers = itertools.count()
_SECONDS_TO_EXIT = 5.0
_SECONDS_TO_FLUSH = 1.0
# Seconds after the timeout in which jax ends this process.
_SECONDS_FOR_JAX = 10
# The text of an error of communication: a status code, and a word.
_COMMUNICATION = re.compile(
    "[A-Z_]+: .*(gloo|nccl|peer|connection|coordination|heartbeat|collective)",
    re.IGNORECASE | re.DOTALL,
)
# The store ends with process 0. The others read its error first.
_SECONDS_TO_READ = 2.0
# Python handles no signals while it waits for the store.
_SECONDS_BETWEEN_SIGNALS = 0.5


class Processes:
    """The processes of a run: a context manager around everything that it does.

    A process that raises an error within the context prints it and exits within 5 s
    after the error has left the context, even if the error is caught there. (An error
    of communication waits for jax to name a lost process first.) jax's
    coordination service notices that a process has ended or is suspended, and ends all
    others after `timeout` seconds with a message that names it. SIGTERM is jax's
    preemption notice, which `StopRequest` handles. A single process runs as it would
    without the context.

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
      timeout: seconds without a heartbeat after which a process counts as lost; the
        `heartbeat_timeout_seconds` of jax.
      start_timeout: seconds to wait, on entering, for all processes to start. After
        that, jax aborts the waiting processes.

    Attributes:
      index: the index of this process.
      count: the number of processes.
      store: the key-value store that the processes share; only set if `count` > 1.

    Raises:
      ValueError: if one of the first three arguments is missing or invalid, or if a
        timeout is not positive and finite. On entering, if the port is in use, or
        `num_processes` differs between processes.
    """

    index: int = 0
    count: int = 1
    store: Store

    def __init__(
        self,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        *,
        timeout: float = 60.0,
        start_timeout: float = 300.0,
    ):
        self._timeout = math.ceil(check_float("timeout", timeout))
        self._start_timeout = math.ceil(check_float("start_timeout", start_timeout))
        self._settings = None
        # If the processes are connected already, the settings are not needed.
        if not jax.distributed.is_initialized():
            settings = read_settings(coordinator_address, num_processes, process_id)
            self._settings = settings
        self._calls: collections.Counter[str] = collections.Counter()
        self._owns_connection = False
        self._callbacks: list[Callable[[], None]] = []

    def __enter__(self) -> Processes:
        if self._settings and self._settings[1] > 1:
            connect(self._settings, self._timeout, self._start_timeout)
            self._owns_connection = True
        if jax.distributed.is_initialized():
            self.store = Store(f"jaxbucket/{next(_context_numbers)}")
            self.index, self.count = self.store.index, self.store.count
        if self.count > 1:
            self._check_count()
        return self

    def _check_count(self) -> None:
        if self.index == 0:
            self.store.set("count", str(self.count))
        count = self.store.get("count", self._start_timeout)
        if count != str(self.count):
            error = ValueError(
                f"`num_processes` is {count} in process 0, {self.count} in process "
                f"{self.index}. Pass the same number to all processes."
            )
            self._fail(error)
            raise error

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if self.count == 1:
            return
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._fail(error)
            return
        try:
            for callback in self._callbacks:
                callback()
            self.gather("end", "")
        except BaseException as late_error:
            self._fail(late_error)
            raise
        if self._owns_connection:
            # jax would do this at exit, but the processes may exit at different times.
            jax.distributed.shutdown()
            _restore_sigterm_handler()

    def _fail(self, error: BaseException) -> None:
        """Reports an error that leaves the context, and has this process exit soon."""
        # A normal exit waits: jax for the other processes, threads for collectives.
        code = error.code if isinstance(error, SystemExit) else 1
        status = code if isinstance(code, int) else 1
        atexit.register(_exit_now, status)
        self._report(error)
        _exit_within(_SECONDS_TO_EXIT, status)
        _flush()

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
          error: the exception, which is printed.
        """
        if self.count > 1:
            traceback.print_exception(error)
            self._report(error)
            _exit_within(_SECONDS_TO_FLUSH, 1)
            _exit_now(1)

    def _report(self, error: BaseException) -> None:
        """Prints an error of this process, or the one of another that has caused it."""
        reason = f"process {self.index} raised {type(error).__name__}: {error}"
        reported = None
        if _may_be_of_another(error):
            # The loss of another process may have caused it. Its own report comes
            # immediately; if it was killed, jax ends this process after the timeout.
            traceback.print_exception(error)
            _print(f"{reason}. Waiting to find out whether another process is lost.")
            reported = self._reported(self._timeout + _SECONDS_FOR_JAX)
        if reported is None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.store.set("failure", reason)
        reason = reported or reason
        _print(f"Process {self.index} is exiting: {reason}")
        if self.index == 0:
            time.sleep(_SECONDS_TO_READ)

    def _reported(self, seconds: float) -> str | None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return self.store.get("failure", seconds)
        # Process 0 has ended, and jax ends this process.
        time.sleep(seconds)
        return None

    def gather(self, name: str, value: str) -> list[str]:
        """Returns the values of all processes, in their order. All must call it.

        It waits until every process has called it, or one is lost. After `timeout` it
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
        hint_time = time.monotonic() + self._timeout
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
        if missing:
            _print(
                f"Process {self.index} has waited {self._timeout} s at {name!r} for "
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
            `MeshLoader.position`: its step, plan, data and schedule.
          mesh: the mesh that this process uses.
          extra: further fields that must be equal, serializable as JSON.

        Raises:
          ValueError: in every process, if they differ. The message names the fields
            that differ, and the processes.
        """
        config = _job_config(position, mesh, extra or {})
        texts = self.gather("agreement", json.dumps(config, sort_keys=True))
        phrases = list(_differences([json.loads(text) for text in texts]))
        if phrases:
            raise ValueError(
                f"The processes do not agree: {'; '.join(phrases)}. Start all with the "
                "same arguments, data and package versions."
            )


def _job_config(
    position: DataPosition, mesh: Mesh, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what must be equal in all processes of a job."""
    return {
        "version of jaxbucket": __version__,
        "version of jax": jax.__version__,
        **{name: str(getattr(jax.config, name)) for name in _CONFIG},
        "mesh axes": list(mesh.shape.items()),
        "mesh devices": [device.id for device in mesh.devices.flat],
        "step": position.step,
        **{
            f"{part} {name.replace('_', ' ')}": value
            for part in ("plan", "data", "schedule")
            for name, value in getattr(position, part).items()
        },
        **extra,
    }


def _differences(configs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a phrase for each field in which the processes differ.

    Example:
      >>> list(_differences([{"seed": 0}, {"seed": 0}, {"seed": 5}]))
      ['seed is 0 in processes 0 and 1, 5 in process 2']

    Args:
      configs: the fields of each process, which must be serializable as JSON.
    """
    for name in dict.fromkeys(itertools.chain(*configs)):
        groups: dict[str, list[int]] = {}
        for process, fields in enumerate(configs):
            value = json.dumps(fields.get(name), sort_keys=True)
            groups.setdefault(value, []).append(process)
        if len(groups) > 1:
            # Sort by size; among groups of equal size, the one with process 0 is first.
            largest = sorted(groups.items(), key=lambda group: -len(group[1]))
            phrases = (f"{value} in {list_processes(who)}" for value, who in largest)
            yield f"{name} is {', '.join(phrases)}"


def list_processes(processes: Sequence[int]) -> str:
    """Returns "process 3", or "processes 0, 1 and 4".

    Example:
      >>> print(list_processes(range(20)))
      processes 0, 1, 2, 3, 4, 5, 6, 7 and 12 more
    """
    names = [str(process) for process in processes]
    if len(names) > _MAX_LISTED:
        names[_MAX_LISTED:] = [f"{len(names) - _MAX_LISTED} more"]
    if len(names) == 1:
        return f"process {names[0]}"
    return f"processes {', '.join(names[:-1])} and {names[-1]}"


def _may_be_of_another(error: BaseException) -> bool:
    """Returns whether the loss of another process may have caused an error of jax."""
    # Both types occur, with texts such as "UNKNOWN: Gloo all-reduce failed".
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    return is_of_jax and _COMMUNICATION.match(str(error)) is not None


def _print(message: str) -> None:
    """Prints a message, bypassing Python's buffers and their locks."""
    with contextlib.suppress(OSError):
        os.write(2, f"\njaxbucket: {message}\n".encode())


def _exit_within(seconds: float, status: int) -> None:
    """Exits after some seconds, even if another thread hangs, such as in a write."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def _exit_now(status: int) -> NoReturn:
    """Exits without jax's own exit handlers, which wait for the other processes."""
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _restore_sigterm_handler() -> None:
    """Reinstalls Python's SIGTERM handler, which jax has replaced by its own in C."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
