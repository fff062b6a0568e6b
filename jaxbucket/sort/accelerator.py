"""Local sorts of 64-bit keys on GPUs and TPUs instead of their hosts.

On GPUs, XLA uses radix sort for a single operand. Keys are still exchanged in chunks by
`all_to_all`, and not in runs by `ragged_all_to_all`, which on TPUs pads each key to 128
words (4.3 GB for a share of 34 MB) and would be recompiled for every length.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxbucket.sort.collectives import AXIS, Devices

# The number of sizes per power of two: few shapes, and at most 1/4 of padding.
_SIZES_PER_OCTAVE = 4
# Above this ratio of sizes hosts sort, because devices pad all parts to the largest.
_MAX_IMBALANCE = 1.5
_PADDING = np.uint64(2**64 - 1)


def can_sort_on_devices(sizes: np.ndarray, dtype: np.dtype, devices: Devices) -> bool:
    """Returns whether devices can sort parts of `[D]` sizes and a dtype."""
    is_even = sizes.max() <= _MAX_IMBALANCE * sizes.mean()
    return devices.platform != "cpu" and dtype == np.uint64 and bool(is_even)


def sort_on_devices(
    parts: list[np.ndarray], sizes: np.ndarray, devices: Devices
) -> None:
    """Sorts the uint64 keys of each local device on that device.

    All processes must call this.

    Args:
      parts: one `[n]` array for each local device. They are replaced by sorted,
        read-only arrays, so that hosts do not hold both.
      sizes: `[D]`, the sizes of the parts of all devices.
      devices: the devices of all processes.
    """
    size = _rounded_up(int(sizes.max()))
    padded = [
        np.pad(part, (0, size - len(part)), constant_values=_PADDING) for part in parts
    ]
    parts.clear()
    # Without x64, jax would truncate the keys to 32 bits.
    with devices.as_current_mesh(), jax.enable_x64(True):
        on_devices = devices.put(padded)
        padded.clear()
        sorted_parts = devices.local_parts(_sort(devices.mesh)(on_devices))
    parts += [x[: sizes[i]] for x, i in zip(sorted_parts, devices.local, strict=True)]


def _rounded_up(size: int) -> int:
    """Returns the smallest allowed size that is at least `size`."""
    step = max(1, (1 << max(size - 1, 0).bit_length()) // (2 * _SIZES_PER_OCTAVE))
    return -(-max(size, 1) // step) * step


# Cached for each mesh, because a new jitted function would be compiled again.
@functools.lru_cache(maxsize=8)
def _sort(mesh: Mesh):
    def sort_part(part: jax.Array) -> jax.Array:
        return jax.lax.sort(part, is_stable=False)

    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(sort_part, mesh=mesh, in_specs=spec, out_specs=spec),
        donate_argnums=0,
    )
