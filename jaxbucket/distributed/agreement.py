"""Compares the processes of a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxbucket.base.position import DataPosition
from jaxbucket.base.version import __version__

# jax's settings that change the numbers or the collectives of a program.
_CONFIG = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion"),
)
_MAX_LISTED = 8


def job_config(
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
        **_prefixed("plan", position.plan),
        **_prefixed("data", position.data),
        **_prefixed("schedule", position.schedule),
        **extra,
    }


def _prefixed(part: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part} {name.replace('_', ' ')}": x for name, x in fields.items()}


def differences(configs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a phrase for each field in which the processes differ.

    Example:
      >>> list(differences([{"seed": 0}, {"seed": 0}, {"seed": 5}]))
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
