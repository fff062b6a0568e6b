"""Checks that the processes of a mesh start from the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.distributed.agreement import list_processes


def check_same(mesh: Mesh, digests: Mapping[str, int], remedy: str) -> None:
    """Raises a ValueError if the processes of a mesh have different values.

    All processes of the mesh must call this function.

    Args:
      mesh: a mesh whose processes can be compared.
      digests: name of an argument -> a digest of its value, in [0, 2**32).
      remedy: the end of the message.
    """
    local = np.array([*digests.values()], np.uint32)[None]
    everywhere = jax.make_array_from_callback(
        (mesh.size, len(digests)),
        NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        lambda index: local,
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    of_devices = np.asarray(
        jax.jit(jax.numpy.copy, out_shardings=replicated)(everywhere)
    )
    owners = np.array([device.process_index for device in mesh.devices.flat])
    for name, column in zip(digests, of_devices.T, strict=True):
        first = column[owners == owners.min()][0]
        if others := sorted({int(x) for x in owners[column != first]}):
            raise ValueError(
                f"`{name}` of {list_processes(others)} differs from that of process "
                f"{owners.min()}. {remedy}"
            )


def can_be_compared(mesh: Mesh) -> bool:
    """Returns whether a mesh spans running processes whose values are known now.

    Inside of `jax.jit` and `jax.eval_shape`, there are no values.
    """
    return (
        jax.process_count() > 1
        and len({device.process_index for device in mesh.devices.flat}) > 1
        and not isinstance(jnp.zeros(()), Tracer)
    )


def digest(tree: Any) -> int:
    """Returns a digest of the structure and the leaves of a tree, in [0, 2**32).

    Of arrays, other than random keys, it only includes the shape and the dtype.
    """
    leaves = [
        (jax.tree_util.keystr(path), *_described(leaf))
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]
    return int(hashlib.sha256(repr(leaves).encode()).hexdigest()[:8], 16)


def _described(leaf: Any) -> tuple[Any, ...]:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        # The text of other objects may contain their address.
        is_plain = isinstance(leaf, bool | int | float | str)
        return (repr(leaf) if is_plain else type(leaf).__name__,)
    data = ()
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf)).tolist()
    return leaf.shape, str(leaf.dtype), data
