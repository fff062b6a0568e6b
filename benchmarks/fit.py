"""Compares `fit_batch_sizes` with compiling every batch size.

    python benchmarks/fit.py
    python benchmarks/fit.py --devices 1 --models transformer recurrent --json

For every model, T, and number of CPU devices, the memory of all programs with 1 to 26
multiples of B is read from XLA. The limit is drawn at random so that 4 to 24 multiples
fit. Then `fit_batch_sizes` has to find the same B. The table shows its compilations;
bisection would need 6. The exit status is 1 if an answer differs, or takes more than 5.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxbucket as jb

WORDS, WIDTH, HEADS, LAYERS, MULTIPLE = 256, 64, 4, 2, 8
MOST, SEQ_LENS = 26, (64, 256)
Layer = Callable[[Any, jax.Array, jb.Batch], jax.Array]


def attend(params: Any, x: jax.Array, batch: jb.Batch, masked: bool) -> jax.Array:
    heads = (x @ params["qkv"]).reshape(*x.shape[:2], HEADS, -1)
    query, key, value = jnp.split(heads, 3, axis=-1)
    ids = batch.segment_ids["tokens"]
    if masked:
        mask = jb.attention.attention_mask(ids, batch.positions["tokens"])
        mixed = jax.nn.dot_product_attention(query, key, value, mask=mask)
    else:
        mixed = jb.segment_attention(query, key, value, ids, is_causal=True)
    return x + mixed.reshape(x.shape)


def feed_forward(params: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def block(params: Any, x: jax.Array, batch: jb.Batch, masked: bool = False) -> Any:
    return feed_forward(params, attend(params, x, batch, masked))


def convolve(params: Any, x: jax.Array, batch: jb.Batch) -> jax.Array:
    kernel = params["qkv"].reshape(3, WIDTH, WIDTH)
    dimensions = ("NWC", "WIO", "NWC")
    mixed = jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=dimensions
    )
    return feed_forward(params, x + mixed)


def recur(params: Any, x: jax.Array, batch: jb.Batch) -> jax.Array:
    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(x + carry @ params["up"][:, :WIDTH])
        return carry, carry

    _, outputs = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return x + outputs.swapaxes(0, 1)


MODELS: dict[str, tuple[Layer, Any]] = {
    "transformer": (block, jnp.float32),
    "with mask": (functools.partial(block, masked=True), jnp.float32),
    "with remat": (jax.checkpoint(block), jnp.float32),
    "convolutional": (convolve, jnp.float32),
    "recurrent": (recur, jnp.float32),
    "bfloat16": (block, jnp.bfloat16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare with exhaustive search.")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    cases = [(m, t, n) for m in args.models for t in SEQ_LENS for n in args.devices]
    rows = [
        compare(*case, rng)
        for case in track(cases, "Fitting", transient=True, disable=args.json)
    ]
    if args.json:
        print(json.dumps(rows))
    else:
        show(rows)
    sys.exit(any(x["found"] != x["expected"] or x["programs"] > 5 for x in rows))


def compare(
    model: str, seq_len: int, num_devices: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Returns the answers of both searches for one T."""
    recipe = make_recipe(*MODELS[model], jax.devices()[:num_devices])
    needed = [
        peak_bytes(recipe, count * MULTIPLE, seq_len) for count in range(1, MOST + 1)
    ]
    fitting = int(rng.integers(4, 25))
    limit = int(rng.integers(needed[fitting - 1], needed[fitting]))
    expected = max(i + 1 for i, size in enumerate(needed) if size <= limit)
    fitted = jb.compile.fit_batch_sizes(
        recipe,
        [seq_len],
        batch_size_multiple=MULTIPLE,
        memory_bytes=limit,
        progress=False,
    )
    (size,) = fitted.sizes
    return {
        "model": model,
        "T": seq_len,
        "devices": num_devices,
        "limit": limit,
        "expected": expected * MULTIPLE,
        "found": size.batch_size,
        "programs": size.num_compiled,
    }


def peak_bytes(recipe: Any, batch_size: int, seq_len: int) -> int:
    plan = jb.BucketPlan.from_shapes([(batch_size, seq_len)])
    step_fn, state, specs = recipe(plan)
    steps = jb.compile_steps(step_fn, state, specs, progress=False)
    return steps.report.programs[0].peak_bytes or 0


def make_recipe(layer: Layer, dtype: Any, devices: Any) -> Callable[..., Any]:
    def forward(params: Any, batch: jb.Batch) -> jax.Array:
        x = params["words"][batch.features["tokens"]].astype(dtype)
        for number in range(LAYERS):
            of_layer = {name: value[number] for name, value in params["layers"].items()}
            x = layer(of_layer, x, batch)
        return x @ params["words"].T.astype(dtype)

    def loss_fn(params: Any, batch: jb.Batch, keys: Any) -> tuple[Any, Any]:
        cast = jax.tree.map(lambda p: p.astype(dtype), params["layers"])
        logits = forward({**params, "layers": cast}, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch.features["tokens"]
        )
        return jnp.sum(losses * batch.mask), jnp.sum(batch.mask)

    def recipe(plan: jb.BucketPlan) -> Any:
        mesh, tx = jb.data_mesh(devices), optax.adam(1e-3)
        shapes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH)}
        shapes["down"] = (4 * WIDTH, WIDTH)
        params = {
            "words": jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32),
            "layers": {
                name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32)
                for name, shape in shapes.items()
            },
        }
        state = jb.create_state(params, tx, mesh)
        example = {"tokens": np.zeros(1, np.int32)}
        specs = jb.sharding.batch_specs(plan, example, mesh)
        return jb.make_train_step(loss_fn, tx, mesh), state, specs

    return recipe


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(*(f"{x:,}" if isinstance(x, int) else x for x in row.values()))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
