"""Compares the padding of plans and rules of thumb on real lengths, and times planning.

    python benchmarks/planning.py
    python benchmarks/planning.py --data ../shared/data --sets gsm8k seed2 --json

For every set of lengths, number of shapes and multiple of T, prints the padding of an
epoch with the optimal plan and with every rule of thumb, including partly filled
batches. As usual, the rules pad the remainder of each bucket. "best rule, our
remainders" is the best rule with jaxbucket's treatment of remainders. The padding of
full batches is a lower bound for any choice of the same number of shapes. B is a
multiple of 8 if 8 rows fit.

"Small sets" are random subsets of 3 to 4,000 examples. Their plans are compared with a
dynamic program over (T, B) without promoted examples, for several costs. `--small`
runs only this part, and with `--json` prints the cost of every plan, to be compared
with those of another version: `--before FILE` counts plans that cost more than there.

The last part plans 64 to 4,096 buckets for 1,000 to 100,000 different lengths, padded
and packed, and reports CPU seconds of a single run. `--many` runs only this part.

Uniform lengths are always included. Other sets are `.npz` files in a folder, and are
skipped if it does not exist.
"""

import argparse
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxbucket as jb
from jaxbucket.plan.reports.comparison import ONE_SHAPE, OPTIMAL

DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
BUDGETS = {"seed2": 500_000, "multi30k": 16_384}
BUDGET = 32_768
# Longer examples are truncated.
LONGEST = 16_384
NUM_BUCKETS = (4, 8, 16, 32)
MULTIPLES = (8, 128)
BATCH_SIZE_MULTIPLE = 8
SMALL_SIZES = (3, 10, 20, 50, 100, 200, 500, 1000, 2000, 4000)
SMALL_BUCKETS = (1, 4, 8, 16)
SMALL_COSTS: dict[str, Any] = {
    "tokens": None,
    "operations": jb.plan.TransformerCost(width=256, depth=4),
    "seconds": jb.plan.StepTime(0.02, 1e-6, 2e-9),
}


class Lengths(NamedTuple):
    """A set of lengths, and a token budget from earlier publications."""

    name: str
    values: np.ndarray
    max_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare plans on real lengths.")
    parser.add_argument("--data", type=pathlib.Path, default=DATA)
    parser.add_argument("--sets", nargs="+", help="prefixes of the sets to include")
    parser.add_argument("--many", action="store_true", help="run only the last part")
    parser.add_argument("--small", action="store_true", help="run only small sets")
    parser.add_argument("--seconds", action="store_true", help="run only the times")
    parser.add_argument("--before", type=pathlib.Path, help="JSON of the same part")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    before = json.loads(args.before.read_text()) if args.before else {}
    if args.seconds:
        rows = planning_seconds()
        for old, new in zip(before, rows, strict=bool(before)):
            new |= {"before": old["seconds"], "ratio": new["seconds"] / old["seconds"]}
        print(json.dumps(rows)) if args.json else show_rows(Console(), TIMES, rows)
        return
    if args.small:
        small = small_sets(all_sets(args.data), args.sets)
        print(json.dumps(small)) if args.json else show_small(Console(), small, before)
        return
    if args.many:
        large = many_buckets_and_lengths()
        print(json.dumps(large)) if args.json else show_many(Console(width=132), large)
        return
    sets = [
        lengths
        for lengths in all_sets(args.data)
        if not args.sets or lengths.name.startswith(tuple(args.sets))
    ]
    cases = [(s, k, m) for s in sets for k in NUM_BUCKETS for m in MULTIPLES]
    rows = [row(*case) for case in track(cases, "Planning", transient=True)]
    result = {
        "padding": rows,
        "violations": violations(rows),
        "token_batching": token_batching(),
        "small": small_sets(sets),
        "seconds": planning_seconds(),
        "many": many_buckets_and_lengths(),
    }
    print(json.dumps(result)) if args.json else show(result)


def all_sets(folder: pathlib.Path) -> Iterator[Lengths]:
    yield Lengths("seed2", uniform_lengths(), BUDGETS["seed2"])
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as columns:
            for name in columns.files:
                values = np.minimum(columns[name], LONGEST)
                values = values[values > 0]
                budget = BUDGETS.get(path.stem, BUDGET)
                yield Lengths(f"{path.stem}.{name}", values, budget)


def uniform_lengths() -> np.ndarray:
    """Returns the lengths of a well-known post on batching by tokens."""
    # The legacy generator reproduces the lengths of that post.
    return np.random.RandomState(2023).randint(128, 4096, 200_000)  # noqa: NPY002


def row(lengths: Lengths, num_buckets: int, multiple: int) -> dict[str, Any]:
    def max_tokens(seq_len: int) -> int:
        rows = lengths.max_tokens // seq_len
        if rows > BATCH_SIZE_MULTIPLE:
            rows = rows // BATCH_SIZE_MULTIPLE * BATCH_SIZE_MULTIPLE
        return rows * seq_len

    limits = jb.Limits(max_tokens=max_tokens, seq_len_multiple=multiple)
    start = time.perf_counter()
    with_remainders = jb.plan.compare_plans(
        lengths.values, limits, num_buckets=num_buckets
    )
    seconds = time.perf_counter() - start
    padded = jb.plan.compare_plans(
        lengths.values, limits, num_buckets=num_buckets, remainder="pad"
    )
    optimal, least = with_remainders[OPTIMAL], with_remainders.least_cost
    assert least is not None
    rules = {p.name: p.report.padding for p in padded.plans if p.name != OPTIMAL}
    real = optimal.report.real_tokens
    others = [p.report.padding for p in with_remainders.plans if p.name != OPTIMAL]
    return {
        "set": lengths.name,
        "K": num_buckets,
        "multiple": multiple,
        "ours": optimal.report.padding,
        "bound": 1 - real / least,
        "best_rule_with_our_remainders": min(others),
        "rules": rules,
        "seconds": seconds,
        # Whether every length has a shape of its own, so that all rules are optimal.
        "trivial": len(np.unique(-(-lengths.values // multiple))) <= num_buckets,
        "batches_above_bound": (optimal.report.padded_tokens - least)
        / sum(bucket.num_tokens for bucket in optimal.plan.buckets),
    }


def violations(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Counts rows in which a rule matches the optimal plan, or the bound is loose."""
    slack = 1e-12

    def as_good(padding: float, row: dict[str, Any]) -> bool:
        return padding <= row["ours"] + slack and not row["trivial"]

    best_rules = [min(r["rules"].values()) for r in rows]
    with_remainders = [r["best_rule_with_our_remainders"] for r in rows]
    pairs = list(zip(best_rules, with_remainders, rows, strict=True))
    return {
        "rows": len(rows),
        "a rule is better": sum(min(a, b) < r["ours"] - slack for a, b, r in pairs),
        "a rule is as good, and lengths have more than K values": sum(
            as_good(a, r) for a, _, r in pairs
        ),
        "a rule is as good by our remainders, and lengths have more than K values": sum(
            as_good(b, r) for _, b, r in pairs
        ),
        "more than a full batch for each bucket above the bound": sum(
            r["batches_above_bound"] > 1 for r in rows
        ),
    }


def token_batching() -> list[dict[str, Any]]:
    """Returns the two batching methods of that post, and static shapes."""
    lengths, budget = uniform_lengths(), BUDGETS["seed2"]
    sequential = np.split(lengths, range(128, len(lengths), 128))
    batchings = [
        padding_row("128 in a row", sequential),
        padding_row("sorted, as many as fit", greedy_batches(lengths, budget)),
    ]
    for num_buckets in NUM_BUCKETS:
        plan = jb.plan_buckets(
            lengths,
            max_tokens=budget,
            num_buckets=num_buckets,
            batch_size_multiple=BATCH_SIZE_MULTIPLE,
            seq_len_multiple=8,
        )
        epoch = jb.report(plan, lengths)
        batchings.append(
            {
                "batches": f"{num_buckets} shapes of jaxbucket",
                "number": epoch.steps_per_epoch,
                "shapes": len(plan),
                "padding": epoch.padding,
            }
        )
    return batchings


def greedy_batches(lengths: np.ndarray, max_tokens: int) -> Iterator[np.ndarray]:
    """Yields batches from the longest lengths down, each within the budget."""
    lengths, start = np.sort(lengths)[::-1], 0
    while start < len(lengths):
        end = start + max_tokens // int(lengths[start])
        yield lengths[start:end]
        start = end


def padding_row(name: str, batches: Any) -> dict[str, Any]:
    shapes = [(len(batch), int(batch.max()), int(batch.sum())) for batch in batches]
    padded = sum(rows * longest for rows, longest, _ in shapes)
    return {
        "batches": name,
        "number": len(shapes),
        "shapes": len({(rows, longest) for rows, longest, _ in shapes}),
        "padding": 1 - sum(real for _, _, real in shapes) / padded,
    }


def small_sets(
    sets: Iterable[Lengths], prefixes: Sequence[str] | None = None
) -> dict[str, dict[str, float]]:
    """Returns the costs of plans of random subsets, by set, size, cost and K."""
    sets = [s for s in sets if not prefixes or s.name.startswith(tuple(prefixes))]
    cases = itertools.product(sets, SMALL_SIZES, (1, BATCH_SIZE_MULTIPLE), SMALL_COSTS)
    result = {}
    for (name, values, budget), size, multiple, cost in track(
        list(cases), "Small sets", transient=True
    ):
        rng = np.random.default_rng(size)
        lengths = rng.choice(values, min(size, len(values)), replace=False)
        longest = -(-int(lengths.max()) // multiple) * multiple
        max_tokens = max(budget, multiple * longest)
        best = without_promotion(lengths, max_tokens, multiple, SMALL_COSTS[cost])
        for num_buckets in SMALL_BUCKETS:
            start = time.process_time()
            plan = jb.plan_buckets(
                lengths,
                max_tokens=max_tokens,
                num_buckets=num_buckets,
                batch_size_multiple=multiple,
                seq_len_multiple=multiple,
                cost_fn=SMALL_COSTS[cost],
            )
            seconds = time.process_time() - start
            epoch = jb.report(plan, lengths)
            result[f"{name} {size} x{multiple} {cost} K={num_buckets}"] = {
                "size": size,
                "multiple": multiple,
                "K": num_buckets,
                "cost": float(epoch.epoch_cost),
                "dynamic": float(best[num_buckets - 1]),
                "padding": epoch.padding,
                "seconds": seconds,
            }
    return result


def without_promotion(
    lengths: np.ndarray, max_tokens: int, multiple: int, cost_fn: Any
) -> list[float]:
    """Returns the least cost of an epoch with 1, 2, ... buckets, by (T, B).

    Each bucket has as few batches as the largest B needs, of the smallest B for these.
    """
    ends = np.unique(-(-lengths // multiple) * multiple)
    starts = np.append(0, np.searchsorted(np.sort(lengths), ends, side="right"))
    most = max_tokens // ends // multiple * multiple
    rows = starts[1:] - starts[:, None]
    steps = np.maximum(-(-rows // most), 1)
    sizes = np.maximum(-(-rows // (steps * multiple)), 1) * multiple
    if isinstance(cost_fn, jb.plan.StepTime):
        # Without the shapes that were measured, it has a formula for arrays.
        step, token, pair = cost_fn.per_step, cost_fn.per_token, cost_fn.per_pair
        costs = step + sizes * ends * (token + ends * pair)
    else:
        by_arrays: Any = cost_fn or jb.plan.TokenCost()
        costs = by_arrays(sizes, ends)
    costs = np.where(rows > 0, steps * costs, np.inf)
    best, least = np.where(np.arange(len(starts)) > 0, np.inf, 0.0), []
    for _ in range(max(SMALL_BUCKETS)):
        new = (best[:, None] + costs).min(axis=0)
        best = np.append(0.0, np.minimum(best[1:], new))
        least.append(best[-1])
    return least


def planning_seconds() -> list[dict[str, Any]]:
    """Returns the best of three CPU times, for lengths in memory."""
    many, some = lognormal(10_000_000, 6, 1, 8192), lognormal(1_000_000, 5.5, 1, 4096)
    long = lognormal(1_000_000, 9, 1.3, 131_072)
    by_flops = jb.plan.TransformerCost(width=1024, depth=16)
    rows: Any = {"batch_size_multiple": 8}
    large: Any = {"max_tokens": 1 << 20, "num_buckets": 32, **rows}
    cases: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
        "10 million lengths to 8,192, K=8, multiples of 8": (
            many,
            {"max_tokens": 1 << 19, "seq_len_multiple": 8, **rows},
        ),
        "10 million lengths to 8,192, K=8": (many, {"max_tokens": 1 << 19, **rows}),
        "1 million lengths to 131,072, K=32": (long, large),
        "the same by quadratic cost": (long, {**large, "cost_fn": by_flops}),
        "the same, a budget of 16 million": (long, {**large, "max_tokens": 1 << 24}),
        "1 million lengths to 4,096, K=8": (some, {"max_tokens": 1 << 18}),
        "the same, multiples of 16": (
            some,
            {"max_tokens": 1 << 18, "seq_len_multiple": 16, **rows},
        ),
        "1 million lengths to 4,096, K=32": (
            some,
            {"max_tokens": 1 << 18, "num_buckets": 32},
        ),
        "1 million lengths to 16,384, K=16, multiples of 128": (
            lognormal(1_000_000, 5.5, 1.3, 16_384),
            {"max_tokens": 1 << 18, "num_buckets": 16, "seq_len_multiple": 128, **rows},
        ),
    }
    return [
        {
            "case": name,
            "seconds": min(
                timed(jb.plan_buckets, lengths, **options)[1] for _ in range(3)
            ),
        }
        for name, (lengths, options) in cases.items()
    ]


def lognormal(size: int, mean: float, sigma: float, longest: int) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(mean, sigma, size)
    return np.clip(lengths, 1, longest).astype(np.int32)


def many_buckets_and_lengths() -> dict[str, Any]:
    """Returns the times of calls with many buckets and lengths, and their costs.

    Costs are per epoch, relative to an epoch without padding.
    """
    rows = [*many_buckets(), *given_buckets(), *many_lengths(), *many_pairs()]
    return {"calls": rows, "longest": max(row["seconds"] for row in rows)}


def many_buckets() -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    short = rng.integers(1, 4097, 20_000)
    long = np.clip(rng.lognormal(9, 1.3, 1_000_000), 1, 131_072).astype(np.int32)
    cases = [
        ("20,000 to 4,096", short, 1 << 16),
        ("1,000,000 to 131,072", long, 1 << 20),
    ]
    for name, lengths, max_tokens in cases:
        for num_buckets in (64, 128, 256, 512, 1024, 2048, 4096):
            plan, seconds = timed(
                jb.plan_buckets, lengths, max_tokens=max_tokens, num_buckets=num_buckets
            )
            cost = jb.report(plan, lengths).epoch_cost / lengths.sum()
            call = f"plan_buckets, {name}, K={num_buckets:,}"
            yield {"call": call, "seconds": seconds, "cost": cost}


def given_buckets() -> Iterator[dict[str, Any]]:
    for size in (1000, 10_000):
        lengths = np.random.default_rng(0).integers(1, size + 1, 40 * size)
        ends = list(range(1, size + 1))
        plan = jb.plan_buckets(lengths, max_tokens=64 * size, boundaries=ends)
        schedule, seconds = timed(jb.BatchSchedule, plan, lengths)
        call = f"BatchSchedule, {size:,} given buckets"
        yield {"call": call, "seconds": seconds, "cost": None}
        epoch, seconds = timed(schedule.report)
        cost = epoch.epoch_cost / lengths.sum()
        yield {"call": "its report", "seconds": seconds, "cost": cost}


def many_lengths() -> Iterator[dict[str, Any]]:
    by_flops = jb.plan.TransformerCost(width=64, depth=2)
    for size in (1000, 10_000, 30_000, 100_000):
        rng = np.random.default_rng(0)
        values = np.sort(rng.permutation(size + size // 4)[:size] + 1)
        lengths = rng.permutation(np.append(values, rng.choice(values, size)))
        last, name = int(values[-1]), f"{size:,} lengths"
        for seq_lens in (last, (last // 2, last)):
            packing, seconds = timed(jb.packing.pack, lengths, seq_lens)
            number = 1 if isinstance(seq_lens, int) else len(seq_lens)
            call = f"pack, {name}, {number} T"
            yield {"call": call, "seconds": seconds, "cost": 1 / packing.fill}
        for cost, cost_fn in (("tokens", None), ("operations", by_flops)):
            rows, seconds = timed(
                jb.plan_packing,
                lengths,
                max_tokens=10 * last,
                num_buckets=4,
                cost_fn=cost_fn,
            )
            padded = rows.epoch_costs["packed"] / rows.epoch_costs["padded"]
            call = f"plan_packing, {name}, by {cost}"
            yield {"call": call, "seconds": seconds, "cost": padded}
        plan, seconds = timed(
            jb.plan_buckets, lengths, max_tokens=10 * last, num_buckets=8
        )
        cost = jb.report(plan, lengths).epoch_cost / lengths.sum()
        call = f"plan_buckets, {name}, K=8"
        yield {"call": call, "seconds": seconds, "cost": cost}


def many_pairs() -> Iterator[dict[str, Any]]:
    for size in (10_000, 100_000, 100_001, 300_000, 1_000_000):
        for last in (500, 20_000):
            rng = np.random.default_rng(0)
            lengths = {name: rng.integers(1, last, size) for name in ("a", "b")}
            packing, seconds = timed(jb.packing.pack, lengths, {"a": last, "b": last})
            call = f"pack, {size:,} pairs to {last:,}"
            yield {"call": call, "seconds": seconds, "cost": 1 / packing.fill}


def timed(task: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
    """Returns the result of a call, and the CPU seconds that it took."""
    start = time.process_time()
    result = task(*args, **kwargs)
    return result, time.process_time() - start


TIMES = "CPU seconds of planning, best of three"
COLUMN_NAMES = {
    "equal tokens": "equal tokens",
    "quantile": "equal count",
    "equal width": "width",
    "geometric": "geom.",
    "powers of two": "2^n",
    "quarters": "quarters",
    ONE_SHAPE: "one",
}


def show(result: dict[str, Any]) -> None:
    # Wide enough for the table, regardless of the terminal width.
    console = Console(width=132)
    rows = result["padding"]
    names = list(COLUMN_NAMES)
    table = Table(title="Padding of an epoch, %")
    table.add_column("set")
    for name in ("K", "T x", "ours", "bound", *COLUMN_NAMES.values()):
        table.add_column(name, justify="right")
    table.add_column("best rule, our remainders", justify="right")
    for r in rows:
        table.add_row(
            *(r["set"], str(r["K"]), str(r["multiple"])),
            f"[bold]{100 * r['ours']:.2f}",
            f"{100 * r['bound']:.2f}",
            *(f"{100 * r['rules'][name]:.1f}" for name in names),
            f"{100 * r['best_rule_with_our_remainders']:.2f}",
        )
    console.print(table)
    for name, number in result["violations"].items():
        console.print(f"{name}: {number}")
    show_small(console, result["small"], {})
    show_rows(console, "200,000 uniform lengths", result["token_batching"])
    show_rows(console, TIMES, result["seconds"])
    show_many(console, result["many"])


def show_rows(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    formats = {"padding": "{:.2%}", "seconds": "{:.3f}", "before": "{:.3f}"}
    formats |= {"ratio": "{:.2f}"}
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right" if name != "case" else "left")
    for row in rows:
        table.add_row(*(formats.get(name, "{}").format(row[name]) for name in row))
    console.print(table)


def show_small(
    console: Console, small: dict[str, dict[str, float]], before: dict[str, Any]
) -> None:
    table = Table(title="Small sets: means over sets and costs")
    for name in ("examples", "B x", "K", "padding, %", "by (T, B), cost", "CPU s"):
        table.add_column(name, justify="right")
    rows = small.values()
    keys = sorted({(r["size"], r["multiple"], r["K"]) for r in rows})
    for key in keys:
        part = [r for r in rows if (r["size"], r["multiple"], r["K"]) == key]
        table.add_row(
            *map(str, map(int, key)),
            f"{100 * np.mean([r['padding'] for r in part]):.1f}",
            f"{np.mean([r['dynamic'] / r['cost'] for r in part]):.3f}x",
            f"{np.mean([r['seconds'] for r in part]):.3f}",
        )
    console.print(table)
    above = sum(r["cost"] > r["dynamic"] * (1 + 1e-9) for r in rows)
    console.print(f"plans that cost more than by (T, B): {above} of {len(small)}")
    if before:
        shared = small.keys() & before.keys()
        more = sum(small[x]["cost"] > before[x]["cost"] * (1 + 1e-9) for x in shared)
        console.print(f"plans that cost more than before: {more} of {len(shared)}")


def show_many(console: Console, large: dict[str, Any]) -> None:
    table = Table(
        title="Many buckets and lengths. Costs are relative to an epoch without "
        "padding; for plan_packing, relative to the padded plan."
    )
    table.add_column("call")
    for name in ("CPU s", "cost"):
        table.add_column(name, justify="right")
    for r in large["calls"]:
        cost = "" if r["cost"] is None else f"{r['cost']:.5f}"
        table.add_row(r["call"], f"{r['seconds']:.2f}", cost)
    console.print(table)
    console.print(f"longest call: {large['longest']:.2f} CPU s")


if __name__ == "__main__":
    main()
