"""The key-value store of jax's coordination service.

`jax.distributed.initialize` starts the service in process 0 and connects every process
to it. No device takes part, so it works beside a step, and while a step hangs. What is
private in jax is used here alone.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from typing import Any

import jax

# There is no public way to the store. Orbax takes this one, too.
from jax._src import distributed

# Where jax's preemption service looks for the time at which a process has to end.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"


class Store:
    """The service's key-value store, below a folder.

    Args:
      folder: the prefix of all keys, which keeps them apart from those of others.

    Attributes:
      index: of this process.
      count: of all processes.

    Raises:
      ValueError: if `jax.distributed.initialize` has not been called.
    """

    def __init__(self, folder: str):
        client = distributed.global_state.client
        if client is None:
            raise ValueError(
                "There is no coordination service: call `jax.distributed.initialize`."
            )
        self._client = client
        self._folder = folder
        # `jax.process_index()` would start the backend.
        self.index: int = distributed.global_state.process_id
        self.count: int = distributed.global_state.num_processes
        self._addresses: list[tuple[Any, ...]] = []

    def set(self, key: str, value: str) -> None:
        """Sets a key, whether it was set before or not."""
        self._client.key_value_set(f"{self._folder}/{key}", value, allow_overwrite=True)

    def increment(self, key: str) -> int:
        """Adds one to a key, which begins at zero; returns the sum."""
        return self._client.key_value_increment(f"{self._folder}/{key}", 1)

    def delete(self, key: str) -> None:
        """Deletes a key, and all keys below it."""
        self._client.key_value_delete(f"{self._folder}/{key}")

    def get(self, key: str, timeout: float) -> str | None:
        """Waits for a key to be set; returns None after `timeout` seconds.

        It is the only call that returns in time where process 0 is stopped.
        """
        try:
            return self._client.blocking_key_value_get(
                f"{self._folder}/{key}", int(1000 * timeout)
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def below(self, folder: str) -> dict[str, str]:
        """Returns everything below `folder/`, by the rest of its key."""
        prefix = f"{self._folder}/{folder}/"
        entries = self._client.key_value_dir_get(prefix)
        return {key.removeprefix(prefix): value for key, value in entries}

    def has_preemption_notice(self) -> bool:
        """Whether jax's preemption service was told to stop the processes."""
        try:
            self._client.key_value_try_get(_NOTICE)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return False
            raise
        return True

    def give_preemption_notice(self) -> None:
        """Tells jax's preemption service what SIGTERM would tell it."""
        now = datetime.datetime.now(datetime.UTC)
        self._client.key_value_set(_NOTICE, now.isoformat(), allow_overwrite=True)

    def resolve(self) -> None:
        """Looks up the addresses of process 0; a slow name server takes its time."""
        address = str(distributed.global_state.coordinator_address)
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError):
            self._addresses = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )

    def connect(self, timeout: float) -> socket.socket | None:
        """Returns a connection to process 0, which the system closes when it ends.

        It asks no name server. None where `resolve` found no address that answers.

        Args:
          timeout: seconds to wait for each address, until one has answered.
        """
        for entry in self._addresses:
            with contextlib.suppress(OSError):
                connection = _connect(entry, timeout)
                self._addresses = [entry]
                return connection
        return None


def _connect(entry: tuple[Any, ...], timeout: float) -> socket.socket:
    family, kind, protocol, _, address = entry
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def has_preemption_service() -> bool:
    """Whether `jax_enable_preemption_service` was on as jax connected this process."""
    return distributed.global_state.preemption_sync_manager is not None
