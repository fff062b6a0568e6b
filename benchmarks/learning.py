"""Trains the model of the example with several ways to batch, at equal real tokens.

    python benchmarks/learning.py
    python benchmarks/learning.py --steps 100 300 1000 3000 --results runs.jsonl
    python benchmarks/learning.py --model conv --results conv.jsonl
    python benchmarks/learning.py --results runs.jsonl --show --plot learning.png
    python benchmarks/learning.py --bias 200 --plot bias.png

All ways update the parameters with nearly the same mean number of real tokens, and
their learning rates follow the number of real tokens so far. They differ in which
lengths an update sees:

    packed                      rows of several examples, so updates have many lengths
    packed with mixing          rows of `plan_packing`
    2 packed with mixing        two micro-batches of such rows in one update
    padded                      random examples, all padded to the longest length
    shuffled                    batches of one bucket each, in a random order
    spread                      the same, with each bucket spread evenly
    2 spread, 4 spread          micro-batches of different buckets in one update
    2 shuffled                  micro-batches of random buckets in one update

A comma and one of these names, as in `--ways packed "spread, no clipping"`, change how
parameters are updated:

    sqrt of examples            learning rates multiplied by the square root of the
                                number of examples, with the same mean over tokens
    sqrt of mean examples       the same, relative to the mean number of examples of an
                                update, so that learning rates are lower on average
    sqrt of tokens              by the square root of the number of real tokens
    no clipping                 gradients are not clipped
    clipping by bucket          clipped relative to the mean norm of the bucket, with
                                one batch in each update
    long warm-up                a warm-up of four times as many updates to the same
                                peak, so later learning rates are twice as high
    slow second moments         Adam averages squares of ten times as many gradients

`--model conv` trains a convolutional model that looks at no byte of another example, so
that its rows can be packed, too. Ordinary convolutions cross the borders of examples:
for these, compare the other ways with "padded". Finished runs are added to `--results`
and are not repeated. `--bias` trains for some steps with the order "spread", and then
measures how much the gradients of buckets differ; or, with `--bias 300 --ways packed`,
the noise of packed rows.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxbucket as jb

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
sys.path.append(str(pathlib.Path(__file__).parent / "gradients"))
import documents
import recipe
from bias_plot import plot_bias
from bias_report import BucketBias
from bucket_bias import bucket_bias
from learning_report import draw, show
from learning_ways import WAYS, BatchWays, check_ways, optimizer, update_options
from transformer import VOCABULARY, Transformer

# The options that all runs in a file share.
OPTIONS = (
    *("data", "model", "steps", "held_out", "max_len", "max_tokens", "num_buckets"),
    *("width", "layers", "lr", "warmup_steps", "clip", "b1", "b2"),
)


class Conv(nnx.Module):
    """Bytes `[B, T]` -> logits, by causal convolutions with growing dilation."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.taps = nnx.List(
            nnx.List(nnx.Linear(width, width, rngs=rngs) for _ in range(4))
            for _ in range(layers)
        )
        self.norms = nnx.List(nnx.RMSNorm(width, rngs=rngs) for _ in range(layers))
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        keys: jax.Array | None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        x = self.embed(inputs)
        for layer, (taps, norm) in enumerate(zip(self.taps, self.norms, strict=True)):
            y = norm(x)
            distances = [number * 4**layer for number in range(4)]
            x = x + nnx.gelu(
                sum(
                    tap(earlier(y, distance, positions))
                    for tap, distance in zip(taps, distances, strict=True)
                )
            )
        return self.head(x)


def earlier(x: jax.Array, distance: int, positions: jax.Array) -> jax.Array:
    """Returns `[B, T, D]` from some positions earlier, 0 before an example starts."""
    if distance == 0:
        return x
    moved = jnp.pad(x, ((0, 0), (distance, 0), (0, 0)))[:, : x.shape[1]]
    return jnp.where((positions >= distance)[..., None], moved, 0)


class Training:
    """The documents, model, and optimizer that all ways to batch share."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        split = documents.load(args.data, max_len=args.max_len)
        self.source = split.train
        self.held_out = documents.Examples(split.held_out[: args.held_out])
        self.lengths = jb.measure_lengths(self.source)
        self.mesh = jb.data_mesh()
        self.ways = BatchWays(args, self.lengths)
        self.tokens_per_step = self.ways.tokens_per_step
        plan = self.ways.plan
        held_out = jb.measure_lengths(self.held_out)
        self._to_evaluate = list(
            jb.sharding.prefetch_to_mesh(
                jb.batch_dataset(
                    self.held_out, jb.BatchSchedule(plan, held_out, order="source")
                ),
                self.mesh,
            )
        )
        specs = jb.sharding.batch_specs(plan, self.source[0], self.mesh)
        evaluate = jb.make_eval_step(recipe.loss_fn, self.mesh)
        state = without_optimizer(self.state(0, optimizer(args, self.ways)))
        self._evaluate = jb.compile_steps(evaluate, state, specs)

    def state(self, seed: int, tx: optax.GradientTransformation) -> jb.train.TrainState:
        args, rngs = self.args, nnx.Rngs(seed)
        if args.model == "conv":
            model = Conv(args.width, args.layers, rngs)
        else:
            model = Transformer(args.width, args.layers, 0.0, rngs)
        return jb.create_state(model, tx, self.mesh)

    def held_out_loss(self, state: jb.train.TrainState) -> float:
        """Returns bits per byte."""
        state = without_optimizer(state)
        return recipe.bits_per_byte(
            [self._evaluate(state, batch) for batch in self._to_evaluate]
        )[0]

    def runs(self, way: str, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Trains once per seed, with steps that are compiled only once."""
        make_schedule = self.ways[way.partition(", ")[0]]
        schedule = make_schedule(seed=0)
        options = update_options(way, self.args, self.ways)
        tx = optimizer(self.args, self.ways, **options)
        step_fn = jb.make_train_step(
            recipe.loss_fn, tx, self.mesh, accumulate=schedule.accumulate > 1
        )
        specs = jb.MeshLoader(self.source, schedule, self.mesh).specs
        steps = jb.compile_steps(step_fn, self.state(0, tx), specs)
        for seed in seeds:
            state = self.state(seed, tx)
            curve = list(self._curve(make_schedule(seed=seed), state, steps))
            options = {name: vars(self.args)[name] for name in OPTIONS}
            yield {"way": way, "seed": seed, "options": options, "curve": curve}

    def _curve(
        self, schedule: jb.BatchSchedule, state: jb.train.TrainState, steps: Any
    ) -> Iterator[dict[str, Any]]:
        """Trains once, and yields the held-out loss after given numbers of tokens."""
        points = [round(n * self.tokens_per_step) for n in self.args.steps]
        tokens, seconds = 0, 0.0
        dataset = jb.batch_dataset(self.source, schedule, num_steps=math.inf)
        start = time.perf_counter()
        for batch in jb.sharding.prefetch_to_mesh(dataset, self.mesh):
            state, metrics = steps(state, batch)
            tokens += int(metrics["num_tokens"])
            if tokens < points[0]:
                continue
            seconds += time.perf_counter() - start
            yield {
                "step": int(state.step),
                "tokens": tokens,
                "bits_per_byte": self.held_out_loss(state),
                "seconds": seconds,
            }
            if not (points := points[1:]):
                return
            start = time.perf_counter()

    def bias(self, num_steps: int, way: str) -> BucketBias:
        """Measures the gradients of a way to batch after some steps of "spread"."""
        schedule, tx = self.ways["spread"](seed=0), optimizer(self.args, self.ways)
        loader = functools.partial(jb.MeshLoader, self.source, schedule, self.mesh)
        step_fn = jb.make_train_step(recipe.loss_fn, tx, self.mesh)
        state, batches = self.state(0, tx), loader(num_steps=num_steps)
        steps = jb.compile_steps(step_fn, state, batches.specs)
        for batch in batches:
            state, _ = steps(state, batch)
        measured = self.ways[way](seed=0)
        later = jb.MeshLoader(self.source, measured, self.mesh, start_step=num_steps)
        return bucket_bias(recipe.loss_fn, state, later)


def without_optimizer(state: jb.train.TrainState) -> jb.train.TrainState:
    """Returns the state for evaluation, which is the same for all optimizers."""
    return dataclasses.replace(state, opt_state=())


def main() -> None:
    args = parse_arguments()
    if args.bias is not None:
        bias = Training(args).bias(args.bias, (args.ways or ["spread"])[0])
        print(bias)
        if args.plot:
            plot_bias(bias).savefig(args.plot, dpi=120)
        return
    path = pathlib.Path(args.results)
    done = [json.loads(line) for line in path.open()] if path.exists() else []
    if not args.show:
        train_missing(args, done, path)
    if not done:
        sys.exit(f"There are no runs in {path}.")
    show(done)
    if args.plot:
        draw(done, args.plot)


def train_missing(
    args: argparse.Namespace, done: list[dict[str, Any]], path: pathlib.Path
) -> None:
    """Adds the runs that are not done yet to the list and to the file."""
    for name in OPTIONS if done else ():
        earlier, value = done[0]["options"][name], vars(args)[name]
        if earlier != value:
            sys.exit(f"The runs in {path} have {name}={earlier!r}, not {value!r}.")
    training = Training(args)
    for way in args.ways or WAYS:
        seeds = {run["seed"] for run in done if run["way"] == way}
        missing = [seed for seed in range(args.seeds) if seed not in seeds]
        for run in training.runs(way, missing) if missing else ():
            done.append(run)
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            last = run["curve"][-1]
            print(way, run["seed"], last, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare what ways to batch learn from equal numbers of tokens: "
        "packed, padded, shuffled, spread, ... (see the file's docstring).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--data", help="a .jsonl file, a .txt file or a folder")
    option("--results", default="learning.jsonl", help="file of finished runs")
    option("--show", action="store_true", help="only show finished runs")
    option("--plot", help="file for a plot of what is shown")
    option("--bias", type=int, help="only measure gradients, after this many steps")
    option("--ways", nargs="+", help="ways to train, or the way that --bias measures")
    option("--model", choices=("transformer", "conv"), default="transformer")
    option("--steps", type=int, nargs="+", default=[100, 300, 1000], help="evaluations")
    option("--seeds", type=int, default=5)
    option("--held-out", type=int, default=200, help="documents to evaluate on")
    option("--max-len", type=int, default=2048)
    option("--max-tokens", type=int, default=8192)
    option("--num-buckets", type=int, default=8)
    option("--width", type=int, default=64)
    option("--layers", type=int, default=2)
    option("--lr", type=float, default=8e-3)
    option("--warmup-steps", type=int, default=35)
    option("--clip", type=float, default=1.0)
    option("--b1", type=float, default=0.9)
    option("--b2", type=float, default=0.98)
    args = parser.parse_args()
    args.steps = sorted(args.steps)
    check_ways(args.ways or ())
    if args.steps[0] < 1:
        parser.error(f"argument --steps: {args.steps[0]} is not positive")
    for name in ("seeds", "held_out"):
        if vars(args)[name] < 1:
            option_name = f"--{name.replace('_', '-')}"
            parser.error(f"argument {option_name}: {vars(args)[name]} is not positive")
    if args.bias is not None and args.bias < 0:
        parser.error(f"argument --bias: {args.bias} is negative")
    if args.bias is not None and args.ways and (args.ways[1:] or "," in args.ways[0]):
        parser.error("argument --bias: pass one way to batch to --ways")
    return args


if __name__ == "__main__":
    main()
