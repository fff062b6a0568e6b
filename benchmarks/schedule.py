"""Measures time and memory of schedules, and the time of their steps.

    python benchmarks/schedule.py
    python benchmarks/schedule.py --examples 1000000 --json

For each order and number of examples, a separate process measures the time to plan, to
create the schedule and to get its first step, the time of random steps in a million
epochs, and the peak memory of the process, including lengths. A pacing curriculum
computes an epoch when it is first needed, and so does one of several metrics. Their
steps are therefore drawn from a single epoch, and their first step includes the time to
compute the epoch.

Planning and creating a shuffled schedule are compared with a stable `np.argsort` of the
same lengths. They run in turn.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import jaxbucket as jb
from jaxbucket.schedule.base import Schedule

ORDERS = (
    *("shuffled", "source", "ascending", "descending"),
    *("grouped", "replacement", "pacing", "mixture"),
    *("metrics", "metrics_replacement"),
)
EPOCHS = 1_000_000
_CHUNK = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Time plans, schedules and steps.")
    parser.add_argument(
        "--examples", type=int, nargs="+", default=[10_000_000, 100_000_000]
    )
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="repetitions of the comparison with np.argsort",
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args, args.examples[0], args.orders[0])))
        return
    rows = [
        measure_in_process(args, size, order)
        for size in args.examples
        for order in args.orders
    ]
    argsort_times = compare_with_argsort(args, min(args.examples))
    if args.json:
        print(json.dumps({"orders": rows, "beside_argsort": argsort_times}))
    else:
        show(rows, argsort_times)


def measure_in_process(
    args: argparse.Namespace, size: int, order: str
) -> dict[str, Any]:
    """Measures in a separate process, so that its peak memory can be measured."""
    command = [sys.executable, __file__, "--one", "--examples", size, "--orders", order]
    command += ["--batch-size", args.batch_size, "--steps", args.steps]
    run = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


def measure(args: argparse.Namespace, size: int, order: str) -> dict[str, Any]:
    lengths = lognormal_lengths(size)
    seconds: dict[str, float] = {}
    plan = timed(seconds, "plan_s", lambda: make_plan(lengths, args.batch_size))
    even = same_batch_size(plan, args.batch_size)
    schedule = timed(seconds, "schedule_s", lambda: make(order, even, lengths))
    timed(seconds, "first_step_s", lambda: schedule[0])
    by_epoch = ("pacing", "metrics", "metrics_replacement")
    epochs = 1 if order in by_epoch else EPOCHS
    lookups = lookup_times(schedule, epochs * len(schedule), args.steps)
    return {
        "order": order,
        "examples": size,
        "steps_per_epoch": len(schedule),
        **seconds,
        "step_p50_ms": 1e3 * np.percentile(lookups, 50),
        "step_p99_ms": 1e3 * np.percentile(lookups, 99),
        # Use the fastest of three calls per step, to exclude pauses of the machine.
        "step_p99_of_best_ms": 1e3 * np.percentile(lookups.min(axis=1), 99),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def make(order: str, plan: jb.BucketPlan, lengths: np.ndarray) -> Schedule:
    if order == "mixture":
        # A mixture of three datasets, in which the smallest has the largest weight.
        parts = np.split(lengths, [len(lengths) // 2, len(lengths) * 9 // 10])
        schedules = [jb.BatchSchedule(plan, part) for part in parts]
        return jb.Mixture(schedules, [0.4, 0.35, 0.25])
    if order in ("pacing", "replacement"):
        curriculum = jb.Curriculum(lengths, replacement=order == "replacement")
        return jb.BatchSchedule(plan, lengths, order=curriculum)
    if order in ("metrics", "metrics_replacement"):
        curriculum = three_metrics(lengths, replacement=order == "metrics_replacement")
        return jb.BatchSchedule(plan, lengths, order=curriculum)
    named = {"grouped": jb.schedule.GroupedByLength()}
    return jb.BatchSchedule(plan, lengths, order=named.get(order, order))  # pyright: ignore


def three_metrics(lengths: np.ndarray, replacement: bool) -> jb.Curriculum:
    """Returns a curriculum by value, by a share of steps and by a share of epochs."""
    rng = np.random.default_rng(2)
    rarity = rng.normal(size=len(lengths))
    loss = rng.random(len(lengths), np.float32)
    by_step = jb.schedule.LinearPacing(start=0, duration=30_000, unit="steps")
    pacing = {
        "length": jb.schedule.ByValue(by_step, low=8, high=8192, multiple=8),
        "rarity": jb.schedule.RootPacing(start=0.1, duration=50_000, unit="steps"),
        "loss": jb.schedule.LinearPacing(start=0.1, duration=2),
    }
    metrics = {"length": lengths, "rarity": rarity, "loss": loss}
    return jb.Curriculum(metrics, pacing, replacement=replacement)


def timed(seconds: dict[str, float], name: str, task: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = task()
    seconds[name] = time.perf_counter() - start
    return result


def lognormal_lengths(size: int) -> np.ndarray:
    """Returns text-like lengths: the median is 400, and the longest 8192."""
    rng = np.random.default_rng(0)
    lengths = np.empty(size, np.int32)
    for start in range(0, size, _CHUNK):
        part = lengths[start : start + _CHUNK]
        part[:] = np.clip(rng.lognormal(np.log(400), 1.0, len(part)), 1, 8192)
    return lengths


def make_plan(lengths: np.ndarray, batch_size: int) -> jb.BucketPlan:
    return jb.plan_buckets(
        lengths,
        max_tokens=batch_size * 1024,
        num_buckets=8,
        batch_size_multiple=8,
        seq_len_multiple=8,
    )


def same_batch_size(plan: jb.BucketPlan, batch_size: int) -> jb.BucketPlan:
    """Returns the boundaries of a plan, with the same B in every bucket."""
    buckets = tuple(jb.Bucket(batch_size, bucket.seq_len) for bucket in plan.buckets)
    return jb.BucketPlan(buckets, max_tokens=buckets[-1].num_tokens)


def lookup_times(schedule: Schedule, last: int, steps: int) -> np.ndarray:
    """Returns `[steps, 3]` seconds: three times for each of `steps` random steps."""
    drawn = np.random.default_rng(1).integers(0, last, steps)
    seconds = np.empty((steps, 3))
    for index, step in enumerate(drawn.tolist()):
        for turn in range(3):
            start = time.perf_counter()
            schedule[step]
            seconds[index, turn] = time.perf_counter() - start
    return seconds


def compare_with_argsort(args: argparse.Namespace, size: int) -> dict[str, float]:
    lengths = lognormal_lengths(size)
    plan = make_plan(lengths, args.batch_size)
    times = in_turn(
        {
            "plan": lambda: make_plan(lengths, args.batch_size),
            "schedule": lambda: jb.BatchSchedule(plan, lengths),
            "argsort": lambda: np.argsort(lengths, kind="stable"),
        },
        args.repeats,
    )
    tracemalloc.start()
    schedule = jb.BatchSchedule(plan, lengths)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del schedule
    return {
        "examples": size,
        **{f"{name}_s": value for name, value in times.items()},
        "plan_and_schedule_over_argsort": (times["plan"] + times["schedule"])
        / times["argsort"],
        "bytes_kept_per_example": kept / size,
    }


def in_turn(tasks: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Returns median seconds. The tasks run in turn, so noise affects all equally."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def show(rows: list[dict[str, Any]], argsort_times: dict[str, float]) -> None:
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(
            *(f"{x:,.3f}" if isinstance(x, float) else str(x) for x in row.values())
        )
    # Wide enough for the table, regardless of the terminal width.
    console = Console(width=132)
    console.print(table)
    for name, value in argsort_times.items():
        console.print(f"{name:32} {value:,.3f}")


if __name__ == "__main__":
    main()
