"""Memory and time at 1e8 and 1e9 examples: reports, shared rows, simulations.

python benchmarks/scale.py [report shared schedule simulate] [--before TREE] [--json]

`--before` is the folder of another version, whose report is measured beside this one.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap

# Each part is a program, whose memory is then its own. It prints its numbers as JSON.
COMMON = """
import json, pathlib, resource, sys, time, tracemalloc
import numpy as np, jaxbucket as jb

def draw(rng, size):
    return np.minimum(rng.lognormal(5.5, 1, size) + 1, 8192).astype(np.uint16)

def fill(lengths):
    rng = np.random.default_rng(0)
    for start in range(0, len(lengths), 10**6):
        part = lengths[start : start + 10**6]
        part[:] = draw(rng, len(part))

def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def proportional():
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024

def plan_of(lengths, **options):
    return jb.plan_buckets(lengths, max_tokens=2**20, num_buckets=8, **options)

def show(**numbers):
    print(json.dumps(numbers))
"""
REPORT = """
lengths = np.empty(SIZE, np.int32)
fill(lengths)
plan = plan_of(lengths[:10**6], sample=True, max_seq_len=8192)
jb.report(plan, lengths[:1000])
start = time.perf_counter()
report = jb.report(plan, lengths)
seconds = time.perf_counter() - start
# The memory of numpy's arrays, too.
tracemalloc.start()
jb.report(plan, lengths)
show(seconds=seconds, megabytes=tracemalloc.get_traced_memory()[1] / 2**20,
     real_tokens=report.real_tokens, padding=report.padding)
"""
WRITE = """
file = np.lib.format.open_memmap(PATH, "w+", np.uint16, (SIZE,))
fill(file)
file.flush()
plan = plan_of(file[:10**6], sample=True, max_seq_len=8192)
pathlib.Path(PATH + ".json").write_text(plan.to_json())
show(gigabytes=file.nbytes / 1e9)
"""
SHARED = """
lengths = np.load(PATH, mmap_mode="r")
plan = jb.BucketPlan.from_json(pathlib.Path(PATH + ".json").read_text())
schedule = jb.BatchSchedule(plan, lengths)
# As many steps as it takes to have read all of the file.
rows = [int(schedule[step].rows.sum()) for step in range(0, len(schedule), 20)]
print("ready", flush=True)
sys.stdin.readline()
show(megabytes=proportional(), rows=rows)
sys.stdout.flush()
sys.stdin.readline()
"""
SCHEDULE = """
lengths = np.load(PATH, mmap_mode="r")
start = time.perf_counter()
plan = plan_of(lengths)
planned = time.perf_counter()
schedule = jb.BatchSchedule(plan, lengths)
built = time.perf_counter()
first = schedule[0]
stepped = time.perf_counter()
times = []
for step in np.random.default_rng(1).integers(0, 2 * len(schedule), 200).tolist():
    begin = time.perf_counter()
    schedule[step]
    times.append(time.perf_counter() - begin)
fingerprint = schedule.fingerprint
show(plan_seconds=planned - start, schedule_seconds=built - planned,
     first_step_ms=1e3 * (stepped - built), step_ms=1e3 * float(np.median(times)),
     slowest_step_ms=1e3 * max(times), steps=len(schedule), fingerprint=fingerprint,
     megabytes=megabytes())
"""
SIMULATE = """
drawn = draw(np.random.default_rng(0), 10**6)
values, counts = np.unique(drawn, return_counts=True)
pairs = dict(zip(values.tolist(), counts.tolist()))
cluster = jb.simulate.Cluster(
    num_hosts=4096, devices_per_host=4, skew=0.02, hours_between_faults=20_000,
    restart_seconds=300, checkpoint_seconds=20, compile_seconds=60,
    step_seconds=jb.plan.TransformerCost(4096, 32, flops_per_second=3e18))
start = time.perf_counter()
lengths = jb.LengthCounts({n: 1000 * count for n, count in pairs.items()})
plans = {
    str(multiple): jb.plan_buckets(
        lengths, max_tokens=2**27, num_buckets=8, batch_size_multiple=16_384,
        seq_len_multiple=multiple)
    for multiple in (1, 128, 512)
}
simulation = jb.simulate.simulate(plans, lengths, cluster)
seconds = time.perf_counter() - start
# One million examples of the same histogram, step for step.
counted = jb.LengthCounts(pairs)
plan, equal = plan_of(counted, batch_size_multiple=16), True
schedule = jb.BatchSchedule(plan, drawn)
steps = jb.schedule.BatchCounts(plan, counted)
for step in range(2 * len(schedule)):
    batch = schedule[step]
    expected = ((batch.bucket, int((batch.rows >= 0).sum())),)
    equal &= steps.micro_batches(step) == expected
show(seconds=seconds, megabytes=megabytes(), examples=lengths.num_examples,
     hours={name: x.seconds / 3600 for name, x in simulation.epochs.items()},
     compared_steps=2 * len(schedule), equal=bool(equal))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parts = ["report", "shared", "schedule", "simulate"]
    parser.add_argument("parts", nargs="*", default=parts, metavar="PART")
    parser.add_argument("--before", type=pathlib.Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts:
            results[part] = measured(part, folder, args.before)
            if not args.json:
                print(part, json.dumps(results[part], indent=1), flush=True)
    if args.json:
        print(json.dumps(results, indent=1))


def measured(part: str, folder: str, before: pathlib.Path | None) -> dict:
    """Returns the numbers of a part."""
    path = f"{folder}/{part}.npy"
    trees = {"now": None} | ({"before": before} if before else {})
    if part == "report":
        return {name: run(REPORT, 10**8, path, tree) for name, tree in trees.items()}
    if part == "simulate":
        return run(SIMULATE, 0, path)
    size = 10**8 if part == "shared" else 10**9
    file = run(WRITE, size, path)
    if part == "shared":
        return {name: compared(size, path, tree) for name, tree in trees.items()}
    built, again = run(SCHEDULE, size, path), run(SCHEDULE, size, path)
    equal = built["fingerprint"] == again["fingerprint"]
    return {"file": file, "built": built, "again": again, "equal": equal}


def compared(size: int, path: str, tree: pathlib.Path | None) -> dict:
    """Returns the memory of schedules in one process, and in four of a host."""
    (one, rows), (four, same) = (shared(n, size, path, tree) for n in (1, 4))
    return {"one": one, "four": four, "ratio": four / one, "equal": same == rows}


def shared(
    count: int, size: int, path: str, tree: pathlib.Path | None
) -> tuple[float, list[int]]:
    """Returns the MB of all of several processes at the same time, and their rows."""
    started = [start(SHARED, size, path, tree) for _ in range(count)]
    for process in started:
        assert process.stdout and process.stdout.readline() == "ready\n"
    results = []
    for process in started:
        assert process.stdin and process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        results.append(json.loads(process.stdout.readline()))
    # None ends before all have measured: others would no longer share with it.
    for process in started:
        process.communicate("\n")
    assert all(result["rows"] == results[0]["rows"] for result in results)
    return sum(x["megabytes"] for x in results), results[0]["rows"]


def run(code: str, size: int, path: str, tree: pathlib.Path | None = None) -> dict:
    process = start(code, size, path, tree)
    output, _ = process.communicate()
    if process.returncode:
        sys.exit("A part failed.")
    return json.loads(output)


def start(
    code: str, size: int, path: str, tree: pathlib.Path | None = None
) -> subprocess.Popen:
    environment = dict(os.environ)
    if tree is not None:
        environment["PYTHONPATH"] = str(tree)
    names = f"SIZE, PATH = {size}, {path!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + names + textwrap.dedent(code)],
        env=environment,
        cwd=tree,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    main()
