"""Measures padding and speed of streams, compared with a schedule that knows lengths.

    python benchmarks/streaming.py
    python benchmarks/streaming.py --many 100000 --json

Uses every set of real lengths with at least 200 planned steps, shuffled once, with a
budget of 16,384 tokens, 8 buckets, B a multiple of 4, and a pool of 4 times the largest
B. The table compares:

    planned            `BatchSchedule`, which knows all lengths
    1 host             `stream_batches`, with all rows in one process
    4 hosts            four processes with a quarter of the examples each: until the
                       first stream ends, and until all examples have been used
    all lengths known  the minimum padding of four hosts in lockstep if all lengths were
                       known in advance
    packed             1 host, rows of 4,096 with several examples
    cosmos-rl          its "prefer_closest", without fixed shapes: with the same pool,
                       and with its default pool of 32

Padding is measured over all batches. Real lengths are read from `shared/data` next to
the repository if that exists, and are lognormal otherwise. Then `--many` examples go
through a pool of 4,096 in a separate process. The benchmark prints its peak memory, and
the peak after a tenth of the examples. The exit status is 1 if a stream has more than
1.25 times the padding of the schedule.
"""

import argparse
import bisect
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxbucket as jb

_LAUNCH = pathlib.Path(__file__).parents[1] / "scripts" / "launch_local.py"
_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
_BUDGET, _BUCKETS, _HOSTS, _STEPS = 16_384, 8, 4, 200
_TIMES_PLANNED = 1.25
_PACKED = jb.BucketPlan.from_shapes([(_HOSTS, _BUDGET // _HOSTS)])
_SEGMENTS = 64


def main() -> int:
    args = parse_arguments()
    if args.through:
        print(json.dumps(stream_many(args.through)))
        return 0
    sets = {name: lengths for name, lengths in length_sets() if is_long(lengths)}
    if args.result:
        run_as_host(sets, args)
        return 0
    several = with_hosts(args)
    results = [
        {"set": name, **compare(lengths, args.pool), "several": several[name]}
        for name, lengths in track(sets.items(), transient=True, disable=args.json)
    ]
    many = None
    if args.many:
        command = [sys.executable, __file__, "--through", str(args.many)]
        many = json.loads(subprocess.check_output(command, text=True))
    if args.json:
        print(json.dumps({"sets": results, "many": many}))
    else:
        show(results, many)
    return 0 if all(is_close_to_schedule(result) for result in results) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare the batches of a stream with the batches of a schedule.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--pool",
        type=int,
        default=4,
        help="size of the pool as a multiple of the largest B",
    )
    parser.add_argument(
        "--many",
        type=int,
        default=10**7,
        help="number of examples in the last part; 0 skips it",
    )
    parser.add_argument("--through", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.pool < 1 or args.many < 0:
        parser.error("--pool must be at least 1, and --many at least 0.")
    return args


def length_sets() -> Iterator[tuple[str, np.ndarray]]:
    paths = sorted(_DATA.glob("*.npz"))
    for path in paths:
        with np.load(path) as columns:
            for name, lengths in columns.items():
                kept = lengths[(lengths > 0) & (lengths <= _BUDGET // _HOSTS)]
                yield f"{path.stem} {name}", np.random.default_rng(0).permutation(kept)
    if not paths:
        yield "lognormal", lognormal(100_000)


def lognormal(size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.minimum(1 + rng.lognormal(5, 1, size), 4096).astype(np.int32)


def planned(lengths: np.ndarray) -> jb.BucketPlan:
    return jb.plan_buckets(
        lengths,
        max_tokens=_BUDGET,
        num_buckets=_BUCKETS,
        batch_size_multiple=_HOSTS,
        sample=True,
    )


def is_long(lengths: np.ndarray) -> bool:
    return jb.report(planned(lengths), lengths).steps_per_epoch >= _STEPS


def compare(lengths: np.ndarray, times: int) -> dict[str, Any]:
    """Returns the padding and the batches per second of every method."""
    plan = planned(lengths)
    pool_size = times * int(plan.batch_sizes.max())
    report = jb.report(plan, lengths)
    start = time.perf_counter()
    closest = closest_of_pool(lengths, pool_size)
    seconds = time.perf_counter() - start
    return {
        "examples": len(lengths),
        "steps": report.steps_per_epoch,
        "pool_size": pool_size,
        "planned": report.padding,
        "one": streamed(lengths, plan, pool_size),
        "packed": streamed(lengths, _PACKED, pool_size, _SEGMENTS),
        "known": all_known(lengths, plan),
        "closest": {
            "padding": closest[0],
            "batches_per_second": closest[1] / seconds,
            "small_pool": closest_of_pool(lengths, 32)[0],
        },
    }


class Zeros:
    """A source of examples with the given lengths."""

    def __init__(self, lengths: np.ndarray):
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": np.zeros(self._lengths[index], np.uint8)}


def streamed(
    lengths: np.ndarray,
    plan: jb.BucketPlan,
    pool_size: int,
    max_segments: int | None = None,
) -> dict[str, float]:
    """Returns the padding of all batches, with a single process."""
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=pool_size,
        max_segments_per_row=max_segments,
    )
    start = time.perf_counter()
    padded = [batch.bucket.num_tokens for batch in dataset]
    seconds = time.perf_counter() - start
    return {
        "padding": 1 - float(lengths.sum()) / sum(padded),
        "batches_per_second": len(padded) / seconds,
    }


def with_hosts(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the results of real processes for each set of lengths."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "result.json"
        command = [sys.executable, str(_LAUNCH), "-n", str(_HOSTS), "--"]
        command += [sys.executable, __file__, "--pool", str(args.pool)]
        run = subprocess.run(
            [*command, "--result", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(run.stdout + run.stderr)
        return json.loads(path.read_text())


def run_as_host(sets: dict[str, np.ndarray], args: argparse.Namespace) -> None:
    with jb.Processes() as processes:
        results = {
            name: in_lockstep(lengths, args.pool, processes)
            for name, lengths in sets.items()
        }
        if processes.index == 0:
            args.result.write_text(json.dumps(results))


def in_lockstep(
    lengths: np.ndarray, times: int, processes: jb.Processes
) -> dict[str, float]:
    """Returns the padding of all batches of all hosts; the same on every host."""
    plan, index = planned(lengths), processes.index
    local = lengths[index::_HOSTS]
    iterator = iter(
        jb.stream_batches(
            stream(local),
            plan,
            pool_size=times * int(plan.batch_sizes.max()),
            lengths=lengths,
            shard=jb.data.RowShard((index,), _HOSTS),
            processes=processes,
        )
    )
    real, padded, steps = [], [], 0
    start = time.perf_counter()
    for batch in iterator:
        real.append(int(batch.num_tokens))
        padded.append(batch.bucket.num_tokens)
        steps += iterator.counts.read < len(local)
    seconds = time.perf_counter() - start
    text = json.dumps([real, padded, steps, seconds])
    results = map(json.loads, processes.gather("results", text))
    real, padded, steps, seconds = zip(*results, strict=True)
    # Sum over all hosts, for each step.
    real, padded = np.sum(real, axis=0), np.sum(padded, axis=0)
    assert real.sum() == lengths.sum()
    return {
        "padding": 1 - float(real.sum() / padded.sum()),
        "lasting": 1 - float(real[: min(steps)].sum() / padded[: min(steps)].sum()),
        "batches_per_second": _HOSTS * len(real) / max(seconds),
    }


def all_known(lengths: np.ndarray, plan: jb.BucketPlan) -> float:
    """Returns the padding of the minimum number of batches that all hosts need."""
    sizes = plan.batch_sizes // _HOSTS
    counts = [
        np.bincount(plan.assign(lengths[host::_HOSTS]), minlength=len(plan))
        for host in range(_HOSTS)
    ]
    padded, free = 0, np.zeros(_HOSTS, np.int64)
    for k in range(len(plan) - 1, -1, -1):
        missing = np.array([count[k] for count in counts]) - free
        batches = max(0, -(-int(missing.max()) // int(sizes[k])))
        free = batches * sizes[k] - missing
        padded += batches * plan.buckets[k].num_tokens
    return 1 - float(lengths.sum()) / padded


def stream(lengths: np.ndarray) -> grain.IterDataset:
    # Grain's own threads would be slower on few cores.
    options = grain.ReadOptions(num_threads=0)
    return grain.MapDataset.source(Zeros(lengths)).to_iter_dataset(options)


def closest_of_pool(lengths: np.ndarray, pool_size: int) -> tuple[float, int]:
    """Returns the padding of batches that start with the oldest example.

    Each batch then takes the longest pending example that does not increase T, or
    otherwise the shortest one, as long as B * T stays within the budget.
    """
    rest = iter(lengths.tolist())
    oldest: list[int] = []
    pool: list[int] = []
    padded = batches = 0
    while True:
        while len(pool) < pool_size and (length := next(rest, None)) is not None:
            oldest.append(length)
            bisect.insort(pool, length)
        if not pool:
            return 1 - float(lengths.sum()) / padded, batches
        longest, rows = oldest[0], 0
        candidate = longest
        while candidate and max(longest, candidate) * (rows + 1) <= _BUDGET:
            longest, rows = max(longest, candidate), rows + 1
            pool.pop(bisect.bisect_left(pool, candidate))
            oldest.remove(candidate)
            index = bisect.bisect_right(pool, longest)
            candidate = pool[max(index - 1, 0)] if pool else 0
        padded += longest * rows
        batches += 1


def is_close_to_schedule(result: dict[str, Any]) -> bool:
    worst = max(result[name]["padding"] for name in ("one", "several"))
    return worst <= _TIMES_PLANNED * result["planned"]


def stream_many(size: int) -> dict[str, float]:
    """Returns the speed and memory of `size` examples in a pool of 4,096."""
    plan = planned(np.append(lognormal(100_000), 4096))
    lengths = np.tile(lognormal(10**6), -(-size // 10**6))[:size]
    iterator = iter(jb.stream_batches(stream(lengths), plan, pool_size=4096))
    start, early, batches = time.perf_counter(), 0, 0
    for _ in iterator:
        batches += 1
        if not early and iterator.counts.read > size // 10:
            early = peak()
    seconds = time.perf_counter() - start
    return {
        "examples": size,
        "examples_per_second": size / seconds,
        "batches_per_second": batches / seconds,
        "peak_after_a_tenth_mib": early,
        "peak_mib": peak(),
    }


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def show(results: list[dict[str, Any]], many: dict[str, float] | None) -> None:
    table = Table(box=box.SIMPLE, title="Padding, and batches per second")
    table.add_column("lengths")
    for name in (
        *(
            "steps",
            "pool",
            "planned",
            "1 host",
            "4 hosts, until the first stream ends",
            "4 hosts, to the end",
        ),
        *("4 hosts, all lengths known", "1 host, packed"),
        *("cosmos-rl, same pool", "cosmos-rl, pool 32"),
    ):
        table.add_column(name, justify="right")
    for result in results:
        base = result["planned"]
        one, several, closest = (result[x] for x in ("one", "several", "closest"))
        table.add_row(
            result["set"],
            *(str(result[name]) for name in ("steps", "pool_size")),
            f"{base:.2%}",
            *(times(one["padding"], base), times(several["lasting"], base)),
            *(times(several["padding"], base), times(result["known"], base)),
            times(result["packed"]["padding"], base),
            *(times(closest[x], base) for x in ("padding", "small_pool")),
        )
        table.add_row(
            "  batches per second",
            *[""] * 3,
            *(f"{x['batches_per_second']:,.0f}" for x in (one, several)),
            *[""] * 2,
            f"{result['packed']['batches_per_second']:,.0f}",
            f"{closest['batches_per_second']:,.0f}",
            "",
        )
    console = Console(width=160)
    console.print(table)
    if many:
        console.print(
            f"{many['examples']:,} examples through a pool of 4,096: "
            f"{many['examples_per_second']:,.0f} per second, "
            f"{many['batches_per_second']:,.0f} batches. Peak "
            f"{many['peak_mib']:,} MiB, {many['peak_after_a_tenth_mib']:,} after a "
            "tenth of the examples."
        )


def times(padding: float, planned: float) -> str:
    return f"{padding:.2%} ({padding / planned:.2f}x)"


if __name__ == "__main__":
    sys.exit(main())
