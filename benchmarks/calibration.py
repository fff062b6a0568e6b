"""Predicts the epoch time of several plans from a few timed steps, and measures it.

    python benchmarks/calibration.py
    python benchmarks/calibration.py --every 40 --rounds 3 --rules all --json

The model, the documents and the limits are those of `end_to_end/run.py`, with every
`--every`-th document only. First, a few shapes are timed. These times are used to
choose a plan, once with any number of buckets and once with `--num-buckets`. They are
compared with the plans that minimize tokens, and with the rule of thumb that is
predicted to be best (or with all rules), for the same numbers of buckets. In every
round, each plan compiles its steps again and trains for the same epoch.

The plans are made from shapes that were timed before the first round. Every round times
the same shapes again, because the speed of a shared machine varies. An error compares
the epoch predicted from these times with the measured epoch, as the median over rounds.
"End to end" is the time to compile and to train for an epoch. The time to measure the
shapes is reported separately, because it is spent only once for all runs of a model.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import jaxbucket as jb
from jaxbucket.plan.reports.comparison import BY_TOKENS, ONE_SHAPE, OPTIMAL

sys.path.append(str(pathlib.Path(__file__).parent / "end_to_end"))
import training
from example import documents

AUTO = "time, auto"
# As in `end_to_end/run.py`.
_SEQ_LEN_MULTIPLE = 32
_BATCH_SIZE_MULTIPLE = 4
_TRAINING = {"dropout": 0.0, "seed": 0, "mode": "jit", "policy": "bucketed"}
_TRAINING |= {"model_devices": 1, "fully_sharded": False}
_TRAINING |= {"steps": 700, "seconds": None, "lr": 8e-3}


@dataclasses.dataclass
class Candidate:
    """A plan, and its measurements in every round."""

    name: str
    plan: jb.BucketPlan
    epoch: jb.plan.Report
    schedule: jb.BatchSchedule
    predicted_seconds: list[float] = dataclasses.field(default_factory=list)
    compile_seconds: list[float] = dataclasses.field(default_factory=list)
    epoch_seconds: list[float] = dataclasses.field(default_factory=list)

    def predict(self, cost: jb.plan.StepTime) -> None:
        """Predicts the time of an epoch from the step times of this round."""
        steps = [bucket.batches for bucket in self.epoch.buckets]
        seconds = [cost(b.batch_size, b.tokens_per_row) for b in self.plan.buckets]
        self.predicted_seconds.append(float(np.dot(steps, seconds)))

    @property
    def end_to_end(self) -> np.ndarray:
        return np.add(self.compile_seconds, self.epoch_seconds)


class Training:
    """The model and the documents of the examples, on all devices."""

    def __init__(self, args: argparse.Namespace):
        options = argparse.Namespace(**_TRAINING, width=args.width, layers=args.layers)
        splits = documents.load(args.data)
        self.source = documents.Examples(splits.train[:: args.every])
        self.lengths = jb.measure_lengths(self.source)
        self.mesh = jb.data_mesh()
        tx = training.make_optimizer(options)
        self.state = training.make_state(options, tx, self.mesh)
        # Every run needs a new step, because jax caches the programs of a step.
        self._make_step = functools.partial(
            training.make_step, options, tx, self.mesh, self.state
        )
        self._timed_step = self._make_step()

    def calibrate(self, shapes: list[jb.Bucket], repeats: int) -> jb.train.Calibration:
        return jb.train.calibrate(
            *(self._timed_step, self.state, shapes, self.source[0], self.mesh),
            repeats=repeats,
        )

    def candidate(self, name: str, plan: jb.BucketPlan) -> Candidate:
        epoch = jb.report(plan, self.lengths)
        return Candidate(name, plan, epoch, jb.BatchSchedule(plan, self.lengths))

    def run(self, candidate: Candidate) -> None:
        """Compiles the steps, and trains for an epoch."""
        specs = jb.sharding.batch_specs(candidate.plan, self.source[0], self.mesh)
        steps = jb.compile_steps(self._make_step(), self.state, specs)
        candidate.compile_seconds.append(steps.seconds_waited)
        candidate.epoch_seconds.append(self._time_epoch(candidate, steps))

    def _time_epoch(
        self, candidate: Candidate, steps: jb.compile.CompiledSteps
    ) -> float:
        """Returns the seconds of an epoch that starts from the initial state."""
        state = jb.sharding.replicate(self.state, self.mesh)
        dataset = jb.batch_dataset(
            self.source, candidate.schedule, shard=jb.sharding.local_rows(self.mesh)
        )
        jax.block_until_ready(state)
        metrics = None
        start = time.perf_counter()
        for batch in jb.sharding.prefetch_to_mesh(dataset, self.mesh):
            before = metrics
            state, metrics = steps(state, batch)
            # Run one step ahead, like a loop that reads the loss of the previous step.
            jax.block_until_ready(before)
        jax.block_until_ready(state)
        return time.perf_counter() - start


def main() -> None:
    args = parse_arguments()
    job = Training(args)
    limits = jb.Limits(
        max_tokens=args.max_tokens or _BATCH_SIZE_MULTIPLE * args.max_len,
        batch_size_multiple=_BATCH_SIZE_MULTIPLE,
        seq_len_multiple=_SEQ_LEN_MULTIPLE,
        max_seq_len=args.max_len,
        overlong="truncate",
    )
    start = time.perf_counter()
    shapes = jb.train.calibration_shapes(limits, job.lengths)
    measured = job.calibrate(shapes, args.repeats)
    calibration_seconds = time.perf_counter() - start
    limits = dataclasses.replace(limits, cost_fn=measured.cost)
    curve = jb.plan.plan_curve(
        job.lengths,
        limits,
        compile_seconds=measured.seconds_per_compile,
        num_epochs=1,
    )
    candidates = [
        job.candidate(name, plan)
        for name, plan in plans(args, job.lengths, limits, curve).items()
    ]
    for turn in range(args.rounds):
        round_cost = job.calibrate(shapes, args.repeats).cost
        for candidate in candidates:
            candidate.predict(round_cost)
            job.run(candidate)
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    again = job.calibrate(shapes, args.repeats).step_seconds
    rows = [row(candidate, candidates) for candidate in candidates]
    results = {
        "examples": len(job.source),
        "calibration_seconds": calibration_seconds,
        "calibration": measured.to_dict(),
        "timed_again": float(
            np.median([again[b] / measured.step_seconds[b] for b in shapes])
        ),
        "reason": curve.reason,
        "plans": rows,
    }
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show(results, measured)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predict and measure epoch times.")
    parser.add_argument(
        "--data",
        help="a .jsonl file, a .txt file or a folder; default: the standard library",
    )
    parser.add_argument("--every", type=int, default=10, help="use every n-th document")
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, help="defaults to 4 * --max-len")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--num-buckets", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--repeats", type=int, default=5, help="number of timings per shape"
    )
    parser.add_argument("--rules", choices=("best", "all"), default="best")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def plans(
    args: argparse.Namespace,
    lengths: np.ndarray,
    limits: jb.Limits,
    curve: jb.plan.PlanCurve,
) -> dict[str, jb.BucketPlan]:
    """Returns the plans to compare. The best rule of thumb is so by prediction."""
    chosen = {AUTO: curve.chosen.plan}
    for num_buckets in {args.num_buckets: None, curve.chosen.num_buckets: None}:
        compared = jb.plan.compare_plans(lengths, limits, num_buckets=num_buckets)
        by_name = {one.name: one.plan for one in compared.plans}
        selected = {"time": by_name.pop(OPTIMAL)}
        # It is left out if the cost is proportional to tokens.
        if BY_TOKENS in by_name:
            selected["tokens"] = by_name.pop(BY_TOKENS)
        if num_buckets != curve.chosen.num_buckets:
            by_name.pop(ONE_SHAPE)
        rules = list(by_name.items())
        selected |= dict(rules if args.rules == "all" else rules[:1])
        for name, plan in selected.items():
            # The plan that minimizes time is already included for the chosen number of
            # buckets.
            if plan != curve.chosen.plan:
                label = name if name == ONE_SHAPE else f"{name}, {num_buckets}"
                chosen[label] = in_time(plan, limits)
    return chosen


def in_time(plan: jb.BucketPlan, limits: jb.Limits) -> jb.BucketPlan:
    costs = limits.costs(plan.batch_sizes, plan.boundaries)
    return dataclasses.replace(plan, step_costs=tuple(costs), cost_unit="s")


def row(candidate: Candidate, candidates: list[Candidate]) -> dict[str, Any]:
    median = float(np.median(candidate.epoch_seconds))
    # Compute ratios within a round, because noise affects all of its plans equally.
    ratios = candidate.end_to_end / candidates[0].end_to_end
    return {
        "plan": candidate.name,
        "shapes": len(candidate.plan),
        "steps": candidate.epoch.steps_per_epoch,
        "padding": candidate.epoch.padding,
        "predicted_s": candidate.epoch.epoch_cost,
        "measured_s": median,
        "least_s": min(candidate.epoch_seconds),
        "most_s": max(candidate.epoch_seconds),
        "error": float(
            np.median(np.divide(candidate.predicted_seconds, candidate.epoch_seconds))
            - 1
        ),
        "error_of_the_first": candidate.epoch.epoch_cost / median - 1,
        "compile_s": float(np.median(candidate.compile_seconds)),
        "end_to_end_s": float(np.median(candidate.end_to_end)),
        "end_to_end_ratio": float(np.median(ratios)),
    }


def show(results: dict[str, Any], measured: jb.train.Calibration) -> None:
    # Wide enough for the table, regardless of the terminal width.
    console = Console(width=100, highlight=False)
    cost = measured.cost
    console.print(
        f"{results['examples']} documents. Measured in "
        f"{results['calibration_seconds']:.0f} s on {len(measured.step_seconds)} "
        f"shapes: a step takes {1e3 * cost.per_step:.3g} ms + "
        f"{1e6 * cost.per_token:.3g} us per position + "
        f"{1e9 * cost.per_pair:.3g} ns per pair, within "
        f"{cost.error:.0%}. When timed again after the last round, the same steps took "
        f"{results['timed_again']:.2f} times as long.\n{results['reason']}"
    )
    table = Table(
        box=box.SIMPLE_HEAD,
        caption="Seconds per epoch: predicted, and the measured median (minimum to "
        "maximum).\nTotal: compile time plus one epoch. Ratio: total relative to the "
        "first plan.\nErrors use step times from the same round. Errors and ratios are "
        "medians over rounds.",
        caption_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("plan", no_wrap=True)
    names = ("shapes", "padding", "predicted", "measured", "error", "compile")
    for name in (*names, "total", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in results["plans"]:
        table.add_row(
            *(one["plan"], str(one["shapes"])),
            *(f"{one['padding']:.1%}", f"{one['predicted_s']:.1f}"),
            f"{one['measured_s']:.1f} ({one['least_s']:.1f} to {one['most_s']:.1f})",
            *(f"{one['error']:+.1%}", f"{one['compile_s']:.1f}"),
            *(f"{one['end_to_end_s']:.1f}", f"{one['end_to_end_ratio']:.2f}"),
        )
    console.print(table)


if __name__ == "__main__":
    main()
