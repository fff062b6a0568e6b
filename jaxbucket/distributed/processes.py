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
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxbucket.base.checks import check_integer
from jaxbucket.base.position import DataPosition
from jaxbucket.base.version import __version__
from jaxbucket.distributed.exit import leave, speak
from jaxbucket.distributed.handover import handover
from jaxbucket.distributed.rendezvous import Member, listed, meet
from jaxbucket.distributed.store import Store
from jaxbucket.distributed.watchdog import EXIT_STATUS, Watchdog

# What of jax's configuration makes for other numbers, or other collectives.
_CONFIG = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion"),
)
# Every process enters as often as the others.
_entered = itertools.count()
_MIN_TIMEOUT = 2.0
# jax aborts without naming anyone: later than we do, then.
_JAX_TIMEOUTS = 3
_TIMEOUTS_TO_WAIT = 2
_SECONDS_TO_FAIL = 5.0
# Whoever is lost meanwhile ends the waiting.
_FOREVER = 10.0**6
_ECHOES = {
    *("ABORTED", "CANCELLED", "DATA_LOSS", "DEADLINE_EXCEEDED"),
    *("FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE", "UNKNOWN"),
}
_MAX_WORDS = 500
_NUM_PORTS = 2**16


class Processes:
    """The processes of a run; a context around all that it does.

    Within it, a process that is killed, stopped or raises makes all others end, within
    `timeout` and a few seconds, with a sentence that names it. So does the one that
    raises, once the error leaves the context: within 5 s, caught or not. Alone, it does
    nothing.

    Whatever it has started it ends with the context: from then on each process is on
    its own. To see one that hangs with Python's lock held it takes
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
      timeout: seconds without a sign of life after which a process is lost. Longer
        than any call that keeps Python from running its other threads. If they have
        different ones, the longest counts.
      start_timeout: seconds to wait, on entering, for all processes to come.

    Attributes:
      index: of this process.
      count: of all.
      store: what they write to one another; only where they are several.

    Raises:
      ValueError: if some of the three are missing or wrong, or a timeout is too short;
        on entering, if the port is in use, the processes are not those that
        `num_processes` says, or this one has left such a context before.
      TimeoutError: on entering, if some processes do not come; it names them.
    """

    index: int = 0
    count: int = 1
    store: Store
    _is_over = False

    def __init__(
        self,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        *,
        timeout: float = 60.0,
        start_timeout: float = 300.0,
    ):
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
        self._timeout = timeout
        self._start_timeout = start_timeout
        # Whoever has connected them has had settings of his own.
        self._given = (
            None
            if jax.distributed.is_initialized()
            else _settings(coordinator_address, num_processes, process_id)
        )
        self._meetings: collections.Counter[str] = collections.Counter()
        self._watchdog: Watchdog | None = None
        self._is_ours = False
        self._finishing: list[Callable[[], None]] = []

    def __enter__(self) -> Processes:
        if jax.distributed.is_initialized():
            _heed_sigterm(signal.getsignal(signal.SIGTERM))
            names = self._hear_names()
        elif self._given and self._given[1] > 1:
            names = self._start(*self._given)
        else:
            return self
        if self.count > 1:
            self._watchdog = Watchdog(self.store, self.index, names, self._timeout)
            self._watchdog.start()
        return self

    def _start(self, address: str, count: int, index: int) -> list[str]:
        """Connects all processes, by ourselves first, by jax then; returns names."""
        if self._is_over:
            raise ValueError(
                "`Processes` was entered before, and jax connects a process only once: "
                "keep one context around all, or call `jax.distributed.initialize`, "
                "which stays."
            )
        others = meet(address, Member(index, count, _own_name()), self._start_timeout)
        with handover(index, others, EXIT_STATUS):
            handler = signal.getsignal(signal.SIGTERM)
            jax.distributed.initialize(
                address,
                count,
                index,
                initialization_timeout=math.ceil(self._start_timeout),
                heartbeat_timeout_seconds=_JAX_TIMEOUTS * math.ceil(self._timeout),
            )
            _heed_sigterm(handler)
            self._is_ours = True
            try:
                return self._hear_names()
            except BaseException:
                # jax would wait for the others on its way out.
                atexit.register(leave, 1)
                raise

    def _hear_names(self) -> list[str]:
        self.store = Store(f"jaxbucket/{next(_entered)}")
        self.index, self.count = self.store.index, self.store.count
        own = json.dumps([_own_name(), self._timeout])
        told = self.gather("start", own, timeout=self._start_timeout)
        names, timeouts = zip(*map(json.loads, told), strict=True)
        # Each judges others: the most patient one says for how long.
        self._timeout = max(timeouts)
        return list(names)

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if self._watchdog is None:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            error = None
            try:
                for finish in self._finishing:
                    finish()
                self.gather("end", "")
            except BaseException as late:
                self._end_with(self._watchdog, late)
                raise
        if error is not None:
            self._end_with(self._watchdog, error)
            return
        self._watchdog.stop()
        if self._is_ours:
            # Or jax would do it when they exit, and each may take its time until then.
            jax.distributed.shutdown()
            Processes._is_over = True

    def _end_with(self, watchdog: Watchdog, error: BaseException) -> None:
        # jax would wait for the others on its way out, and threads for collectives.
        code = error.code if isinstance(error, SystemExit) else 1
        status = code if isinstance(code, int) else 1
        atexit.register(leave, status)
        self._accuse(watchdog, error)
        late = threading.Timer(_SECONDS_TO_FAIL, leave, (status,))
        late.daemon = True
        late.start()

    def at_end(self, finish: Callable[[], None]) -> None:
        """Calls a function at the end of the context, before this process leaves it."""
        self._finishing.append(finish)

    def fail(self, error: BaseException) -> None:
        """Ends this process, from any thread, and so all others; alone it does nothing.

        For an error that no other thread would hear of in time, such as of a file that
        is written beside the loop, for which all others wait.
        """
        if self._watchdog is not None:
            words = self._accuse(self._watchdog, error)
            leave(1, f"process {self.index} ends, for it {words}")

    def _accuse(self, watchdog: Watchdog, error: BaseException) -> str:
        """Tells the others of an error of this process; returns in which words."""
        if _may_be_an_echo(error):
            # Said now, for a verdict would end this process before it is raised.
            traceback.print_exception(error)
            speak(
                f"process {self.index} has met what the loss of another one may cause, "
                f"and waits {self._timeout:g} s to hear of one."
            )
            with contextlib.suppress(KeyboardInterrupt):
                watchdog.wait_for_verdict()
        message = " ".join(str(error).split())[:_MAX_WORDS]
        words = f"raised {type(error).__name__}: {message}"
        watchdog.accuse(words)
        return words

    def gather(self, name: str, value: str, *, timeout: float = _FOREVER) -> list[str]:
        """Returns what every process gave, in order. All of them have to call it.

        Args:
          name: what for, as it is said of those that do not come.
          value: what this one gives.
          timeout: seconds to wait. By default until all are here, or one is lost: whom
            it waits for is said after a while.

        Raises:
          TimeoutError: if some did not come; it names them.
        """
        if self.count == 1:
            return [value]
        number = self.count_call(name)
        folder = f"{name}/{number}"
        self.store.set(f"{folder}/{self.index}", value)
        # Later than one that is lost is named.
        seconds = _TIMEOUTS_TO_WAIT * self._timeout
        patience = threading.Timer(seconds, self._name_missing, (name, folder, seconds))
        patience.daemon = True
        patience.start()
        try:
            met = self.store.meet(folder, timeout)
        finally:
            patience.cancel()
        values = self.store.below(folder)
        missing = self._missing(values)
        if missing and not met:
            raise TimeoutError(
                f"{listed(missing)} did not come to {name!r} within {timeout:g} s. "
                "Look for what they wait for."
            )
        if number:
            # Whoever is here has read what was there before.
            self.store.delete(f"{name}/{number - 1}/{self.index}")
        return [values[index] for index in sorted(values, key=int)]

    def _missing(self, values: Mapping[str, str]) -> list[int]:
        return sorted(set(range(self.count)) - set(map(int, values)))

    def _name_missing(self, name: str, folder: str, seconds: float) -> None:
        # Where the store is lost, so is this process.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if missing := self._missing(self.store.below(folder)):
                speak(
                    f"process {self.index} has waited {seconds:g} s at {name!r} "
                    f"for {listed(missing)}. Where they wait for it, too, one of them "
                    "has left a loop before the others."
                )

    def count_call(self, name: str) -> int:
        """How often this was called for a name: the same in all, if all call it."""
        self._meetings[name] += 1
        return self._meetings[name] - 1

    def check_agreement(
        self,
        position: DataPosition,
        mesh: Mesh,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Checks that all processes are about to do the same. All have to call it.

        Args:
          position: where each of them begins, from `BatchDataset.position`: its step,
            plan, data and schedule.
          mesh: what each of them runs on.
          extra: what else must be the same, for JSON.

        Raises:
          ValueError: in every process, if they differ; it names who and in what.
        """
        own = {
            "version of jaxbucket": __version__,
            "version of jax": jax.__version__,
            **{name: str(getattr(jax.config, name)) for name in _CONFIG},
            "mesh axes": list(mesh.shape.items()),
            "mesh devices": [device.id for device in mesh.devices.flat],
            "step": position.step,
            **_named("plan", position.plan),
            **_named("data", position.data),
            **_named("schedule", position.schedule),
            **dict(extra or {}),
        }
        text = json.dumps(own, sort_keys=True)
        told = [json.loads(x) for x in self.gather("agreement", text)]
        differences = list(_differences(told))
        if differences:
            raise ValueError(
                f"The processes do not agree: {'; '.join(differences)}. Start all of "
                "them with the same arguments, data and packages."
            )


def _heed_sigterm(handler: Any) -> None:
    """Takes the signal back: jax notes it for a service of its own, and that is all."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def _named(part: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part} {name.replace('_', ' ')}": x for name, x in fields.items()}


def _differences(told: list[dict[str, Any]]) -> Iterator[str]:
    for name in dict.fromkeys(itertools.chain(*told)):
        groups: dict[str, list[int]] = {}
        for process, fields in enumerate(told):
            value = json.dumps(fields.get(name), sort_keys=True)
            groups.setdefault(value, []).append(process)
        if len(groups) > 1:
            # Most of them first; of equally many, the one with process 0.
            largest = sorted(groups.items(), key=lambda group: -len(group[1]))
            said = (f"{value} in {listed(who)}" for value, who in largest)
            yield f"{name} is {', '.join(said)}"


def _may_be_an_echo(error: BaseException | None) -> bool:
    """Whether it may be what a lost process causes in a collective of this one.

    jax gives it as one error or the other; its text begins with the status code.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
            if str(error).partition(":")[0] in _ECHOES:
                return True
        error = error.__cause__ or error.__context__
    return False


def _settings(
    address: str | None, count: int | None, index: int | None
) -> tuple[str, int, int] | None:
    """What was given or is in the environment, checked; None if nothing is."""
    given = {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": index,
    }
    for name, value in given.items():
        if value is None:
            given[name] = os.environ.get(f"JAX_{name.upper()}")
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ValueError(
            f"`{missing[0]}` is missing, beside {given}: pass all three, or set "
            f"JAX_{missing[0].upper()}."
        )
    address, count, index = given.values()
    port = str(address).rpartition(":")[2]
    if not (port.isdecimal() and 0 < int(port) < _NUM_PORTS):
        raise ValueError(
            f"`coordinator_address={address!r}`: make it host:port of process 0, "
            f"with a port from 1 to {_NUM_PORTS - 1}."
        )
    count, index = _to_int("num_processes", count), _to_int("process_id", index)
    if not 0 <= index < count:
        raise ValueError(
            f"`process_id={index}` must be from 0 to `num_processes={count}` - 1."
        )
    return str(address), count, index


def _to_int(name: str, value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return check_integer(name, value)


def _own_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"
