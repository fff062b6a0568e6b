"""How the model is trained: the loss, and the optimizer with its learning rate."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import partition
from example import transformer
from flax import nnx
from options import parse_arguments

import jaxbucket as jb

BASE_EXAMPLES = 32
WARM_UP_STEPS = 35


def loss(
    model: transformer.Transformer, batch: jb.Batch, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Sum of the nats of every real byte, and how many there are; packed or not."""
    inputs, targets, weights = jb.next_tokens(batch, "tokens", begin=transformer.BEGIN)
    ids, positions = batch.segment_ids["tokens"], batch.positions["tokens"]
    logits = model(inputs, positions, keys, ids)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(nats * weights), jnp.sum(weights)


def make_optimizer(
    args: argparse.Namespace,
) -> optax.GradientTransformation:
    """AdamW, its rate rising, then falling; updates scaled by the batch's size."""
    if args.seconds:
        # Needs no end.
        learning_rate = jb.optim.warmup_inverse_sqrt_schedule(args.lr, WARM_UP_STEPS)
    else:
        learning_rate = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=args.lr,
            warmup_steps=max(1, args.steps // 20),
            decay_steps=max(2, args.steps),
            end_value=args.lr / 20,
        )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate, b2=0.98, weight_decay=0.05),
        jb.scale_by_batch_size(
            base_examples=BASE_EXAMPLES, rule="sqrt", learning_rate=learning_rate
        ),
    )


def make_state(
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> jb.train.TrainState:
    """The state before the first step, on the mesh."""
    model = transformer.Transformer(
        args.width, args.layers, args.dropout, nnx.Rngs(args.seed)
    )
    state = jb.create_state(model, tx)
    return partition.place(state, mesh, partition.state_sharding(state, mesh, args))


def abstract_state(
    args: argparse.Namespace, tx: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> jb.train.TrainState:
    """What that state will be: shapes, dtypes and where they are."""
    shapes = jax.eval_shape(
        lambda: jb.create_state(
            transformer.Transformer(
                args.width, args.layers, args.dropout, nnx.Rngs(args.seed)
            ),
            tx,
        )
    )
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sharding = partition.state_sharding(shapes, mesh, args)
    if sharding is None:
        sharding = jax.tree.map(lambda _: replicated, shapes)
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        sharding,
    )


def make_step(
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    state: jb.train.TrainState,
) -> Any:
    """The train step, for states like that one."""
    return jb.make_train_step(
        loss,
        tx,
        mesh,
        mode=args.mode,
        seed=args.seed,
        state_sharding=partition.state_sharding(state, mesh, args),
    )


def steps(plan: jb.BucketPlan, *words: str) -> dict[str, Any]:
    """What `train_lm.py` with these words compiles, for `jaxbucket precompile`."""
    args = parse_arguments(words)
    if args.pack != "never":
        raise ValueError(
            f"`--pack {args.pack}` plans rows with the documents, which a plan has "
            "not: leave it out."
        )
    set_devices(args)
    mesh = partition.make_mesh(args)
    tx = make_optimizer(args)
    state = abstract_state(args, tx, mesh)
    specs = jb.sharding.batch_specs(plan, {"tokens": np.zeros(1, np.uint8)}, mesh)
    evaluate = jb.make_eval_step(loss, mesh, mode=args.mode)
    return {
        "train": (make_step(args, tx, mesh, state), state, specs),
        "eval": (evaluate, state, specs),
    }


def set_devices(args: argparse.Namespace) -> None:
    """Simulates as many as asked for."""
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
