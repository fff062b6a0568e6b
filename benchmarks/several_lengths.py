"""Shapes for pairs of lengths: planned jointly, side by side, and by other rules.

    python benchmarks/several_lengths.py
    python benchmarks/several_lengths.py --data ../shared/data --sets gsm8k --json

Every pair is in the cheapest shape that holds it, whichever rule chose the shapes, and
remainders flow between the shapes in the same way. Real lengths come from
`../shared/data`, where it exists; `speech_lengths` makes up others.

The numbers are the share of an epoch's cost that is padding, with remainders and if
every batch were full. B of the shapes of every rule is chosen for its rows. The other
rules are the best of all their variants: product grids of the best boundaries of each
side, the two passes of NeMo, and the best buckets by the maximum or by the sum of both
lengths.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxbucket.base.assignment import cheapest
from jaxbucket.plan.flow.batch_sizes import fitted_between
from jaxbucket.plan.flow.dominance import dominates, fits, shape_order
from jaxbucket.plan.joint_planner import search_shapes
from jaxbucket.plan.limits import Limits

DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
NUM_BUCKETS = (4, 8, 16, 32)
BATCH_SIZE_MULTIPLE = 8
COLUMNS = [
    ("multi30k", "words", ("en_words", "de_words"), 1, 16_384),
    ("multi30k", "bytes", ("en_bytes", "de_bytes"), 8, 16_384),
    ("gsm8k", "bytes", ("question_bytes", "answer_bytes"), 8, 32_768),
    ("alpaca_subset", "bytes", ("prompt_bytes", "output_bytes"), 8, 32_768),
]


class Pairs(NamedTuple):
    """A set of pairs of lengths, `[N, 2]`, and the limits of its shapes."""

    name: str
    lengths: np.ndarray
    multiple: int
    max_tokens: int

    @property
    def needed(self) -> np.ndarray:
        """`[N, 2]`: the lengths, rounded up."""
        return -(-self.lengths // self.multiple) * self.multiple

    def limits(self, costs_fn: Callable) -> Limits:
        def cost_fn(batch_size: int, seq_len: Any) -> float:
            shape = np.array([list(seq_len.values())])
            return float(costs_fn(np.array([batch_size]), shape)[0])

        def budget(seq_len: Any) -> int:
            shape = np.array([list(seq_len.values())])
            return int(self.batch_sizes(shape)[0]) * seq_len.total

        return Limits(
            sequences=("source", "target"),
            max_tokens=budget,
            seq_len_multiple=self.multiple,
            cost_fn=None if costs_fn is by_tokens else cost_fn,
        )

    def batch_sizes(self, seq_lens: np.ndarray) -> np.ndarray:
        rows = self.max_tokens // seq_lens.sum(axis=1)
        multiple = rows // BATCH_SIZE_MULTIPLE * BATCH_SIZE_MULTIPLE
        return np.where(rows > BATCH_SIZE_MULTIPLE, multiple, rows)


def by_tokens(batch_sizes: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Returns the cost of a batch if each position costs the same."""
    return batch_sizes * seq_lens.sum(axis=1)


def by_attention(batch_sizes: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Returns the cost of a batch in an encoder and a decoder of width 64.

    A layer of the encoder multiplies each position with 12 d^2 weights, one of the
    decoder with 16 d^2, because of its cross attention. Each pair of positions costs
    2 d in attention, within the source, within the target, and between the two.
    """
    source, target = seq_lens.astype(np.float64).T
    width = 64
    weights = width * (12 * source + 16 * target)
    pairs = 2 * (source**2 + target**2 + source * target)
    return batch_sizes * (weights + pairs)


COSTS = {"tokens": by_tokens, "attention": by_attention}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare shapes for two lengths.")
    parser.add_argument("--data", type=pathlib.Path, default=DATA)
    parser.add_argument("--sets", nargs="+", help="prefixes of the sets to include")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sets = [
        pairs
        for pairs in all_sets(args.data)
        if not args.sets or pairs.name.startswith(tuple(args.sets))
    ]
    cases = [(s, cost, k) for s in sets for cost in COSTS for k in NUM_BUCKETS]
    rows = [row(*case) for case in track(cases, "Planning", transient=True)]
    result = {"rows": rows, "million": [] if args.sets else one_million()}
    print(json.dumps(result)) if args.json else show(result)


def all_sets(folder: pathlib.Path) -> Iterator[Pairs]:
    for file, unit, names, multiple, max_tokens in COLUMNS:
        path = folder / f"{file}.npz"
        if path.exists():
            with np.load(path) as columns:
                lengths = np.stack([columns[name] for name in names], axis=1)
            name = f"{file} {unit}"
            yield Pairs(name, lengths.astype(np.int64), multiple, max_tokens)
    yield Pairs("speech", speech_lengths(100_000), 8, 131_072)


def speech_lengths(size: int) -> np.ndarray:
    """Returns numbers of frames and of characters, `[size, 2]`, like LibriSpeech's.

    72% of the utterances last 14.3 +- 1.2 s, because recordings are cut at the first
    silence after that time, and 28% are distributed evenly from 2 s to 14 s. A second
    has 100 frames, and 14.7 characters times exp(0.15 z) for a normal z.
    """
    rng = np.random.default_rng(0)
    long = rng.random(size) < 0.72
    seconds = np.where(long, rng.normal(14.3, 1.2, size), rng.uniform(2, 14, size))
    seconds = np.clip(seconds, 1.3, 24.5)
    speed = 14.7 * np.exp(0.15 * rng.standard_normal(size))
    lengths = np.stack([100 * seconds, seconds * speed], axis=1)
    return np.maximum(1, np.rint(lengths)).astype(np.int64)


class Epoch(NamedTuple):
    """The costs of an epoch: with remainders, and if every batch were full."""

    cost: float
    steady: float


def row(pairs: Pairs, cost: str, num_buckets: int) -> dict[str, Any]:
    costs_fn = COSTS[cost]
    start = time.perf_counter()
    shapes = search_shapes(pairs.lengths, pairs.limits(costs_fn), num_buckets)
    seconds = time.perf_counter() - start
    ours = epoch_of(pairs, shapes, costs_fn)
    least = float(costs_fn(np.ones(len(pairs.lengths), int), pairs.lengths).sum())
    others = {}
    for name, rule in RULES.items():
        epochs = [
            epoch_of(pairs, shapes, costs_fn)
            for shapes in rule(pairs, num_buckets, costs_fn)
        ]
        others[name] = [
            1 - least / min(epoch.cost for epoch in epochs),
            1 - least / min(epoch.steady for epoch in epochs),
        ]
    return {
        "set": pairs.name,
        "cost": cost,
        "K": num_buckets,
        "jointly": [1 - least / ours.cost, 1 - least / ours.steady],
        "others": others,
        "seconds": seconds,
    }


def epoch_of(pairs: Pairs, seq_lens: np.ndarray, costs_fn: Callable) -> Epoch:
    """Returns the costs of an epoch with some shapes, `[K, 2]`."""
    seq_lens = np.unique(seq_lens, axis=0)
    seq_lens = seq_lens[pairs.batch_sizes(seq_lens) > 0]
    seq_lens = seq_lens[shape_order(seq_lens)]
    sizes = pairs.batch_sizes(seq_lens)
    costs = costs_fn(sizes, seq_lens)
    shapes = cheapest(pairs.lengths, seq_lens, costs / sizes)
    counts = np.bincount(shapes, minlength=len(seq_lens))
    examples = np.full_like(sizes, counts.sum())
    steps = pairs.limits(costs_fn).sizes(seq_lens, sizes, examples)
    cost = fitted_between(steps, counts, dominates(seq_lens))[1]
    return Epoch(cost, float(counts @ (costs / sizes)))


def factorizations(number: int) -> Iterator[tuple[int, int]]:
    for first in range(1, number + 1):
        if number % first == 0:
            yield first, number // first


def each_side_apart(
    pairs: Pairs, num_buckets: int, costs_fn: Callable
) -> Iterator[np.ndarray]:
    """Yields all combinations of the best boundaries of each side, `[K, 2]`."""
    for numbers in factorizations(num_buckets):
        ends = [
            best_groups(side, side[:, None], number, lambda shape: shape[:, 0]).ravel()
            for side, number in zip(pairs.needed.T, numbers, strict=True)
        ]
        grid = np.stack(np.meshgrid(*ends), axis=-1).reshape(-1, 2)
        # The budget may exclude shapes that no pair needs.
        yield grid[pairs.batch_sizes(grid) > 0]


def two_passes(
    pairs: Pairs, num_buckets: int, costs_fn: Callable
) -> Iterator[np.ndarray]:
    """Yields shapes by the rule of NeMo's `estimate_duration_bins_2d`, `[K, 2]`.

    The first side is divided into bins of equal total length, and the pairs of each bin
    into bins of equal total length of the second side. All factorizations of K are
    tried, with either side first.
    """
    for first in (0, 1):
        for outer, inner in factorizations(num_buckets):
            shapes = []
            for part in equal_totals(pairs.needed, first, outer):
                longest = part[:, first].max()
                for cell in equal_totals(part, 1 - first, inner):
                    shape = [longest, longest]
                    shape[1 - first] = cell[:, 1 - first].max()
                    shapes.append(shape)
            yield np.array(shapes)


def equal_totals(lengths: np.ndarray, side: int, number: int) -> list[np.ndarray]:
    """Returns parts of pairs, `[n, 2]` each, with equal total lengths of one side."""
    lengths = lengths[np.argsort(lengths[:, side], kind="stable")]
    totals = np.cumsum(lengths[:, side])
    shares = totals[-1] * np.arange(1, number) / number
    parts = np.split(lengths, np.searchsorted(totals, shares))
    return [part for part in parts if len(part)]


def by_maximum(
    pairs: Pairs, num_buckets: int, costs_fn: Callable
) -> Iterator[np.ndarray]:
    """Yields the best shapes of buckets by the longer side, `[K, 2]`."""
    rate = rates_of(pairs, costs_fn)
    yield best_groups(pairs.needed.max(axis=1), pairs.needed, num_buckets, rate)


def by_sum(pairs: Pairs, num_buckets: int, costs_fn: Callable) -> Iterator[np.ndarray]:
    """Yields the best shapes of buckets by the sum of both sides, `[K, 2]`."""
    rate = rates_of(pairs, costs_fn)
    yield best_groups(pairs.needed.sum(axis=1), pairs.needed, num_buckets, rate)


RULES = {
    "apart": each_side_apart,
    "NeMo": two_passes,
    "maximum": by_maximum,
    "sum": by_sum,
}


def rates_of(pairs: Pairs, costs_fn: Callable) -> Callable[[np.ndarray], np.ndarray]:
    def rates(seq_lens: np.ndarray) -> np.ndarray:
        sizes = pairs.batch_sizes(seq_lens)
        allowed = np.maximum(1, sizes)
        return np.where(sizes, costs_fn(allowed, seq_lens) / allowed, np.inf)

    return rates


def best_groups(
    keys: np.ndarray, lengths: np.ndarray, number: int, rates: Callable
) -> np.ndarray:
    """Returns the shapes of groups of examples with consecutive keys, `[K, Q]`.

    Each group has the least shape that holds its examples. Dynamic programming finds
    the groups whose rows cost least in total.

    Args:
      keys: `[N]` integers by which the examples are grouped.
      lengths: `[N, Q]` integers, the lengths of the examples.
      number: the largest number of groups.
      rates: `[n, Q]` T -> `[n]` the cost of a row.
    """
    values, which = np.unique(keys, return_inverse=True)
    counts = np.bincount(which)
    longest = np.zeros((len(values), lengths.shape[1]), np.int64)
    np.maximum.at(longest, which, lengths)
    size = len(values)
    # `[i, j]`: the shape and the cost of a group from value i to value j.
    shapes = np.zeros((size, size, lengths.shape[1]), np.int64)
    costs = np.full((size, size), np.inf)
    for start in range(size):
        shapes[start, start:] = np.maximum.accumulate(longest[start:])
        rows = np.cumsum(counts[start:])
        costs[start, start:] = rows * rates(shapes[start, start:])
    beyond = np.full(size + 1, np.inf)
    beyond[size] = 0
    ends = []
    for _ in range(min(number, size)):
        totals = costs + beyond[1:]
        ends.append(totals.argmin(axis=1))
        beyond = np.append(totals.min(axis=1), 0)
    chosen, start = [], 0
    for end in reversed(ends):
        if start < size:
            chosen.append(shapes[start, end[start]])
            start = int(end[start]) + 1
    return np.array(chosen)


def one_million() -> list[dict[str, Any]]:
    """Returns the times and the peak memory of planning for a million pairs."""
    pairs = Pairs("speech", speech_lengths(1_000_000), 1, 131_072)
    limits = Limits(sequences=("source", "target"), max_tokens=pairs.max_tokens)
    result = []
    for num_buckets in (8, 16, 32):
        start, cpu = time.perf_counter(), time.process_time()
        shapes = search_shapes(pairs.lengths, limits, num_buckets)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        assert fits(pairs.lengths, shapes).any(axis=1).all()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        result.append(
            {"K": num_buckets, "seconds": seconds, "CPU s": cpu, "peak MiB": peak}
        )
    return result


def show(result: dict[str, Any]) -> None:
    # Wide enough for the table, regardless of the terminal width.
    console = Console(width=150)
    for cost in COSTS:
        title = "Padding of an epoch with remainders / with full batches, %"
        if cost != "tokens":
            title = f"Cost of padding by {cost}, with remainders / full batches, %"
        table = Table(title=title)
        table.add_column("set")
        for name in ("K", "jointly", *RULES, "seconds"):
            table.add_column(name, justify="right")
        for r in result["rows"]:
            if r["cost"] == cost:
                table.add_row(
                    *(r["set"], str(r["K"]), f"[bold]{percents(r['jointly'])}"),
                    *(percents(r["others"][name]) for name in RULES),
                    f"{r['seconds']:.2f}",
                )
        console.print(table)
    for part, name in enumerate(("with remainders", "with full batches")):
        number = sum(
            r["jointly"][part] > min(other[part] for other in r["others"].values())
            for r in result["rows"]
        )
        console.print(f"rows in which another rule is better, {name}: {number}")
    if result["million"]:
        table = Table(title="One million pairs")
        for name in result["million"][0]:
            table.add_column(name, justify="right")
        for r in result["million"]:
            table.add_row(*(f"{value:,.1f}" for value in r.values()))
        console.print(table)


def percents(shares: list[float]) -> str:
    return " / ".join(f"{100 * share:.2f}" for share in shares)


if __name__ == "__main__":
    main()
