"""What a GPU or a TPU does of a sort in place of its host.

GPUs and TPUs sort keys of 64 bits: one operand, which XLA sorts by radix on GPUs. GPUs
exchange runs of any length by `ragged_all_to_all`. XLA has none for CPUs, and compiled
for TPUs it pads each key to 128 words: 4.3 GB for a share of 34 MB.

Arrays are a little longer than what is in them, so that few shapes are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxbucket.sort.collectives import AXIS, Devices

# Of a power of two: no array is longer by more than this part of it.
_STEPS = 8
_LARGEST = np.uint64(2**64 - 1)


def do_sort(devices: Devices) -> bool:
    """Returns whether devices sort uint64 keys, and not their hosts."""
    return devices.platform != "cpu"


def exchange_any_runs(devices: Devices) -> bool:
    """Returns whether runs of any length are exchanged at once, and not chunks."""
    return devices.platform == "gpu"


def sort_on_devices(
    parts: Sequence[np.ndarray], sizes: np.ndarray, devices: Devices
) -> None:
    """Sorts the uint64 keys of each local device there, in place.

    Args:
      parts: one `[n]` array for each local device.
      sizes: `[D]` of the parts of all devices.
      devices: of all processes, which all call this.
    """
    padded = [_padded(part, sizes.max()) for part in parts]
    # Else what has 64 bits would be cut to 32.
    with devices.alone(), jax.enable_x64(True):
        found = devices.own(_sort(devices.mesh)(devices.put(padded)))
    for part, keys in zip(parts, found, strict=True):
        part[:] = keys[: len(part)]


def exchange_ragged(
    parts: Sequence[np.ndarray], counts: np.ndarray, devices: Devices
) -> list[np.ndarray]:
    """Returns what `exchange.exchange_runs` does, in one round.

    Args:
      parts: one `[n]` array for each local device: what goes to device 0 first.
      counts: `[D, D]` int64, how many keys go from each device to each.
      devices: of all processes, which all call this.
    """
    dtype, most = parts[0].dtype, counts.sum(axis=1).max()
    starts = np.cumsum(counts, axis=1) - counts
    places = np.cumsum(counts, axis=0) - counts
    # For each device: where its runs begin and how long they are, where they go to in
    # what each other one gets, and how long those are that it gets.
    runs = np.stack([starts, counts, places, counts.T], axis=1).astype(np.int32)
    words = [_padded(x, most).view(np.uint32).reshape(1, -1, _words(x)) for x in parts]
    with devices.alone():
        exchange = _exchange(devices.mesh, _rounded(int(counts.sum(axis=0).max())))
        own = [runs[i : i + 1] for i in devices.local]
        found = exchange(devices.put(words), devices.put(own))
    whole = devices.own(found)
    return [
        x.reshape(-1).view(dtype)[: counts[:, i].sum()].copy()
        for x, i in zip(whole, devices.local, strict=True)
    ]


def _rounded(size: int) -> int:
    """At least it, and one of few."""
    step = max(1, (1 << max(size - 1, 0).bit_length()) // (2 * _STEPS))
    return -(-max(size, 1) // step) * step


def _padded(part: np.ndarray, size: int) -> np.ndarray:
    """A copy with room for so many, of which the last are the largest there are."""
    padded = np.empty(_rounded(int(size)), part.dtype)
    padded[: len(part)] = part
    padded[len(part) :].view(np.uint64)[:] = _LARGEST
    return padded


def _words(part: np.ndarray) -> int:
    return part.dtype.itemsize // 4


# For each mesh once: a function that is jitted anew would be compiled anew.
@functools.lru_cache(maxsize=8)
def _sort(mesh: Mesh):
    def sort_part(part: jax.Array) -> jax.Array:
        return jax.lax.sort(part, is_stable=False)

    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(sort_part, mesh=mesh, in_specs=spec, out_specs=spec))


@functools.lru_cache(maxsize=8)
def _exchange(mesh: Mesh, capacity: int):
    def exchange_runs(part: jax.Array, runs: jax.Array) -> jax.Array:
        got = jnp.zeros((capacity, *part.shape[2:]), part.dtype)
        starts, counts, places, received = runs[0]
        return jax.lax.ragged_all_to_all(
            part[0], got, starts, counts, places, received, axis_name=AXIS
        )[None]

    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            exchange_runs,
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            # What it fills begins as the same zeros everywhere.
            check_vma=False,
        )
    )
