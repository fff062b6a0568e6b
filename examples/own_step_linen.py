"""Your own train step: a Flax Linen module, a Flax `TrainState` and `jax.jit`.

    python examples/own_step_linen.py

jaxbucket plans the shapes, loads the batches and compiles the step for every shape. The
step itself does not use jaxbucket, except for `batch.mask`, which is False for padding.
The model learns to tag each digit of a sequence: is it larger than the digit before it?
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxbucket as jb


class Tagger(nn.Module):
    """Digits `[B, T]` -> logits `[B, T]`, from each digit and the one before it."""

    @nn.compact
    def __call__(self, digits: jax.Array) -> jax.Array:
        x = nn.Embed(10, 16)(digits)
        x = nn.relu(nn.Conv(64, kernel_size=[2], padding="CAUSAL")(x))
        return nn.Dense(1)(x)[..., 0]


def make_source(num_examples: int) -> list[dict[str, np.ndarray]]:
    """Returns sequences of digits, each with a tag for every digit."""
    rng = np.random.default_rng(0)
    source = []
    for length in rng.integers(1, 120, num_examples):
        digits = rng.integers(0, 10, length, dtype=np.int32)
        rises = np.diff(digits, prepend=digits[0]) > 0
        source.append({"digits": digits, "rises": rises.astype(np.float32)})
    return source


def train_step(state: TrainState, batch: jb.Batch) -> tuple[TrainState, jax.Array]:
    """An ordinary train step, whose loss is the mean over the real digits."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch.features["digits"])
        losses = optax.sigmoid_binary_cross_entropy(logits, batch.features["rises"])
        # [B, T]; both features have the same length, so they share one mask.
        mask = batch.mask
        return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train with your own Linen step.")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data")
    args = parser.parse_args(argv)

    # Plan the shapes and the examples of every batch, with data parallelism.
    mesh = jb.data_mesh()
    source = make_source(2000)
    lengths = jb.measure_lengths(source)
    plan = jb.plan_buckets(
        lengths, max_tokens=4096, num_buckets=4, batch_size_multiple=8
    )
    schedule = jb.BatchSchedule(plan, lengths, seed=0)
    batches = jb.MeshLoader(source, schedule, mesh, num_epochs=args.epochs)

    # Create the state. `replicate` puts it on all devices of the mesh.
    model = Tagger()
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    tx = optax.adam(1e-2)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = jb.sharding.replicate(state, mesh)

    # Compile the step for every bucket. It must return a state with the same sharding
    # as its input.
    replicated = NamedSharding(mesh, PartitionSpec())
    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=replicated)
    with jb.compile.count_compiles() as compiles:
        step = jb.compile_steps(step_fn, state, batches.specs)
        for number, batch in enumerate(batches):
            state, loss = step(state, batch)
            if number % len(schedule) == len(schedule) - 1:
                print(f"step {number + 1:4d}  {batch.bucket!s:>8}  loss {loss:.3f}")
    print(f"{compiles['train_step']} compilations for {len(plan)} buckets")


if __name__ == "__main__":
    main()
