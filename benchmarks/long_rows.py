"""Compares rows that as few devices as needed share with rows that are cut or divided.

    python benchmarks/long_rows.py
    python benchmarks/long_rows.py --tokens-per-device 4096 --json
    python benchmarks/long_rows.py --no-training

The first table shows, for each set of lengths, how many tokens are in rows that need 1,
2, 4 or 8 devices, how many tokens a limit of one device cuts off, and the modeled time
of an epoch, relative to a fixed mesh on which 8 devices share every row. The time of a
device is the sum of its arithmetic and of the bytes that it exchanges, 8 activations
for each layer, forward and backward: a model of `--layers` layers of `--width`, in
bfloat16, with `--tflops` and `--gigabytes` per second. Nothing is hidden behind
anything else.

The second table trains on eight CPU devices, one method after the other in each round:
rows of as few devices as needed; the hand-written mesh ("data", "seq") of shape (1, 8),
which divides every row; and rows cut off at what one device holds. Times are medians.
Lengths are those of a web-like tail, and of files in `shared/data` next to the
repository if it exists.
"""

import argparse
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

import jaxbucket as jb

DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
DEVICES, CUTS = 8, (1, 2, 4, 8)
WORDS, WIDTH, HEADS = 256, 64, 8
# Query, key, value and output, and their gradients.
EXCHANGES = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare rows on several devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokens-per-device", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tflops", type=float, default=400.0)
    parser.add_argument("--gigabytes", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    result: dict[str, Any] = {"sets": [of_set(args, *item) for item in sets()]}
    if not args.no_training:
        result["training"] = train_all(args.rounds)
    if args.json:
        print(json.dumps(result))
    else:
        show(args, result)


def sets() -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and lengths in tokens or bytes."""
    tail = np.random.default_rng(0).lognormal(np.log(700), 1.45, 200_000)
    yield "web-like tail", np.clip(tail, 1, 131_072).astype(np.int64)
    for path in sorted(DATA.glob("*.npz")):
        with np.load(path) as columns:
            for name in columns.files:
                values = columns[name]
                if values.ndim == 1 and values.dtype.kind in "iu" and len(values) > 100:
                    values = values[values > 0].astype(np.int64)
                    yield f"{path.stem}.{name}", np.minimum(values, 131_072)


def of_set(args: Any, name: str, lengths: np.ndarray) -> dict[str, Any]:
    """Returns shares by number of devices, and modeled times of an epoch."""
    tokens = args.tokens_per_device
    kept = np.minimum(lengths, DEVICES * tokens)
    shares = jb.plan.row_shard_shares(kept, tokens, DEVICES)
    limits = jb.plan.device_limits(DEVICES, tokens, max_row_shards=DEVICES)
    plan = jb.plan_buckets(kept, num_buckets=12, **limits)
    batches = [bucket.batches for bucket in jb.report(plan, kept).buckets]
    batches = [bucket.batches for bucket in jb.report(plan, kept).buckets]
    seq_lens = np.array([bucket.seq_len for bucket in plan.buckets])
    rows = plan.batch_sizes * np.array(batches)
    needed = [jb.plan.row_shard_shares([t], tokens, DEVICES) for t in seq_lens.tolist()]
    cuts = np.array(
        [sum(row["devices"] * row["examples"] for row in table) for table in needed]
    )
    least = epoch_seconds(args, rows, seq_lens, cuts)
    fixed = epoch_seconds(args, rows, seq_lens, np.full_like(cuts, DEVICES))
    return {
        "name": name,
        "tokens": {row["devices"]: row["tokens"] for row in shares},
        "cut_off": shares[0]["cut_off"],
        "time": least / fixed,
    }


def epoch_seconds(
    args: Any, rows: np.ndarray, seq_lens: np.ndarray, cuts: np.ndarray
) -> float:
    """Returns the modeled time of rows `[K]` of T `[K]`, shared by `[K]` devices."""
    positions = rows * seq_lens / DEVICES
    # Twelve matrices of the width, and causal attention, forward and backward.
    per_position = 3 * (24 * args.width**2 + 2 * args.width * seq_lens)
    arithmetic = positions * per_position * args.layers / (args.tflops * 1e12)
    sent = positions * EXCHANGES * 2 * args.width * args.layers * (1 - 1 / cuts)
    return float((arithmetic + sent / (args.gigabytes * 1e9)).sum())


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.heads = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        heads = self.heads(self.norm(x)).reshape(*x.shape[:2], HEADS, -1)
        query, key, value = jnp.split(heads, 3, axis=-1)
        output = jb.segment_attention(query, key, value, ids, is_causal=True)
        x = x + self.out(output.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        x = self.words(x)
        for block in self.blocks:
            x = block(x, ids)
        return self.words.attend(x)


def loss_fn(model: Model, batch: jb.Batch, keys: Any) -> tuple[jax.Array, jax.Array]:
    inputs, targets, weights = jb.next_tokens(batch)
    ids = batch.segment_ids["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(inputs, ids), targets
    )
    return jnp.sum(losses * weights), jnp.sum(weights)


def train_all(rounds: int) -> list[dict[str, Any]]:
    """Trains on few rows of up to 8 * 128 tokens, with 128 tokens on each device."""
    tokens = 128
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(4, 1.3, 1500), 2, DEVICES * tokens).astype(int)
    limits = jb.plan.device_limits(DEVICES, tokens, max_row_shards=DEVICES)
    plan = jb.plan_buckets(lengths, num_buckets=8, **limits)
    short = jb.plan_buckets(
        np.minimum(lengths, tokens),
        max_tokens=DEVICES * tokens,
        num_buckets=8,
        batch_size_multiple=DEVICES,
    )
    flat = jax.devices()[:DEVICES]
    fixed = jax.sharding.Mesh(np.array(flat).reshape(1, DEVICES), ("data", "seq"))
    methods = {
        "as few devices as needed": run(
            plan, lengths, jb.data_mesh(flat, max_row_shards=DEVICES), loss_fn
        ),
        "eight devices for every row": run(
            plan, lengths, fixed, on_fixed_mesh(fixed), batch_axes="data"
        ),
        "one device, rows cut off": run(
            short, np.minimum(lengths, tokens), jb.data_mesh(flat), loss_fn
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, epoch in methods.items():
            start = time.perf_counter()
            epoch()
            seconds[name].append(time.perf_counter() - start)
    total = int(lengths.sum())
    return [
        {
            "name": name,
            "seconds": float(np.median(times)),
            "tokens": total
            if "cut off" not in name
            else int(np.minimum(lengths, tokens).sum()),
        }
        for name, times in seconds.items()
    ]


def on_fixed_mesh(mesh: Any) -> Any:
    """Returns the loss with the sequence axis divided by hand, as users write it."""
    sharding = NamedSharding(mesh, PartitionSpec("data", "seq"))

    def loss(model: Model, batch: jb.Batch, keys: Any) -> Any:
        cut = jax.lax.with_sharding_constraint(batch, sharding)
        return loss_fn(model, cut, keys)

    return loss


def run(plan: Any, lengths: np.ndarray, mesh: Any, loss: Any, **axes: Any) -> Any:
    """Returns a function that trains for an epoch, after compiling everything."""
    rng = np.random.default_rng(0)
    source = [{"tokens": rng.integers(1, WORDS, n).astype(np.int32)} for n in lengths]
    batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh, **axes)
    tx = optax.adam(1e-3)
    step = jb.make_train_step(loss, tx, mesh, **axes)
    state = jb.create_state(Model(nnx.Rngs(0)), tx, mesh)
    steps = jb.compile_steps(step, state, batches.specs, progress=False)

    def epoch() -> None:
        nonlocal state
        for batch in batches:
            state, _ = steps(state, batch)
        jax.block_until_ready(jax.tree.leaves(state))

    return epoch


def show(args: Any, result: dict[str, Any]) -> None:
    console = Console(width=120)
    table = Table(
        box=box.SIMPLE,
        title=f"Shares of tokens by the devices of a row, {args.tokens_per_device:,} "
        "tokens each",
    )
    table.add_column("lengths")
    for cut in CUTS:
        table.add_column(f"{cut}", justify="right")
    table.add_column("cut off by one", justify="right")
    table.add_column("time / fixed", justify="right")
    for row in result["sets"]:
        shares = [f"{row['tokens'][cut]:.1%}" for cut in CUTS]
        table.add_row(
            row["name"], *shares, f"{row['cut_off']:.1%}", f"{row['time']:.2f}"
        )
    console.print(table)
    if "training" in result:
        table = Table(box=box.SIMPLE, title="An epoch on eight CPU devices")
        for name in ("", "seconds", "tokens", "tokens/s"):
            table.add_column(name, justify="right" if name else "left")
        for row in result["training"]:
            table.add_row(
                row["name"],
                f"{row['seconds']:.2f}",
                f"{row['tokens']:,}",
                f"{row['tokens'] / row['seconds']:,.0f}",
            )
        console.print(table)


if __name__ == "__main__":
    main()
