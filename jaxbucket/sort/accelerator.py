"""Local sorts on GPUs and TPUs, in place of their hosts: keys of 64 bits.

XLA sorts one operand by radix on GPUs. Chunks are exchanged by `all_to_all` there as
well, and not runs by `ragged_all_to_all`: compiled for TPUs that pads each key to 128
words, 4.3 GB for a share of 34 MB, and would be compiled anew for every length.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxbucket.sort.collectives import AXIS, Devices

# Lengths between a power of two and the next: few shapes, and at most 1/4 too long.
_SIZES_PER_OCTAVE = 4
# Parts that are less even are sorted by the hosts: the longest sets the shape of all.
_MAX_BY_MEAN = 1.5
_PADDING = np.uint64(2**64 - 1)


def can_sort_on_devices(sizes: np.ndarray, dtype: np.dtype, devices: Devices) -> bool:
    """Returns whether devices can sort parts of these sizes, `[D]`, and this dtype."""
    is_even = sizes.max() <= _MAX_BY_MEAN * sizes.mean()
    return devices.platform != "cpu" and dtype == np.uint64 and bool(is_even)


def sort_on_devices(
    parts: list[np.ndarray], sizes: np.ndarray, devices: Devices
) -> None:
    """Sorts the uint64 keys of each local device on that device.

    Args:
      parts: one `[n]` array for each local device; sorted, read-only ones take their
        place, so that hosts do not hold them twice.
      sizes: `[D]` of the parts of all devices.
      devices: of all processes, which all call this.
    """
    size = _rounded_up(int(sizes.max()))
    padded = [
        np.pad(part, (0, size - len(part)), constant_values=_PADDING) for part in parts
    ]
    parts.clear()
    # Else what has 64 bits would be cut to 32.
    with devices.as_current_mesh(), jax.enable_x64(True):
        on_devices = devices.put(padded)
        padded.clear()
        sorted_parts = devices.local_parts(_sort(devices.mesh)(on_devices))
    parts += [x[: sizes[i]] for x, i in zip(sorted_parts, devices.local, strict=True)]


def _rounded_up(size: int) -> int:
    """At least `size`, and one of few."""
    step = max(1, (1 << max(size - 1, 0).bit_length()) // (2 * _SIZES_PER_OCTAVE))
    return -(-max(size, 1) // step) * step


# Cached for each mesh: a function that is jitted anew would be compiled anew.
@functools.lru_cache(maxsize=8)
def _sort(mesh: Mesh):
    def sort_part(part: jax.Array) -> jax.Array:
        return jax.lax.sort(part, is_stable=False)

    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(sort_part, mesh=mesh, in_specs=spec, out_specs=spec),
        donate_argnums=0,
    )
