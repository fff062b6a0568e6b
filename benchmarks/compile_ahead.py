"""Times several methods of starting a training job, up to its first step.

    python benchmarks/compile_ahead.py
    python benchmarks/compile_ahead.py --width 256 --layers 4 --rounds 5 --json

The benchmark uses the model of `examples/train_lm.py`. Every method runs in its own
process, and the methods run in turn:

    in turn         all buckets are traced and compiled sequentially
    overlapped      one bucket is compiled while the next one is traced (one worker)
    two at a time   two buckets are compiled while the next one is traced (two workers)
    one bucket      a plan with a single bucket
    files           all buckets are loaded with `executables=`
    jax's cache     all buckets are loaded from jax's own compilation cache
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

_SHAPES = [(8192 // t // 8 * 8, t) for t in (32, 64, 128, 256, 384, 512, 768, 1024)]
_PARALLEL = ("overlapped", "two at a time")
_LOADING = ("files", "jax's cache")
_METHODS = ("in turn", *_PARALLEL, "one bucket", *_LOADING)

# Times the start of a job up to the first step, without imports and model creation.
_START = """
import json, sys, time
import numpy as np
from flax import nnx
import optax
import jaxbucket as jb
import recipe
from transformer import Transformer

method, folder, width, layers, shapes = json.loads(sys.argv[1])
plan = jb.BucketPlan.from_shapes([tuple(shape) for shape in shapes])
mesh = jb.data_mesh()
tx = optax.chain(optax.adamw(1e-3), jb.scale_by_batch_size(base_examples=32))
model = Transformer(width, layers, 0.0, nnx.Rngs(0))
state = jb.create_state(model, tx, mesh)
step = jb.make_train_step(recipe.loss_fn, tx, mesh)
specs = jb.sharding.batch_specs(plan, {"tokens": np.zeros(1, np.uint8)}, mesh)
first = plan.buckets[0]
if method == "one bucket":
    specs = {first: specs[first]}
options = {
    "overlapped": {"workers": 1},
    "two at a time": {"workers": 2},
    "files": {"executables": folder},
}
if method == "jax's cache":
    jb.compile.use_xla_cache(folder + "/xla")
cpu, start = time.process_time(), time.perf_counter()
with jb.compile.count_compiles() as compiles:
    if method == "in turn":
        for spec in specs.values():
            step.lower(state, spec).compile()
    else:
        steps = jb.compile_steps(step, state, specs, **options.get(method, {}))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({
    "seconds": seconds,
    "cpu_seconds": cpu,
    "compiled": compiles["train_step"],
}))
"""


def main() -> None:
    args = parse_arguments()
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in _METHODS}
    with tempfile.TemporaryDirectory() as folder:
        for method in _LOADING:
            # Writes the files.
            start(method, folder, args)
        for number in range(args.rounds):
            for method in _METHODS:
                results[method].append(start(method, folder, args))
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    numbers = summarize(results)
    if args.json:
        print(json.dumps(numbers, indent=2))
    else:
        show(numbers, args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time several methods of starting a job."
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def start(method: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a process, and returns its times."""
    examples = pathlib.Path(__file__).parents[1] / "examples"
    task = json.dumps([method, folder, args.width, args.layers, _SHAPES])
    environment = {
        name: value for name, value in os.environ.items() if "CACHE" not in name
    }
    run = subprocess.run(
        [sys.executable, "-c", _START, task],
        stdout=subprocess.PIPE,
        text=True,
        cwd=examples,
        env=environment,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def summarize(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns the medians of every method, and their ratios."""
    medians = {
        method: {
            name: float(np.median([run[name] for run in runs])) for name in runs[0]
        }
        for method, runs in results.items()
    }

    def ratio(above: str, below: str) -> float:
        return medians[above]["seconds"] / medians[below]["seconds"]

    best = min(_PARALLEL, key=lambda method: medians[method]["seconds"])
    return {
        "shapes": _SHAPES,
        "medians": medians,
        "overlapped, times faster than in turn": ratio("in turn", "overlapped"),
        "two at a time, times faster than in turn": ratio("in turn", "two at a time"),
        f"files, times faster than {best}": ratio(best, "files"),
        f"jax's cache, times faster than {best}": ratio(best, "jax's cache"),
        "runs": results,
    }


def show(numbers: dict[str, Any], args: argparse.Namespace) -> None:
    console = Console(width=100, highlight=False)
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"{len(_SHAPES)} buckets, a transformer of width {args.width} with "
        f"{args.layers} layers; medians of {args.rounds} rounds.",
        caption_justify="left",
    )
    table.add_column("method", no_wrap=True)
    for name in ("seconds", "CPU seconds", "compilations"):
        table.add_column(name, justify="right")
    for method, row in numbers["medians"].items():
        table.add_row(
            method,
            f"{row['seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['compiled']:.0f}",
        )
    console.print(table)
    for name, value in numbers.items():
        if isinstance(value, float):
            console.print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
