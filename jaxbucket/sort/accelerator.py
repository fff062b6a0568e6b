"""What GPUs and TPUs do of a sort in place of their hosts: they sort keys of 64 bits.

XLA sorts one operand by radix on GPUs. What is exchanged are chunks by `all_to_all`
there as well, and not runs by `ragged_all_to_all`: compiled for TPUs that pads each key
to 128 words, 4.3 GB for a share of 34 MB, and with every length of a share it would be
compiled anew.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxbucket.sort.collectives import AXIS, Devices

# Lengths between a power of two and the next: few shapes, and at most 1/4 too long.
_STEPS = 4
# Shares that are less even than this are sorted by the hosts: the longest one sets the
# shape of all.
_MOST_BY_MEAN = 1.5
_LARGEST = np.uint64(2**64 - 1)


def devices_sort(sizes: np.ndarray, dtype: np.dtype, devices: Devices) -> bool:
    """Returns whether devices sort these keys themselves, of `[D]` sizes."""
    is_even = sizes.max() <= _MOST_BY_MEAN * sizes.mean()
    return devices.platform != "cpu" and dtype == np.uint64 and bool(is_even)


def sort_on_devices(
    parts: list[np.ndarray], sizes: np.ndarray, devices: Devices
) -> None:
    """Sorts the uint64 keys of each local device there.

    Args:
      parts: one `[n]` array for each local device; sorted ones, not to be written to,
        take their place, so that hosts do not have them twice.
      sizes: `[D]` of the parts of all devices.
      devices: of all processes, which all call this.
    """
    padded = [_padded(part, _rounded(int(sizes.max()))) for part in parts]
    parts.clear()
    # Else what has 64 bits would be cut to 32.
    with devices.alone(), jax.enable_x64(True):
        on_devices = devices.put(padded)
        padded.clear()
        found = devices.own(_sort(devices.mesh)(on_devices))
    parts += [x[: sizes[i]] for x, i in zip(found, devices.local, strict=True)]


def _rounded(size: int) -> int:
    """At least it, and one of few."""
    step = max(1, (1 << max(size - 1, 0).bit_length()) // (2 * _STEPS))
    return -(-max(size, 1) // step) * step


def _padded(part: np.ndarray, size: int) -> np.ndarray:
    """A copy of so many keys, of which the last are the largest there are."""
    padded = np.empty(size, part.dtype)
    padded[: len(part)] = part
    padded[len(part) :] = _LARGEST
    return padded


# For each mesh once: a function that is jitted anew would be compiled anew.
@functools.lru_cache(maxsize=8)
def _sort(mesh: Mesh):
    def sort_part(part: jax.Array) -> jax.Array:
        return jax.lax.sort(part, is_stable=False)

    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(sort_part, mesh=mesh, in_specs=spec, out_specs=spec),
        donate_argnums=0,
    )
