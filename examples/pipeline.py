"""Pipeline parallelism: each stage has half of the layers, and passes on what it made.

    python examples/pipeline.py --devices 4

Every step has `--accumulate` micro-batches of one bucket, `[G, B, T]`, so that all
stages work on equal shapes at every tick. At tick t the first stage begins micro-batch
t, and the last one ends an earlier one (GPipe: Huang et al., arXiv:1811.06965). Beside
the axis of stages the mesh has one of data, over which rows are cut as everywhere else.
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
    """A transformer, cut. All leaves of `blocks` are `[stages, layers, ...]`.

    The embedding and the head are held by all stages, and used by the first and the
    last.
    """

    embed: Any
    blocks: Any
    norm: Any
    head: Any

    @property
    def specs(self) -> "Stages":
        """How they lie on the mesh."""
        return Stages(P(), P("stage"), P(), P())


class Shared(NamedTuple):
    """What does not change: how parameters become layers again."""

    embed: Any
    block: Any
    norm: Any
    head: Any


def cut(model: Transformer, num_stages: int) -> tuple[Shared, Stages]:
    """Returns how to build the layers, and the parameters by stage."""
    split = [nnx.split(block, nnx.Param) for block in model.blocks]
    layers = len(split) // num_stages
    blocks = jax.tree.map(lambda *x: jnp.stack(x), *(params for _, params in split))
    blocks = jax.tree.map(lambda x: x.reshape(num_stages, layers, *x.shape[1:]), blocks)
    embed, norm, head = (
        nnx.split(part, nnx.Param) for part in (model.embed, model.norm, model.head)
    )
    shared = Shared(embed[0], split[0][0], norm[0], head[0])
    return shared, Stages(embed[1], blocks, norm[1], head[1])


def place(stages: Stages, mesh: Mesh) -> Stages:
    """Puts the blocks of each stage on its devices, and the rest on all."""
    return Stages(
        *(
            jax.device_put(part, NamedSharding(mesh, spec))
            for part, spec in zip(stages, stages.specs, strict=True)
        )
    )


def init(tx: optax.GradientTransformation, stages: Stages, mesh: Mesh) -> Any:
    """Returns the optimizer's state: each moment beside its parameter, counts on all.

    A count left on one device would come back from the first step on all of them, and
    the second step would be compiled again.
    """
    return jax.tree.map(
        lambda x: x if x.ndim else jb.sharding.replicate(x, mesh), tx.init(stages)
    )


def pipelined_loss(shared: Shared, mesh: Mesh) -> Callable[[Stages, jb.Batch], Any]:
    """Returns (stages, micro-batches `[G, B, T]`) -> the mean loss of a real byte."""

    def of_device(stages: Stages, micro: jb.Batch) -> tuple[jax.Array, jax.Array]:
        stage, num_stages = jax.lax.axis_index("stage"), mesh.shape["stage"]
        blocks = jax.tree.map(lambda x: x[0], stages.blocks)
        ids = micro.segment_ids["tokens"]
        num_micro = ids.shape[0]
        width = stages.norm.scale.get_value().shape[-1]

        def tick(received: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            number = t - stage
            batch = jax.tree.map(lambda x: x[jnp.clip(number, 0, num_micro - 1)], micro)
            made = embed(shared, stages, batch)
            x = jnp.where(stage == 0, made, received)
            x = run_blocks(shared.block, blocks, x, batch)
            ends = (stage == num_stages - 1) & (number >= 0) & (number < num_micro)
            nats = jnp.where(ends, nats_of(shared, stages, x, batch), 0.0)
            onwards = [(s, s + 1) for s in range(num_stages - 1)]
            return jax.lax.ppermute(x, "stage", onwards), nats

        nothing = jnp.zeros((*ids.shape[1:], width))
        nothing = jax.lax.pcast(nothing, ("data", "stage"), to="varying")
        _, nats = jax.lax.scan(tick, nothing, jnp.arange(num_micro + num_stages - 1))
        total = jax.lax.psum(nats.sum(), ("data", "stage"))
        return total, jax.lax.psum(jnp.sum(ids > 0, dtype=jnp.float32), "data")

    def loss(stages: Stages, micro: jb.Batch) -> jax.Array:
        total, weight = jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(stages.specs, P(None, "data")),
            out_specs=(P(), P()),
        )(stages, micro)
        return total / jnp.maximum(weight, 1)

    return loss


def plain_loss(shared: Shared) -> Callable[[Stages, jb.Batch], Any]:
    """The same without stages, one micro-batch after another."""

    def loss(stages: Stages, micro: jb.Batch) -> jax.Array:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stages.blocks)

        def of_batch(batch: jb.Batch) -> jax.Array:
            x = run_blocks(shared.block, flat, embed(shared, stages, batch), batch)
            return nats_of(shared, stages, x, batch)

        total = jax.lax.map(of_batch, micro).sum()
        return total / jnp.maximum(micro.num_tokens, 1).astype(jnp.float32)

    return loss


def embed(shared: Shared, stages: Stages, batch: jb.Batch) -> jax.Array:
    layer = nnx.merge(shared.embed, stages.embed)
    return layer(jb.next_tokens(batch, "tokens", bos_token=BEGIN).inputs)


def run_blocks(block: Any, params: Any, x: jax.Array, batch: jb.Batch) -> jax.Array:
    """All layers whose parameters these are, `[layers, ...]`, one after another."""

    def one(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
        layer: Block = nnx.merge(block, state)
        return layer(x, batch.positions["tokens"], None, None), None

    return jax.lax.scan(one, x, params)[0]


def nats_of(shared: Shared, stages: Stages, x: jax.Array, batch: jb.Batch) -> jax.Array:
    """The sum over all real bytes."""
    norm = nnx.merge(shared.norm, stages.norm)
    head = nnx.merge(shared.head, stages.head)
    _, targets, weights = jb.next_tokens(batch, "tokens", bos_token=BEGIN)
    nats = optax.softmax_cross_entropy_with_integer_labels(head(norm(x)), targets)
    return jnp.sum(nats * weights)


def make_step(
    loss_fn: Callable[[Stages, jb.Batch], Any], tx: optax.GradientTransformation
) -> Callable[..., Any]:
    """Returns (stages, opt_state, tuple of G batches) -> the same, and the loss."""

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
    shared, stages = cut(model, args.stages)
    stages = place(stages, mesh)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.lr))
    opt_state = init(tx, stages, mesh)
    step_fn = make_step(pipelined_loss(shared, mesh), tx)
    dataset = jb.batch_dataset(
        source, schedule, shard=jb.sharding.local_rows(mesh), num_steps=args.steps
    )
    with jb.compile.count_compiles() as compiles:
        for step, batches in enumerate(jb.sharding.prefetch_to_mesh(dataset, mesh)):
            micro = batches if args.accumulate > 1 else (batches,)
            stages, opt_state, loss = step_fn(stages, opt_state, micro)
            if step % 10 == 0 or step == args.steps - 1:
                print(f"step {step:4d} {micro[0].bucket!s:>12} loss {float(loss):.3f}")
    print(f"compiled {compiles['pipeline_step']} times for {len(plan)} buckets")


def make_mesh(num_stages: int) -> Mesh:
    """All devices: rows over "data", layers over "stage"."""
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
    parser.add_argument("--data", metavar="PATH", help="as in train_lm.py")
    parser.add_argument("--devices", type=int, help="simulate so many on the CPU")
    parser.add_argument("--stages", type=int, default=2, help="must divide the devices")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches")
    parser.add_argument("--max-len", type=int, default=256, help="bytes")
    parser.add_argument("--max-tokens", type=int, default=1024, help="B * T")
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--steps", type=int, default=100, help="updates")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    args = parser.parse_args()
    if args.layers % args.stages:
        parser.error(
            f"--layers {args.layers} must be divided by --stages {args.stages}"
        )
    return args


if __name__ == "__main__":
    main()
