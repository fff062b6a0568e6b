"""Measures how fast batches are built from a token file.

    python benchmarks/collate.py
    python benchmarks/collate.py --megabytes 50 --json

For each T, prints the bytes per second of all arrays of the batches (tokens, segment
ids and positions), relative to `np.copyto` with an array of 200 MB in the same run. It
also prints the speed relative to a loop over the rows and to a Grain pipeline that pads
and batches records, and the relative time with `split_source`.
"""

import argparse
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxbucket as jb
from jaxbucket.data.token_source import TokenSource

LENGTHS = (32, 128, 512, 2048)
COPIED = 200_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Time batches from a token file.")
    parser.add_argument("--megabytes", type=int, default=200, help="size of the file")
    parser.add_argument(
        "--tokens", type=int, default=65_536, help="number of positions per batch"
    )
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for seq_len in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(args, pathlib.Path(folder) / "tokens", seq_len))
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)


def measure(
    args: argparse.Namespace, path: pathlib.Path, seq_len: int
) -> dict[str, float]:
    """Times batches of examples of 3/4 T to T tokens, in random order."""
    rng = np.random.default_rng(0)
    count = args.megabytes * 1_000_000 // (4 * seq_len)
    lengths = rng.integers(3 * seq_len // 4, seq_len, count, endpoint=True)
    tokens = rng.integers(0, 50_000, lengths.sum(), dtype=np.int32)
    pieces = np.split(tokens, np.cumsum(lengths)[:-1])
    file = jb.data.write_token_file(path, ({"tokens": piece} for piece in pieces))
    bucket = jb.Bucket(args.tokens // seq_len, seq_len)
    orders = rng.integers(0, count, (args.batches, bucket.batch_size))

    def with_token_file() -> list[jb.Batch]:
        return [file.collate(rows, bucket) for rows in orders]

    def with_loop() -> list[jb.Batch]:
        return [
            jb.data.collate_rows([file[row] for row in rows], bucket) for rows in orders
        ]

    split = jb.data.split_source(file, seq_len)
    assert isinstance(split, TokenSource)

    def with_split_source() -> list[jb.Batch]:
        options = {"pad_value": 0, "truncate": False}
        return [split.collate(rows, bucket, **options) for rows in orders]

    def with_grain() -> list[Any]:
        dataset = (
            grain.MapDataset.source(Subset(file, orders.ravel()))
            .map(lambda example: padded(example["tokens"], seq_len))
            .batch(bucket.batch_size)
        )
        return list(dataset)

    source, target = np.ones(COPIED // 4, np.int32), np.empty(COPIED // 4, np.int32)
    times = in_turn(
        {
            "copy": lambda: np.copyto(target, source),
            "gather": with_token_file,
            "split": with_split_source,
            "loop": with_loop,
            "grain": with_grain,
        },
        args.repeats,
    )
    for actual, expected in zip(with_token_file(), with_loop(), strict=True):
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, actual, expected)))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(with_token_file()))
    copied = COPIED / times["copy"]
    return {
        "seq_len": seq_len,
        "batch_size": bucket.batch_size,
        "gigabytes_per_second": size / times["gather"] / 1e9,
        "of_copyto": size / times["gather"] / copied,
        "times_a_loop": times["loop"] / times["gather"],
        "times_grain": times["grain"] / times["gather"],
        "of_split": times["split"] / times["gather"],
    }


class Subset:
    """Some examples of a source, in a given order."""

    def __init__(self, source: Any, order: np.ndarray):
        self._source, self._order = source, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._source[int(self._order[index])]


def padded(tokens: np.ndarray, seq_len: int) -> dict[str, np.ndarray]:
    """Returns the arrays of one row, as a Grain user would write it."""
    pad = seq_len - len(tokens)
    positions = np.arange(len(tokens), dtype=np.int32)
    return {
        "tokens": np.pad(tokens, (0, pad)),
        "tokens_segment_ids": np.pad(np.ones_like(positions), (0, pad)),
        "tokens_positions": np.pad(positions, (0, pad)),
    }


def in_turn(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Returns the seconds of the fastest call of each function; they run in turn."""
    best = dict.fromkeys(functions, np.inf)
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def show(rows: list[dict[str, float]]) -> None:
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.3g}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
