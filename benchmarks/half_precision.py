"""Trains the model of the examples in float32, bfloat16 and float16.

    python benchmarks/half_precision.py
    python benchmarks/half_precision.py --tokens 500_000 --seeds 5 --json

Parameters, the optimizer state and the loss are float32. The layers of the model
compute in the dtype of the row. All runs with the same seed use the same batches and
the same initial parameters. Compare the effect of half precision with the differences
between seeds. No step should be skipped because a float16 gradient exceeded 65,504.
"""

import argparse
import json
import math
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

import jaxbucket as jb

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
import documents
from transformer import BEGIN, Transformer

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


class Training:
    """The model and the documents of the examples, on all devices."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        splits = documents.load(args.data)
        self.source = splits.train
        held_out = documents.Examples(splits.held_out[: args.held_out])
        self.lengths = jb.measure_lengths(self.source)
        self.mesh = jb.data_mesh()
        self.plan = jb.plan_buckets(
            self.lengths,
            max_tokens=args.max_tokens,
            num_buckets=args.num_buckets,
            seq_len_multiple=32,
            max_seq_len=args.max_len,
            overlong="truncate",
        )
        self.held_out = jb.batch_dataset(
            held_out,
            jb.BatchSchedule(self.plan, jb.measure_lengths(held_out), order="source"),
        )
        rate = optax.warmup_cosine_decay_schedule(
            0.0, args.lr, args.tokens // 20, args.tokens, args.lr / 20
        )
        self.tx = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.inject_hyperparams(optax.adamw)(
                learning_rate=jb.optim.schedule_by_work(rate, "tokens"), b2=0.98
            ),
        )

    def runs(self, dtype: Any) -> list[dict[str, Any]]:
        """Trains once per seed, with steps that are compiled only once."""
        specs = jb.sharding.batch_specs(self.plan, self.source[0], self.mesh)
        step = jb.make_train_step(loss, self.tx, self.mesh, skip_nonfinite=True)
        state = self._state(0, dtype)
        steps = jb.compile_steps(step, state, specs)
        evaluate = jb.compile_steps(jb.make_eval_step(loss, self.mesh), state, specs)
        return [
            self._run(seed, dtype, steps, evaluate) for seed in range(self.args.seeds)
        ]

    def _state(self, seed: int, dtype: Any) -> jb.train.TrainState:
        args = self.args
        model = Transformer(args.width, args.layers, 0.0, nnx.Rngs(seed), dtype)
        return jb.create_state(model, self.tx, self.mesh)

    def _run(self, seed: int, dtype: Any, steps: Any, evaluate: Any) -> dict[str, Any]:
        state = self._state(seed, dtype)
        schedule = jb.BatchSchedule(self.plan, self.lengths, seed=seed)
        dataset = jb.batch_dataset(self.source, schedule, num_steps=math.inf)
        tokens = count = skipped = 0
        start = time.perf_counter()
        for batch in jb.sharding.prefetch_to_mesh(dataset, self.mesh):
            state, metrics = steps(state, batch)
            tokens, count = tokens + int(metrics["num_tokens"]), count + 1
            skipped += int(metrics["skipped"])
            if tokens >= self.args.tokens:
                break
        seconds = time.perf_counter() - start
        nats = num_bytes = 0.0
        for batch in jb.sharding.prefetch_to_mesh(self.held_out, self.mesh):
            metrics = evaluate(state, batch)
            nats += float(metrics["loss_sum"])
            num_bytes += float(metrics["weight"])
        return {
            "seed": seed,
            "steps": count,
            "skipped": skipped,
            "bits_per_byte": nats / num_bytes / math.log(2),
            "seconds": seconds,
        }


def loss(
    model: Transformer, batch: jb.Batch, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of the examples, computed from float32 logits."""
    inputs, targets, weights = jb.next_tokens(batch, "tokens", bos_token=BEGIN)
    ids, positions = batch.segment_ids["tokens"], batch.positions["tokens"]
    logits = model(inputs, positions, keys, ids).astype(jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(nats * weights), jnp.sum(weights)


def main() -> None:
    args = parse_arguments()
    training = Training(args)
    results = {}
    for dtype in _DTYPES:
        results[jnp.dtype(dtype).name] = training.runs(dtype)
        print(f"{jnp.dtype(dtype).name} done", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show(results, args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare compute dtypes of the model.")
    parser.add_argument(
        "--data",
        help="a .jsonl file, a .txt file or a folder; default: the standard library",
    )
    parser.add_argument(
        "--tokens", type=int, default=200_000, help="number of real tokens per run"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--held-out", type=int, default=100, help="number of documents to evaluate on"
    )
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--max-len", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--num-buckets", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def show(results: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"Held-out bits per byte after {args.tokens:,} real tokens, with "
        f"{args.seeds} seeds; apart: the largest difference from the float32 run with "
        "the same seed.",
        caption_justify="left",
    )
    table.add_column("compute", no_wrap=True)
    for name in ("steps", "skipped", "mean", "min", "max", "apart", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    reference = bits_per_byte(results["float32"])
    for name, runs in results.items():
        bits = bits_per_byte(runs)
        table.add_row(
            *(name, f"{sum(run['steps'] for run in runs)}"),
            f"{sum(run['skipped'] for run in runs)}",
            *(f"{x:.3f}" for x in (bits.mean(), bits.min(), bits.max())),
            f"{np.abs(bits - reference).max():.3f}",
            f"{sum(run['seconds'] for run in runs):.0f}",
        )
    Console(width=100, highlight=False).print(table)


def bits_per_byte(runs: list[dict[str, Any]]) -> np.ndarray:
    return np.array([run["bits_per_byte"] for run in runs])


if __name__ == "__main__":
    main()
