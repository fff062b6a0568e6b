"""Measures real tokens per second of batching methods, on one device.

    python benchmarks/end_to_end/speed.py
    python benchmarks/end_to_end/speed.py --width 1024 --layers 8 --dtype bfloat16
    python benchmarks/end_to_end/speed.py --sleep 0.03 --methods bucketed,packed

Every method trains the transformer of the examples, with `segment_attention`, on the
same lengths and within the same `max_tokens`, for `--seconds` after its shapes are
compiled:

    bucketed     a few shapes, planned for a transformer
    packed       several examples in each row, by `jb.plan_packing(pack="always")`
    auto         the cheaper of the two, by `jb.plan_packing(pack="auto")`
    pad to max   one shape, as long as the longest example
    grain        Grain's packing into rows of that shape

With `--sleep`, a step sleeps instead, as long as a device would work. `data wait` is
the share of the time for which the loop, at most four steps ahead of the device, waits
for its next batch. All batches, Grain's too, are made in a thread. MFU counts the
operations of the model on real tokens: 6 for each parameter of a product of matrices
and 12 * width for each pair of a query and a key.
"""

import argparse
import collections
import itertools
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import policies
from example import recipe, transformer
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

import jaxbucket as jb
from jaxbucket.data.workers import in_thread
from jaxbucket.train.loader import Waiting

METHODS = ("bucketed", "packed", "auto", "pad to max", "grain")
# Dense operations per second in bfloat16, from NVIDIA's data sheets.
_PEAKS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}
_NUM_DOCUMENTS = 20_000
_WARM_UP_STEPS = 50
# A loop that runs further ahead of the device would measure only itself.
_STEPS_AHEAD = 4


class Feed(NamedTuple):
    """Batches without end, their shapes, and their share of padding."""

    batches: Iterable[jb.Batch]
    specs: dict[jb.Bucket, jb.Batch]
    padding: float


def main() -> None:
    args = parse_arguments()
    source, lengths = documents(args)
    mesh = jb.data_mesh(jax.devices()[:1])
    results = {}
    for method in args.methods:
        feed = FEEDS[method](args, source, lengths, mesh)
        results[method] = measure(args, feed, mesh)
    about = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    if args.json:
        print(json.dumps({**about, **vars(args), "results": results}))
    else:
        show(args, about["device"], results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time training by several batching methods.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--methods", type=lambda x: x.split(","), default=list(METHODS))
    option("--max-len", type=int, default=1024, help="tokens to truncate documents to")
    option("--max-tokens", type=int, default=8192, help="maximum tokens per batch")
    option("--width", type=int, default=128, help="width of the model")
    option("--layers", type=int, default=2, help="layers of the model")
    option("--dtype", default="float32", help="dtype of the computation")
    option("--seconds", type=float, default=20, help="time to train, after compiling")
    option("--sleep", type=float, help="seconds that a step sleeps instead")
    option("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if unknown := {*args.methods} - {*METHODS}:
        parser.error(f"--methods {unknown} are not among {', '.join(METHODS)}.")
    return args


def documents(args: argparse.Namespace) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Returns random bytes with lengths like those of functions in a language."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.6, 1, _NUM_DOCUMENTS).astype(np.int32) + 1
    lengths = np.minimum(lengths, args.max_len)
    source = [{"tokens": rng.integers(0, 256, n, np.uint8)} for n in lengths]
    return source, lengths


def planned(
    pack: Literal["never", "always", "auto"],
) -> Callable[[argparse.Namespace, Any, np.ndarray, Any], Feed]:
    """Returns a function that makes the loader of a plan for packed or padded rows."""

    def make(
        args: argparse.Namespace, source: Any, lengths: np.ndarray, mesh: Any
    ) -> Feed:
        choice = jb.plan_packing(
            lengths,
            max_tokens=args.max_tokens,
            num_buckets=8,
            seq_len_multiple=32,
            pack=pack,
            cost_fn=jb.plan.TransformerCost(
                args.width, args.layers, transformer.VOCABULARY
            ),
            block_sparse=True,
        )
        schedule = jb.BatchSchedule(choice.plan, lengths, packing=choice.packing)
        loader = jb.MeshLoader(source, schedule, mesh, num_steps=np.inf)
        return Feed(loader, loader.specs, schedule.report().padding)

    return make


def pad_to_max(
    args: argparse.Namespace, source: Any, lengths: np.ndarray, mesh: Any
) -> Feed:
    bucket = jb.Bucket(args.max_tokens // args.max_len, args.max_len)
    plan = jb.BucketPlan.from_shapes([(bucket.batch_size, bucket.seq_len)])
    schedule = jb.BatchSchedule(plan, lengths, order="shuffled")
    loader = jb.MeshLoader(source, schedule, mesh, num_steps=np.inf)
    return Feed(loader, loader.specs, schedule.report().padding)


def grain(
    args: argparse.Namespace, source: Any, lengths: np.ndarray, mesh: Any
) -> Feed:
    bucket = jb.Bucket(args.max_tokens // args.max_len, args.max_len)
    limits = policies.Limits(args.max_tokens, args.max_len, 1)
    local = policies.grain_pack(source, bucket, limits, 0)
    some = list(itertools.islice(local, 50))
    padding = 1 - float(np.mean([x.segment_ids["tokens"] > 0 for x in some]))
    (first,) = jb.sharding.prefetch_to_mesh(some[:1], mesh)
    specs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first
    )
    batches = (batch for batch in jb.sharding.prefetch_to_mesh(local, mesh))
    return Feed(in_thread(batches, 2), {bucket: specs}, padding)


FEEDS = {
    "bucketed": planned("never"),
    "packed": planned("always"),
    "auto": planned("auto"),
    "pad to max": pad_to_max,
    "grain": grain,
}


def measure(args: argparse.Namespace, feed: Feed, mesh: Any) -> dict[str, Any]:
    """Trains with a method, and returns its speed."""
    model = transformer.Transformer(
        args.width, args.layers, 0.0, nnx.Rngs(0), dtype=args.dtype
    )
    tx = recipe.make_optimizer(recipe.warmup_cosine_schedule(4e-3, 10_000))
    state = jb.create_state(model, tx, mesh)
    step = jb.make_train_step(recipe.loss_fn, tx, mesh)
    compile_seconds = 0.0
    if not args.sleep:
        start = time.perf_counter()
        step = jb.compile_steps(step, state, feed.specs, progress=False)
        compile_seconds = time.perf_counter() - start
    waiting, batches = Waiting(num_steps=10**6), iter(feed.batches)
    # Loaders fill their buffers first.
    for _ in range(_WARM_UP_STEPS):
        next(batches)
    start = time.perf_counter()
    real: list[jax.Array] = []
    pending: collections.deque[Any] = collections.deque()
    for batch in waiting.during(batches):
        real.append(batch.segment_ids["tokens"])
        if args.sleep:
            time.sleep(args.sleep)
        else:
            state, metrics = step(state, batch)
            pending.append(metrics)
        if len(pending) > _STEPS_AHEAD:
            jax.block_until_ready(pending.popleft())
        if time.perf_counter() - start > args.seconds:
            break
    jax.block_until_ready(pending)
    seconds = time.perf_counter() - start
    tokens, flops = work(args, model, real)
    device = jax.devices()[0].device_kind
    peak = next((x for name, x in _PEAKS.items() if name in device), None)
    return {
        "steps": len(real),
        "shapes": len(feed.specs),
        "tokens_per_second": tokens / seconds,
        "compile_seconds": compile_seconds,
        "with_compile": tokens / (seconds + compile_seconds),
        "data_wait": waiting.share,
        "mfu": peak and flops / seconds / peak,
        "padding": feed.padding,
    }


def work(
    args: argparse.Namespace, model: nnx.Module, batches: list[jax.Array]
) -> tuple[int, float]:
    """Returns the real tokens of batches, and the operations of the model on them."""
    products = [x for x in jax.tree.leaves(nnx.state(model, nnx.Param)) if x.ndim > 1]
    # The first table is looked up, not multiplied.
    per_token = 6 * (
        sum(x.size for x in products) - transformer.VOCABULARY * args.width
    )
    tokens = pairs = 0
    for ids in map(np.asarray, batches):
        for row in ids:
            lengths = np.bincount(row)[1:].astype(np.int64)
            tokens += int(lengths.sum())
            pairs += int((lengths * (lengths + 1)).sum()) // 2
    return tokens, per_token * tokens + 12.0 * args.width * args.layers * pairs


def show(args: argparse.Namespace, device: str, results: dict[str, Any]) -> None:
    table = Table(
        box=box.SIMPLE,
        title=f"Width {args.width}, {args.layers} layers, {args.dtype}, at most "
        f"{args.max_tokens:,} tokens in rows of {args.max_len:,}, {device}",
    )
    names = ("shapes", "steps", "padding", "tokens/s", "compile", "tokens/s with it")
    table.add_column("method")
    for name in (*names, "data wait", "MFU"):
        table.add_column(name, justify="right")
    for method, x in results.items():
        table.add_row(
            *(method, str(x["shapes"]), f"{x['steps']:,}", f"{x['padding']:.1%}"),
            f"{x['tokens_per_second']:,.0f}",
            f"{x['compile_seconds']:.1f} s",
            f"{x['with_compile']:,.0f}",
            f"{x['data_wait']:.2%}",
            f"{x['mfu']:.1%}" if x["mfu"] else "",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
