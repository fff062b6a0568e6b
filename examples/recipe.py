"""How the model is trained: the loss, and the optimizer with its learning rate."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
import partition
from flax import nnx
from transformer import Transformer

import jaxbucket as jb

BASE_EXAMPLES = 32
WARM_UP_STEPS = 35


def loss(
    model: Transformer, batch: jb.Batch, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Sum of the nats of every real byte, and how many there are."""
    return _nats(model, batch, keys, None), batch.num_tokens


def packed_loss(
    model: Transformer, batch: jb.Batch, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The same for rows of several documents, which do not see one another."""
    return _nats(model, batch, keys, batch.segment_ids["tokens"]), batch.num_tokens


def _nats(
    model: Transformer,
    batch: jb.Batch,
    keys: jax.Array | None,
    segment_ids: jax.Array | None,
) -> jax.Array:
    tokens = batch.features["tokens"].astype(jnp.int32)
    logits = model(tokens, batch.positions["tokens"], keys, segment_ids)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return jnp.sum(nats * batch.mask)


def make_optimizer(
    args: argparse.Namespace,
) -> optax.GradientTransformation:
    """AdamW, its rate rising, then falling; updates scaled by the batch's size."""
    if args.seconds:
        learning_rate = inverse_sqrt(args.lr)
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
) -> jb.TrainState:
    """The state before the first step, on the mesh."""
    model = Transformer(args.width, args.layers, args.dropout, nnx.Rngs(args.seed))
    state = jb.create_state(model, tx)
    return partition.place(state, mesh, partition.state_sharding(state, mesh, args))


def make_step(
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    state: jb.TrainState,
) -> Any:
    """The train step, for states like that one."""
    return jb.data_parallel(
        packed_loss if args.policy == "grain-pack" else loss,
        tx,
        mesh,
        mode=args.mode,
        seed=args.seed,
        state_sharding=partition.state_sharding(state, mesh, args),
    )


def inverse_sqrt(peak: float) -> optax.Schedule:
    """Needs no end: it falls as the root of the steps (Vaswani et al., 2017)."""

    def learning_rate(step: Any) -> Any:
        relative = jnp.maximum(step, 1) / WARM_UP_STEPS
        return peak * jnp.minimum(relative, jax.lax.rsqrt(relative))

    return learning_rate
