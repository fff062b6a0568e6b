"""Trains on a stream: passages that are cut from documents while it trains.

    python examples/stream.py
    python examples/stream.py --pack --epochs 3
    python examples/stream.py --checkpoint runs/s   # the same again when it was stopped
    python scripts/launch_local.py -n 4 -- python examples/stream.py --json run.json

Every epoch cuts other passages, so that nobody knows their lengths before. A sample of
them makes the plan; each process has documents of its own, of its own number, and all
end behind the same step, when every passage of every process was given.
"""

import argparse
import contextlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import documents
import grain
import jax
import numpy as np
import optax
import options
import recipe
from flax import nnx
from transformer import Transformer

import jaxbucket as jb
from jaxbucket.stream.dataset import StreamDataset

EXAMPLE = {"tokens": np.zeros(1, np.uint8)}
STEPS_BETWEEN_LINES = 25


class Step(NamedTuple):
    """What is told of a step."""

    step: int
    batch_size: int
    seq_len: int
    real_tokens: int
    loss: float


def main() -> None:
    args = parse_arguments()
    with jb.Processes() as processes:
        mesh = jb.data_mesh()
        dataset = passages(args, mesh, processes)
        processes.check_agreement(dataset.position(0), mesh)
        steps = train(dataset, args, mesh, processes)
        if processes.index == 0:
            report(steps, args)


def passages(
    args: argparse.Namespace, mesh: jax.sharding.Mesh, processes: jb.Processes
) -> StreamDataset:
    """Batches of the passages of this process's documents."""
    own = documents.load(args.data).train[processes.index :: processes.count]

    def cut_anew(epoch: int, seed: int) -> grain.IterDataset:
        del epoch
        texts = grain.MapDataset.source(own).seed(seed).shuffle()
        return texts.random_map(passage).to_iter_dataset()

    sample = jb.stream.sample_lengths(cut_anew, args.sample, seed=args.seed)
    # The same in all processes, and of all of them.
    told = processes.gather("lengths", json.dumps(sample.tolist()))
    lengths = np.concatenate([json.loads(text) for text in told])
    plan = jb.plan_buckets(
        lengths,
        max_tokens=args.max_tokens,
        num_buckets=args.num_buckets,
        batch_size_multiple=mesh.size,
        seq_len_multiple=32,
        max_seq_len=args.max_len,
        overlong="truncate",
    )
    if args.pack:
        longest = plan.buckets[-1]
        shape = longest.batch_size, longest.seq_len
        plan = jb.BucketPlan.from_shapes([shape], overlong=plan.overlong)
    if processes.index == 0:
        print(f"Shapes {', '.join(map(str, plan.buckets))} of {len(lengths)} passages.")
    return jb.stream_batches(
        cut_anew,
        plan,
        pool_size=args.pool_size,
        lengths=lengths,
        shard=jb.sharding.local_rows(mesh),
        processes=processes,
        num_epochs=args.epochs,
        pack=args.pack,
        like=EXAMPLE,
        seed=args.seed,
    )


def passage(
    example: dict[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Some of a document, from anywhere in it."""
    tokens = example["tokens"]
    length = min(len(tokens), 1 + int(rng.lognormal(5, 1)))
    begin = int(rng.integers(len(tokens) - length + 1))
    return {"tokens": tokens[begin : begin + length]}


def train(
    dataset: StreamDataset,
    args: argparse.Namespace,
    mesh: jax.sharding.Mesh,
    processes: jb.Processes,
) -> list[Step]:
    """Trains to the end of all streams; returns the steps of this run."""
    rate = jb.optim.warmup_inverse_sqrt_schedule(args.lr, recipe.WARM_UP_STEPS)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=0.98, weight_decay=0.05),
        jb.scale_by_batch_size(base_examples=recipe.BASE_EXAMPLES, learning_rate=rate),
    )
    model = Transformer(args.width, args.layers, 0.0, nnx.Rngs(args.seed))
    state = jb.sharding.replicate(jb.create_state(model, tx), mesh)
    specs = jb.sharding.batch_specs(
        dataset.plan, EXAMPLE, mesh, max_segments=dataset.max_segments
    )
    steps = jb.compile_steps(
        jb.data_parallel(recipe.loss, tx, mesh), state, specs, progress=False
    )
    batches, found = iter(dataset), []
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if args.checkpoint:
            checkpoints = jb.Checkpoints(args.checkpoint, processes=processes)
            stack.enter_context(checkpoints)
        first = 0
        if checkpoints and checkpoints.latest_step is not None:
            state, position, extra = checkpoints.restore(state)
            position.check_same(dataset.position(position.step))
            batches.set_state(json.loads(extra["streams"][processes.index]))
            first = position.step
        for step, batch in enumerate(
            jb.sharding.prefetch_to_mesh(batches, mesh), first
        ):
            state, metrics = steps(state, batch)
            found.append(told_of(step, batch, metrics))
            if processes.index == 0 and step % STEPS_BETWEEN_LINES == 0:
                show(found[-1])
            if checkpoints and (step + 1) % args.save_every == 0:
                own = json.dumps(batches.state_before(step + 1))
                streams = processes.gather("streams", own)
                position = dataset.position(step + 1)
                checkpoints.save(state, position, {"streams": streams})
    if processes.index == 0:
        print(f"Of this process: {batches.counts}")
    return found


def told_of(step: int, batch: jb.Batch, metrics: dict[str, Any]) -> Step:
    tokens, loss = int(metrics["num_tokens"]), float(metrics["loss"])
    return Step(step, batch.bucket.batch_size, batch.bucket.seq_len, tokens, loss)


def show(step: Step) -> None:
    padding = 1 - step.real_tokens / (step.batch_size * step.seq_len)
    print(
        f"step {step.step:5d}  [{step.batch_size}, {step.seq_len}]  "
        f"padding {padding:5.1%}  loss {step.loss:.3f}"
    )


def report(steps: Sequence[Step], args: argparse.Namespace) -> None:
    real = sum(step.real_tokens for step in steps)
    padded = sum(step.batch_size * step.seq_len for step in steps)
    padding = 1 - real / padded if padded else 0.0
    print(f"{len(steps)} steps of {real:,} bytes, {padding:.1%} padding.")
    if args.json:
        numbers = [step._asdict() for step in steps]
        found = {"steps": numbers, "real_tokens": real, "padding": padding}
        pathlib.Path(args.json).write_text(json.dumps(found))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on a stream, in one process or several.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", metavar="PATH", help="as in train_lm.py")
    parser.add_argument(
        "--epochs", type=options.positive, default=1, help="of the documents"
    )
    parser.add_argument(
        "--sample",
        type=options.positive,
        default=1000,
        help="passages of each process that the plan is made of",
    )
    parser.add_argument(
        "--pool-size",
        type=options.positive,
        default=512,
        help="passages that wait in each process",
    )
    parser.add_argument("--pack", action="store_true", help="several in each row")
    parser.add_argument("--max-len", type=options.length, default=512, help="bytes")
    parser.add_argument(
        "--max-tokens", type=options.positive, default=8192, help="B * T at most"
    )
    parser.add_argument("--num-buckets", type=options.positive, default=4)
    parser.add_argument("--lr", type=options.rate, default=4e-3)
    parser.add_argument("--width", type=options.even, default=64)
    parser.add_argument("--layers", type=options.positive, default=2)
    parser.add_argument("--seed", type=options.seed, default=0)
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="save the run there, and go on with it"
    )
    parser.add_argument("--save-every", type=options.positive, default=50, help="steps")
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=options.new_file,
        help="every number of the steps",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
