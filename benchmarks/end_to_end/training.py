"""The optimizer, the state and the steps for the given options."""

import argparse
from typing import Any

import jax
import numpy as np
import optax
import partition
from example import recipe, transformer
from flax import nnx
from options import parse_arguments

import jaxbucket as jb

_WARM_UP_STEPS = 35


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Returns the optimizer of the examples.

    A run with `--seconds` uses a schedule without a fixed end.
    """
    if args.seconds:
        rate = jb.optim.warmup_inverse_sqrt_schedule(args.lr, _WARM_UP_STEPS)
    else:
        rate = recipe.warmup_cosine_schedule(args.lr, args.steps)
    return recipe.make_optimizer(rate)


def make_state(
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> jb.train.TrainState:
    """Returns the state before the first step, on the mesh."""
    state = jb.create_state(_make_model(args), tx)
    return partition.place(state, mesh, partition.state_sharding(state, mesh, args))


def abstract_state(
    args: argparse.Namespace, tx: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> jb.train.TrainState:
    """Returns the shapes, dtypes and shardings of the state before the first step."""
    shapes = jax.eval_shape(lambda: jb.create_state(_make_model(args), tx))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sharding = partition.state_sharding(shapes, mesh, args)
    if sharding is None:
        sharding = jax.tree.map(lambda _: replicated, shapes)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        sharding,
    )


def make_step(
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    state: jb.train.TrainState,
) -> Any:
    """Returns the train step for states of this structure."""
    return jb.make_train_step(
        recipe.loss_fn,
        tx,
        mesh,
        mode=args.mode,
        seed=args.seed,
        state_sharding=partition.state_sharding(state, mesh, args),
    )


def steps(plan: jb.BucketPlan, *options: str) -> dict[str, Any]:
    """Returns the steps of `run.py` for `jaxbucket precompile`."""
    args = parse_arguments(options)
    if args.pack != "never":
        raise ValueError(
            f"`--pack {args.pack}` needs the documents, which are not part of a plan. "
            "Remove it."
        )
    set_devices(args)
    mesh = partition.make_mesh(args)
    tx = make_optimizer(args)
    state = abstract_state(args, tx, mesh)
    specs = jb.sharding.batch_specs(plan, {"tokens": np.zeros(1, np.uint8)}, mesh)
    eval_step = jb.make_eval_step(recipe.loss_fn, mesh, mode=args.mode)
    return {
        "train": (make_step(args, tx, mesh, state), state, specs),
        "eval": (eval_step, state, specs),
    }


def set_devices(args: argparse.Namespace) -> None:
    """Simulates `--devices` devices, before jax starts its backend."""
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)


def _make_model(args: argparse.Namespace) -> transformer.Transformer:
    return transformer.Transformer(
        args.width, args.layers, args.dropout, nnx.Rngs(args.seed)
    )
