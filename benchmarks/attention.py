"""Measures time and memory of attention over packed rows, with a mask or segments.

    python benchmarks/attention.py
    python benchmarks/attention.py --seq-lens 352,4096 --dtypes float32,bfloat16
    python benchmarks/attention.py --tokens 4096 --rounds 9 --json

Rows are packed by `jb.packing.pack`. The lengths are those of Python functions in
bytes, from `shared/data` next to the repository if that exists, and lognormal
otherwise. The methods run in turn, forward and with gradients:

    mask      `jax.nn.dot_product_attention` with an `attention_mask`
    blocks    `segment_attention` in plain jax
    kernel    the kernel that `segment_attention` takes here, if one applies
    cudnn     `jax.nn.dot_product_attention` with the lengths of rows of one example,
              in 16 bits on GPUs

"one" is for rows of a single example, in which few blocks can be skipped. Times are
medians. Memory is the size of temporary arrays, as reported by the compiler. All
outputs and gradients are first compared with a softmax in float64, on smaller arrays of
the same T; the table has the largest relative distance.
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
from jaxbucket.attention import segment
from jaxbucket.data.collate import row_segments

_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data" / "pyfuncs.npz"
# The relative distance that rounding to a dtype explains. GPUs round the factors of
# products of float32 to 10 bits of mantissa.
_TOLERANCES = {"float32": 3e-3, "bfloat16": 3e-2, "float16": 5e-3}
# Longer rows are compared in part, for the memory of the float64 softmax.
_MAX_CHECKED = 2048

Attend = Callable[..., jax.Array]


def main() -> None:
    args = parse_arguments()
    results = [
        measure(args, seq_len, dtype, is_packed)
        for dtype in args.dtypes
        for seq_len in args.seq_lens
        for is_packed in (True, False)
    ]
    device = jax.devices()[0].device_kind
    if args.json:
        about = {"jax": jax.__version__, "device": device, "tokens": args.tokens}
        print(json.dumps({**about, "results": results}))
    else:
        show(args, device, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time attention over packed rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--tokens", type=int, default=8192, help="B * T of every batch")
    option("--seq-lens", type=numbers, default=[352, 2048], help="lengths T of a row")
    option("--width", type=int, default=256, help="total width of all heads")
    option("--heads", type=int, default=4)
    option("--dtypes", type=lambda x: x.split(","), default=["float32"])
    option("--full", action="store_true", help="attention in both directions")
    option("--rounds", type=int, default=5, help="rounds; medians are reported")
    option("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.tokens < max(args.seq_lens) or args.rounds < 1 or args.width % args.heads:
        parser.error(
            "--tokens must hold the longest row, --rounds be at least 1, and --heads "
            "divide --width."
        )
    if unknown := {*args.dtypes} - {*_TOLERANCES}:
        parser.error(f"--dtypes {unknown} are not among {', '.join(_TOLERANCES)}.")
    return args


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def packed_rows(size: int, seq_len: int) -> np.ndarray:
    """Returns the `[B, T]` segment ids of rows drawn from a packing."""
    rng = np.random.default_rng(0)
    if _DATA.exists():
        with np.load(_DATA) as columns:
            lengths = columns["bytes"]
    else:
        lengths = rng.lognormal(5.6, 1, 50_000).astype(np.int32) + 1
    lengths = lengths[(lengths > 0) & (lengths <= seq_len)]
    packing = jb.packing.pack(lengths, seq_len)
    rows = rng.choice(packing.num_rows, size)
    slots = np.zeros((size, packing.max_segments), np.int64)
    for index, row in enumerate(rows.tolist()):
        row_slots = rng.permutation(packing.slots(row))
        slots[index, : len(row_slots)] = row_slots
    return row_segments(slots, seq_len)[0]


def measure(
    args: argparse.Namespace, seq_len: int, dtype: str, is_packed: bool
) -> dict[str, Any]:
    """Returns times, memory and errors of all methods for rows of one kind."""
    size = args.tokens // seq_len
    ids = packed_rows(size, seq_len)
    if not is_packed:
        ids = np.minimum(ids, 1)
    shape = (size, seq_len, args.heads, args.width // args.heads)
    inputs = (*random_heads(shape, dtype), jnp.asarray(ids, jnp.int32))
    methods = methods_for(inputs[0], not args.full, is_packed)
    runs: dict[str, Callable[[], Any]] = {}
    memory: dict[str, float] = {}
    for method, attend in methods.items():
        for kind, make in (("forward", lambda x: x), ("gradient", gradient)):
            compiled = jax.jit(make(attend)).lower(*inputs).compile()
            analysis = compiled.memory_analysis()
            assert analysis is not None
            memory[f"{method}, {kind}"] = analysis.temp_size_in_bytes / 1e6
            runs[f"{method}, {kind}"] = functools.partial(compiled, *inputs)
    return {
        "seq_len": seq_len,
        "batch_size": size,
        "dtype": dtype,
        "examples_per_row": float(ids.max(axis=1).mean()),
        "seconds": in_turn(runs, args.rounds),
        "megabytes": memory,
        "errors": {
            method: error(attend, ids, dtype, shape, not args.full)
            for method, attend in methods.items()
        },
    }


def random_heads(shape: tuple[int, ...], dtype: str) -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(3)]


def methods_for(
    query: jax.Array, is_causal: bool, is_packed: bool
) -> dict[str, Attend]:
    methods: dict[str, Attend] = {
        "mask": functools.partial(with_mask, is_causal=is_causal),
        "blocks": functools.partial(
            jb.segment_attention, is_causal=is_causal, implementation="blockwise"
        ),
    }
    kernel = segment._choose(query)
    if kernel != "blockwise":
        methods["kernel"] = functools.partial(
            jb.segment_attention, is_causal=is_causal, implementation=kernel
        )
    if jax.default_backend() == "gpu" and query.itemsize == 2 and not is_packed:
        methods["cudnn"] = functools.partial(with_lengths, is_causal=is_causal)
    return methods


def with_mask(
    query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, is_causal: bool
) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = jb.attention.attention_mask(ids, positions if is_causal else None)
    outputs = jax.nn.dot_product_attention(query, key, value, mask=mask)
    return jnp.where(ids[..., None, None] > 0, outputs, 0)


def with_lengths(
    query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, is_causal: bool
) -> jax.Array:
    lengths = jb.attention.sequence_lengths(ids)
    outputs = jax.nn.dot_product_attention(
        *(query, key, value),
        is_causal=is_causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return jnp.where(ids[..., None, None] > 0, outputs, 0)


def gradient(attend: Attend) -> Callable[..., Any]:
    """Returns the gradients of the sum of squares with respect to all three inputs."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array):
        return jnp.sum(jnp.square(attend(query, key, value, ids).astype(jnp.float32)))

    return jax.grad(loss, (0, 1, 2))


def error(
    attend: Attend, ids: np.ndarray, dtype: str, shape: tuple[int, ...], is_causal: bool
) -> float:
    """Returns the largest relative distance from a softmax in float64.

    One row and two heads are compared, in outputs and gradients. Rows are cut at a
    length for which the softmax fits into memory.
    """
    ids = ids[:1, :_MAX_CHECKED]
    inputs = random_heads((1, ids.shape[1], 2, shape[-1]), dtype)
    actual = jax.jit(lambda *x: (attend(*x), *gradient(attend)(*x)))(
        *inputs, jnp.asarray(ids, jnp.int32)
    )
    heads = [np.asarray(x, np.float64) for x in inputs]
    query, key, value = heads
    expected = softmax_in_float64(query, key, value, ids, is_causal)
    distances = []
    for a, b in zip(actual, expected, strict=True):
        a = np.asarray(a, np.float64)
        distances.append(np.linalg.norm(a - b) / np.linalg.norm(b))
    largest = float(max(distances))
    assert largest < _TOLERANCES[dtype], f"{attend}: {largest}"
    return largest


def softmax_in_float64(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    ids: np.ndarray,
    is_causal: bool,
) -> list[np.ndarray]:
    """Returns the output, and the gradients of its sum of squares, by numpy."""
    scale = query.shape[-1] ** -0.5
    is_seen = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, None]
    if is_causal:
        is_seen &= np.tri(ids.shape[1], dtype=bool)
    logits = scale * np.einsum("bqnh,bknh->bnqk", query, key)
    logits = np.where(is_seen[:, None], logits, -np.inf)
    # Padding has no key.
    most = np.maximum(logits.max(-1, keepdims=True), -1e300)
    weights = np.exp(logits - most)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    output = np.einsum("bnqk,bknh->bqnh", weights, value)
    slope = 2 * output
    of_weights = np.einsum("bqnh,bknh->bnqk", slope, value)
    mean = np.einsum("bqnh,bqnh->bnq", slope, output)
    of_logits = scale * weights * (of_weights - mean[..., None])
    return [
        output,
        np.einsum("bnqk,bknh->bqnh", of_logits, key),
        np.einsum("bnqk,bqnh->bknh", of_logits, query),
        np.einsum("bnqk,bqnh->bknh", weights, slope),
    ]


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


def show(args: argparse.Namespace, device: str, results: list[dict[str, Any]]) -> None:
    title = (
        f"{args.tokens:,} tokens, {args.heads} heads of {args.width // args.heads}, "
        f"{'both directions' if args.full else 'causal'}, {device}"
    )
    table = Table(box=box.SIMPLE, title=title)
    for name in ("rows", "examples", "dtype", "method"):
        table.add_column(name)
    for name in ("forward", "gradient", "/ blocks", "memory", "error"):
        table.add_column(name, justify="right")
    for x in results:
        first = [f"{x['batch_size']} x {x['seq_len']:,}"]
        first += [f"{x['examples_per_row']:.1f}", x["dtype"]]
        blocks = x["seconds"]["blocks, gradient"]
        for method, distance in x["errors"].items():
            seconds = x["seconds"][f"{method}, gradient"]
            table.add_row(
                *(*first, method),
                f"{1e3 * x['seconds'][f'{method}, forward']:,.3f} ms",
                f"{1e3 * seconds:,.3f} ms",
                f"{seconds / blocks:.3f}",
                f"{x['megabytes'][f'{method}, gradient']:,.0f} MB",
                f"{distance:.0e}",
            )
            first = ["", "", ""]
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
