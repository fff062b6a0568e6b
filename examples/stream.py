"""Trains on a stream of passages, which are cut from documents during training.

    python examples/stream.py
    python examples/stream.py --pack --epochs 3
    python examples/stream.py --checkpoint runs/s  # run it again to continue
    python scripts/launch_local.py -n 4 -- python examples/stream.py --json run.json

Every epoch cuts different passages, so their lengths are not known in advance, and the
plan is made from a sample. Each process reads its own documents. All of them end after
the same step, when every passage of every process has been used.
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
import recipe
from flax import nnx
from transformer import Transformer

import jaxbucket as jb
from jaxbucket.stream.dataset import StreamDataset

EXAMPLE = {"tokens": np.zeros(1, np.uint8)}
STEPS_BETWEEN_LINES = 25


class Step(NamedTuple):
    """Metrics of a step."""

    step: int
    batch_size: int
    seq_len: int
    real_tokens: int
    loss: float


def main() -> None:
    args = parse_arguments()
    with jb.Processes() as processes:
        mesh = jb.data_mesh()
        dataset = passage_batches(args, mesh, processes)
        processes.check_agreement(dataset.position(0), mesh)
        steps = train(dataset, args, mesh, processes)
        if processes.index == 0:
            report(steps, args)


def passage_batches(
    args: argparse.Namespace, mesh: jax.sharding.Mesh, processes: jb.Processes
) -> StreamDataset:
    """Returns batches of the passages of this process's documents."""
    texts = documents.load(args.data).train[processes.index :: processes.count]

    def new_passages(epoch: int, seed: int) -> grain.IterDataset:
        del epoch
        shuffled = grain.MapDataset.source(texts).seed(seed).shuffle()
        return shuffled.random_map(passage).to_iter_dataset()

    examples = jb.stream.ExampleStream(
        new_passages, num_epochs=args.epochs, like=EXAMPLE, seed=args.seed
    )
    sample = jb.stream.sample_lengths(examples, args.sample)
    # Gather the samples of all processes, so that they compute the same plan.
    samples = processes.gather("lengths", json.dumps(sample.tolist()))
    lengths = np.concatenate([json.loads(text) for text in samples])
    plan = jb.plan_buckets(
        lengths,
        max_tokens=args.max_tokens,
        num_buckets=args.num_buckets,
        batch_size_multiple=mesh.size,
        seq_len_multiple=32,
        max_seq_len=args.max_len,
        overlong="truncate",
        sample=True,
    )
    if args.pack:
        longest = plan.buckets[-1]
        shape = longest.batch_size, longest.seq_len
        plan = jb.BucketPlan.from_shapes([shape], overlong=plan.overlong)
    if processes.index == 0:
        print(f"Shapes: {', '.join(map(str, plan.buckets))} ({len(lengths):,} lengths)")
    return jb.stream_batches(
        examples,
        plan,
        pool_size=args.pool_size,
        max_segments_per_row=args.max_segments if args.pack else None,
        lengths=lengths,
        shard=jb.sharding.local_rows(mesh),
        processes=processes,
    )


def passage(
    example: dict[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Returns a random passage of a document."""
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
    """Trains to the end of all streams, and returns the steps of this run."""
    # The schedule has no fixed end, because the number of steps is not known.
    rate = jb.optim.warmup_inverse_sqrt_schedule(args.lr, 35)
    tx = recipe.make_optimizer(rate)
    model = Transformer(args.width, args.layers, 0.0, nnx.Rngs(args.seed))
    state = jb.create_state(model, tx, mesh)
    specs = jb.sharding.batch_specs(
        dataset.plan, EXAMPLE, mesh, max_segments=dataset.max_segments
    )
    step_fn = jb.make_train_step(recipe.loss_fn, tx, mesh)
    train_step = jb.compile_steps(step_fn, state, specs, progress=False)
    batches, records = iter(dataset), []
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
            state, metrics = train_step(state, batch)
            records.append(to_record(step, batch, metrics))
            if processes.index == 0 and step % STEPS_BETWEEN_LINES == 0:
                show(records[-1])
            if checkpoints and (step + 1) % args.save_every == 0:
                stream = json.dumps(batches.state_before(step + 1))
                streams = processes.gather("streams", stream)
                position = dataset.position(step + 1)
                checkpoints.save(state, position, {"streams": streams})
    if processes.index == 0:
        print(f"In this process: {batches.counts}")
    return records


def to_record(step: int, batch: jb.Batch, metrics: dict[str, Any]) -> Step:
    tokens, loss = int(metrics["num_tokens"]), float(metrics["loss"])
    return Step(
        step, batch.bucket.batch_size, batch.bucket.tokens_per_row, tokens, loss
    )


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
        summary = {"steps": numbers, "real_tokens": real, "padding": padding}
        pathlib.Path(args.json).write_text(json.dumps(summary))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on a stream, in one process or several.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--data",
        help="a .jsonl file, a .txt file or a folder; default: the standard library",
    )
    option("--epochs", type=int, default=1, help="passes over the documents")
    option("--sample", type=int, default=1000, help="passages per process to plan from")
    option("--pool-size", type=int, default=512, help="pending passages, per process")
    option("--pack", action="store_true", help="put several passages in each row")
    option("--max-segments", type=int, default=16, help="passages in a packed row")
    option("--max-len", type=int, default=512, help="bytes to truncate passages to")
    option("--max-tokens", type=int, default=8192, help="maximum tokens per batch")
    option("--num-buckets", type=int, default=4, help="maximum number of shapes")
    option("--lr", type=float, default=4e-3, help="peak learning rate")
    option("--width", type=int, default=64, help="width of the model")
    option("--layers", type=int, default=2, help="number of layers")
    option("--seed", type=int, default=0, help="seed of the model and of the passages")
    option("--checkpoint", help="a folder to save to, and to continue from")
    option("--save-every", type=int, default=50, help="steps between checkpoints")
    option("--json", help="a file to write the metrics of all steps to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
