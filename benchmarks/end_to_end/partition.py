"""The mesh, and how the state is sharded on it."""

import argparse
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxbucket as jb

# Kernels are sharded by outputs and then by inputs, so that a layer needs one sum over
# the axis "model" (Shoeybi et al., arXiv:1909.08053).
_OUTPUTS = ("qkv", "up")
_INPUTS = ("out", "down")


def make_mesh(args: argparse.Namespace) -> Mesh:
    """Returns a mesh of all devices, with axes for the rows and for the model."""
    if args.model_devices == 1:
        return jb.data_mesh()
    num_devices = jax.device_count()
    if num_devices % args.model_devices:
        raise ValueError(
            f"`--model-devices {args.model_devices}` does not divide the {num_devices} "
            "devices."
        )
    shape = num_devices // args.model_devices, args.model_devices
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def state_sharding(state: Any, mesh: Mesh, args: argparse.Namespace) -> Any:
    """Returns the sharding of each array of a state, or None to replicate all."""
    if args.mode == "pmap" or not (args.fully_sharded or args.model_devices > 1):
        return None
    return jax.tree.map_with_path(
        lambda path, leaf: NamedSharding(
            mesh, _spec(jax.tree_util.keystr(path), leaf.shape, mesh, args)
        ),
        state,
    )


def place(state: Any, mesh: Mesh, sharding: Any) -> Any:
    """Puts a state on the mesh. Every process provides the shards of its devices."""
    if sharding is None:
        return jb.sharding.replicate(state, mesh)

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        values = np.asarray(leaf)
        return jax.make_array_from_callback(
            values.shape, sharding, lambda index: values[index].copy()
        )

    return jax.tree.map(put, state, sharding)


def _spec(
    name: str, shape: tuple[int, ...], mesh: Mesh, args: argparse.Namespace
) -> PartitionSpec:
    axes: list[str | None] = [None] * len(shape)
    if args.model_devices > 1 and shape:
        if any(f"'{layer}'" in name for layer in _OUTPUTS):
            axes[-1] = "model"
        elif any(f"'{layer}'" in name for layer in _INPUTS) and len(shape) > 1:
            axes[0] = "model"
    if args.fully_sharded and math.prod(shape) > 1:
        # Shard the first free axis that can be divided (Rajbhandari et al.,
        # arXiv:1910.02054). If there is none, the array is not sharded.
        for axis, size in enumerate(shape):
            if axes[axis] is None and size % mesh.shape["data"] == 0:
                axes[axis] = "data"
                break
    return PartitionSpec(*axes)
