"""Devices that this machine does not have, for which programs can be compiled.

XLA compiles for a *topology*, a description of devices, if the compiler of the platform
is installed: `libtpu` for TPUs, the CUDA plugin of jax for GPUs. Nothing can be put on
such devices, so states and batches consist of shapes, dtypes and shardings.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
from jax.experimental.topologies import get_topology_desc

from jaxbucket.base.checks import check_positive
from jaxbucket.base.notes import Noting
from jaxbucket.compile.gpu_targets import GPUS

Device: TypeAlias = jax.Device  # pyright: ignore
_LEAST_SECONDS_TO_STORE = "jax_persistent_cache_min_compile_time_secs"

# What can be rented: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_TORI = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
# TPU -> its layouts; or of 3-D tori, the largest number of chips.
_TPUS: dict[str, tuple[str, ...] | int] = {
    "v5e": _FLAT,
    "v5p": 6144,
    "v6e": _FLAT,
    "tpu7x": 9216,
}
# Kind of device -> GiB that XLA lets programs use.
_TPU_MEMORY = {
    "TPU v5 lite": 15.75,
    "TPU v5": 95.74,
    "TPU v6 lite": 31.25,
    "TPU7x": 94.75,
}
# Read when libtpu is loaded. Without them it asks a server of Google Cloud what it runs
# on, and refuses to be loaded by a second process.
_TPU_VARIABLES = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# Platform -> the package of its compiler, and the extra that installs it.
_COMPILERS = {"tpu": ("libtpu", "tpu"), "cuda": ("jax-cuda13-plugin", "gpu-plan")}
# Those of the innermost `absent_devices`, in all threads.
_absent: list[Sequence[Device]] = []


@contextlib.contextmanager
def absent_devices(topology: str, *, num_slices: int = 1) -> Iterator[list[Device]]:
    """Lets `data_mesh` use devices that are not there, inside a `with` block.

    On their mesh, `create_state` returns shapes and shardings, and `compile_steps`
    compiles programs that cannot run, with a report of their memory. One process
    compiles for all hosts. If this process has not used devices yet, it then only uses
    its CPU. While a program for absent GPUs is traced, jax cannot evaluate anything
    eagerly.

    Example: the memory of a step on 256 chips (requires `jaxbucket[tpu]`).
      >>> with absent_devices("v5e:16x16"):  # doctest: +SKIP
      ...     mesh = jb.data_mesh()
      ...     state = jb.create_state(model, tx, mesh)
      ...     step = jb.make_train_step(loss_fn, tx, mesh)
      ...     specs = jb.sharding.batch_specs(plan, example, mesh)
      ...     print(jb.compile_steps(step, state, specs).report)

    Args:
      topology: the type and layout of the devices. For TPUs, such as "v5e:16x16" or
        "v5p:4x4x8", it is the layout of the chips. For GPUs, such as "h100:1x2x8", it
        is the numbers of slices, of hosts in a slice, and of GPUs in a host; the types
        are "a100-40gb", "a100", "h100", "h200" and "b200".
      num_slices: the number of TPU slices of this layout.

    Yields:
      The devices, for meshes of other axes.

    Raises:
      ValueError: if there is no such topology, or this process uses real devices of
        this platform.
      ModuleNotFoundError: if the compiler of the platform is not installed, or not in
        the version that this version of jax needs.
    """
    check_positive("num_slices", num_slices)
    platform, name, options = _described(topology, num_slices)
    _check_compiler(platform)
    if not jax.config.jax_platforms:  # pyright: ignore
        # Otherwise jax looks for drivers, and takes the devices that are there.
        jax.config.update("jax_platforms", "cpu")
    real = jax.devices()[0]
    if real.platform == {"cuda": "gpu"}.get(platform, platform):
        raise ValueError(
            f"`topology={topology!r}` is for absent devices, but this process uses a "
            f"{real.device_kind}. Set JAX_PLATFORMS=cpu to plan on this machine."
        )
    added = {x: y for x, y in _TPU_VARIABLES.items() if x not in os.environ}
    os.environ.update(added)
    # The plugin of GPUs is not loaded if it finds no driver.
    remedy = Noting("Set JAX_PLATFORMS=cpu, or call this before jax is used.")
    try:
        with remedy:
            _absent.append(get_topology_desc(name, platform, **options).devices)
    finally:
        # Processes that this one starts may use TPUs.
        for variable in added:
            del os.environ[variable]
    # The compilation cache of jax could not read these programs back.
    least_seconds = jax.config.values[_LEAST_SECONDS_TO_STORE]
    jax.config.update(_LEAST_SECONDS_TO_STORE, math.inf)
    try:
        yield list(_absent[-1])
    finally:
        jax.config.update(_LEAST_SECONDS_TO_STORE, least_seconds)
        _absent.pop()


def current_absent_devices() -> Sequence[Device]:
    """Returns the devices of the innermost `absent_devices`; none outside of it."""
    return _absent[-1] if _absent else ()


def default_devices() -> Sequence[Device]:
    """Returns the devices of `absent_devices`, or all devices of all processes."""
    return current_absent_devices() or jax.devices()


def is_absent(device: Device) -> bool:
    """Whether a device, such as one of a mesh, is not there to hold arrays."""
    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:
        # There is no device of this platform.
        return True


def memory_limit(device: Device) -> int | None:
    """Returns the bytes of a device that programs may use; None if unknown, as of CPUs.

    Of a GPU, jax uses three quarters, or the part XLA_PYTHON_CLIENT_MEM_FRACTION.
    """
    if not is_absent(device):
        # Devices of other processes do not say.
        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if device.device_kind in _TPU_MEMORY:
        return int(_TPU_MEMORY[device.device_kind] * 2**30)
    part = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
    sizes = {gpu.name: int(part * gpu.memory_bytes) for gpu in GPUS.values()}
    return sizes.get(device.device_kind)


def _described(topology: str, num_slices: int) -> tuple[str, str, dict[str, Any]]:
    """Returns the platform, the name and the options of a topology for jax."""
    kind, _, layout = str(topology).lower().partition(":")
    sizes = [int(x) if x.isdecimal() else 0 for x in layout.split("x")]
    if kind in GPUS and len(sizes) == 3 and all(sizes) and num_slices == 1:
        options = {"topology": layout, "target_config": GPUS[kind].target_config()}
        return "cuda", kind, options
    if kind in _TPUS and _exists(_TPUS[kind], layout, sizes):
        options: dict[str, Any] = {"num_slices": num_slices} if num_slices > 1 else {}
        if layout == "1x1":
            options["chips_per_host_bounds"] = (1, 1, 1)
        return "tpu", f"{kind}:{layout}", options
    raise ValueError(
        f"`topology={topology!r}` with {num_slices} slice{'s' * (num_slices > 1)} does "
        f"not exist. Pass one such as 'v5e:4x4' ({', '.join(_FLAT)} of v5e and v6e), "
        "'v5p:4x4x8' (of v5p and tpu7x: 2x2x1 and longer tori, the shortest side first "
        f"and multiples of 4 above 2x4x4), or 'h100:1x1x8' (of {', '.join(GPUS)}: "
        "slices x hosts x GPUs, without `num_slices`)."
    )


def _exists(layouts: tuple[str, ...] | int, layout: str, sizes: list[int]) -> bool:
    if isinstance(layouts, tuple):
        return layout in layouts
    if layout in _SMALL_TORI:
        return True
    a, b, c = sizes if len(sizes) == 3 else (0, 0, 0)
    return 0 < a <= b <= c and a * b * c <= layouts and not any(x % 4 for x in sizes)


def _check_compiler(platform: str) -> None:
    """Raises a ModuleNotFoundError unless the compiler that jax needs is installed."""
    package, extra = _COMPILERS[platform]
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    # Such as "libtpu==0.0.42.*" or "jax-cuda13-plugin<=0.10.2,>=0.10.2".
    requirements = " ".join(importlib.metadata.requires("jax") or ())
    pinned = re.search(rf"{package}\S*?[=>]=(\d+(?:\.\d+)*)", requirements)
    version = pinned[1] if pinned else ""
    # The pin may leave out the last number.
    if installed is None or not f"{installed}.".startswith(version and f"{version}."):
        raise ModuleNotFoundError(
            f"To compile for absent devices, jax {jax.__version__} needs {package} "
            f"{version}; installed is {installed or 'none'}. pip install "
            f"'jaxbucket[{extra}]'."
        )
