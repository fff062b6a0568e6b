"""Times `sample_sort` with real processes, and other methods of sorting the same keys.

    python benchmarks/sort.py
    python benchmarks/sort.py --sizes 1000000 --processes 1 2 4 --json

Keys are int32 lengths, lognormal and at most 100,000. Every method returns the order of
(key, index). The methods run in turn, so that noise affects all of them equally:

    np.sort         one process: keys and index packed in uint64; packing is not timed
    packed          the same, including packing and unpacking the index
    sample_sort     1, 2 and 4 processes with one device each, with jax and Gloo
    torch, lists    a sample sort through Python lists that splits only by key, as in a
                    well-known analyzer of training data, with torch and Gloo; skipped
                    if torch is not installed

The time of a sort over processes is the time of its slowest process. By default, keys
are in random order. With `--order sorted` or `reversed`, each process sends its share
to a single process.
"""

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

_LAUNCH = pathlib.Path(__file__).parents[1] / "scripts" / "launch_local.py"
_SAMPLES = 100
_NUMPY = ("np_sort_seconds", "packed_seconds")


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(json.loads(args.worker))
        return
    has_torch = importlib.util.find_spec("torch") is not None
    results = [
        result for size in args.sizes for result in compare(size, args, has_torch)
    ]
    if args.json:
        print(json.dumps({"cores": os.cpu_count(), "results": results}))
    else:
        show(results, has_torch)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time sorts over processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10**6, 10**7], help="numbers of keys"
    )
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        help="numbers of processes for sample_sort",
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="number of rounds; medians are reported"
    )
    parser.add_argument(
        "--torch-rounds",
        type=int,
        default=1,
        help="number of rounds of torch; 0 skips it",
    )
    parser.add_argument(
        "--order", choices=("random", "sorted", "reversed"), default="random"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(size: int, args: argparse.Namespace, has_torch: bool) -> list[Any]:
    """Returns the results of every method for `size` keys."""
    methods = [("sample_sort", count, args.rounds) for count in args.processes]
    if has_torch and args.torch_rounds:
        methods.append(("torch, lists", max(args.processes), args.torch_rounds))
    results = []
    for method, count, rounds in methods:
        task = {"way": method, "size": size, "rounds": rounds, "order": args.order}
        # np.sort is timed next to each method, because other load on the machine may
        # change between them.
        result = launch(task, count)
        results.append({"way": method, "processes": count, "keys": size, **result})
    return results


def launch(task: dict[str, Any], count: int) -> dict[str, Any]:
    """Runs a task in `count` processes, and returns the result of process 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, str(_LAUNCH), "-n", str(count), "--", sys.executable),
            *(__file__, "--worker", json.dumps({**task, "folder": folder})),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
        reports = [
            json.loads((pathlib.Path(folder) / str(index)).read_text())
            for index in range(count)
        ]
    # The time of a round is the time of its slowest process.
    cold, *warm = np.max([x.pop("sort") for x in reports], axis=0).tolist()
    seconds = {name: float(np.median(reports[0].pop(name)[1:])) for name in _NUMPY}
    return {"cold_seconds": cold, "warm_seconds": float(np.median(warm))} | {
        **seconds,
        **reports[0],
    }


def work(task: dict[str, Any]) -> None:
    """Sorts in this process, in turn with numpy in process 0."""
    index = int(os.environ["JAX_PROCESS_ID"])
    count = int(os.environ["JAX_NUM_PROCESSES"])
    rng = np.random.default_rng(0)
    keys = np.minimum(rng.lognormal(6, 1.5, task["size"]), 10**5).astype(np.int32)
    if task["order"] != "random":
        keys = np.sort(keys)[:: 1 if task["order"] == "sorted" else -1].copy()
    local_keys = keys[
        task["size"] * index // count : task["size"] * (index + 1) // count
    ]
    sort, barrier, check = METHODS[task["way"]](local_keys, index, count)
    seconds: dict[str, list[float]] = {name: [] for name in ("sort", *_NUMPY)}
    result = None
    for _ in range(task["rounds"] + 1):
        barrier()
        start = time.perf_counter()
        result = sort()
        seconds["sort"].append(time.perf_counter() - start)
        barrier()
        if index == 0:
            for name, value in numpy_sort(keys).items():
                seconds[name].append(value)
        barrier()
    report = seconds | check(result, np.argsort(keys, kind="stable"))
    (pathlib.Path(task["folder"]) / str(index)).write_text(json.dumps(report))
    barrier()


def numpy_sort(keys: np.ndarray) -> dict[str, float]:
    begin = time.perf_counter()
    packed = keys.astype(np.uint64) << np.uint64(32)
    packed |= np.arange(len(keys), dtype=np.uint64)
    start = time.perf_counter()
    packed.sort()
    stop = time.perf_counter()
    packed.astype(np.uint32)
    return {
        "np_sort_seconds": stop - start,
        "packed_seconds": time.perf_counter() - begin,
    }


Method = tuple[Callable[[], Any], Callable[[], None], Callable[[Any, np.ndarray], dict]]


def with_jax(local_keys: np.ndarray, index: int, count: int) -> Method:
    import jax
    from jax._src import distributed

    import jaxbucket as jb
    from jaxbucket.sort import collectives

    address = os.environ["JAX_COORDINATOR_ADDRESS"]
    jax.distributed.initialize(address, count, index)
    mesh = jb.data_mesh()
    numbers = itertools.count()
    sent = [0]
    exchange = collectives.Devices.exchange

    def counted(self: Any, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        # Keys that stay on their device are not sent.
        sent[0] += sum(x.nbytes * (self.count - 1) // self.count for x in parts)
        return exchange(self, parts)

    collectives.Devices.exchange = counted

    def sort() -> list[jb.sort.SortedShare]:
        sent[0] = 0
        return jb.sort.sample_sort(local_keys, mesh)

    def barrier() -> None:
        # The barrier runs on the host, so that it does not affect timed collectives.
        client = distributed.global_state.client
        assert client is not None
        client.wait_at_barrier(f"benchmark/{next(numbers)}", 600_000)

    def check(
        result: list[jb.sort.SortedShare], expected: np.ndarray
    ) -> dict[str, Any]:
        for share in result:
            np.testing.assert_array_equal(share.index, expected[list(share.ranks)])
        most = max(len(share.ranks) for share in result)
        return {
            "bytes_per_key": sent[0] / max(1, len(local_keys)),
            "most_by_mean": most * count / len(expected),
        }

    return sort, barrier, check


def with_torch(local_keys: np.ndarray, index: int, count: int) -> Method:
    import torch  # pyright: ignore
    from torch import distributed  # pyright: ignore

    host, _, port = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    distributed.init_process_group("gloo", rank=index, world_size=count)
    starts: list[Any] = [None] * count
    distributed.all_gather_object(starts, len(local_keys))
    first = sum(starts[:index])
    table = np.stack(
        [local_keys.astype(np.int64), first + np.arange(len(local_keys))], axis=1
    )
    rows = torch.from_numpy(table)

    def exchange(parts: list[Any]) -> Any:
        sizes = torch.tensor([len(part) for part in parts])
        received_sizes = torch.empty(count, dtype=torch.int64)
        distributed.all_to_all_single(received_sizes, sizes)
        received = torch.empty((int(received_sizes.sum()), 2), dtype=torch.int64)
        distributed.all_to_all_single(
            received, torch.cat(parts), received_sizes.tolist(), sizes.tolist()
        )
        return received

    def sort() -> Any:
        ordered = torch.tensor(sorted(rows.tolist()))
        positions = torch.linspace(0, len(ordered) - 1, _SAMPLES).round().long()
        samples = ordered[positions, 0].contiguous()
        all_samples = [torch.empty_like(samples) for _ in range(count)]
        distributed.all_gather(all_samples, samples)
        bounds, _ = torch.cat(all_samples).sort()
        positions = torch.linspace(0, len(bounds) - 1, count + 1).round().long()
        bounds = bounds[positions]
        # Keys above the last bound go to the last process, keys below the first bound
        # to the first process.
        inner = bounds[1:-1].contiguous()
        owner = torch.bucketize(ordered[:, 0].contiguous(), inner, right=True)
        received = exchange([ordered[owner == i] for i in range(count)])
        return torch.tensor(sorted(received.tolist()))

    def check(result: Any, expected: np.ndarray) -> dict[str, Any]:
        sizes: list[Any] = [None] * count
        distributed.all_gather_object(sizes, len(result))
        start = sum(sizes[:index])
        indices = result[:, 1].numpy()
        np.testing.assert_array_equal(indices, expected[start : start + len(indices)])
        return {"bytes_per_key": None, "most_by_mean": max(sizes) / np.mean(sizes)}

    def barrier() -> None:
        distributed.barrier()

    return sort, barrier, check


METHODS = {"sample_sort": with_jax, "torch, lists": with_torch}


def show(results: list[Any], has_torch: bool) -> None:
    table = Table(box=box.SIMPLE, title=f"Sorting, {os.cpu_count()} cores")
    columns = "keys", "method", "processes", "cold s", "warm s", "/ np.sort"
    for name in (*columns, "/ packed", "bytes per key", "max / mean"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for x in results:
        warm, sent = x["warm_seconds"], x["bytes_per_key"]
        table.add_row(
            f"{x['keys']:,}",
            *(x["way"], str(x["processes"])),
            *(f"{x['cold_seconds']:.3f}", f"{warm:.4f}"),
            f"{warm / x['np_sort_seconds']:.2f}",
            f"{warm / x['packed_seconds']:.2f}",
            "" if sent is None else f"{sent:.1f}",
            f"{x['most_by_mean']:.2f}",
        )
    console = Console(width=120)
    console.print(table)
    if not has_torch:
        console.print("torch is not installed, so its sort was skipped.")
    for size in dict.fromkeys(x["keys"] for x in results):
        both = {x["way"]: x for x in results if x["keys"] == size}
        if len(both) == len(METHODS):
            ours, other = both["sample_sort"], both["torch, lists"]
            ratio = other["warm_seconds"] / ours["warm_seconds"]
            console.print(
                f"{size:,} keys in {ours['processes']} processes: {ratio:.0f} times "
                "faster than through Python lists."
            )


if __name__ == "__main__":
    main()
