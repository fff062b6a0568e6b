"""jax's coordination service: the connection of processes, and its key-value store.

`jax.distributed.initialize` starts the service in process 0 and connects every process
to it. It involves no devices, so it also works while a step runs or hangs. Only this
module uses the private parts of jax that give access to it.
"""

from __future__ import annotations

import datetime
import os
import re
import socket
from typing import Any

import jax

# jax has no public access to the store. Orbax uses this one, too.
from jax._src import distributed

# The key under which jax's preemption service looks for the time of a preemption.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
_SETTINGS = "coordinator_address", "num_processes", "process_id"


def read_settings(*settings: Any) -> tuple[Any, Any, Any] | None:
    """Returns the first arguments of `jax.distributed.initialize`, None for no process.

    In a step of several SLURM tasks, jax finds all of them but their number.

    Args:
      *settings: the address of process 0, the number of processes and the index of this
        one. None stands for an environment variable, such as JAX_PROCESS_ID.
    """
    names = [f"JAX_{name.upper()}" for name in _SETTINGS]
    pairs = zip(settings, names, strict=True)
    found = [os.environ.get(name) if x is None else x for x, name in pairs]
    if found == [None, None, None]:
        # The number in a step of `srun`, unlike SLURM_NTASKS, which a whole job has.
        count = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
        return (None, count, None) if count > 1 else None
    match = re.fullmatch(r"(.+:\d+) (\d+) (\d+)", " ".join(map(str, found)))
    if match is None or int(match[3]) >= int(match[2]):
        given = ", ".join(
            f"`{name}={x!r}`" for name, x in zip(_SETTINGS, found, strict=True)
        )
        raise ValueError(
            f"{given} must be host:port of process 0, the number of processes, and the "
            f"index of this one, from 0. Pass all three, or set {', '.join(names)}."
        )
    return match[1], int(match[2]), int(match[3])


def connect(settings: tuple[Any, Any, Any], timeout: int, start_timeout: int) -> None:
    """Connects this process to the others, with the settings from `read_settings`."""
    address, _, index = settings
    if index == 0:
        try:
            socket.create_server(("", int(address.rpartition(":")[2]))).close()
        except OSError as error:
            raise ValueError(
                f"`coordinator_address={address!r}`: cannot listen on this port "
                f"({error.strerror}). Choose a different port."
            ) from None
    jax.distributed.initialize(
        *settings,
        initialization_timeout=start_timeout,
        heartbeat_timeout_seconds=timeout,
    )


class Store:
    """A folder in the key-value store of the coordination service, once connected.

    Args:
      folder: the prefix of all keys, which separates them from other users' keys.

    Attributes:
      index: the index of this process.
      count: the number of processes.
    """

    def __init__(self, folder: str):
        self._client: Any = distributed.global_state.client
        self._folder = folder
        # `jax.process_index()` would start the backend.
        self.index: int = distributed.global_state.process_id
        self.count: int = distributed.global_state.num_processes

    def set(self, key: str, value: str) -> None:
        """Sets a key, and overwrites its value if it has one."""
        self._client.key_value_set(f"{self._folder}/{key}", value, allow_overwrite=True)

    def increment(self, key: str) -> int:
        """Adds one to a counter that starts at zero, and returns the sum."""
        return self._client.key_value_increment(f"{self._folder}/{key}", 1)

    def delete(self, key: str) -> None:
        """Deletes a key and all keys below it."""
        self._client.key_value_delete(f"{self._folder}/{key}")

    def get(self, key: str, timeout: float) -> str | None:
        """Waits for a key to be set; returns None after `timeout` seconds.

        It is the only call that returns in time if process 0 is suspended.
        """
        try:
            return self._client.blocking_key_value_get(
                f"{self._folder}/{key}", int(1000 * timeout)
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def read_folder(self, folder: str) -> dict[str, str]:
        """Returns the values of all keys below `folder/`, by the rest of the key."""
        prefix = f"{self._folder}/{folder}/"
        entries = self._client.key_value_dir_get(prefix)
        return {key.removeprefix(prefix): value for key, value in entries}

    def has_preemption_notice(self) -> bool:
        """Returns whether jax's preemption service has been notified to stop."""
        try:
            self._client.key_value_try_get(_NOTICE)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return False
            raise
        return True

    def set_preemption_notice(self) -> None:
        """Notifies jax's preemption service, as SIGTERM would."""
        now = datetime.datetime.now(datetime.UTC)
        self._client.key_value_set(_NOTICE, now.isoformat(), allow_overwrite=True)
