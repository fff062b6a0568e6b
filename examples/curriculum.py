"""Trains from easy to hard documents, in one process or several.

    python examples/curriculum.py
    python scripts/launch_local.py -n 4 -- python examples/curriculum.py --plot run.png

Each process measures the length and the rarity of the bytes of its share of the
documents. Then all processes sort them together and write an index for each metric.
From these indexes every process computes the same batches, starting with the documents
that are easy by both, and gradually adding harder ones.
"""

import argparse
import contextlib
import json
import pathlib
import zlib
from typing import NamedTuple

import documents
import jax
import numpy as np
import recipe
from flax import nnx
from transformer import Transformer

import jaxbucket as jb


def length(example: dict[str, np.ndarray]) -> float:
    """Returns the number of bytes: long documents are hard."""
    return len(example["tokens"])


def surprise(example: dict[str, np.ndarray]) -> float:
    """Returns the compressed size in bits per byte: repetitive documents are easy."""
    content = example["tokens"].tobytes()
    return 8 * len(zlib.compress(content)) / len(content)


class Rarity:
    """Returns the mean of `-log` of the share of each byte: rare bytes are hard."""

    def __init__(self, source: documents.Examples):
        counts = sum(np.bincount(x["tokens"], minlength=256) for x in source)
        self.surprise = np.log(np.sum(counts)) - np.log(np.maximum(counts, 1))

    def __call__(self, example: dict[str, np.ndarray]) -> float:
        return self.surprise[example["tokens"]].mean()


DIFFICULTIES = ("length", "rarity", "surprise")
PANELS = {
    "difficulty": "difficulty",
    "seq_len": "T",
    "batch_size": "B",
    "learning_rate": "learning rate",
    "loss": "nats per byte",
}


class Step(NamedTuple):
    """Metrics of a step; `difficulty` is the median over its documents, `rows`."""

    step: int
    difficulty: float
    seq_len: int
    batch_size: int
    learning_rate: float
    loss: float
    rows: list[int]


def main() -> None:
    args = parse_arguments()
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(jb.Processes())
        mesh = jb.data_mesh()
        source = documents.load(args.data).train
        difficulty = write_indexes(source, args, mesh, processes)
        schedule = make_schedule(source, difficulty, args)
        if processes.index == 0:
            print(schedule)
        checkpoints = None
        if args.checkpoint:
            manager = jb.Checkpoints(args.checkpoint, processes=processes)
            checkpoints = stack.enter_context(manager)
        index = difficulty[args.difficulty[0]]
        steps = train(source, schedule, index, args, mesh, checkpoints)
        if processes.index == 0:
            report(steps, args)


def write_indexes(
    source: documents.Examples,
    args: argparse.Namespace,
    mesh: jax.sharding.Mesh,
    processes: jb.Processes,
) -> dict[str, jb.schedule.DifficultyIndex]:
    """Measures all metrics of this process's share, and writes an index for each."""
    folder = pathlib.Path(args.index)
    metrics = {"length": length, "rarity": Rarity(source), "surprise": surprise}
    shares = jb.data.measure_difficulty(
        source,
        {name: metrics[name] for name in args.difficulty},
        cache=folder / "cache",
        cache_key="bytes-1",
        processes=processes,
        progress=processes.index == 0,
    )
    indexes = {}
    for name, share in shares.items():
        describe(name, share, processes)
        indexes[name] = jb.sort.write_difficulty_index(
            folder / f"by-{name}",
            share,
            mesh,
            processes=processes,
        )
    return indexes


def describe(name: str, share: np.ndarray, processes: jb.Processes) -> None:
    """Prints how many documents each process has, and their mean difficulty."""
    shares = processes.gather(
        name, f"{len(share):,} documents with mean {share.mean():.3g}"
    )
    if processes.index == 0:
        print(f"{name}: {'; '.join(shares)}")


def make_schedule(
    source: documents.Examples,
    difficulty: dict[str, jb.schedule.DifficultyIndex],
    args: argparse.Namespace,
) -> jb.BatchSchedule:
    """Returns batches of the documents that are easy enough for their step."""
    lengths = jb.measure_lengths(source, progress=False)
    plan = jb.plan_buckets(
        lengths,
        max_tokens=args.max_tokens,
        num_buckets=args.num_buckets,
        batch_size_multiple=8,
        seq_len_multiple=32,
        max_seq_len=args.max_len,
        overlong="truncate",
    )
    pacing = jb.schedule.RootPacing(
        start=0.05, duration=args.steps_to_all, unit="steps"
    )
    order = jb.Curriculum(difficulty, pacing)
    return jb.BatchSchedule(plan, lengths, seed=args.seed, order=order)


def train(
    source: documents.Examples,
    schedule: jb.BatchSchedule,
    index: jb.schedule.DifficultyIndex,
    args: argparse.Namespace,
    mesh: jax.sharding.Mesh,
    checkpoints: jb.Checkpoints | None,
) -> list[Step]:
    rate = recipe.warmup_cosine_schedule(args.lr, args.steps)
    tx = recipe.make_optimizer(rate, args.rule)
    model = Transformer(args.width, args.layers, 0.0, nnx.Rngs(args.seed))
    state = jb.create_state(model, tx, mesh)
    batches = jb.MeshLoader(source, schedule, mesh, num_steps=args.steps)
    if checkpoints and checkpoints.latest_step is not None:
        state, position, _ = checkpoints.restore(state)
        batches = batches.resume(position)
    step_fn = jb.make_train_step(recipe.loss_fn, tx, mesh)
    train_step = jb.compile_steps(step_fn, state, batches.specs, progress=False)
    steps = []
    for number, batch in enumerate(batches, batches.start_step):
        state, metrics = train_step(state, batch)
        rows = schedule[number].rows
        step = Step(
            number,
            float(np.median(index.difficulty[rows[rows >= 0]])),
            batch.bucket.seq_len,
            batch.bucket.batch_size,
            float(metrics["learning_rate"]),
            float(metrics["loss"]),
            rows.tolist(),
        )
        steps.append(step)
    if checkpoints:
        checkpoints.save(state, batches.position(args.steps))
    return steps


def report(steps: list[Step], args: argparse.Namespace) -> None:
    for step in steps[:: max(1, len(steps) // 10)]:
        print(
            f"step {step.step:4d}  difficulty {step.difficulty:8.3g}  "
            f"[{step.batch_size}, {step.seq_len}]  rate {step.learning_rate:.2e}  "
            f"loss {step.loss:.3f}"
        )
    if args.json:
        numbers = [step._asdict() for step in steps]
        pathlib.Path(args.json).write_text(json.dumps({"steps": numbers}))
    if args.plot:
        draw(steps, args.plot)


def draw(steps: list[Step], path: str) -> None:
    """Draws a panel for each metric over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    axes = figure.subplots(len(PANELS), sharex=True)
    shapes = [step.seq_len for step in steps]
    for ax, (name, title) in zip(axes, PANELS.items(), strict=True):
        values = [getattr(step, name) for step in steps]
        ax.scatter([step.step for step in steps], values, 8, shapes, cmap="viridis")
        ax.set_ylabel(title)
        ax.grid(alpha=0.3)
    axes[0].set_yscale("log")
    for ax, name in zip(axes[1:3], ("seq_len", "batch_size"), strict=True):
        ticks = sorted({getattr(step, name) for step in steps})
        ax.set_yscale("log", base=2)
        ax.set_yticks(ticks, list(map(str, ticks)))
        ax.minorticks_off()
    figure.align_ylabels(axes)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train from easy to hard documents, in one process or several.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--data",
        help="a .jsonl file, a .txt file or a folder; default: the standard library",
    )
    option(
        "--index",
        default="curriculum-index",
        help="a folder for the difficulties and their index, shared by all processes",
    )
    option(
        "--difficulty",
        choices=DIFFICULTIES,
        default=["length", "rarity"],
        nargs="+",
        help="a document is trained on once it is easy enough by each of these",
    )
    option(
        "--steps-to-all",
        type=int,
        default=100,
        help="number of steps until all documents are available",
    )
    option("--rule", choices=["linear", "sqrt", "none"], default="linear")
    option("--max-len", type=int, default=512, help="bytes to truncate documents to")
    option("--max-tokens", type=int, default=4096, help="maximum tokens per batch")
    option("--num-buckets", type=int, default=6, help="maximum number of shapes")
    option("--steps", type=int, default=200, help="number of steps")
    option("--lr", type=float, default=2e-3, help="peak learning rate")
    option("--width", type=int, default=64, help="width of the model")
    option("--layers", type=int, default=2, help="number of layers")
    option("--seed", type=int, default=0, help="seed of the model and of the batches")
    option("--checkpoint", help="a folder to save to, and to continue from")
    option("--json", help="a file to write the metrics of all steps to")
    option("--plot", help="a file for a plot of the run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
