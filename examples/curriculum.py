"""From the easy to the hard over several processes: measured, sorted, planned, trained.

    python examples/curriculum.py
    python scripts/launch_local.py -n 4 -- python examples/curriculum.py --plot run.png

Each process measures the difficulty of its share of the documents; all of them sort,
and each writes its part of one index. Every process then computes the same batches from
it: the easiest documents first, as many as a budget of tokens holds, the learning rate
scaled by how many they are.
"""

import argparse
import json
import pathlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import documents
import jax
import numpy as np
import optax
import options
import recipe
from flax import nnx
from transformer import Transformer

import jaxbucket as jb

PANELS = {
    "difficulty": "difficulty",
    "seq_len": "T",
    "batch_size": "B",
    "learning_rate": "learning rate",
    "loss": "nats per byte",
}


def length(example: dict[str, np.ndarray]) -> float:
    """Bytes: long documents are hard."""
    return len(example["tokens"])


def surprise(example: dict[str, np.ndarray]) -> float:
    """Bits per byte that zlib needs: what does not repeat itself is hard."""
    content = example["tokens"].tobytes()
    return 8 * len(zlib.compress(content)) / len(content)


DIFFICULTIES = {"length": length, "surprise": surprise}


class Step(NamedTuple):
    """What is drawn of a step; `difficulty` is the median of its documents."""

    step: int
    difficulty: float
    seq_len: int
    batch_size: int
    learning_rate: float
    loss: float


def main() -> None:
    args = parse_arguments()
    with jb.Processes() as processes:
        mesh = jb.data_mesh()
        source = documents.load(args.data).train
        index = indexed(source, args, mesh, processes)
        schedule = planned(source, index, args, processes)
        steps = train(source, schedule, index, args, mesh)
        if processes.index == 0:
            report(steps, args)


def indexed(
    source: documents.Examples,
    args: argparse.Namespace,
    mesh: jax.sharding.Mesh,
    processes: jb.Processes,
) -> jb.schedule.DifficultyIndex:
    """Measures a share here, and has all processes sort and write."""
    folder = pathlib.Path(args.index)
    share = jb.data.measure_difficulty(
        source,
        DIFFICULTIES[args.difficulty],
        cache=folder / "cache",
        processes=processes,
        progress=processes.index == 0,
    )
    describe("as measured", share, processes)
    for assignment in ("contiguous", "interleaved"):
        found = jb.sort.sample_sort(share, mesh, assignment=assignment)
        keys = [np.asarray(part.keys) for part in found.local_shares()]
        describe(f"sorted, {assignment}", np.concatenate(keys), processes)
    return jb.sort.write_difficulty_index(
        folder / f"by-{args.difficulty}-of-{args.sorted_by}",
        share,
        mesh,
        processes=processes,
        sorted_by=args.sorted_by,
    )


def describe(name: str, share: np.ndarray, processes: jb.Processes) -> None:
    """Prints what each process has: how much, and how hard."""
    own = f"{len(share):,} of {share.mean():.3g}"
    told = processes.gather(name, own)
    if processes.index == 0:
        print(f"{name}: {'; '.join(told)} on average")


def planned(
    source: documents.Examples,
    index: jb.schedule.DifficultyIndex,
    args: argparse.Namespace,
    processes: jb.Processes,
) -> jb.BatchSchedule:
    """Shapes within the budget, and batches of what is easy enough."""
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
    order = jb.Curriculum(
        index, jb.schedule.RootPacing(start=0.05, epochs=args.epochs_to_all)
    )
    schedule = jb.BatchSchedule(plan, lengths, seed=args.seed, order=order)
    if processes.index == 0:
        print(schedule)
    return schedule


def train(
    source: documents.Examples,
    schedule: jb.BatchSchedule,
    index: jb.schedule.DifficultyIndex,
    args: argparse.Namespace,
    mesh: jax.sharding.Mesh,
) -> list[Step]:
    """Trains; returns what each step was."""
    warm_up = max(1, args.steps // 20)
    rate = optax.warmup_cosine_decay_schedule(0, args.lr, warm_up, args.steps)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=0.98, weight_decay=0.05),
        jb.scale_by_batch_size(
            base_examples=recipe.BASE_EXAMPLES, rule=args.rule, learning_rate=rate
        ),
    )
    model = Transformer(args.width, args.layers, 0.0, nnx.Rngs(args.seed))
    state = jb.sharding.replicate(jb.create_state(model, tx), mesh)
    steps = jb.compile_steps(
        jb.data_parallel(recipe.loss, tx, mesh),
        state,
        jb.sharding.batch_specs(schedule.plan, source[0], mesh),
        opening=schedule.bucket_order(),
        progress=False,
    )
    dataset = jb.batch_dataset(
        source, schedule, shard=jb.sharding.local_rows(mesh), num_steps=args.steps
    )
    found = []
    batches = jb.sharding.prefetch_to_mesh(dataset, mesh)
    for step, batch in enumerate(batches):
        state, metrics = steps(state, batch)
        rows = schedule[step].rows
        found.append(
            Step(
                step,
                float(np.median(index.difficulty[rows[rows >= 0]])),
                batch.bucket.seq_len,
                batch.bucket.batch_size,
                float(metrics["learning_rate"]),
                float(metrics["loss"]),
            )
        )
    return found


def report(steps: Sequence[Step], args: argparse.Namespace) -> None:
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


def draw(steps: Sequence[Step], path: str) -> None:
    """A panel for each number, over the steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(PANELS), sharex=True, figsize=(8, 9), layout="constrained"
    )
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
        description="Train by curriculum, in one process or several.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", metavar="PATH", help="as in train_lm.py")
    parser.add_argument(
        "--index",
        metavar="FOLDER",
        default="curriculum-index",
        help="keep measures and index there, and find them again; shared by all",
    )
    parser.add_argument("--difficulty", choices=DIFFICULTIES, default="length")
    parser.add_argument(
        "--sorted-by",
        choices=("all", "process"),
        default="all",
        help="sort over all processes, or in each alone",
    )
    parser.add_argument(
        "--epochs-to-all", type=options.rate, default=0.5, help="until all is open"
    )
    parser.add_argument("--rule", choices=("linear", "sqrt", "none"), default="sqrt")
    parser.add_argument("--max-len", type=options.length, default=512, help="bytes")
    parser.add_argument(
        "--max-tokens", type=options.positive, default=4096, help="B * T at most"
    )
    parser.add_argument("--num-buckets", type=options.positive, default=6)
    parser.add_argument("--steps", type=options.positive, default=200)
    parser.add_argument("--lr", type=options.rate, default=2e-3)
    parser.add_argument("--width", type=options.even, default=64)
    parser.add_argument("--layers", type=options.positive, default=2)
    parser.add_argument("--seed", type=options.seed, default=0)
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=options.new_file,
        help="every number of the steps",
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=options.new_picture, help="draw the run"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
