"""Times how a training job gets to its first step, in several ways.

    python benchmarks/compile_ahead.py
    python benchmarks/compile_ahead.py --width 256 --layers 4 --rounds 5 --json

The model is that of `examples/train_lm.py`. Every way runs in its own process, without
jax's compilation cache, and the ways take turns:

    in turn         all buckets, traced and compiled one after another
    overlapped      one bucket is compiled while the next one is traced
    two at a time   two buckets are compiled while the next one is traced
    one bucket      a plan with a single bucket
    opening         all buckets, but steps may start on the first, compiled alone
    one, none       all buckets loaded from files; one or none is traced to compare
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
_WAYS = ("in turn", *_PARALLEL, "one bucket", "opening", "one", "none")

# Times the way to the first step, without imports and the model.
_START = """
import json, sys, time
import numpy as np
from flax import nnx
import optax
import jaxbucket as jb
import recipe
from transformer import Transformer

way, folder, width, layers, shapes = json.loads(sys.argv[1])
plan = jb.BucketPlan.from_shapes([tuple(shape) for shape in shapes])
mesh = jb.data_mesh()
tx = optax.chain(optax.adamw(1e-3), jb.scale_by_batch_size(base_examples=32))
model = Transformer(width, layers, 0.0, nnx.Rngs(0))
state = jb.create_state(model, tx, mesh)
step = jb.make_train_step(recipe.loss_fn, tx, mesh)
specs = jb.sharding.batch_specs(plan, {"tokens": np.zeros(1, np.uint8)}, mesh)
first = plan.buckets[0]
if way == "one bucket":
    specs = {first: specs[first]}
options = {
    "overlapped": {"workers": 1},
    "two at a time": {"workers": 2},
    "opening": {"opening": first},
    "one": {"executables": jb.ExecutableCache(folder, verify="one", key="benchmark")},
    "none": {"executables": jb.ExecutableCache(folder, verify="none", key="benchmark")},
}
cpu, start = time.process_time(), time.perf_counter()
with jb.compile.count_compiles() as compiles:
    if way == "in turn":
        for spec in specs.values():
            step.lower(state, spec).compile()
    else:
        steps = jb.compile_steps(step, state, specs, **options.get(way, {}))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    if way == "opening":
        steps.wait()
print(json.dumps({
    "seconds": seconds,
    "cpu_seconds": cpu,
    "all_seconds": time.perf_counter() - start,
    "compiled": compiles["train_step"],
}))
"""


def main() -> None:
    args = parse_arguments()
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory() as folder:
        # Writes the files that the last two ways load.
        start("one", folder, args)
        for number in range(args.rounds):
            for way in _WAYS:
                found[way].append(start(way, folder, args))
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    numbers = summarize(found)
    if args.json:
        print(json.dumps(numbers, indent=2))
    else:
        show(numbers, args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time several ways to a first step.")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def start(way: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the times of one process."""
    examples = pathlib.Path(__file__).parents[1] / "examples"
    words = json.dumps([way, folder, args.width, args.layers, _SHAPES])
    environment = {
        name: value for name, value in os.environ.items() if "CACHE" not in name
    }
    run = subprocess.run(
        [sys.executable, "-c", _START, words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=examples,
        env=environment,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def summarize(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns the medians of every way, and their ratios."""
    medians = {
        way: {name: float(np.median([run[name] for run in runs])) for name in runs[0]}
        for way, runs in found.items()
    }

    def ratio(above: str, below: str) -> float:
        return medians[above]["seconds"] / medians[below]["seconds"]

    best = min(_PARALLEL, key=lambda way: medians[way]["seconds"])
    return {
        "shapes": _SHAPES,
        "medians": medians,
        "overlapped, times faster than in turn": ratio("in turn", "overlapped"),
        "two at a time, times faster than in turn": ratio("in turn", "two at a time"),
        f"one traced, times faster than {best}": ratio(best, "one"),
        f"none traced, times faster than {best}": ratio(best, "none"),
        "opening, times as long as one bucket": ratio("opening", "one bucket"),
        "runs": found,
    }


def show(numbers: dict[str, Any], args: argparse.Namespace) -> None:
    console = Console(width=100, highlight=False)
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"{len(_SHAPES)} buckets, a transformer of width {args.width} with "
        f"{args.layers} layers; medians of {args.rounds}.",
        caption_justify="left",
    )
    table.add_column("way", no_wrap=True)
    for name in ("first step may begin", "CPU s until then", "all ready", "compiled"):
        table.add_column(name, justify="right")
    for way, row in numbers["medians"].items():
        table.add_row(
            way,
            f"{row['seconds']:.2f} s",
            f"{row['cpu_seconds']:.2f}",
            f"{row['all_seconds']:.2f} s",
            f"{row['compiled']:.0f}",
        )
    console.print(table)
    for name, value in numbers.items():
        if isinstance(value, float):
            console.print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
