"""The key-value store of jax's coordination service.

`jax.distributed.initialize` starts the service in process 0 and connects every process
to it. It involves no devices, so it also works while a step runs or hangs. Only this
module uses the private parts of jax that give access to it.
"""

from __future__ import annotations

import datetime

import jax

# jax has no public access to the store. Orbax uses this one, too.
from jax._src import distributed

# The key under which jax's preemption service looks for the time of a preemption.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"


class Store:
    """A folder in the key-value store of the coordination service.

    Args:
      folder: the prefix of all keys, which separates them from other users' keys.

    Attributes:
      index: the index of this process.
      count: the number of processes.

    Raises:
      ValueError: if `jax.distributed.initialize` has not been called.
    """

    def __init__(self, folder: str):
        client = distributed.global_state.client
        if client is None:
            raise ValueError(
                "jax's coordination service is not running. Call "
                "`jax.distributed.initialize` first."
            )
        self._client = client
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


def has_preemption_service() -> bool:
    """Returns whether jax started its preemption service with this process."""
    return distributed.global_state.preemption_sync_manager is not None
