"""Fill and speed of packing, compared with ways that pack while they read.

    python benchmarks/packing.py
    python benchmarks/packing.py --examples 2000 --json

Rows of 2,048 and of 4,096 for each set of lengths, without the longer examples:

    pack               `jaxbucket.packing.pack`, all lengths at once
    best fit           the same rule in plain Python, one example after the other
    Grain              `grain.experimental.BestFitPackIterDataset` with 512 bins
    greedy pool        the largest example of a pool of 64 that fits in the open row

Fill is tokens over positions, partly filled rows included. Real lengths are read from
`shared/data` next to the repository if that exists, and are lognormal otherwise. Then
examples of two sequences are packed in both, and 10 million lengths are packed, once
and for the first batch of another epoch.
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
    both = [
        {"set": name, **compare_pairs(lengths)}
        for name, lengths in track(
            list(pair_sets(args.examples)), transient=True, disable=args.json
        )
    ]
    large = many(args.many)
    if args.json:
        print(json.dumps({"sets": results, "pairs": both, "many": large}))
    else:
        show(results, both, large)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare ways to pack examples into rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--examples", type=int, default=6000, help="the first examples of each set"
    )
    parser.add_argument(
        "--many", type=int, default=10**7, help="lengths to pack for the speed"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.examples < 1 or args.many < 1:
        parser.error("--examples and --many are at least 1.")
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
            yield path.stem, {name: np.maximum(own, 1) for name, own in pair.items()}


def compare_pairs(lengths: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the rows of each way, and the fewest that the tokens allow."""
    first, second = lengths
    lengths = {
        name: np.minimum(own, _SEQ_LENS[0]).astype(np.int32)
        for name, own in lengths.items()
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
    """Returns the fill and the examples per second of every way."""
    found = {}
    for name, pack in WAYS.items():
        start = time.perf_counter()
        num_rows = pack(lengths, seq_len)
        seconds = time.perf_counter() - start
        fill = float(lengths.sum() / (num_rows * seq_len))
        found[name] = {"fill": fill, "examples_per_second": len(lengths) / seconds}
    return found


def with_pack(lengths: np.ndarray, seq_len: int) -> int:
    return jb.packing.pack(lengths, seq_len).num_rows


def best_fit(lengths: np.ndarray, seq_len: int) -> int:
    rooms: list[int] = []
    rows = 0
    for length in sorted(lengths.tolist(), reverse=True):
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms.pop(place)
        else:
            room, rows = seq_len, rows + 1
        if room > length:
            bisect.insort(rooms, room - length)
    return rows


def with_grain(lengths: np.ndarray, seq_len: int) -> int:
    return grain_rows({"tokens": lengths}, {"tokens": seq_len})


def grain_rows(lengths: dict[str, np.ndarray], capacities: dict[str, int]) -> int:
    examples = [
        {name: np.zeros(n, np.uint8) for name, n in zip(lengths, own, strict=True)}
        for own in zip(*(x.tolist() for x in lengths.values()), strict=True)
    ]
    # Read as it would be: with threads of its own it is slower on few cores.
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
        place = bisect.bisect_right(pool, room)
        if place:
            room -= pool.pop(place - 1)
        else:
            rows, room = rows + 1, seq_len


WAYS: dict[str, Callable[[np.ndarray, int], int]] = {
    "pack": with_pack,
    "best fit": best_fit,
    "Grain": with_grain,
    "greedy pool": greedy_pool,
}


def many(size: int) -> dict[str, float]:
    """Returns the speed of packing very many lengths, and of another epoch."""
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
    results: list[dict[str, Any]], both: list[dict[str, Any]], large: dict[str, float]
) -> None:
    table = Table(box=box.SIMPLE, title="Fill of rows, and examples per second")
    table.add_column("lengths")
    for name in ("T", *WAYS):
        table.add_column(name, justify="right")
    for result in results:
        cells = [
            f"{x['fill']:.2%}  {x['examples_per_second'] / 1000:6,.0f} k"
            for x in result["ways"].values()
        ]
        table.add_row(result["set"], str(result["seq_len"]), *cells)
    console = Console(width=120)
    console.print(table)
    if both:
        console.print(pair_table(both))
    console.print(
        f"{large['examples']:,} lengths: "
        f"{large['pack_examples_per_second'] / 1e6:.0f} million a second; their "
        f"schedule {large['schedule_seconds']:.2f} s; the first batch of the next "
        f"epoch {large['next_epoch_milliseconds']:.1f} ms."
    )


def pair_table(both: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE, title="Rows of examples with two sequences")
    table.add_column("lengths")
    for name in ("capacities", "fewest by tokens", "pack", "Grain", "pack, examples/s"):
        table.add_column(name, justify="right")
    for x in both:
        table.add_row(
            x["set"],
            ", ".join(f"{name} {size}" for name, size in x["capacities"].items()),
            *(f"{x[name]:,}" for name in ("fewest", "pack", "Grain")),
            f"{x['pack_examples_per_second']:,.0f}",
        )
    return table


if __name__ == "__main__":
    main()
