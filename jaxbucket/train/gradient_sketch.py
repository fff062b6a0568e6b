"""Short random projections of gradients, which keep their inner products.

Comparing the gradients of many batches needs all of them at the same time, which is too
much for large models. A sketch has a few thousand numbers: every element of the
gradient is added to one of them, chosen at random, with a random sign. A gradient that
is sharded over devices is gathered, one array at a time. The inner
product of two sketches is an unbiased estimate of that of the gradients, with a
standard deviation of at most sqrt(2 / size) times the product of their norms
(Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002;
Weinberger et al., "Feature hashing for large scale multitask learning", 2009).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxbucket.base.batch import Batch
from jaxbucket.compile.events import record_arguments
from jaxbucket.train.gradients import gradient_sums
from jaxbucket.train.loss import LossFn, Metrics, sum_over_batch
from jaxbucket.train.state import TrainState

if TYPE_CHECKING:
    from jaxbucket.train.loader import MeshLoader

# A power of two, so that a few bits of a random number select an entry.
SKETCH_SIZE = 1 << 14
# Elements that are added at a time, which bounds the memory for random numbers.
_CHUNK = 1 << 20


def make_sketch_step(
    loss_fn: LossFn, batches: MeshLoader, seed: int
) -> Callable[[TrainState, Batch], Metrics]:
    """Returns a jitted step, `(state, batch) -> {"sketch", "weight", "num_examples"}`.

    The sketch `[SKETCH_SIZE]` is that of the mean gradient of the batch. All sketches
    with the same seed use the same projection.

    Args:
      loss_fn: the loss, as for `make_train_step`.
      batches: the loader, which determines the mesh.
      seed: the seed of the projection and of the keys of the loss.
    """
    mesh = batches.mesh
    # New values of the model's variables are not needed, so no rules combine them.
    global_sums = sum_over_batch(
        gradient_sums(loss_fn, rules=None), mesh, "jit", batches.batch_axes, seed
    )

    @record_arguments
    def sketch_step(state: TrainState, batch: Batch) -> Metrics:
        (grads, sums), _ = global_sums(state, batch)
        weight = sums["weight"]
        mean = sketch(grads, seed) / jnp.where(weight == 0, 1, weight)
        examples = sums["num_examples"]
        return {"sketch": mean, "weight": weight, "num_examples": examples}

    return jax.jit(sketch_step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def sketch(tree: Any, seed: int = 0) -> jax.Array:
    """Returns the sketch of a tree of arrays, `[SKETCH_SIZE]` float32.

    Example:
      >>> tree = {"w": jnp.arange(30_000.0)}
      >>> ratio = jnp.sum(sketch(tree) ** 2) / jnp.sum(tree["w"] ** 2)
      >>> bool(jnp.abs(ratio - 1) < 0.05)
      True

    Args:
      tree: arrays of any shape.
      seed: selects the projection.
    """
    total = jnp.zeros(SKETCH_SIZE, jnp.float32)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number)
        size = min(_CHUNK, max(1, leaf.size))
        num_chunks = -(-leaf.size // size)
        flat = jnp.pad(leaf.reshape(-1), (0, num_chunks * size - leaf.size))
        chunks = jnp.arange(num_chunks), flat.reshape(num_chunks, size)
        total, _ = jax.lax.scan(functools.partial(_add_chunk, key), total, chunks)
    return total


def _add_chunk(
    key: jax.Array, total: jax.Array, chunk: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    """Adds the elements of a chunk, `(number [], values [n])`, to a sketch."""
    number, values = chunk
    bits = jax.random.bits(jax.random.fold_in(key, number), values.shape, jnp.uint32)
    entry = (bits & (SKETCH_SIZE - 1)).astype(jnp.int32)
    sign = jnp.where(bits >> 31, 1.0, -1.0)
    return total.at[entry].add(sign * values.astype(jnp.float32)), None
