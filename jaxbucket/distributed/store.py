"""What processes tell one another on the host: jax's coordination service.

`jax.distributed.initialize` starts it in process 0 and connects every process to it. No
device takes part, so it works beside a step, and while a step hangs.
"""

from __future__ import annotations

import socket
import threading

import jax

# There is no public way to the store; Orbax takes this one, too.
from jax._src import distributed

_SECONDS_BETWEEN_SIGNALS = 0.2


class Store:
    """The service's key-value store, under names of our own.

    Args:
      folder: what all keys begin with, for nobody else's to be met.

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

    def set(self, key: str, value: str) -> None:
        """Sets a key, whether it was set before or not."""
        self._client.key_value_set(f"{self._folder}/{key}", value, allow_overwrite=True)

    def delete(self, key: str) -> None:
        self._client.key_value_delete(f"{self._folder}/{key}")

    def claim(self, key: str, value: str) -> bool:
        """Sets a key that nobody has set; returns whether that was so."""
        try:
            self._client.key_value_set(
                f"{self._folder}/{key}", value, allow_overwrite=False
            )
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, key: str, timeout: float) -> str | None:
        """Waits some seconds at most for a key to be set; None if it was not."""
        try:
            return self._client.blocking_key_value_get(
                f"{self._folder}/{key}", int(1000 * timeout)
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def below(self, folder: str) -> dict[str, str]:
        """Everything set below `folder/`, by what comes behind it."""
        start = f"{self._folder}/{folder}/"
        found = self._client.key_value_dir_get(start)
        return {key.removeprefix(start): value for key, value in found}

    def is_reachable(self, timeout: float) -> bool:
        """Whether process 0 still listens where it has the store."""
        host, _, port = str(distributed.global_state.coordinator_address).rpartition(
            ":"
        )
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout):
                return True
        except OSError:
            return False

    def meet(self, name: str, timeout: float) -> bool:
        """Waits for all processes to come here; returns whether they did in time."""
        errors: list[Exception] = []

        def wait() -> None:
            key, milliseconds = f"{self._folder}/{name}", int(1000 * timeout)
            try:
                self._client.wait_at_barrier(key, milliseconds)
            except jax.errors.JaxRuntimeError as error:
                errors.append(error)

        # In a thread: a signal is not seen while the main one waits in C.
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        while waiting.is_alive():
            waiting.join(_SECONDS_BETWEEN_SIGNALS)
        if errors and "DEADLINE_EXCEEDED" not in str(errors[0]):
            raise errors[0]
        return not errors
