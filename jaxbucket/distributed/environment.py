"""Reads the settings that connect the processes, from arguments or the environment."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from jaxbucket.base.checks import check_integer

_NUM_PORTS = 2**16


class Settings(NamedTuple):
    """The first arguments of `jax.distributed.initialize`; None leaves one to jax."""

    coordinator_address: Any
    num_processes: Any
    process_id: Any


def read_settings(*values: Any) -> Settings | None:
    """Returns the checked settings, or None if there are none at all.

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
    address, port = settings[0], str(settings[0]).rpartition(":")[2]
    if not (port.isdecimal() and 0 < int(port) < _NUM_PORTS):
        raise ValueError(
            f"`coordinator_address={address!r}` must be host:port of process 0, with "
            f"a port from 1 to {_NUM_PORTS - 1}."
        )
    count, index = (
        _to_int("num_processes", settings[1]),
        _to_int("process_id", settings[2]),
    )
    if not 0 <= index < count:
        raise ValueError(
            f"`process_id={index}` must be from 0 to `num_processes={count}` - 1."
        )
    return Settings(str(address), count, index)


def _to_int(name: str, value: Any) -> int:
    is_text = isinstance(value, str) and value.strip().isdecimal()
    return int(value) if is_text else check_integer(name, value)
