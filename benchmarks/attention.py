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
medians. Memory is the size of temporary arrays, as reported by the compiler. Outputs
and gradients of one row and two heads of the same T are compared with a softmax in
float64, for blocks and kernels also with a window, a cap and a single key head; the
table has the largest relative distance, and the exit status is 1 if one is too large.
"""

import argparse
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
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
_TOLERANCES = {"float32": 3e-3, "bfloat16": 3e-2}
# Also compared, with two queries for each key head.
_SPECIAL = {"local_window_size": (100, 7), "logits_soft_cap": 3.0}

Attend = Callable[..., jax.Array]


def main() -> int:
    args = parse_arguments()
    device = jax.devices()[0].device_kind
    results = []
    console = Console(width=120, quiet=args.json)
    console.print(
        f"{args.tokens:,} tokens, {args.heads} heads of {args.width // args.heads}, "
        f"{'both directions' if args.full else 'causal'}, {device}"
    )
    for dtype in args.dtypes:
        for seq_len in args.seq_lens:
            for is_packed in (True, False):
                results.append(measure(args, seq_len, dtype, is_packed))
                # At once, in case that a later one fails.
                console.print(table([results[-1]]))
    if args.json:
        about = {"jax": jax.__version__, "device": device, "tokens": args.tokens}
        print(json.dumps({**about, "results": results}))
    return int(any(is_off(x, y) for x in results for y in x["errors"].values()))


def is_off(result: dict[str, Any], error: float) -> bool:
    return not error < _TOLERANCES[result["dtype"]]


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
        "errors": errors(methods, ids, inputs[0], not args.full),
    }


def random_heads(shape: tuple[int, ...], dtype: Any) -> list[jax.Array]:
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
        outputs = attend(query, key, value, ids)
        return jnp.sum(jnp.square(outputs.astype(jnp.result_type(outputs, "float32"))))

    return jax.grad(loss, (0, 1, 2))


def errors(
    methods: dict[str, Attend], ids: np.ndarray, like: jax.Array, is_causal: bool
) -> dict[str, float]:
    """Returns the largest relative distance of each method from a softmax in float64.

    One row and two heads are compared, in outputs and gradients.
    """
    shape = (1, like.shape[1], 2, like.shape[3])
    query, key, value = random_heads(shape, like.dtype)
    grouped = (query, key[:, :, :1], value[:, :, :1])
    # `segment_attention` has more options.
    special = {
        method: functools.partial(attend, **_SPECIAL)
        for method, attend in methods.items()
        if getattr(attend, "func", None) is jb.segment_attention
    }
    result = distances(methods, (query, key, value), ids[:1], is_causal)
    for method, x in distances(special, grouped, ids[:1], is_causal, _SPECIAL).items():
        result[method] = max(result[method], x)
    return result


def distances(
    methods: dict[str, Attend],
    heads: tuple[jax.Array, ...],
    ids: np.ndarray,
    is_causal: bool,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, float]:
    """Returns the largest relative distance of the output and the gradients."""
    with jax.enable_x64(True):
        exact = functools.partial(softmax, is_causal=is_causal, **options)
        wide = [x.astype(jnp.float64) for x in heads]
        expected = jax.device_get(output_and_gradients(exact, wide, ids))
    found = {}
    for method, attend in methods.items():
        actual = output_and_gradients(attend, heads, ids)
        found[method] = max(
            float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
            for a, b in zip(actual, expected, strict=True)
        )
    return found


def output_and_gradients(
    attend: Attend, heads: Sequence[jax.Array], ids: np.ndarray
) -> tuple[jax.Array, ...]:
    run = jax.jit(lambda *x: (attend(*x), *gradient(attend)(*x)))
    return run(*heads, jnp.asarray(ids, jnp.int32))


def softmax(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array,
    is_causal: bool,
    local_window_size: tuple[int, int] = (2**30, 2**30),
    logits_soft_cap: float | None = None,
) -> jax.Array:
    """Returns attention by its definition, from all pairs."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    logits = jnp.einsum("bqnh,bknh->bnqk", query, key) / query.shape[-1] ** 0.5
    if logits_soft_cap:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    places = jnp.arange(ids.shape[1])
    past = places[:, None] - places
    before, after = local_window_size
    is_seen = (past <= before) & (past >= -(0 if is_causal else after))
    is_seen = is_seen & (ids[:, :, None] == ids[:, None])
    weights = jax.nn.softmax(jnp.where(is_seen[:, None], logits, -1e300))
    output = jnp.einsum("bnqk,bknh->bqnh", weights, value)
    return jnp.where(ids[..., None, None] > 0, output, 0)


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


def table(results: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE)
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
                f"{distance:.0e}{' OFF' if is_off(x, distance) else ''}",
            )
            first = ["", "", ""]
    return table


if __name__ == "__main__":
    sys.exit(main())
