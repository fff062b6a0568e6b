"""Measures time and memory of attention over packed rows, with a mask or segments.

    python benchmarks/attention.py
    python benchmarks/attention.py --seq-len 4096 --batch 1 --rounds 9 --json
    python benchmarks/attention.py --block 512 --dtype bfloat16

Rows are packed by `jb.packing.pack`. The lengths are those of Python functions in
bytes, from `shared/data` next to the repository if that exists, and lognormal
otherwise. The methods run in turn, forward and with gradients:

    mask        `jax.nn.dot_product_attention` with a causal `attention_mask`
    segments    `segment_attention`, for rows of several examples
    one each    `segment_attention`, for rows of a single example, in which no block can
                be skipped

`--block` sets the size of the blocks of `segment_attention`, which depends on the
platform by default. Times are medians. Memory is the size of temporary arrays, as
reported by the compiler.
"""

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import jaxbucket as jb
from jaxbucket.attention import blockwise
from jaxbucket.data.collate import row_segments

_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data" / "pyfuncs.npz"


def main() -> None:
    args = parse_arguments()
    packed = packed_rows(args)
    kinds = {"forward": forward, "gradient": gradient}
    results = [
        {"pass": kind, "causal": is_causal, **measure(args, make, packed, is_causal)}
        for kind, make in kinds.items()
        for is_causal in (True, False)
    ]
    segments = float(packed.max(axis=1).mean())
    if args.json:
        about = {"jax": jax.__version__, "segments_per_row": segments}
        print(json.dumps({**about, "results": results}))
    else:
        show(args, segments, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time attention over packed rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=4, help="number of rows")
    parser.add_argument("--seq-len", type=int, default=2048, help="length T of a row")
    parser.add_argument(
        "--width", type=int, default=256, help="total width of all heads"
    )
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--block", type=int, help="size of a block of tokens")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds; medians are reported"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    sizes = (args.batch, args.seq_len, args.rounds)
    sizes += () if args.block is None else (args.block,)
    if min(sizes) < 1 or args.width % args.heads:
        parser.error(
            "--batch, --seq-len, --rounds and --block must be at least 1, and --heads "
            "must divide --width."
        )
    return args


def packed_rows(args: argparse.Namespace) -> np.ndarray:
    """Returns the `[B, T]` segment ids of rows drawn from a packing."""
    rng = np.random.default_rng(0)
    if _DATA.exists():
        with np.load(_DATA) as columns:
            lengths = columns["bytes"]
    else:
        lengths = rng.lognormal(5.6, 1, 50_000).astype(np.int32) + 1
    lengths = lengths[(lengths > 0) & (lengths <= args.seq_len)]
    packing = jb.packing.pack(lengths, args.seq_len)
    rows = rng.choice(packing.num_rows, args.batch)
    slots = np.zeros((args.batch, packing.max_segments), np.int64)
    for index, row in enumerate(rows.tolist()):
        row_slots = rng.permutation(packing.slots(row))
        slots[index, : len(row_slots)] = row_slots
    return row_segments(slots, args.seq_len)[0]


def forward(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    return attend


def gradient(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns the gradients of the sum of squares with respect to all three inputs."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array):
        return jnp.sum(jnp.square(attend(query, key, value, ids)))

    return jax.grad(loss, (0, 1, 2))


def measure(
    args: argparse.Namespace,
    make: Callable[[Any], Any],
    packed: np.ndarray,
    is_causal: bool,
) -> dict[str, Any]:
    segments = functools.partial(with_segments, is_causal=is_causal, block=args.block)
    masked = functools.partial(with_mask, is_causal=is_causal)
    methods = {
        "mask": (masked, packed),
        "segments": (segments, packed),
        "one each": (segments, np.ones_like(packed)),
    }
    shape = (args.batch, args.seq_len, args.heads, args.width // args.heads)
    heads = [jax.random.normal(jax.random.key(i), shape, args.dtype) for i in range(3)]
    runs, memory = {}, {}
    for method, (attend, ids) in methods.items():
        inputs = (*heads, jnp.asarray(ids))
        compiled = jax.jit(make(attend)).lower(*inputs).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        memory[method] = analysis.temp_size_in_bytes
        runs[method] = functools.partial(compiled, *inputs)
    check(runs["mask"](), runs["segments"]())
    seconds = in_turn(runs, args.rounds)
    return {
        "seconds": seconds,
        "megabytes": {method: size / 1e6 for method, size in memory.items()},
        "times_as_fast": seconds["mask"] / seconds["segments"],
        "memory_ratio": memory["mask"] / memory["segments"],
    }


def with_mask(
    query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, is_causal: bool
) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = jb.attention.attention_mask(ids, positions if is_causal else None)
    outputs = jax.nn.dot_product_attention(query, key, value, mask=mask)
    return jnp.where(ids[..., None, None] > 0, outputs, 0)


def with_segments(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array,
    is_causal: bool,
    block: int | None,
) -> jax.Array:
    if block is None:
        return jb.segment_attention(query, key, value, ids, is_causal=is_causal)
    scale = query.shape[-1] ** -0.5
    outputs = blockwise.attend(
        *(query, key, value, ids), is_causal=is_causal, scale=scale, block=block
    )
    return jnp.where(ids[..., None, None] > 0, outputs, 0)


def check(expected: Any, actual: Any) -> None:
    """Checks that both methods return the same result."""
    tolerance = 1e-5
    if jax.tree.leaves(expected)[0].dtype == jnp.bfloat16:
        tolerance = 2e-2
    elif jax.default_backend() == "gpu":
        # Matrices are rounded to 10 bits of mantissa before they are multiplied.
        tolerance = 2e-3
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        assert jnp.linalg.norm(a - b) < tolerance * jnp.linalg.norm(a)


def in_turn(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns median seconds. All methods have been warmed up."""
    seconds: dict[str, list[float]] = {method: [] for method in runs}
    for number in range(rounds + 1):
        for method, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number:
                seconds[method].append(time.perf_counter() - start)
    return {method: float(np.median(times)) for method, times in seconds.items()}


def show(
    args: argparse.Namespace, segments: float, results: list[dict[str, Any]]
) -> None:
    title = (
        f"{args.batch} rows of {args.seq_len}, {segments:.1f} examples per row, "
        f"width {args.width}"
    )
    table = Table(box=box.SIMPLE, title=title)
    table.add_column("")
    methods = list(results[0]["seconds"])
    for name in (*methods, "mask / segments", *methods[:2], "mask / segments"):
        table.add_column(name, justify="right")
    for x in results:
        table.add_row(
            f"{x['pass']}, {'causal' if x['causal'] else 'full'}",
            *(f"{1e3 * x['seconds'][method]:,.4g} ms" for method in methods),
            f"{x['times_as_fast']:.1f}",
            *(f"{x['megabytes'][method]:,.0f} MB" for method in methods[:2]),
            f"{x['memory_ratio']:.0f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
