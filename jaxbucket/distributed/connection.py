"""Connects the processes of a run by jax's coordination service."""

from __future__ import annotations

import os
import socket
from typing import Any, NamedTuple

import jax

_NUM_PORTS = 2**16


class Settings(NamedTuple):
    """The first arguments of `jax.distributed.initialize`; None leaves one to jax."""

    coordinator_address: Any
    num_processes: Any
    process_id: Any


def read_settings(*values: Any) -> Settings | None:
    """Returns the settings, or None if there are none at all.

    In a step of several SLURM tasks, only their number is set.

    Args:
      values: one per field of `Settings`. None stands for the environment variable of
        that field, such as JAX_PROCESS_ID.

    Raises:
      ValueError: if only some of the settings are given, or one of them is invalid.
    """
    names = {name: f"JAX_{name.upper()}" for name in Settings._fields}
    pairs = zip(values, names.values(), strict=True)
    settings = Settings(*(os.environ.get(n) if x is None else x for x, n in pairs))
    if settings == (None, None, None):
        # The number in a step of `srun`, unlike SLURM_NTASKS, which a whole job has.
        count = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
        return Settings(None, count, None) if count > 1 else None
    for name, value in settings._asdict().items():
        if value is None:
            raise ValueError(
                f"`{name}` is missing from {settings}. Pass all three arguments, or "
                f"set {names[name]}."
            )
    return _checked(settings)


def _checked(settings: Settings) -> Settings:
    address, port = settings[0], str(settings[0]).rpartition(":")[2]
    if not (port.isdecimal() and 0 < int(port) < _NUM_PORTS):
        raise ValueError(
            f"`coordinator_address={address!r}` must be host:port of process 0, with "
            f"a port from 1 to {_NUM_PORTS - 1}."
        )
    for name in ("num_processes", "process_id"):
        if not str(value := getattr(settings, name)).isdecimal():
            raise ValueError(f"`{name}={value!r}` must be an integer of at least 0.")
    count, index = int(settings.num_processes), int(settings.process_id)
    if index >= count:
        raise ValueError(
            f"`process_id={index}` must be from 0 to `num_processes={count}` - 1."
        )
    return Settings(str(address), count, index)


def connect(settings: Settings, timeout: int, start_timeout: int) -> None:
    """Connects this process to the others.

    Args:
      settings: the settings from `read_settings`.
      timeout: seconds without a heartbeat after which jax ends all processes.
      start_timeout: seconds to wait for the others.

    Raises:
      ValueError: if the port of process 0 is in use.
    """
    if settings.process_id == 0:
        _check_port(settings.coordinator_address)
    jax.distributed.initialize(
        *settings,
        initialization_timeout=start_timeout,
        heartbeat_timeout_seconds=timeout,
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
