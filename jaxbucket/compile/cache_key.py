"""JSON keys for executables. Executables with equal keys are interchangeable."""

from __future__ import annotations

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

from jaxbucket.compile.canonical import canonical, digest
from jaxbucket.compile.jax_settings import compiler_flags, trace_settings
from jaxbucket.compile.mismatch import avals
from jaxbucket.compile.program import Program

# A tuple of `jax.Device`, whose attributes type checkers do not know.
Devices: TypeAlias = tuple[Any, ...]
_CALLBACK = re.compile(r"python\w*callback|is_host_transfer = true")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def devices_of(args: Any) -> Devices:
    """Returns the devices, in order, on which a program with these arguments runs."""
    devices: Devices = ()
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            of_leaf = tuple(np.ravel(cast(np.ndarray, sharding.mesh.devices)))
        else:
            device_set = getattr(sharding, "device_set", ())
            of_leaf = tuple(sorted(device_set, key=lambda device: device.id))
        devices = max(devices, of_leaf, key=len)
    return devices or (jax.devices()[0],)


def environment(devices: Devices) -> dict[str, Any]:
    """Returns the versions, devices and flags on which executables depend."""
    client = devices[0].client
    return {
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform": devices[0].platform,
        "platform_version": client.platform_version,
        "devices": [f"{device.device_kind} {device.id}" for device in devices],
        # On CPUs, XLA generates code for the exact processor.
        "processor": _processor() if devices[0].platform == "cpu" else "",
        **{name: os.environ.get(name, "") for name in _VARIABLES},
        **compiler_flags(),
    }


def arguments(program: Program) -> dict[str, Any]:
    """Returns the part of the key that is known without tracing a program."""
    leaves, structure = jax.tree.flatten_with_path(program.args)
    return {
        "name": program.name,
        "label": str(program.label),
        "arguments": [[jax.tree_util.keystr(p), _aval(leaf)] for p, leaf in leaves],
        "constants": _constants(structure),
    }


def tracing(programs: Sequence[Program]) -> dict[str, Any]:
    """Returns what the lowered programs depend on, besides code and arguments.

    The text of a lowered program reflects all of it.
    """
    leaves = {
        str(program.label): [
            _tracing_properties(leaf) for leaf in jax.tree.leaves(program.args)
        ]
        for program in programs
    }
    return {"settings": trace_settings(), "leaves": leaves}


def shapes(program: Program) -> list[Any]:
    """Returns the name and argument shapes, which are the same in all processes."""
    return [program.name, str(program.label), avals(program.args)]


def program_text(lowered: Any) -> str:
    """Returns the lowered program with constants, donation, options and outputs."""
    # jax has no public access to the compiler options of `jax.jit`.
    inner = getattr(lowered, "_lowering", None)
    options = getattr(inner, "_compiler_options_kvs", None)
    # The static fields of the outputs are not part of the program itself.
    outputs = json.dumps(_constants(lowered.out_tree))
    return f"{options or ''}\n{outputs}\n{lowered.as_text()}"


def calls_python(text: str) -> bool:
    """Returns whether a program calls Python functions, which cannot be saved."""
    return bool(_CALLBACK.search(text))


def _constants(structure: Any) -> list[Any]:
    """Returns the static data of a tree's nodes, in a form equal in all processes.

    Objects of unknown types are represented by their type. They are compared when a
    file is loaded.
    """
    node = structure.node_data()
    if node is None:
        return []
    kind, data = node
    children = [_constants(child) for child in structure.children()]
    static = canonical(data, fallback=lambda value: type(value).__name__)
    return [kind.__name__, static, [child for child in children if child]]


def _aval(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        # Written out, because the text of a mesh only contains its size.
        parts = list(sharding.spec)
        while parts and parts[-1] is None:
            # A trailing None does not change the sharding.
            parts.pop()
        sharding = f"{dict(sharding.mesh.shape)} {parts} {sharding.memory_kind}"
    return f"{leaf.dtype}{list(leaf.shape)} {sharding}"


def _tracing_properties(leaf: Any) -> str:
    """Returns further properties of an array on which tracing depends."""
    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    is_weak = bool(getattr(leaf, "weak_type", False))
    return f"{is_weak} {getattr(mesh, 'axis_types', '')}"


def _processor() -> str:
    """Returns the architecture of the CPU and a digest of its instruction sets."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = [line for line in lines if line.startswith(("flags", "Features"))]
    return f"{platform.machine()} {digest(named[:1])}"
