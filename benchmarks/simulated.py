"""Compares simulated epochs with real ones, in 1, 2 and 4 processes on this machine.

python benchmarks/simulated.py [--processes 1 2 4] [--json]

Each process computes the gradients of its rows, and then exchanges them, so that the
time for which it waits for the others is known. Before the epoch, all processes time a
few steps of every shape, whose programs are then forgotten. From these times alone the
epoch is predicted, and then run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

NUM_EXAMPLES, MAX_LENGTH, MAX_TOKENS = 8_000, 512, 8_192
WIDTH, DEPTH = 192, 6
# Steps that are timed for each shape, and left out before these.
TIMED, WARM = 16, 2
PARTS = ("compile", "waiting")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        address, count, index = args.worker
        work(address, int(count), int(index))
        return
    rows = [run(count) for count in args.processes]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print("processes  steps  predicted      real  error   share of compile, waiting")
    for row in rows:
        shares = (
            f"{name} {row['predicted'][name]:.1%} ({row['real'][name]:.1%})"
            for name in PARTS
        )
        print(
            f"{row['processes']:9} {row['steps']:6} "
            f"{row['predicted']['seconds']:8.1f} s {row['real']['seconds']:7.1f} s "
            f"{row['error']:+6.1%}   {', '.join(shares)}"
        )


def run(count: int) -> dict:
    """Returns the numbers of one epoch in some processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", address, str(count), str(index)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
            text=True,
        )
        for index in range(count)
    ]
    output, _ = workers[0].communicate()
    if any(worker.wait() for worker in workers):
        sys.exit("A process failed.")
    return json.loads(output.splitlines()[-1])


def work(address: str, count: int, index: int) -> None:
    """Predicts and runs an epoch, as one of several processes."""
    import jax
    import jax.numpy as jnp

    import jaxbucket as jb

    if count > 1:
        jax.distributed.initialize(address, count, index)
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(4.5, 0.8, NUM_EXAMPLES).astype(int) + 1
    lengths = np.minimum(drawn, MAX_LENGTH)
    plan = jb.plan_buckets(
        lengths, max_tokens=MAX_TOKENS, num_buckets=4, batch_size_multiple=4
    )
    schedule = jb.BatchSchedule(plan, lengths)
    params = {
        "embed": rng.normal(size=(256, WIDTH)).astype(np.float32),
        "layers": rng.normal(size=(DEPTH, WIDTH, WIDTH)).astype(np.float32) / 14,
    }

    def loss(params, tokens):
        x = params["embed"][tokens]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer)
        return jnp.square(x).mean()

    mesh = jb.data_mesh()
    whole = jax.NamedSharding(mesh, jax.P())
    total = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)

    def exchange(gradients):
        """Adds up the gradients of all processes."""
        flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradients)])
        sharding = jax.NamedSharding(mesh, jax.P("data"))
        stacked = jax.make_array_from_process_local_data(sharding, flat[None])
        return jax.block_until_ready(total(stacked))

    def gather(values) -> np.ndarray:
        """Returns the `[n]` numbers of all processes, `[count, n]`."""
        sharding = jax.NamedSharding(mesh, jax.P("data"))
        local = np.asarray(values, np.float32)[None]
        stacked = jax.make_array_from_process_local_data(sharding, local)
        copies = jax.jit(lambda x: x + 0, out_shardings=whole)(stacked)
        return np.asarray(copies)

    def compiled(shape):
        start = time.perf_counter()
        tokens = jax.ShapeDtypeStruct((shape[0] // count, shape[1]), np.int32)
        program = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
        return program, time.perf_counter() - start

    def step(program, shape) -> tuple[float, float]:
        """Returns the seconds of a step's gradients, and of their exchange."""
        start = time.perf_counter()
        tokens = np.full((shape[0] // count, shape[1]), 7, np.int32)
        gradients = jax.block_until_ready(program(params, tokens))
        middle = time.perf_counter()
        exchange(gradients)
        return middle - start, time.perf_counter() - middle

    # The times that the prediction knows, measured in turns.
    shapes = [tuple(bucket.to_list()) for bucket in plan.buckets]
    programs, seconds = zip(*map(compiled, shapes), strict=True)
    compile_seconds = gather(seconds[1:]).mean(axis=1).max()
    times = [
        [step(*pair) for pair in zip(programs, shapes, strict=True)]
        for _ in range(WARM + TIMED)
    ]
    # [processes, timed steps, shapes, (gradients, exchange)]
    known = gather(np.ravel(times[WARM:])).reshape(count, TIMED, len(shapes), 2)
    own, exchanges = known[..., 0], known[..., 1].min(axis=0).mean(axis=0)
    means = own.mean(axis=(0, 1)) + exchanges
    # How processes differ in the same step, as if the mean were that of many.
    differences = (own - own.mean(axis=0)) * np.sqrt(count / max(count - 1, 1))
    cluster = jb.simulate.Cluster(
        num_hosts=count,
        step_seconds=lambda b, t: float(means[shapes.index((b, t))]),
        skew=np.maximum(1 + np.ravel(differences / means), 0),
        compile_seconds=float(compile_seconds),
    )
    predicted = jb.simulate.simulate(plan, lengths, cluster)["plan"]

    # The epoch, in which each program is compiled before its first step.
    ready, compiling, measured = {}, 0.0, []
    start = time.perf_counter()
    for bucket in buckets_of(schedule):
        if bucket not in ready:
            ready[bucket], elapsed = compiled(bucket)
            compiling += elapsed
        measured.append(step(ready[bucket], bucket))
    real = gather([time.perf_counter() - start, compiling])
    waits = gather([exchange for _, exchange in measured])
    waiting = (waits - waits.min(axis=0)).sum(axis=1).mean()
    if index == 0:
        seconds = float(real[:, 0].max())
        result = {
            "processes": count,
            "steps": len(schedule),
            "error": predicted.seconds / seconds - 1,
            "predicted": {
                "seconds": predicted.seconds,
                **{name: predicted.share(name) for name in PARTS},
            },
            "real": {
                "seconds": seconds,
                "compile": float(real[:, 1].mean()) / seconds,
                "waiting": float(waiting) / seconds,
            },
        }
        print(json.dumps(result), flush=True)


def buckets_of(schedule) -> Iterator[tuple[int, int]]:
    """Yields the (B, T) of the steps of an epoch."""
    return (tuple(batch.bucket.to_list()) for batch in schedule)


if __name__ == "__main__":
    main()
