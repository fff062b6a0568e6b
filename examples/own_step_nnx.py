"""Your own train step: a Flax NNX model, `nnx.Optimizer` and `nnx.jit`.

    python examples/own_step_nnx.py

Nothing is compiled ahead of time here: `nnx.jit` traces the step when it first sees a
shape. Every batch has a shape of the plan, so each bucket is traced once, however long
the run. The model learns to continue sequences that count in steps of some size, such
as 3 5 7 9 1 3.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxbucket as jb

START = 10  # The token before the first digit.

# The number of times that each shape was traced.
traces: Counter[jb.Bucket] = Counter()


class Counting(nnx.Module):
    """Digits `[B, T]` -> logits `[B, T, 10]` of the next digit, by a recurrent cell."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(START + 1, width, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(width, width, rngs=rngs))
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, digits: jax.Array) -> jax.Array:
        hidden: Any = self.rnn(self.embed(digits))
        return self.head(hidden)


def make_source(num_examples: int) -> list[dict[str, np.ndarray]]:
    """Returns sequences that start anywhere, and count in steps of any size."""
    rng = np.random.default_rng(0)
    source = []
    for length in rng.integers(2, 60, num_examples):
        start, difference = rng.integers(0, 10, 2)
        digits = (start + difference * np.arange(length)) % 10
        source.append({"digits": digits.astype(np.int32)})
    return source


@nnx.jit
def train_step(
    model: Counting, optimizer: nnx.Optimizer, batch: jb.Batch
) -> tuple[jax.Array, jax.Array]:
    """Updates the model, and returns the sum of the losses and of the weights."""
    traces[batch.bucket] += 1  # Runs when the step is traced, and only then.

    def loss_fn(model):
        # The weights are 0 for padding.
        inputs, targets, weights = jb.next_tokens(batch, bos_token=START)
        logits = model(inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        total, weight = jnp.sum(losses * weights), jnp.sum(weights)
        return total / jnp.maximum(weight, 1), (total, weight)

    grads, sums = nnx.grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return sums


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train with your own NNX step.")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the data")
    args = parser.parse_args(argv)

    source = make_source(1000)
    lengths = jb.measure_lengths(source)
    plan = jb.plan_buckets(lengths, max_tokens=1024, num_buckets=4)
    schedule = jb.BatchSchedule(plan, lengths, seed=0)
    print(jb.report(plan, lengths).summary)

    model = Counting(64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    # A `grain.MapDataset` of numpy batches: an epoch is `len(schedule)` of them.
    batches = jb.batch_dataset(source, schedule, num_epochs=args.epochs)
    for epoch in range(args.epochs):
        start = epoch * len(schedule)
        sums = np.zeros(2)
        for step in range(start, start + len(schedule)):
            sums += jax.device_get(train_step(model, optimizer, batches[step]))
        print(f"epoch {epoch + 1}  {sums[0] / sums[1]:.3f} nats per digit")
    counts = ", ".join(f"{bucket}: {traces[bucket]}" for bucket in plan.buckets)
    print(f"{len(batches)} steps. Traces of each shape: {counts}.")


if __name__ == "__main__":
    main()
