"""Loss, optimizer and steps of the transformer, and their command line options.

`jaxbucket precompile --recipe recipe:steps` compiles the steps before a job starts.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformer import BEGIN, Transformer

import jaxbucket as jb

# The batch size, in tokens, for which `--lr` was tuned.
BASE_TOKENS = 4096


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--width", type=int, default=128, help="width of the model")
    option("--layers", type=int, default=2, help="number of layers")
    option("--lr", type=float, default=4e-3, help="peak learning rate")
    option("--steps", type=int, default=350, help="steps to train and decay for")
    option("--seed", type=int, default=0, help="seed of the model and of the batches")
    option("--fsdp", action="store_true", help="shard the state over all devices")


def loss_fn(
    model: Transformer, batch: jb.Batch, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the loss in nats over all real bytes, and their number.

    Rows may be padded or packed: padding has weight 0, and no byte is predicted from
    another document.
    """
    inputs, targets, weights = jb.next_tokens(batch, "tokens", bos_token=BEGIN)
    positions, segment_ids = batch.positions["tokens"], batch.segment_ids["tokens"]
    logits = model(inputs, positions, keys, segment_ids)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(nats * weights), jnp.sum(weights)


def bits_per_byte(metrics: Sequence[dict[str, jax.Array]]) -> tuple[float, int]:
    """Returns the mean bits per byte of batches, and their total number of bytes."""
    nats = math.fsum(float(batch["loss_sum"]) for batch in metrics)
    num_bytes = sum(int(batch["weight"]) for batch in metrics)
    return nats / num_bytes / math.log(2), num_bytes


def warmup_cosine_schedule(lr: float, num_steps: int) -> optax.Schedule:
    """Returns a schedule with linear warmup over 5% of the steps and cosine decay."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=lr,
        warmup_steps=max(1, num_steps // 20),
        decay_steps=max(2, num_steps),
        end_value=lr / 20,
    )


def make_optimizer(
    rate: optax.Schedule, rule: Literal["linear", "sqrt", "none"] = "sqrt"
) -> optax.GradientTransformation:
    """Returns AdamW with updates scaled by the number of real tokens in the batch."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(rate, b2=0.98, weight_decay=0.05),
        # The loss is a mean over tokens, so its noise depends on their number.
        jb.scale_by_batch_size(base_tokens=BASE_TOKENS, rule=rule),
    )


def make_steps(args: argparse.Namespace, mesh: jax.sharding.Mesh) -> tuple[Any, ...]:
    """Returns the state before the first step, the train step and the eval step."""
    tx = make_optimizer(warmup_cosine_schedule(args.lr, args.steps))
    model = Transformer(args.width, args.layers, 0.0, nnx.Rngs(args.seed))
    sharding = jb.sharding.fully_sharded(mesh) if args.fsdp else None
    state = jb.create_state(model, tx, mesh, sharding=sharding)
    state_sharding = jax.tree.map(lambda x: x.sharding, state)
    train_step = jb.make_train_step(
        loss_fn, tx, mesh, state_sharding=state_sharding, seed=args.seed
    )
    return state, train_step, jb.make_eval_step(loss_fn, mesh)


def steps(plan: jb.BucketPlan, *options: str) -> dict[str, Any]:
    """Returns the steps that `train_lm.py` compiles for a plan and options."""
    parser = argparse.ArgumentParser(prog="recipe:steps")
    add_options(parser)
    mesh = jb.data_mesh()
    state, train_step, eval_step = make_steps(parser.parse_args(options), mesh)
    example = {"tokens": np.zeros(1, np.uint8)}
    specs = jb.sharding.batch_specs(plan, example, mesh)
    return {"train": (train_step, state, specs), "eval": (eval_step, state, specs)}
