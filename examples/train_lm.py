"""Trains a byte-level language model on documents of every length.

    python examples/train_lm.py
    python examples/train_lm.py --data my.jsonl --field text --json summary.json

Without `--data` it reads the functions and classes of the running Python's standard
library. All shapes are compiled before the first step; the end says whether any was
compiled after it.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections import Counter
from typing import Any

import documents
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from live import TrainingLog, console
from transformer import Transformer

import jaxbucket as jb

SEQ_LEN_MULTIPLE = 32
BASE_EXAMPLES = 32


@dataclasses.dataclass(frozen=True)
class Part:
    """Documents, and the schedule that batches them."""

    source: documents.Examples
    schedule: jb.BatchSchedule

    @property
    def report(self) -> jb.Report:
        return jb.report(self.schedule.plan, self.schedule.lengths)


@dataclasses.dataclass(frozen=True)
class Job:
    """All that is settled before anything compiles."""

    mesh: jax.sharding.Mesh
    plan: jb.BucketPlan
    specs: dict[jb.Bucket, jb.Batch]
    train: Part
    held_out: Part


def main() -> None:
    args = parse_arguments()
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    try:
        job = prepare(args)
    except ValueError as error:
        sys.exit(f"train_lm.py: {error}")
    with jb.count_compiles() as compiles:
        summary = run(job, args, compiles)
    console.print(in_words(summary))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(summary, indent=2) + "\n")


def prepare(args: argparse.Namespace) -> Job:
    """Reads and measures the documents, and plans the shapes for them."""
    split = documents.load(args.data, args.field)
    lengths = jb.measure_lengths(split.train)
    held_out = jb.measure_lengths(split.held_out)
    longest = max(lengths.max(), held_out.max())
    plan = jb.plan_buckets(
        lengths,
        max_tokens=args.max_tokens,
        num_buckets=args.num_buckets,
        batch_size_multiple=args.batch_size_multiple,
        seq_len_multiple=SEQ_LEN_MULTIPLE,
        # Shorter than asked where no document is that long: no shape for nothing.
        max_seq_len=min(
            args.max_len, -(-longest // SEQ_LEN_MULTIPLE) * SEQ_LEN_MULTIPLE
        ),
        overlong="truncate",
    )
    mesh = jb.data_mesh()
    return Job(
        mesh,
        plan,
        jb.batch_specs(plan, split.train[0], mesh),
        Part(split.train, jb.BatchSchedule(plan, lengths, seed=args.seed)),
        Part(split.held_out, jb.BatchSchedule(plan, held_out, order="source")),
    )


def run(job: Job, args: argparse.Namespace, compiles: Counter[str]) -> dict[str, Any]:
    """Compiles, trains and evaluates; returns every number about it."""
    show(job, args)
    learning_rate, tx = make_optimizer(args)
    model = Transformer(args.width, args.layers, args.dropout, nnx.Rngs(args.seed))
    state = jb.replicate(jb.create_state(model, tx), job.mesh)
    train_step = jb.data_parallel(loss_fn, tx, job.mesh, mode=args.mode, seed=args.seed)
    eval_step = jb.data_parallel_eval(loss_fn, job.mesh, mode=args.mode)
    train_steps = jb.compile_steps(train_step, state, job.specs)
    eval_steps = jb.compile_steps(eval_step, state, job.specs)
    ahead = compiles.copy()
    state, log = train(job, state, train_steps, learning_rate, args.steps)
    held_out = evaluate(job, state, eval_steps)
    return {
        "versions": {"jaxbucket": jb.__version__, "jax": jax.__version__},
        "devices": [str(device) for device in job.mesh.devices.flat],
        "arguments": vars(args),
        "plan": json.loads(job.plan.to_json()),
        "schedule": job.train.schedule.fingerprint,
        "epoch": job.train.report.to_dict(),
        "compile": {
            name: {
                "ahead": ahead[name],
                "seconds": sum(steps.seconds.values()),
                "later": compiles[name] - ahead[name],
            }
            for name, steps in (("train_step", train_steps), ("eval_step", eval_steps))
        },
        "train": log.summary(),
        "held_out": held_out,
    }


def show(job: Job, args: argparse.Namespace) -> None:
    console.print(
        f"{len(job.train.source)} documents to train on, {len(job.held_out.source)} "
        f"held out. One epoch on {job.mesh.size} device(s), {args.mode}:"
    )
    console.print(job.train.report)


def make_optimizer(
    args: argparse.Namespace,
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """AdamW with warm-up and cosine decay, its updates scaled by the batch's size."""
    learning_rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=args.lr,
        warmup_steps=max(1, args.steps // 20),
        decay_steps=max(2, args.steps),
        end_value=args.lr / 20,
    )
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate, b2=0.98, weight_decay=0.05),
        jb.scale_by_batch_size(base_examples=BASE_EXAMPLES, rule="sqrt"),
    )
    return learning_rate, tx


def loss_fn(
    model: Transformer, batch: jb.Batch, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Sum of the nats of every real byte, and how many there are."""
    tokens = batch.features["tokens"].astype(jnp.int32)
    logits = model(tokens, batch.positions["tokens"], keys)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return jnp.sum(nats * batch.mask), batch.num_tokens


def train(
    job: Job,
    state: jb.TrainState,
    steps: jb.CompiledSteps,
    learning_rate: optax.Schedule,
    num_steps: int,
) -> tuple[jb.TrainState, TrainingLog]:
    dataset = jb.batch_dataset(
        job.train.source,
        job.train.schedule,
        shard=jb.local_rows(job.mesh),
        num_steps=num_steps,
    )
    with TrainingLog(num_steps, learning_rate) as log:
        for batch in jb.prefetch_to_mesh(dataset, job.mesh):
            state, metrics = steps(state, batch)
            # A copy, as the next step takes the state's own buffers.
            metrics["lr_factor"] = jnp.copy(state.opt_state[-1].factor)
            log.add(batch.bucket, metrics)
    return state, log


def evaluate(job: Job, state: jb.TrainState, steps: jb.CompiledSteps) -> dict[str, Any]:
    """Every held-out document once, in source order, through the same shapes."""
    start = time.perf_counter()
    dataset = jb.batch_dataset(
        job.held_out.source, job.held_out.schedule, shard=jb.local_rows(job.mesh)
    )
    totals = Counter[str]()
    for batch in jb.prefetch_to_mesh(dataset, job.mesh):
        totals.update(jax.tree.map(float, steps(state, batch)))
    return {
        "documents": int(totals["num_examples"]),
        "bytes": int(totals["weight"]),
        "bits_per_byte": totals["loss_sum"] / totals["weight"] / math.log(2),
        "seconds": time.perf_counter() - start,
    }


def in_words(summary: dict[str, Any]) -> str:
    trained, held_out = summary["train"], summary["held_out"]
    compiled = [
        f"{name} compiled {c['ahead']} times in {c['seconds']:.1f} s, then {c['later']}"
        for name, c in summary["compile"].items()
    ]
    return "\n".join(
        [
            f"\nTrained {trained['steps']} steps in {trained['seconds']:.0f} s: "
            f"{trained['real_tokens_per_second']:,.0f} real tokens/s, "
            f"{trained['padding']:.1%} padding.",
            f"{len(summary['plan']['buckets'])} shapes: {'; '.join(compiled)}.",
            f"Held out: {held_out['bits_per_byte']:.3f} bits per byte over "
            f"{held_out['bytes']:,} bytes of {held_out['documents']} documents.",
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model on documents of every length.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        metavar="PATH",
        help="a .jsonl file, a .txt file with a document in every line, or a folder of "
        "documents; by default Python's standard library",
    )
    data.add_argument("--field", default="text", help="of a .jsonl line, its text")
    data.add_argument(
        "--max-len", type=_length, default=1024, help="bytes a document is cut to"
    )
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--max-tokens", type=_positive, default=4096, help="B * T of a global batch"
    )
    plan.add_argument("--num-buckets", type=_positive, default=8, help="shapes at most")
    plan.add_argument(
        "--batch-size-multiple",
        type=_positive,
        default=4,
        help="every B is a multiple of it, and the devices must divide it",
    )
    model = parser.add_argument_group("model and training")
    model.add_argument("--width", type=_even, default=128, help="of the model")
    model.add_argument("--layers", type=_positive, default=2, help="of the model")
    model.add_argument("--dropout", type=_share, default=0.0, help="share dropped")
    model.add_argument("--steps", type=_positive, default=700, help="updates")
    model.add_argument("--lr", type=_rate, default=8e-3, help="peak learning rate")
    model.add_argument("--seed", type=int, default=0, help="of everything random")
    devices = parser.add_argument_group("devices")
    devices.add_argument(
        "--devices", type=_positive, help="simulate so many on the CPU"
    )
    devices.add_argument("--mode", choices=("jit", "shard_map"), default="jit")
    parser.add_argument(
        "--json", metavar="FILE", type=_new_file, help="write the summary there"
    )
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _even(text: str) -> int:
    number = _positive(text)
    if number % 2:
        raise argparse.ArgumentTypeError(f"{number} is not even")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not from 0 to below 1")
    return number


def _rate(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _new_file(text: str) -> str:
    # Now, not when the run is over.
    if pathlib.Path(text).is_dir() or not pathlib.Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no file in an existing folder")
    return text


def _length(text: str) -> int:
    number = _positive(text)
    if number % SEQ_LEN_MULTIPLE:
        raise argparse.ArgumentTypeError(
            f"{number} is no multiple of {SEQ_LEN_MULTIPLE}"
        )
    return number


if __name__ == "__main__":
    main()
