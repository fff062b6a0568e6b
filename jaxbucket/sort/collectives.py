"""What the devices of a mesh tell one another: a gather and an exchange.

Each holds its part of an array cut over all devices, `[D, ...]`, in their order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "devices"


class Devices:
    """All devices of a mesh in a row, whatever its axes.

    Args:
      mesh: every process has a device in it.

    Attributes:
      mesh: of them alone, with one axis.
      devices: in their order.
      count: how many they are.
      local: the places of those of this process among them.

    Raises:
      ValueError: if the mesh has no device of this process.
    """

    def __init__(self, mesh: Mesh):
        devices = mesh.devices.reshape(-1)
        self.count = len(devices)
        here = jax.process_index()
        self.local = [i for i, x in enumerate(devices) if x.process_index == here]
        if not self.local:
            raise ValueError(
                "No device of the mesh belongs to this process: build the mesh from "
                "`jax.devices()`, those of all processes."
            )
        self.mesh = Mesh(devices, (AXIS,))
        self.devices = list(devices)
        self._cut = NamedSharding(self.mesh, PartitionSpec(AXIS))

    @property
    def platform(self) -> str:
        """What its devices are: "cpu", "gpu" or "tpu"."""
        return self.devices[0].platform

    def put(self, parts: Sequence[np.ndarray], sharding: NamedSharding | None = None):
        """Returns the global array `[D * n, ...]` of local parts `[n, ...]`."""
        arrays = [
            jax.device_put(part, self.devices[i])
            for i, part in zip(self.local, parts, strict=True)
        ]
        shape = (self.count * len(parts[0]), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(
            shape, sharding or self._cut, arrays
        )

    def gather(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns `[D, ...]` of all devices' arrays, which all have one shape."""
        words = [_as_words(part)[None] for part in parts]
        with self.alone():
            whole = _gather(self.mesh)(self.put(words))
        found = np.asarray(whole.addressable_data(0))
        return found.view(parts[0].dtype).reshape(self.count, *parts[0].shape)

    def exchange(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Sends row j of each `[D, ...]` part to device j; returns what each got.

        Row i of a result came from device i.
        """
        dtype = parts[0].dtype
        with self.alone():
            found = _exchange(self.mesh)(self.put([x.view(np.uint32) for x in parts]))
        return [x.view(dtype) for x in self.own(found)]

    def own(self, array: jax.Array) -> list[np.ndarray]:
        """Returns what each local device has of an array that is cut over all."""
        on = {shard.device: shard.data for shard in array.addressable_shards}
        return [np.asarray(on[self.devices[i]]) for i in self.local]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Whatever mesh the caller has set, and whether or not it jits."""
        with jax.set_mesh(self.mesh), jax.disable_jit(False):
            yield


def _as_words(part: np.ndarray) -> np.ndarray:
    """It as uint32, which a device has whatever is enabled."""
    return np.ascontiguousarray(part).reshape(-1).view(np.uint32)


# For each mesh once: a function that is jitted anew would be compiled anew.
@functools.lru_cache(maxsize=8)
def _gather(mesh: Mesh):
    def gather_parts(parts: jax.Array) -> jax.Array:
        return parts

    return jax.jit(gather_parts, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.lru_cache(maxsize=8)
def _exchange(mesh: Mesh):
    spec = PartitionSpec(AXIS)

    def exchange_chunks(part: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(part, AXIS, 0, 0, tiled=True)

    return jax.jit(
        jax.shard_map(exchange_chunks, mesh=mesh, in_specs=spec, out_specs=spec)
    )
