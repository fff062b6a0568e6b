"""Your own train step: a Flax Linen module, a Flax `TrainState` and `jax.jit`.

    python examples/own_step_linen.py --checkpoints runs/tagger

The model has batch normalization and dropout, and the learning rate follows the size of
the batch. jaxbucket plans the shapes, loads the batches, compiles the step for every
shape and saves checkpoints; run it again with more `--epochs` to resume. The model
learns to tag each digit of a sequence: is it larger than the digit before it?
"""

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec

import jaxbucket as jb


class Tagger(nn.Module):
    """Digits `[B, T]` -> logits `[B, T]`, from each digit and the one before it."""

    @nn.compact
    def __call__(
        self, digits: jax.Array, mask: jax.Array, keys: jax.Array | None = None
    ) -> jax.Array:
        x = nn.Embed(10, 16)(digits)
        x = nn.Conv(64, kernel_size=[2], padding="CAUSAL")(x * mask[..., None])
        # In training there is a key for each row, in evaluation there are none.
        x = nn.BatchNorm(momentum=0.9)(x, keys is None, mask=mask[..., None])
        x = nn.relu(x)
        if keys is not None:
            dropout = nn.Dropout(0.1, deterministic=False)
            x = jax.vmap(lambda x, key: dropout(x, rng=key))(x, keys)
        return nn.Dense(1)(x)[..., 0]


class TrainState(train_state.TrainState):
    batch_stats: Any


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
    # [B, T]; both features have the same length, so they share one mask.
    mask = batch.mask
    keys = jb.train.row_keys(0, state.step, batch.bucket.batch_size)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        args = batch.features["digits"], mask, keys
        logits, new = state.apply_fn(variables, *args, mutable=["batch_stats"])
        losses = optax.sigmoid_binary_cross_entropy(logits, batch.features["rises"])
        return jnp.sum(losses * mask) / batch.num_tokens, new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    # Not `apply_gradients`, which does not pass the size of the batch to the optimizer.
    update = optax.with_extra_args_support(state.tx).update
    updates, opt_state = update(
        grads, state.opt_state, state.params, num_tokens=batch.num_tokens
    )
    params = optax.apply_updates(state.params, updates)
    new |= {"step": state.step + 1, "params": params, "opt_state": opt_state}
    return state.replace(**new), loss


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train with your own Linen step.")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data")
    parser.add_argument("--checkpoints", help="the folder to save in and resume from")
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
    model, ones = Tagger(), jnp.ones((1, 1), jnp.int32)
    scale = jb.scale_by_batch_size(base_tokens=4096, rule="sqrt")
    state = TrainState.create(
        apply_fn=model.apply,
        tx=optax.chain(optax.adam(1e-2), scale),
        **model.init(jax.random.key(0), ones, ones),
    )
    state = jb.sharding.replicate(state, mesh)

    # Compile the step for every bucket. `out_shardings` keeps the state replicated,
    # because the next step is compiled for it.
    replicated = NamedSharding(mesh, PartitionSpec())
    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=replicated)
    folder = args.checkpoints or tempfile.mkdtemp()
    with jb.compile.count_compiles() as compiles, jb.Checkpoints(folder) as checkpoints:
        step = jb.compile_steps(step_fn, state, batches.specs)
        if checkpoints.latest_step is not None:
            state, position, _ = checkpoints.restore(state)
            batches = batches.resume(position)
        for number, batch in enumerate(batches, batches.start_step + 1):
            state, loss = step(state, batch)
            if number % len(schedule) == 0:
                print(f"step {number:4d}  {batch.bucket!s:>8}  loss {loss:.3f}")
                checkpoints.save(state, batches.position(number))
    print(f"{compiles['train_step']} compilations for {len(plan)} buckets")


if __name__ == "__main__":
    main()
