"""How a process finds the others: what was passed, or the environment."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from jaxbucket.base.checks import check_integer

_NUM_PORTS = 2**16


class Settings(NamedTuple):
    """The first arguments of `jax.distributed.initialize`."""

    coordinator_address: str
    num_processes: int
    process_id: int


def read_settings(
    address: str | None, count: int | None, index: int | None
) -> Settings | None:
    """Returns what was passed or is in the environment, checked; None if nothing is."""
    values = {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": index,
    }
    for name, value in values.items():
        if value is None:
            values[name] = os.environ.get(f"JAX_{name.upper()}")
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise ValueError(
            f"`{missing[0]}` is missing, beside {values}: pass all three, or set "
            f"JAX_{missing[0].upper()}."
        )
    address, count, index = values.values()
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
    return Settings(str(address), count, index)


def _to_int(name: str, value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return check_integer(name, value)
