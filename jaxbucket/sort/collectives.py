"""Collectives over the devices of a mesh: a gather and an exchange.

Arrays `[D, ...]` are sharded over all devices, in the order of the devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "devices"


class Devices:
    """The devices of a mesh along one axis, regardless of its axes.

    Args:
      mesh: a mesh with at least one device of every process.

    Attributes:
      mesh: a mesh of the same devices with one axis.
      devices: the devices in order.
      count: the number of devices, D.
      local: the indices of this process's devices in `devices`.
    """

    def __init__(self, mesh: Mesh):
        devices = mesh.devices.reshape(-1)
        self.count = len(devices)
        here = jax.process_index()
        self.local = [i for i, x in enumerate(devices) if x.process_index == here]
        if not self.local:
            raise ValueError(
                "No device of the mesh belongs to this process. Build the mesh from "
                "`jax.devices()`, the devices of all processes."
            )
        self.mesh = Mesh(devices, (AXIS,))
        self.devices = list(devices)
        self._sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))

    def _put(self, parts: Sequence[np.ndarray]) -> jax.Array:
        """Returns the global array `[D * n, ...]` made of local parts `[n, ...]`."""
        arrays = [
            jax.device_put(part, self.devices[i])
            for i, part in zip(self.local, parts, strict=True)
        ]
        shape = (self.count * len(parts[0]), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, arrays)

    def gather(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns `[D, ...]`, the arrays of all devices, which have the same shape."""
        # The bytes as uint32, which works on devices without jax_enable_x64.
        flat = [np.ascontiguousarray(part).reshape(1, -1) for part in parts]
        words = [part.view(np.uint32) for part in flat]
        with jax.set_mesh(self.mesh), jax.disable_jit(False):
            gathered = _gather(self.mesh)(self._put(words))
        local = np.asarray(gathered.addressable_data(0))
        return local.view(parts[0].dtype).reshape(self.count, *parts[0].shape)

    def exchange(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Sends row j of each `[D, ...]` part to device j.

        Returns:
          For each local device, the `[D, ...]` rows that it received. Row i is from
          device i.
        """
        words = [part.view(np.uint32) for part in parts]
        with jax.set_mesh(self.mesh), jax.disable_jit(False):
            received = _exchange(self.mesh)(self._put(words))
        by_device = {x.device: x.data for x in received.addressable_shards}
        arrays = [np.asarray(by_device[self.devices[i]]) for i in self.local]
        return [array.view(parts[0].dtype) for array in arrays]


# Cached for each mesh, because a new jitted function would be compiled again.
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
