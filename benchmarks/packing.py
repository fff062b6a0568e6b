"""Measures fill and speed of packing, compared with packing while reading.

    python benchmarks/packing.py
    python benchmarks/packing.py --examples 2000 --json

Each set of lengths is packed into rows of 2,048 and of 4,096, without longer examples:

    pack               `jaxbucket.packing.pack`, all lengths at once
    best fit           the same rule in plain Python, one example at a time
    Grain              `grain.experimental.BestFitPackIterDataset` with 512 bins
    greedy pool        the largest example of a pool of 64 that fits in the open row

Fill is tokens divided by positions, including partly filled rows. Real lengths are read
from `shared/data` next to the repository if that exists, and are lognormal otherwise.
Then examples with two sequences are packed. Finally, 10 million lengths are packed, and
the first batch of a second epoch is timed.
"""

import argparse
import bisect
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxbucket as jb

_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
_SEQ_LENS = (2048, 4096)
_PAIRS = {
    "multi30k": ("en_words", "de_words"),
    "gsm8k": ("question_bytes", "answer_bytes"),
    "alpaca_subset": ("prompt_bytes", "output_bytes"),
    "azure_code": ("context", "generated"),
}
_BINS = 512
_POOL = 64


def main() -> None:
    args = parse_arguments()
    sets = list(length_sets(args.examples))
    cases = [
        (name, lengths[lengths <= seq_len], seq_len)
        for name, lengths in sets
        for seq_len in _SEQ_LENS
    ]
    results = [
        {"set": name, "seq_len": seq_len, "ways": compare(lengths, seq_len)}
        for name, lengths, seq_len in track(cases, transient=True, disable=args.json)
    ]
    pairs = [
        {"set": name, **compare_pairs(lengths)}
        for name, lengths in track(
            list(pair_sets(args.examples)), transient=True, disable=args.json
        )
    ]
    large = pack_many(args.many)
    if args.json:
        print(json.dumps({"sets": results, "pairs": pairs, "many": large}))
    else:
        show(results, pairs, large)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare methods of packing examples into rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--examples", type=int, default=6000, help="number of examples per set"
    )
    parser.add_argument(
        "--many", type=int, default=10**7, help="number of lengths for the speed test"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.examples < 1 or args.many < 1:
        parser.error("--examples and --many must be at least 1.")
    return args


def length_sets(most: int) -> Iterator[tuple[str, np.ndarray]]:
    paths = sorted(_DATA.glob("*.npz"))
    for path in paths:
        with np.load(path) as columns:
            for name, lengths in columns.items():
                yield f"{path.stem} {name}", lengths[lengths > 0][:most]
    if not paths:
        yield "lognormal", lognormal(most)


def pair_sets(most: int) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    for path in sorted(_DATA.glob("*.npz")):
        if path.stem in _PAIRS:
            with np.load(path) as columns:
                pair = {name: columns[name][:most] for name in _PAIRS[path.stem]}
            yield path.stem, {name: np.maximum(x, 1) for name, x in pair.items()}


def compare_pairs(lengths: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the number of rows of each method, and a lower bound."""
    first, second = lengths
    lengths = {
        name: np.minimum(x, _SEQ_LENS[0]).astype(np.int32)
        for name, x in lengths.items()
    }
    share = lengths[second].sum() / lengths[first].sum()
    rounded = 64 * int(np.ceil(_SEQ_LENS[0] * share / 64))
    capacities = {
        first: _SEQ_LENS[0],
        second: max(rounded, int(lengths[second].max())),
    }
    start = time.perf_counter()
    rows = jb.packing.pack(lengths, capacities).num_rows
    seconds = time.perf_counter() - start
    needed = [-(-int(lengths[x].sum()) // capacities[x]) for x in capacities]
    size = len(lengths[first])
    return {
        "capacities": capacities,
        "fewest": max(needed),
        "pack": rows,
        "pack_examples_per_second": size / seconds,
        "Grain": grain_rows(lengths, capacities),
    }


def lognormal(size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.minimum(1 + rng.lognormal(6, 1, size), 4096).astype(np.int32)


def compare(lengths: np.ndarray, seq_len: int) -> dict[str, dict[str, float]]:
    """Returns the fill and the examples per second of every method."""
    results = {}
    for name, pack in METHODS.items():
        start = time.perf_counter()
        num_rows = pack(lengths, seq_len)
        seconds = time.perf_counter() - start
        fill = float(lengths.sum() / (num_rows * seq_len))
        results[name] = {"fill": fill, "examples_per_second": len(lengths) / seconds}
    return results


def with_pack(lengths: np.ndarray, seq_len: int) -> int:
    return jb.packing.pack(lengths, seq_len).num_rows


def best_fit(lengths: np.ndarray, seq_len: int) -> int:
    rooms: list[int] = []
    rows = 0
    for length in sorted(lengths.tolist(), reverse=True):
        index = bisect.bisect_left(rooms, length)
        if index < len(rooms):
            room = rooms.pop(index)
        else:
            room, rows = seq_len, rows + 1
        if room > length:
            bisect.insort(rooms, room - length)
    return rows


def with_grain(lengths: np.ndarray, seq_len: int) -> int:
    return grain_rows({"tokens": lengths}, {"tokens": seq_len})


def grain_rows(lengths: dict[str, np.ndarray], capacities: dict[str, int]) -> int:
    examples = [
        {name: np.zeros(n, np.uint8) for name, n in zip(lengths, sizes, strict=True)}
        for sizes in zip(*(x.tolist() for x in lengths.values()), strict=True)
    ]
    # Without threads, because Grain's own threads would be slower on few cores.
    dataset = grain.MapDataset.source(examples).to_iter_dataset(
        grain.ReadOptions(num_threads=0)
    )
    packed = grain.experimental.BestFitPackIterDataset(
        dataset, length_struct=capacities, num_packing_bins=_BINS
    )
    return sum(1 for _ in packed)


def greedy_pool(lengths: np.ndarray, seq_len: int) -> int:
    pool: list[int] = []
    rows, room = 0, 0
    rest = iter(lengths.tolist())
    while True:
        while len(pool) < _POOL and (length := next(rest, None)) is not None:
            bisect.insort(pool, length)
        if not pool:
            return rows
        index = bisect.bisect_right(pool, room)
        if index:
            room -= pool.pop(index - 1)
        else:
            rows, room = rows + 1, seq_len


METHODS: dict[str, Callable[[np.ndarray, int], int]] = {
    "pack": with_pack,
    "best fit": best_fit,
    "Grain": with_grain,
    "greedy pool": greedy_pool,
}


def pack_many(size: int) -> dict[str, float]:
    """Times packing of `size` lengths, and the first batch of the next epoch."""
    lengths = lognormal(size)
    start = time.perf_counter()
    packing = jb.packing.pack(lengths, 4096)
    packed = time.perf_counter() - start
    plan = jb.plan_buckets(packing.row_lengths, max_tokens=32 * 4096, boundaries=[4096])
    start = time.perf_counter()
    schedule = jb.BatchSchedule(plan, lengths, packing=packing)
    scheduled = time.perf_counter() - start
    _ = schedule[0]
    start = time.perf_counter()
    _ = schedule[len(schedule)]
    return {
        "examples": size,
        "pack_examples_per_second": size / packed,
        "schedule_seconds": scheduled,
        "next_epoch_milliseconds": 1000 * (time.perf_counter() - start),
    }


def show(
    results: list[dict[str, Any]], pairs: list[dict[str, Any]], large: dict[str, float]
) -> None:
    table = Table(box=box.SIMPLE, title="Fill of rows, and examples per second")
    table.add_column("lengths")
    for name in ("T", *METHODS):
        table.add_column(name, justify="right")
    for result in results:
        cells = [
            f"{x['fill']:.2%}  {x['examples_per_second'] / 1000:6,.0f} k"
            for x in result["ways"].values()
        ]
        table.add_row(result["set"], str(result["seq_len"]), *cells)
    console = Console(width=120)
    console.print(table)
    if pairs:
        console.print(pair_table(pairs))
    console.print(
        f"{large['examples']:,} lengths: "
        f"{large['pack_examples_per_second'] / 1e6:.0f} million per second; the "
        f"schedule takes {large['schedule_seconds']:.2f} s, the first batch of the "
        f"next epoch {large['next_epoch_milliseconds']:.1f} ms."
    )


def pair_table(pairs: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE, title="Rows of examples with two sequences")
    table.add_column("lengths")
    for name in ("capacities", "lower bound", "pack", "Grain", "pack, examples/s"):
        table.add_column(name, justify="right")
    for x in pairs:
        table.add_row(
            x["set"],
            ", ".join(f"{name} {size}" for name, size in x["capacities"].items()),
            *(f"{x[name]:,}" for name in ("fewest", "pack", "Grain")),
            f"{x['pack_examples_per_second']:,.0f}",
        )
    return table


if __name__ == "__main__":
    main()
