"""Trains the model of the example with several ways to batch, at equal real tokens.

    python benchmarks/learning.py
    python benchmarks/learning.py --steps 100 300 1000 3000 --results runs.jsonl
    python benchmarks/learning.py --model conv --results conv.jsonl
    python benchmarks/learning.py --results runs.jsonl --show --plot learning.png
    python benchmarks/learning.py --bias 200 --plot bias.png

All ways update the parameters with nearly the same mean number of real tokens, and
their learning rates follow the number of real tokens so far. They differ in which
lengths an update sees:

    packed                      rows of several examples, so updates have all lengths
    padded                      random examples, all padded to the longest length
    shuffled                    batches of one bucket each, in a random order
    spread                      the same, with each bucket spread evenly
    2 spread, 4 spread          micro-batches of different buckets in one update
    shuffled, sqrt of examples  learning rates multiplied by the square root of the
                                number of examples, with the same mean over tokens
    spread, sqrt of tokens      by the square root of the number of real tokens

`--model conv` trains a convolutional model that looks at no byte of another example, so
that its rows can be packed, too. Ordinary convolutions cross the borders of examples:
for these, compare the other ways with "padded". Finished runs are added to `--results`
and are not repeated. `--bias` trains for some steps, and then measures how much the
gradients of buckets differ.
"""

import argparse
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
import recipe
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
        self.plan = self._plan(args.max_tokens)
        epoch = jb.report(self.plan, self.lengths)
        self.tokens_per_step = epoch.real_tokens / epoch.steps_per_epoch
        self.examples_per_step = epoch.examples / epoch.steps_per_epoch
        self.base_examples = self._base_examples()
        held_out = jb.measure_lengths(self.held_out)
        self._to_evaluate = list(
            jb.sharding.prefetch_to_mesh(
                jb.batch_dataset(
                    self.held_out, jb.BatchSchedule(self.plan, held_out, order="source")
                ),
                self.mesh,
            )
        )
        specs = jb.sharding.batch_specs(self.plan, self.source[0], self.mesh)
        evaluate = jb.make_eval_step(recipe.loss_fn, self.mesh)
        state = self.state(0, self.optimizer(""))
        self._evaluate = jb.compile_steps(evaluate, state, specs)

    def _plan(self, max_tokens: int, **options: Any) -> jb.BucketPlan:
        options = {"num_buckets": self.args.num_buckets, **options}
        return jb.plan_buckets(
            self.lengths,
            max_tokens=max_tokens,
            seq_len_multiple=32,
            max_seq_len=self.args.max_len,
            **options,
        )

    def _base_examples(self) -> float:
        """Returns the base for which the mean factor of all tokens is 1."""
        schedule = jb.BatchSchedule(self.plan, self.lengths)
        batches = [batch.rows[batch.rows >= 0] for batch in schedule]
        tokens = np.array([self.lengths[rows].sum() for rows in batches])
        sizes = np.array([len(rows) for rows in batches])
        return float(tokens @ np.sqrt(sizes) / tokens.sum()) ** 2

    def optimizer(self, way: str) -> optax.GradientTransformation:
        args = self.args
        warmup = round(args.warmup_steps * self.tokens_per_step)
        curve = jb.optim.warmup_inverse_sqrt_schedule(args.lr, warmup)
        rate = jb.optim.schedule_by_work(curve, "tokens")
        base = {"base_tokens": self.tokens_per_step}
        if way.endswith("sqrt of examples"):
            base = {"base_examples": self.base_examples}
        rule = "sqrt" if "sqrt" in way else "none"
        rate = jb.scale_schedule(rate, **base, rule=rule)
        adam = optax.inject_hyperparams(optax.adamw)
        return optax.chain(
            optax.clip_by_global_norm(args.clip),
            adam(learning_rate=rate, b1=args.b1, b2=args.b2, weight_decay=0.05),
        )

    def state(self, seed: int, tx: optax.GradientTransformation) -> jb.train.TrainState:
        args, rngs = self.args, nnx.Rngs(seed)
        if args.model == "conv":
            model = Conv(args.width, args.layers, rngs)
        else:
            model = Transformer(args.width, args.layers, 0.0, rngs)
        return jb.create_state(model, tx, self.mesh)

    def held_out_loss(self, state: jb.train.TrainState) -> float:
        """Returns bits per byte."""
        return recipe.bits_per_byte(
            [self._evaluate(state, batch) for batch in self._to_evaluate]
        )[0]

    def ways(self) -> dict[str, Callable[[], Any]]:
        """Returns functions that make `seed -> BatchSchedule` for each way to batch."""
        bucketed = self._bucketed
        return {
            "packed": self._packed,
            "padded": self._padded,
            "shuffled, sqrt of examples": functools.partial(bucketed, 1, "shuffled"),
            "shuffled": functools.partial(bucketed, 1, "shuffled"),
            "spread": functools.partial(bucketed, 1, "spread"),
            "spread, sqrt of tokens": functools.partial(bucketed, 1, "spread"),
            "2 shuffled": functools.partial(bucketed, 2, "shuffled"),
            "2 spread": functools.partial(bucketed, 2, "spread"),
            "4 spread": functools.partial(bucketed, 4, "spread"),
        }

    def _packed(self) -> Any:
        """Rows that are as long as it takes to have the same tokens per update."""
        num_rows = max(1, int(self.tokens_per_step) // self.args.max_len)
        seq_len = round(self.tokens_per_step / num_rows / 32) * 32
        packing = jb.packing.pack(self.lengths, seq_len)
        plan = jb.BucketPlan.from_shapes([(num_rows, seq_len)])
        return functools.partial(jb.BatchSchedule, plan, self.lengths, packing=packing)

    def _padded(self) -> Any:
        size = max(1, round(self.examples_per_step))
        plan = jb.BucketPlan.from_shapes([(size, self.args.max_len)])
        return functools.partial(jb.BatchSchedule, plan, self.lengths)

    def _bucketed(self, count: int, order: str) -> Any:
        def micro_batches_of(max_tokens: int) -> Any:
            plan = self._plan(max_tokens)
            options = {"order": order, "accumulate": count, "group": "mixed"}
            return functools.partial(jb.BatchSchedule, plan, self.lengths, **options)

        if count == 1:
            return micro_batches_of(self.args.max_tokens)
        return self._closest(micro_batches_of, self.args.max_tokens // count)

    def _closest(self, make: Callable[[int], Any], max_tokens: int) -> Any:
        """Returns schedules whose updates have the mean number of tokens, or nearly."""

        def difference(schedules: Any) -> float:
            return abs(self.lengths.sum() / len(schedules()) - self.tokens_per_step)

        shares = np.linspace(1, 1.3, 31)
        return min((make(round(x * max_tokens)) for x in shares), key=difference)

    def runs(self, way: str, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Trains once per seed, with steps that are compiled only once."""
        make_schedule = self.ways()[way]()
        schedule = make_schedule(seed=0)
        tx = self.optimizer(way)
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

    def bias(self, num_steps: int) -> jb.train.BucketBias:
        """Measures the gradients of buckets after some steps."""
        schedule, tx = self.ways()["spread"]()(seed=0), self.optimizer("spread")
        loader = functools.partial(jb.MeshLoader, self.source, schedule, self.mesh)
        step_fn = jb.make_train_step(recipe.loss_fn, tx, self.mesh)
        state, batches = self.state(0, tx), loader(num_steps=num_steps)
        steps = jb.compile_steps(step_fn, state, batches.specs)
        for batch in batches:
            state, _ = steps(state, batch)
        later = loader(start_step=num_steps)
        return jb.train.bucket_bias(recipe.loss_fn, state, later)


def main() -> None:
    args = parse_arguments()
    if args.bias is not None:
        bias = Training(args).bias(args.bias)
        print(bias)
        if args.plot:
            jb.train.plot_bias(bias).savefig(args.plot, dpi=120)
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
    if unknown := set(args.ways or ()) - training.ways().keys():
        sys.exit(f"Unknown ways: {', '.join(unknown)}. See the docstring of this file.")
    for way in args.ways or training.ways():
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
    option("--ways", nargs="*", help="ways to train; by default, all")
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
    return args


def by_way(runs: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns way -> `[seeds, points]`: bits per byte, less those of the first way.

    Each run is compared with the run of the first way with the same seed. The values of
    the first way itself are not differences.
    """
    bits: dict[str, dict[int, np.ndarray]] = {}
    for run in runs:
        curve = np.array([point["bits_per_byte"] for point in run["curve"]])
        bits.setdefault(run["way"], {})[run["seed"]] = curve
    first = next(iter(bits))
    return {
        way: np.array(
            [
                curve if way == first else curve - bits[first][seed]
                for seed, curve in curves.items()
                if seed in bits[first]
            ]
        )
        for way, curves in bits.items()
    }


def standard_error(values: np.ndarray) -> np.ndarray:
    """Returns the standard error of the mean of each column."""
    return values.std(axis=0) / math.sqrt(max(1, len(values) - 1))


def more_tokens(values: np.ndarray, first: np.ndarray, steps: list[int]) -> str:
    """Returns how many more tokens a way needs, if losses fall with their logarithm."""
    if values is first or len(steps) < 2:
        return ""
    per_fold = (first[:, -2] - first[:, -1]).mean() / math.log(steps[-1] / steps[-2])
    return f"{math.expm1(values[:, -1].mean() / per_fold):+.0%}"


def show(runs: list[dict[str, Any]]) -> None:
    """Prints the losses of the first way, and the differences of the others from it."""
    bits = by_way(runs)
    first = next(iter(bits))
    steps = [point["step"] for point in runs[0]["curve"]]
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"Held-out bits per byte, and differences from {first!r} of the same "
        "seed: means of the seeds ± standard errors. More tokens: what the way needs "
        f"more than {first!r} to reach the last loss, by interpolation.",
        caption_justify="left",
    )
    table.add_column("way", no_wrap=True)
    names = [f"step {step}" for step in steps]
    for name in ("seeds", *names, "tokens/update", "more tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for way, values in bits.items():
        error = standard_error(values)
        sign = "" if way == first else "+"
        last = [run["curve"][-1] for run in runs if run["way"] == way]
        size = np.mean([point["tokens"] / point["step"] for point in last])
        table.add_row(
            *(way, str(len(values))),
            *(
                f"{x:{sign}.3f} ± {e:.3f}"
                for x, e in zip(values.mean(axis=0), error, strict=True)
            ),
            *(f"{size:,.0f}", more_tokens(values, bits[first], steps)),
        )
    Console(width=140, highlight=False).print(table)


def draw(runs: list[dict[str, Any]], path: str) -> None:
    """Draws the differences from the first way over the number of tokens."""
    from matplotlib.figure import Figure

    bits = by_way(runs)
    first = next(iter(bits))
    tokens = [point["tokens"] for point in runs[0]["curve"]]
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.add_subplot()
    ax.axhline(0, color="0.5", linewidth=0.8)
    others = [(way, values) for way, values in bits.items() if way != first]
    for (way, values), marker in zip(others, "osD^vP*X<", strict=False):
        ax.errorbar(
            *(tokens, values.mean(axis=0), standard_error(values)),
            marker=marker,
            capsize=3,
            label=way,
        )
    ax.set_xscale("log")
    ax.set(xlabel="real tokens", ylabel=f"held-out bits per byte, less {first!r}")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
