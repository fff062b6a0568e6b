"""How long planning and scheduling take, how much is kept, how long a step takes.

    python benchmarks/schedule.py
    python benchmarks/schedule.py --examples 1000000 --json

Building a plan and a schedule is timed beside one stable `np.argsort` of the same
lengths, in turn, in the same run. Steps are drawn from a million epochs.
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import jaxbucket as jb


def main() -> None:
    parser = argparse.ArgumentParser(description="Time plans, schedules and steps.")
    parser.add_argument("--examples", type=int, default=10_000_000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:32} {value:,.3f}")


def measure(args: argparse.Namespace) -> dict[str, float]:
    lengths = lognormal_lengths(args.examples)
    plan = make_plan(lengths, args.batch_size)
    times = in_turn(
        {
            "plan": lambda: make_plan(lengths, args.batch_size),
            "schedule": lambda: jb.BatchSchedule(plan, lengths),
            "argsort": lambda: np.argsort(lengths, kind="stable"),
        },
        args.repeats,
    )
    schedule, kept = traced(lambda: jb.BatchSchedule(plan, lengths))
    lookups = lookup_times(even(plan, lengths, args.batch_size), args.steps)
    built = times["plan"] + times["schedule"]
    return {
        "examples": len(lengths),
        "buckets": len(plan),
        "steps_per_epoch": len(schedule),
        "plan_s": times["plan"],
        "schedule_s": times["schedule"],
        "argsort_s": times["argsort"],
        "plan_and_schedule_over_argsort": built / times["argsort"],
        "bytes_kept_per_example": kept / len(lengths),
        "step_p50_ms": 1e3 * np.percentile(lookups, 50),
        "step_p99_ms": 1e3 * np.percentile(lookups, 99),
        # Without pauses of the machine: each step's best of three.
        "step_p99_of_best_ms": 1e3 * np.percentile(lookups.min(axis=1), 99),
    }


def lognormal_lengths(size: int) -> np.ndarray:
    """Text-like lengths: the median is 400, the longest 8192."""
    drawn = np.random.default_rng(0).lognormal(np.log(400), 1.0, size)
    return np.clip(drawn, 1, 8192).astype(np.int32)


def make_plan(lengths: np.ndarray, batch_size: int) -> jb.BucketPlan:
    return jb.plan_buckets(
        lengths,
        max_tokens=batch_size * 1024,
        num_buckets=8,
        batch_size_multiple=8,
        seq_len_multiple=8,
    )


def even(plan: jb.BucketPlan, lengths: np.ndarray, batch_size: int) -> jb.BatchSchedule:
    """A schedule over the plan's boundaries with the same B in every bucket."""
    buckets = tuple(jb.Bucket(batch_size, bucket.seq_len) for bucket in plan.buckets)
    return jb.BatchSchedule(
        jb.BucketPlan(buckets, max_tokens=buckets[-1].num_tokens), lengths
    )


def in_turn(tasks: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median seconds of each; a busy moment meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def traced(make: Callable[[], Any]) -> tuple[Any, int]:
    """What `make` returns, and the bytes that are still allocated for it."""
    tracemalloc.start()
    made = make()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return made, kept


def lookup_times(schedule: jb.BatchSchedule, steps: int) -> np.ndarray:
    """`[steps, 3]` seconds of each step, three times over."""
    last = len(schedule) * 1_000_000
    drawn = np.random.default_rng(1).integers(0, last, steps)
    seconds = np.empty((steps, 3))
    for index, step in enumerate(drawn.tolist()):
        for turn in range(3):
            start = time.perf_counter()
            schedule[step]
            seconds[index, turn] = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    main()
