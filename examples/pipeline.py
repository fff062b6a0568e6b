"""Pipeline parallelism: every stage has some of the layers, and feeds the next stage.

    python examples/pipeline.py --devices 4

Every step has `--accumulate` micro-batches of one bucket, `[G, B, T]`, so the stages
work on equal shapes at every tick. At tick t the first stage starts micro-batch t, and
the last stage finishes an earlier one (GPipe: Huang et al., arXiv:1811.06965). The mesh
has an axis for the stages and an axis for the rows.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import documents
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from transformer import BEGIN, Block, Transformer

import jaxbucket as jb

P = PartitionSpec


class Stages(NamedTuple):
    """The parameters of a transformer; leaves of `blocks` are `[stages, layers, ...]`.

    All stages hold the embedding and the head. The first stage uses the embedding, and
    the last one the head.
    """

    embed: Any
    blocks: Any
    norm: Any
    head: Any

    @property
    def specs(self) -> "Stages":
        """How the parameters are sharded on the mesh."""
        return Stages(P(), P("stage"), P(), P())


class Shared(NamedTuple):
    """The static parts of the layers, to be merged with their parameters."""

    embed: Any
    block: Any
    norm: Any
    head: Any


def split_into_stages(model: Transformer, num_stages: int) -> tuple[Shared, Stages]:
    """Splits a model into the static parts of its layers and parameters by stage."""
    split = [nnx.split(block, nnx.Param) for block in model.blocks]
    layers = len(split) // num_stages
    blocks = jax.tree.map(lambda *x: jnp.stack(x), *(params for _, params in split))
    blocks = jax.tree.map(lambda x: x.reshape(num_stages, layers, *x.shape[1:]), blocks)
    embed, norm, head = (
        nnx.split(part, nnx.Param) for part in (model.embed, model.norm, model.head)
    )
    shared = Shared(embed[0], split[0][0], norm[0], head[0])
    return shared, Stages(embed[1], blocks, norm[1], head[1])


def shard_stages(stages: Stages, mesh: Mesh) -> Stages:
    """Puts the blocks of each stage on its devices, and the rest on all devices."""
    return Stages(
        *(
            jax.device_put(part, NamedSharding(mesh, spec))
            for part, spec in zip(stages, stages.specs, strict=True)
        )
    )


def init(tx: optax.GradientTransformation, stages: Stages, mesh: Mesh) -> Any:
    """Returns the optimizer's state, with every moment sharded as its parameter is.

    Counts are replicated. The first step would return a count from one device on all
    devices, and the second step would be compiled again.
    """
    return jax.tree.map(
        lambda x: x if x.ndim else jb.sharding.replicate(x, mesh), tx.init(stages)
    )


def pipelined_loss(shared: Shared, mesh: Mesh) -> Callable[[Stages, jb.Batch], Any]:
    """Returns (stages, micro-batches `[G, B, T]`) -> the mean loss per real byte."""

    def local_sums(stages: Stages, micro: jb.Batch) -> tuple[jax.Array, jax.Array]:
        stage, num_stages = jax.lax.axis_index("stage"), mesh.shape["stage"]
        blocks = jax.tree.map(lambda x: x[0], stages.blocks)
        ids = micro.segment_ids["tokens"]
        num_micro = ids.shape[0]
        width = stages.norm.scale.get_value().shape[-1]

        def tick(received: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            number = t - stage
            batch = jax.tree.map(lambda x: x[jnp.clip(number, 0, num_micro - 1)], micro)
            embedded = embed(shared, stages, batch)
            x = jnp.where(stage == 0, embedded, received)
            x = run_blocks(shared.block, blocks, x, batch)
            is_done = (stage == num_stages - 1) & (number >= 0) & (number < num_micro)
            nats = jnp.where(is_done, total_loss(shared, stages, x, batch), 0.0)
            to_next = [(s, s + 1) for s in range(num_stages - 1)]
            return jax.lax.ppermute(x, "stage", to_next), nats

        initial = jnp.zeros((*ids.shape[1:], width))
        initial = jax.lax.pcast(initial, ("data", "stage"), to="varying")
        _, nats = jax.lax.scan(tick, initial, jnp.arange(num_micro + num_stages - 1))
        total = jax.lax.psum(nats.sum(), ("data", "stage"))
        return total, jax.lax.psum(jnp.sum(ids > 0, dtype=jnp.float32), "data")

    def loss(stages: Stages, micro: jb.Batch) -> jax.Array:
        total, weight = jax.shard_map(
            local_sums,
            mesh=mesh,
            in_specs=(stages.specs, P(None, "data")),
            out_specs=(P(), P()),
        )(stages, micro)
        return total / jnp.maximum(weight, 1)

    return loss


def plain_loss(shared: Shared) -> Callable[[Stages, jb.Batch], Any]:
    """Returns the same loss without stages, one micro-batch after another."""

    def loss(stages: Stages, micro: jb.Batch) -> jax.Array:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stages.blocks)

        def batch_nats(batch: jb.Batch) -> jax.Array:
            x = run_blocks(shared.block, flat, embed(shared, stages, batch), batch)
            return total_loss(shared, stages, x, batch)

        total = jax.lax.map(batch_nats, micro).sum()
        return total / jnp.maximum(micro.num_tokens, 1).astype(jnp.float32)

    return loss


def embed(shared: Shared, stages: Stages, batch: jb.Batch) -> jax.Array:
    layer = nnx.merge(shared.embed, stages.embed)
    return layer(jb.next_tokens(batch, "tokens", bos_token=BEGIN).inputs)


def run_blocks(block: Any, params: Any, x: jax.Array, batch: jb.Batch) -> jax.Array:
    """Applies layers one after another; leaves of `params` are `[layers, ...]`."""

    def apply_layer(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
        layer: Block = nnx.merge(block, state)
        return layer(x, batch.positions["tokens"], None, None), None

    return jax.lax.scan(apply_layer, x, params)[0]


def total_loss(
    shared: Shared, stages: Stages, x: jax.Array, batch: jb.Batch
) -> jax.Array:
    """Returns the sum of the loss over all real bytes."""
    norm = nnx.merge(shared.norm, stages.norm)
    head = nnx.merge(shared.head, stages.head)
    _, targets, weights = jb.next_tokens(batch, "tokens", bos_token=BEGIN)
    nats = optax.softmax_cross_entropy_with_integer_labels(head(norm(x)), targets)
    return jnp.sum(nats * weights)


def make_step(
    loss_fn: Callable[[Stages, jb.Batch], Any], tx: optax.GradientTransformation
) -> Callable[..., Any]:
    """Returns (stages, opt_state, G batches) -> (stages, opt_state, loss)."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def pipeline_step(stages: Stages, opt_state: Any, micro: tuple[jb.Batch, ...]):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *micro)
        loss, grads = jax.value_and_grad(loss_fn)(stages, stacked)
        updates, opt_state = tx.update(grads, opt_state, stages)
        return optax.apply_updates(stages, updates), opt_state, loss

    return pipeline_step


def main() -> None:
    args = parse_arguments()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = make_mesh(args.stages)
    source = documents.load(args.data).train
    lengths = jb.measure_lengths(source)
    plan = jb.plan_buckets(
        lengths,
        max_tokens=args.max_tokens,
        num_buckets=4,
        batch_size_multiple=mesh.shape["data"],
        seq_len_multiple=32,
        max_seq_len=args.max_len,
        overlong="truncate",
    )
    schedule = jb.BatchSchedule(plan, lengths, accumulate=args.accumulate, group="same")
    print(schedule)
    model = Transformer(args.width, args.layers, 0.0, nnx.Rngs(0))
    shared, stages = split_into_stages(model, args.stages)
    stages = shard_stages(stages, mesh)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.lr))
    opt_state = init(tx, stages, mesh)
    step_fn = make_step(pipelined_loss(shared, mesh), tx)
    loader = jb.MeshLoader(source, schedule, mesh, num_steps=args.steps)
    with jb.compile.count_compiles() as compiles:
        for step, batches in enumerate(loader):
            micro: Any = batches if args.accumulate > 1 else (batches,)
            stages, opt_state, loss = step_fn(stages, opt_state, micro)
            if step % 10 == 0 or step == args.steps - 1:
                print(f"step {step:4d} {micro[0].bucket!s:>12} loss {float(loss):.3f}")
    print(f"compiled {compiles['pipeline_step']} times for {len(plan)} buckets")


def make_mesh(num_stages: int) -> Mesh:
    """Returns a mesh of all devices: rows over "data", layers over "stage"."""
    return jax.make_mesh(
        (jax.device_count() // num_stages, num_stages),
        ("data", "stage"),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model in stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--data",
        help="a .jsonl file, a .txt file or a folder; default: the standard library",
    )
    option("--devices", type=int, help="devices to simulate on the CPU")
    option("--stages", type=int, default=2, help="a divisor of the number of devices")
    option("--accumulate", type=int, default=4, help="micro-batches of a step")
    option("--max-len", type=int, default=256, help="bytes to truncate documents to")
    option("--max-tokens", type=int, default=1024, help="maximum tokens per batch")
    option("--width", type=int, default=64, help="width of the model")
    option("--layers", type=int, default=4, help="number of layers")
    option("--steps", type=int, default=100, help="number of steps")
    option("--lr", type=float, default=3e-3, help="learning rate")
    args = parser.parse_args()
    if args.layers % args.stages:
        parser.error(
            f"--layers {args.layers} must be a multiple of --stages {args.stages}"
        )
    return args


if __name__ == "__main__":
    main()
