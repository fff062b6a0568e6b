"""Times `sample_sort` over the local devices, and `jnp.sort` on one of them.

    python benchmarks/sort_devices.py
    python benchmarks/sort_devices.py --size 100000000 --json    # on a GPU

Keys are int32 lengths, lognormal and at most 100,000, in the memory of the host, as in
a `DifficultyIndex`. The methods run in turn in every round:

    sample_sort        keys and index are sent from the host, sorted and sent back
    jnp.sort           only keys, on one device: less work and no transfers
    jnp.argsort        a stable argsort on one device: the same work without transfers
    np.sort            keys and index packed in uint64 on the host; packing is not timed

If jax has only CPU devices, `sample_sort` uses numpy.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import jaxbucket as jb


def main() -> None:
    args = parse_arguments()
    rng = np.random.default_rng(0)
    keys = np.minimum(rng.lognormal(6, 1.5, args.size), 10**5).astype(np.int32)
    methods = {
        "sample_sort": with_sample_sort(keys),
        **with_jax(keys),
        **with_numpy(keys),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(args.rounds + 1):
        for name, sort in methods.items():
            start = time.perf_counter()
            sort()
            seconds[name].append(time.perf_counter() - start)
    results = {
        name: {"cold_seconds": cold, "warm_seconds": float(np.median(warm))}
        for name, (cold, *warm) in seconds.items()
    }
    device = jax.devices()[0]
    about = f"{jax.device_count()} x {device.device_kind}, jax {jax.__version__}"
    if args.json:
        print(json.dumps({"devices": about, "keys": args.size, "ways": results}))
    else:
        show(f"{args.size:,} keys, {about}", results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time a sort over devices, and on one of them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size", type=int, default=10**7, help="number of keys")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds; medians are reported"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.size < 1 or args.rounds < 1:
        parser.error("--size and --rounds must be at least 1.")
    return args


def with_sample_sort(keys: np.ndarray) -> Callable[[], Any]:
    mesh = jb.data_mesh()
    expected = np.argsort(keys, kind="stable")

    def sort() -> list[jb.sort.SortedShare]:
        return jb.sort.sample_sort(keys, mesh).local_shares()

    for share in sort():
        np.testing.assert_array_equal(share.index, expected[list(share.ranks)])
    # Compile in the first round, like the other methods.
    jax.clear_caches()
    return sort


def with_jax(keys: np.ndarray) -> dict[str, Callable[[], Any]]:
    on_device = jax.device_put(keys, jax.devices()[0])
    sort, argsort = jax.jit(jnp.sort), jax.jit(jnp.argsort)
    return {
        "jnp.sort": lambda: sort(on_device).block_until_ready(),
        "jnp.argsort": lambda: argsort(on_device).block_until_ready(),
    }


def with_numpy(keys: np.ndarray) -> dict[str, Callable[[], Any]]:
    packed = keys.astype(np.uint64) << np.uint64(32)
    packed |= np.arange(len(keys), dtype=np.uint64)
    return {"np.sort": lambda: np.sort(packed)}


def show(title: str, results: dict[str, dict[str, float]]) -> None:
    table = Table(box=box.SIMPLE, title=title)
    for name in ("method", "cold s", "warm s", "sample_sort / method"):
        table.add_column(name, justify="left" if name == "method" else "right")
    reference = results["sample_sort"]["warm_seconds"]
    for name, x in results.items():
        cold, warm = x["cold_seconds"], x["warm_seconds"]
        table.add_row(name, f"{cold:.3f}", f"{warm:.4f}", f"{reference / warm:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
