"""What an executable depends on, in words: two of equal words are interchangeable."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import jax
import jaxlib
import numpy as np

from jaxbucket.compile.program import Program
from jaxbucket.compile.settings import compiler_flags, trace_settings

# jax has no name for the type of one.
Devices: TypeAlias = tuple[Any, ...]
_CALLBACK = re.compile(r"python\w*callback|is_host_transfer = true")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def digest(words: Any) -> str:
    """Returns 32 hexadecimal digits for anything that goes to JSON."""
    text = json.dumps(words, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def devices_of(args: Any) -> Devices:
    """The devices that a program for such arguments runs on, in their order."""
    found: Devices = ()
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            devices = tuple(np.ravel(cast(np.ndarray, sharding.mesh.devices)))
        else:
            devices = tuple(sorted(getattr(sharding, "device_set", ()), key=_id))
        found = max(found, devices, key=len)
    return found or (jax.devices()[0],)


def environment(devices: Devices) -> dict[str, Any]:
    """Versions, devices and flags."""
    client = devices[0].client
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform": devices[0].platform,
        "platform_version": client.platform_version,
        "devices": [f"{device.device_kind} {device.id}" for device in devices],
        "process": [jax.process_index(), jax.process_count()],
        # XLA makes code for the very processor it runs on.
        "processor": _processor() if devices[0].platform == "cpu" else "",
        "variables": {name: os.environ.get(name, "") for name in _VARIABLES},
        "flags": compiler_flags(),
    }


def tracing(programs: Sequence[Program]) -> dict[str, Any]:
    """What decides, beside the code and the arguments, which programs are traced.

    A program that is traced shows all of it.
    """
    leaves = {
        str(program.label): [_traced_as(leaf) for leaf in jax.tree.leaves(program.args)]
        for program in programs
    }
    return {"settings": trace_settings(), "leaves": leaves}


def arguments(program: Program) -> dict[str, Any]:
    """What is known of a program without tracing it."""
    leaves, structure = jax.tree.flatten_with_path(program.args)
    return {
        "name": program.name,
        "label": str(program.label),
        "arguments": [
            f"{jax.tree_util.keystr(p)}: {_aval(leaf)}" for p, leaf in leaves
        ],
        "constants": _constants(structure),
    }


def shapes(program: Program) -> list[str]:
    """What is the same in all processes of its name and its arguments."""
    leaves, _ = jax.tree.flatten_with_path(program.args)
    return [
        *(program.name, str(program.label)),
        *(f"{jax.tree_util.keystr(p)}: {_shape(leaf)}" for p, leaf in leaves),
    ]


def _shape(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else ""


def _constants(structure: Any) -> list[Any]:
    """The static data of a tree's nodes, in words that are the same in every process.

    What has no such words is only of its type; it is compared when a file is loaded.
    """
    node = structure.node_data()
    if node is None:
        return []
    kind, data = node
    children = [_constants(child) for child in structure.children()]
    return [kind.__name__, _in_words(data), [child for child in children if child]]


def _in_words(data: Any) -> Any:
    if data is None or isinstance(data, bool | int | float | str | bytes):
        return repr(data)
    if isinstance(data, tuple | list):
        return [_in_words(x) for x in data]
    if isinstance(data, set | frozenset):
        # In an order that does not depend on how strings are hashed.
        return sorted(json.dumps(_in_words(x)) for x in data)
    if isinstance(data, dict):
        return [[_in_words(name), _in_words(data[name])] for name in data]
    return type(data).__name__


def program_text(lowered: Any) -> str:
    """The lowered program, constants and donation in it, its options and results."""
    # jax has no public way to ask for the options that `jax.jit` was given.
    inner = getattr(lowered, "_lowering", None)
    options = getattr(inner, "_compiler_options_kvs", None)
    # Static fields of what it returns are in no array.
    outputs = json.dumps(_constants(lowered.out_tree))
    return f"{options or ''}\n{outputs}\n{lowered.as_text()}"


def calls_python(text: str) -> bool:
    """Whether a program calls back: which function is a matter of its process."""
    return bool(_CALLBACK.search(text))


def _id(device: Any) -> int:
    return device.id


def _aval(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    sharding = getattr(leaf, "sharding", None)
    where = sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        # A mesh is printed with its size alone.
        parts = list(sharding.spec)
        while parts and parts[-1] is None:
            # It says the same without.
            parts.pop()
        where = f"{dict(sharding.mesh.shape)} {parts} {sharding.memory_kind}"
    return f"{leaf.dtype}{list(leaf.shape)} {where}"


def _traced_as(leaf: Any) -> str:
    """What tracing knows of an array beside its shape, dtype and sharding."""
    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    is_weak = bool(getattr(leaf, "weak_type", False))
    return f"{is_weak} {getattr(mesh, 'axis_types', '')}"


def _processor() -> str:
    """The instructions it has."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = [line for line in lines if line.startswith(("flags", "Features"))]
    return f"{platform.machine()} {digest(named[:1])}"
