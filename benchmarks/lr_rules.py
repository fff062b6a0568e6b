"""Trains the model of the example with several rules for the learning rate.

    python benchmarks/lr_rules.py
    python benchmarks/lr_rules.py --tokens 1_000_000 --seeds 5 --plot rules.png --json

All runs see the same number of real tokens, and their schedules count tokens, so
warm-up and decay are the same for all of them. They differ in the number of examples
per step, and in how the learning rate follows that number:

    fixed batch    every step has the same number of examples, in any bucket
    none           the token budget sets the number, and the learning rate is not scaled
    linear, sqrt   the learning rate follows the number of examples of each step
    adam sde       Adam's moment estimates follow it as well (Malladi et al., 2022)

Two more methods use the sqrt rule and two micro-batches per step, of the same bucket or
of any two buckets. The learning rate applies to the mean number of examples per step.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Callable
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
from transformer import Transformer

_ADAM = {"b2": 0.98}
_DECAY = 0.05


@dataclasses.dataclass(frozen=True)
class Method:
    """A schedule for a seed, and an optimizer for its batches."""

    schedule: Callable[[int], jb.BatchSchedule]
    tx: optax.GradientTransformation


def scale_by_adam_sde(
    base: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """Returns Adam whose constants follow the batch size (arXiv:2205.10287).

    With k times the examples, the learning rate is multiplied by sqrt(k), 1 - b1 and
    1 - b2 by k, and eps by 1 / sqrt(k).
    """

    def average(new: Any, old: Any, gain: jax.Array) -> Any:
        return jax.tree.map(lambda x, y: y + gain * (x - y), new, old)

    def init(params: Any) -> Any:
        zeros = optax.tree.zeros_like(params)
        # The averages, and the total weight of the gradients in each of them.
        return (zeros, jnp.zeros(())), (zeros, jnp.zeros(()))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        ratio = extra["num_examples"] / base
        squares = jax.tree.map(jnp.square, grads)
        state = tuple(
            average((x, jnp.ones(())), old, jnp.minimum(1, ratio * (1 - b)))
            for x, old, b in zip((grads, squares), state, (b1, b2), strict=True)
        )
        (mu, mu_weight), (nu, nu_weight) = state
        root = jnp.sqrt(ratio)
        updates = jax.tree.map(
            lambda m, n: (
                root * (m / mu_weight) / (jnp.sqrt(n / nu_weight) + eps / root)
            ),
            *(mu, nu),
        )
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


class Training:
    """The model, the documents and the loss of the examples, on all devices."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        splits = documents.load(args.data)
        self.source = splits.train
        self.held_out = documents.Examples(splits.held_out[: args.held_out])
        self.lengths = jb.measure_lengths(self.source)
        self.mesh = jb.data_mesh()
        self.plan = self._plan(args.max_tokens)
        epoch = jb.report(self.plan, self.lengths)
        self.base_examples = round(epoch.examples / epoch.steps_per_epoch)
        held_out = jb.measure_lengths(self.held_out)
        self._to_evaluate = jb.batch_dataset(
            self.held_out, jb.BatchSchedule(self.plan, held_out, order="source")
        )
        evaluate = jb.make_eval_step(recipe.loss_fn, self.mesh)
        specs = jb.sharding.batch_specs(self.plan, self.source[0], self.mesh)
        state = _without_optimizer(self._state(0, optax.sgd(0.0)))
        self._evaluate = jb.compile_steps(evaluate, state, specs)

    def _plan(self, max_tokens: Any) -> jb.BucketPlan:
        return jb.plan_buckets(
            self.lengths,
            max_tokens=max_tokens,
            num_buckets=self.args.num_buckets,
            seq_len_multiple=32,
            max_seq_len=self.args.max_len,
            overlong="truncate",
        )

    def _state(
        self, seed: int, tx: optax.GradientTransformation
    ) -> jb.train.TrainState:
        model = Transformer(self.args.width, self.args.layers, 0.0, nnx.Rngs(seed))
        return jb.create_state(model, tx, self.mesh)

    def methods(self) -> dict[str, Method]:
        args, base = self.args, self.base_examples
        curve = optax.warmup_cosine_decay_schedule(
            0.0, args.lr, args.tokens // 20, args.tokens, args.lr / 20
        )
        by_tokens = jb.optim.schedule_by_work(curve, "tokens")

        def adamw(rule: Any) -> optax.GradientTransformation:
            rate = jb.scale_schedule(by_tokens, base_examples=base, rule=rule)
            adam = optax.inject_hyperparams(optax.adamw)
            scaled = adam(learning_rate=rate, weight_decay=_DECAY, **_ADAM)
            return optax.chain(optax.clip_by_global_norm(1.0), scaled)

        @optax.inject_hyperparams
        def sde(learning_rate: Any) -> optax.GradientTransformation:
            return optax.chain(
                scale_by_adam_sde(base, **_ADAM),
                optax.add_decayed_weights(_DECAY),
                optax.scale_by_learning_rate(learning_rate),
            )

        fixed = self._plan(lambda t: base * t)
        half = self._plan(args.max_tokens // 2)
        one = functools.partial(self._schedule, self.plan)
        return {
            "fixed batch": Method(
                functools.partial(self._schedule, fixed), adamw("none")
            ),
            **{rule: Method(one, adamw(rule)) for rule in ("none", "linear", "sqrt")},
            "adam sde": Method(
                one, optax.chain(optax.clip_by_global_norm(1.0), sde(by_tokens))
            ),
            **{
                f"sqrt, 2 of {'one bucket' if group == 'same' else 'any'}": Method(
                    functools.partial(self._schedule, half, accumulate=2, group=group),
                    adamw("sqrt"),
                )
                for group in ("same", "mixed")
            },
        }

    def _schedule(
        self, plan: jb.BucketPlan, seed: int, **options: Any
    ) -> jb.BatchSchedule:
        # The order "spread" pairs short and long micro-batches; these are random pairs.
        return jb.BatchSchedule(
            plan, self.lengths, seed=seed, order="shuffled", **options
        )

    def runs(self, method: Method) -> list[dict[str, Any]]:
        """Trains once per seed, with steps that are compiled only once."""
        schedule = method.schedule(0)
        step_fn = jb.make_train_step(
            recipe.loss_fn, method.tx, self.mesh, accumulate=schedule.accumulate > 1
        )
        specs = jb.sharding.batch_specs(schedule.plan, self.source[0], self.mesh)
        steps = jb.compile_steps(step_fn, self._state(0, method.tx), specs)
        return [self._run(method, seed, steps) for seed in range(self.args.seeds)]

    def _run(self, method: Method, seed: int, steps: Any) -> dict[str, Any]:
        args, state = self.args, self._state(seed, method.tx)
        dataset = jb.batch_dataset(
            self.source, method.schedule(seed), num_steps=math.inf
        )
        curve, tokens, count, rates = [], 0, 0, []
        for batch in jb.sharding.prefetch_to_mesh(dataset, self.mesh):
            state, metrics = steps(state, batch)
            tokens, count = tokens + int(metrics["num_tokens"]), count + 1
            rates.append(float(metrics["lr_factor"]))
            if tokens >= (len(curve) + 1) * args.tokens / args.points:
                curve.append((tokens, self._held_out_loss(state)))
            if tokens >= args.tokens:
                break
        return {
            "seed": seed,
            "steps": count,
            "curve": curve,
            "factor_p5_p95": np.percentile(rates, (5, 95)).tolist(),
        }

    def _held_out_loss(self, state: jb.train.TrainState) -> float:
        """Returns bits per byte."""
        nats = num_bytes = 0.0
        state = _without_optimizer(state)
        for batch in jb.sharding.prefetch_to_mesh(self._to_evaluate, self.mesh):
            metrics = self._evaluate(state, batch)
            nats += float(metrics["loss_sum"])
            num_bytes += float(metrics["weight"])
        return nats / num_bytes / math.log(2)


def _without_optimizer(state: jb.train.TrainState) -> jb.train.TrainState:
    """Removes the optimizer state, so that all methods share one evaluation step."""
    return dataclasses.replace(state, opt_state=())


def main() -> None:
    args = parse_arguments()
    training = Training(args)
    results = {}
    for name, method in training.methods().items():
        results[name] = training.runs(method)
        print(f"{name} done", file=sys.stderr, flush=True)
    if args.plot:
        draw(results, args.plot)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show(results, training)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare rules for learning rates.")
    parser.add_argument(
        "--data",
        help="a .jsonl file, a .txt file or a folder; default: the standard library",
    )
    parser.add_argument(
        "--tokens", type=int, default=400_000, help="number of real tokens per run"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--points", type=int, default=8, help="number of evaluations per run"
    )
    parser.add_argument(
        "--held-out", type=int, default=150, help="number of documents to evaluate on"
    )
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--num-buckets", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--plot", help="file for a plot of the held-out losses")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def last_losses(runs: list[dict[str, Any]]) -> np.ndarray:
    return np.array([run["curve"][-1][1] for run in runs])


def show(results: dict[str, Any], training: Training) -> None:
    console = Console(width=100, highlight=False)
    args = training.args
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"Held-out bits per byte after {args.tokens:,} real tokens, "
        f"with {args.seeds} seeds. Base: {training.base_examples} examples, learning "
        f"rate {args.lr:g}.",
        caption_justify="left",
    )
    table.add_column("rule", no_wrap=True)
    for name in ("steps", "factors, p5 to p95", "mean", "min", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, runs in sorted(results.items(), key=lambda x: last_losses(x[1]).mean()):
        losses = last_losses(runs)
        low, high = np.mean([run["factor_p5_p95"] for run in runs], axis=0)
        table.add_row(
            *(name, f"{np.mean([run['steps'] for run in runs]):.0f}"),
            f"{low:.2f} to {high:.2f}",
            *(f"{x:.3f}" for x in (losses.mean(), losses.min(), losses.max())),
        )
    console.print(table)


def draw(results: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.add_subplot()
    for name, runs in results.items():
        tokens = np.mean([[t for t, _ in run["curve"]] for run in runs], axis=0)
        losses = np.array([[loss for _, loss in run["curve"]] for run in runs])
        (line,) = ax.plot(tokens / 1e3, losses.mean(axis=0), label=name)
        ax.fill_between(
            *(tokens / 1e3, losses.min(axis=0), losses.max(axis=0)),
            color=line.get_color(),
            alpha=0.15,
        )
    ax.set(xlabel="thousand real tokens", ylabel="held-out bits per byte")
    ax.legend(frameon=False)
    ax.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
