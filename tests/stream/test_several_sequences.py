"""Streams of examples with several sequences, against plain lists and numpy."""

import concurrent.futures
import functools
import itertools
import json
import math
import re
import threading
from fractions import Fraction

import grain
import numpy as np
import pytest
import scipy.optimize

import jaxbucket as jb
from jaxbucket.base.policies import TRUNCATING
from jaxbucket.stream import drift as drift_module
from jaxbucket.stream.bucket_sequence import MIN_SHARE_OF_LONGEST, bucket_shares
from jaxbucket.stream.drain import cheapest_batches
from jaxbucket.testing import check_batches

NAMES = ("source", "target", "video")
# The second feature is as long as the target.
SEQUENCES = {"source": [], "target": ["weights"], "video": []}
OPTIONS = [
    {},
    {"policy": "first"},
    {"accumulate": 3},
    {"accumulate": 2, "group": "mixed"},
]


def exhaustive(values):
    """Returns parameters that run only with `-m exhaustive`."""
    return [pytest.param(x, marks=pytest.mark.exhaustive) for x in values]


FEW_OPTIONS = [OPTIONS[0], OPTIONS[3], *exhaustive(OPTIONS[1:3])]


def make_example(index: int, lengths) -> dict[str, np.ndarray]:
    """Returns an example whose tokens depend on its index."""
    names = NAMES[: len(lengths)]
    example = {
        name: (index * 31 + 7 * q + np.arange(n, dtype=np.int32)) % 1000
        for q, (name, n) in enumerate(zip(names, lengths, strict=True))
    }
    weights = np.arange(lengths[1], dtype=np.float32) + index
    return {**example, "weights": weights, "index": np.int32(index)}


def stream(lengths, first: int = 0) -> grain.IterDataset:
    pairs = list(enumerate(lengths.tolist(), first))
    source = grain.MapDataset.source(pairs).map(lambda pair: make_example(*pair))
    return source.to_iter_dataset(grain.ReadOptions(num_threads=0))


def sequences_of(plan):
    return {name: SEQUENCES[name] for name in plan.sequences}


def by_name(lengths):
    return dict(zip(NAMES, lengths.T, strict=False))


def kept_lengths(lengths, plan):
    """Returns the lengths in batches; None if dropped, "error" if refused."""
    policies = [plan.policy(name) for name in plan.sequences]
    kept = []
    for name, n, policy in zip(plan.sequences, lengths, policies, strict=True):
        longest = max(bucket.seq_len[name] for bucket in plan.buckets)
        if n > longest and policy == "error":
            return "error"
        kept.append(min(n, longest) if policy in TRUNCATING else n)
    if holding(kept, plan):
        return kept
    return None if "drop" in policies else "error"


def kept_part(index: int, lengths, plan) -> dict[str, np.ndarray]:
    """Returns the part of an example that is in a batch."""
    example = make_example(index, lengths)
    kept = kept_lengths(lengths, plan)
    for name, n, size in zip(plan.sequences, lengths, kept, strict=True):
        start = n - size if plan.policy(name) == "truncate_left" else 0
        for feature in (name, *SEQUENCES[name]):
            example[feature] = example[feature][start : start + size]
    return example


def holding(lengths, plan) -> list[int]:
    """Returns the buckets that hold an example."""
    return [
        k
        for k, bucket in enumerate(plan.buckets)
        if all(n <= t for n, t in zip(lengths, bucket.seq_len.values(), strict=True))
    ]


def bucket_of(lengths, plan) -> int:
    """Returns the bucket with the cheapest row, the first among equals."""
    row_costs = plan.costs / plan.batch_sizes
    return min(holding(lengths, plan), key=lambda k: (row_costs[k], k))


def below(bucket: int, plan) -> list[int]:
    """Returns a bucket, and the buckets that it dominates from the longest on."""
    seq_len = plan.buckets[bucket].seq_len
    return [k for k in range(bucket, -1, -1) if seq_len.holds(plan.buckets[k].seq_len)]


def make_case(seed: int, size: int = 60, multiple: int = 1, overlong=None):
    """Returns lengths of 2 or 3 sequences, `[N, Q]`, and a plan of random shapes."""
    rng = np.random.default_rng(seed)
    names = NAMES[: 2 + seed % 2]
    if overlong is None:
        choices = ["error", "drop", "truncate"]
        choices += [dict(zip(names, ["drop", "truncate_left", "error"], strict=False))]
        overlong = choices[seed % 4]
    shapes = {tuple(rng.integers(2, 10, len(names)).tolist()) for _ in range(5)}
    policies = overlong.values() if isinstance(overlong, dict) else [overlong]
    if any(policy in TRUNCATING for policy in policies):
        shapes.add(tuple(map(max, zip(*shapes, strict=True))))
    plan = jb.BucketPlan.from_shapes(
        [
            (multiple * int(rng.integers(1, 5)), dict(zip(names, shape, strict=True)))
            for shape in shapes
        ],
        batch_size_multiple=multiple,
        overlong=overlong,
    )
    lengths = rng.integers(1, 12, (4 * size, len(names)))
    held = [kept_lengths(x, plan) != "error" for x in lengths.tolist()]
    return lengths[held][:size], plan, rng


def pool_of(plan, options: dict, times: int = 1) -> int:
    batches = 1 if options.get("group") == "mixed" else options.get("accumulate", 1)
    return int(plan.batch_sizes.max()) * batches * times


def steps_of(batches) -> list[tuple[jb.Batch, ...]]:
    return [(x,) if isinstance(x, jb.Batch) else x for x in batches]


def indices_in(batch: jb.Batch, lengths, plan) -> list[int]:
    """Checks the contents of a batch, and returns the indices of its examples."""
    examples = jb.data.unbatch(batch, sequences=sequences_of(plan))
    for example in examples:
        index = int(example["index"])
        want = kept_part(index, lengths[index].tolist(), plan)
        assert example.keys() == want.keys()
        for name, value in want.items():
            np.testing.assert_array_equal(example[name], value)
    return [int(example["index"]) for example in examples]


def kept_indices(lengths, plan) -> list[int]:
    return [i for i, x in enumerate(lengths.tolist()) if kept_lengths(x, plan)]


def assert_same(batches, want) -> None:
    for steps, other in zip(steps_of(batches), steps_of(want), strict=True):
        for a, b in zip(steps, other, strict=True):
            for part, other_part in zip(a, b, strict=True):
                assert part.keys() == other_part.keys()
                for name in part:
                    np.testing.assert_array_equal(part[name], other_part[name])


# One host


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2, 3, *exhaustive(range(4, 40))])
def test_every_example_is_in_one_row_of_a_planned_shape(seed, options):
    lengths, plan, rng = make_case(seed)
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=pool_of(plan, options, int(rng.integers(1, 5))),
        lengths=by_name(lengths),
        sequences=sequences_of(plan),
        num_epochs=2,
        on_drift=None,
        **options,
    )
    iterator, indices = iter(dataset), []
    for micro_batches in steps_of(iterator):
        assert len(micro_batches) == options.get("accumulate", 1)
        for batch in micro_batches:
            assert batch.bucket in plan.buckets
            assert batch.bucket.num_tokens <= plan.max_tokens
            indices += indices_in(batch, lengths, plan)
        assert sum(batch.num_examples for batch in micro_batches) > 0
    assert sorted(indices) == sorted(kept_indices(lengths, plan) * 2)
    kept = [kept_lengths(x, plan) for x in lengths.tolist()]
    lost = [sum(x) - sum(y) for x, y in zip(lengths.tolist(), kept, strict=True) if y]
    counts = iterator.counts
    assert counts.read == 2 * len(lengths) and counts.arrived == len(indices)
    assert counts.dropped == 2 * kept.count(None)
    assert counts.truncated == 2 * np.count_nonzero(lost)
    assert counts.truncated_tokens == 2 * sum(lost)


def oracle(lengths, plan, pool_size, policy, max_wait):
    """Yields the bucket and the examples of every batch, using plain lists.

    With the policy "closest", it ends before the first batch that is not full.
    """
    pool, arrived, sizes = [], 0, plan.batch_sizes.tolist()
    rest = [(i, kept_lengths(x, plan)) for i, x in enumerate(lengths.tolist())]
    rest = [(i, bucket_of(kept, plan)) for i, kept in rest if kept]
    while True:
        while len(pool) < pool_size and rest:
            pool.append((arrived, *rest.pop(0)))
            arrived += 1
        if not pool:
            return
        queues = [[x for x in pool if x[2] == k] for k in range(len(plan))]
        full = [len(x) // b for x, b in zip(queues, sizes, strict=True)]
        bucket = pool[0][2]
        if policy == "closest" and arrived - pool[0][0] <= max_wait:
            if not max(full):
                return
            fullest = [k for k, number in enumerate(full) if number == max(full)]
            bucket = min(fullest, key=lambda k: queues[k][0])
        fitting = [x for k in below(bucket, plan) for x in queues[k]]
        overdue = [x for x in sorted(fitting) if x[0] < arrived - max_wait]
        taken = [*overdue, *(x for x in fitting if x not in overdue)][: sizes[bucket]]
        pool = [x for x in pool if x not in taken]
        yield bucket, [index for _, index, _ in taken]


@pytest.mark.parametrize("policy", ["closest", "first"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, *exhaustive(range(4, 20))])
def test_batches_equal_a_reference_with_plain_lists(seed, policy):
    lengths, plan, _ = make_case(seed, size=120)
    pool = max(int((plan.batch_sizes - 1).sum()) + 1, pool_of(plan, {}))
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=pool,
        policy=policy,
        max_wait=2 * pool,
        sequences=sequences_of(plan),
    )
    want = list(oracle(lengths, plan, pool, policy, 2 * pool))
    assert len(want) > 10
    for batch, (bucket, indices) in zip(dataset, want, strict=policy == "first"):
        assert batch.bucket == plan.buckets[bucket]
        assert indices_in(batch, lengths, plan) == indices


@pytest.mark.parametrize("seed", [*range(8), *exhaustive(range(8, 60))])
def test_a_pool_with_all_examples_costs_little_more_than_a_schedule(seed):
    lengths, plan, _ = make_case(seed, size=60, overlong="drop")
    dataset = jb.stream_batches(
        stream(lengths), plan, pool_size=1000, sequences=sequences_of(plan)
    )
    tokens = sum(batch.bucket.num_tokens for batch in dataset)
    want = jb.report(plan, by_name(lengths)).padded_tokens
    assert tokens <= 1.02 * want


@pytest.mark.parametrize("options", FEW_OPTIONS, ids=str)
def test_resuming_at_every_step_yields_the_remaining_batches(options):
    lengths, plan, _ = make_case(7, size=14)
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=pool_of(plan, options) + 9,
        sequences=sequences_of(plan),
        num_epochs=2,
        **options,
    )
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_a_loader_and_a_transform_make_examples_with_several_sequences():
    lengths, plan, _ = make_case(2, size=60)
    columns = {"sequences": sequences_of(plan), "seed": 5}

    def shorter(example, rng):
        size = int(rng.integers(1, len(example["source"]) + 1))
        return {**example, "source": example["source"][:size]}

    def epoch(number: int, seed: int) -> grain.IterDataset:
        order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
        loader = [make_example(i, lengths[i].tolist()) for i in order]
        return jb.stream.from_loader([loader[:40], loader[40:]], batched=True)

    sample = jb.stream.sample_lengths(epoch, 100, transform=shorter, **columns)
    assert list(sample) == list(plan.sequences) and len(sample["source"]) == 60
    assert sample["source"].dtype == np.int32
    assert (np.sort(sample["source"]) <= np.sort(lengths[:, 0])).all()
    assert sorted(sample["target"]) == sorted(lengths[:, 1])
    dataset = jb.stream_batches(
        epoch, plan, pool_size=40, num_epochs=2, transform=shorter, **columns
    )
    batches = list(dataset)
    assert sum(batch.num_examples for batch in batches) == 120
    iterator = iter(dataset)
    for _ in range(7):
        next(iterator)
    again = iter(dataset)
    again.set_state(json.loads(json.dumps(iterator.get_state())))
    assert_same(again, batches[7:])


def test_the_histogram_has_a_column_for_each_sequence():
    lengths, plan, _ = make_case(0, overlong="drop")
    iterator = iter(
        jb.stream_batches(
            stream(lengths), plan, pool_size=400, sequences=sequences_of(plan)
        )
    )
    assert [x.shape for x in iterator.histogram()] == [(0, 2), (0,)]
    next(iterator)
    values, counts = iterator.histogram()
    want = lengths[kept_indices(lengths, plan)]
    np.testing.assert_array_equal(values, np.unique(want, axis=0))
    assert counts.sum() == len(want)


# Several hosts


class Threads:
    """Lets threads of a test exchange values like the processes of a run."""

    def __init__(self, count: int):
        self.values = [""] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def of(self, index: int) -> "Thread":
        return Thread(self, index)


class Thread:
    """The process group of one thread."""

    def __init__(self, threads: Threads, index: int):
        self.threads = threads
        self.index = index
        self.count = len(threads.values)

    def gather(self, name: str, value: str) -> list[str]:
        self.threads.values[self.index] = value
        self.threads.barrier.wait()
        values = list(self.threads.values)
        self.threads.barrier.wait()
        return values


def hosts_of(lengths, plan, shares, pool_size, threads=None, **options):
    """Returns an iterator for each host, over its share of the examples."""
    ends = np.cumsum(shares) * len(lengths) // sum(shares)
    starts = [0, *ends[:-1].tolist()]
    return [
        iter(
            jb.stream_batches(
                stream(lengths[start:end], first=start),
                plan,
                pool_size=pool_size,
                lengths=by_name(lengths),
                shard=jb.data.RowShard((host,), len(shares)),
                processes=threads and threads.of(host),
                on_drift=None,
                like=make_example(0, [1] * lengths.shape[1]),
                sequences=sequences_of(plan),
                **{"num_steps": None if threads else math.inf, **options},
            )
        )
        for host, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def drive(hosts, steps: int | None = None):
    """Returns the steps of each host, by default until all of them end."""
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        take = [functools.partial(itertools.islice, host, steps) for host in hosts]
        return [
            x.result() for x in [pool.submit(lambda f=f: steps_of(f())) for f in take]
        ]


SHARES = [[1, 1, 1], [1, 4], [5, 0, 1]]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [3, 4, *exhaustive(range(5, 25))])
def test_hosts_are_in_lockstep_until_stream_end_stops_them(seed, options):
    shares = SHARES[seed % 3]
    lengths, plan, rng = make_case(seed, multiple=len(shares))
    pool = pool_of(plan, options, int(rng.integers(1, 3)))
    hosts = hosts_of(lengths, plan, shares, pool, **options)
    end, indices, has_ended = jb.stream.StreamEnd(plan, delay=0), [], False
    while not has_ended:
        at_hosts = [steps_of([next(host)])[0] for host in hosts]
        buckets = []
        for parts in zip(*at_hosts, strict=True):
            assert len({part.bucket for part in parts}) == 1
            size, seq_len = parts[0].bucket.batch_size, parts[0].bucket.seq_len
            buckets.append(jb.Bucket(len(shares) * size, seq_len))
            indices += [i for part in parts for i in indices_in(part, lengths, plan)]
        assert set(buckets) <= set(plan.buckets)
        tokens = sum(part.num_tokens for parts in at_hosts for part in parts)
        has_ended = end.reached(buckets, tokens)
    assert sorted(indices) == kept_indices(lengths, plan)
    assert all(host.ended for host in hosts)


@pytest.mark.parametrize("options", FEW_OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [4, *exhaustive([3, *range(5, 25)])])
def test_hosts_with_processes_end_together_and_resume(seed, options):
    shares = SHARES[seed % 3]
    lengths, plan, rng = make_case(seed + 40, size=60, multiple=len(shares))
    pool = pool_of(plan, options, int(rng.integers(1, 4)))

    def make():
        threads = Threads(len(shares))
        return hosts_of(lengths, plan, shares, pool, threads, **options)

    hosts = make()
    whole = drive(hosts)
    for steps in zip(*whole, strict=True):
        for parts in zip(*steps, strict=True):
            assert len({part.bucket for part in parts}) == 1
    tokens = [
        sum(x.num_tokens for micro in steps for x in micro)
        for steps in zip(*whole, strict=True)
    ]
    # A round at the end has 4 steps.
    assert sum(tokens[-4:]) > 0
    batches = [batch for steps in whole for micro in steps for batch in micro]
    indices = [i for batch in batches for i in indices_in(batch, lengths, plan)]
    assert sorted(indices) == kept_indices(lengths, plan)
    assert all(host.ended for host in hosts)
    for start in range(1, len(whole[0]) + 1, max(4, len(whole[0]) // 3)):
        before, after = make(), make()
        # Hosts load ahead of the step that is saved.
        drive(before, start + 3)
        for host, loaded in zip(after, before, strict=True):
            host.set_state(json.loads(json.dumps(loaded.state_before(start))))
        for rest, steps in zip(drive(after), whole, strict=True):
            assert_same(rest, steps[start:])


def test_draining_the_pools_costs_little_more_than_the_minimum():
    ratios = []
    for seed in range(20):
        _, plan, rng = make_case(seed, size=1, multiple=2)
        shape = (int(rng.integers(1, 5)), len(plan))
        needed = rng.integers(0, int(rng.choice([3, 9, 30])), shape)
        sizes = plan.batch_sizes // 2
        num_parts = [1] * len(needed)
        batches = cheapest_batches(plan, needed.tolist(), num_parts, sizes)
        # By Hall's theorem, rows hold all examples if, for any buckets, those that hold
        # an example of them have enough rows.
        buckets = range(len(plan))
        sets = [set(x) for n in buckets for x in itertools.combinations(buckets, n + 1)]
        fitting = [[bool(x & set(below(k, plan))) for k in buckets] for x in sets]
        least = [needed[:, list(x)].sum(axis=1).max() for x in sets]
        constraint = scipy.optimize.LinearConstraint(fitting * sizes, lb=least)
        assert (constraint.A @ batches >= least).all()
        # So do pools that are served from the longest bucket on.
        left = needed.copy()
        for k in reversed(buckets):
            free = batches[k] * sizes[k]
            for j in below(k, plan):
                taken = np.minimum(left[:, j], free)
                left[:, j] -= taken
                free = free - taken
        assert not left.any()
        best = scipy.optimize.milp(
            plan.costs, constraints=constraint, integrality=np.ones(len(plan))
        )
        ratios.append(plan.costs @ batches / max(best.fun, 1))
    assert np.mean(ratios) < 1.1


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
@pytest.mark.parametrize("seed", [1, *exhaustive([2, 3])])
def test_streams_pass_the_checks_of_any_loader(seed, num_hosts):
    lengths, plan, _ = make_case(seed, size=30, multiple=num_hosts)
    num_steps = None if num_hosts == 1 else 80
    make = functools.partial(
        hosts_of, lengths, plan, [1] * num_hosts, pool_of(plan, {}) + 10
    )

    def loader(host: int, start_step: int):
        iterator = make(num_steps=num_steps)[host]
        for _ in range(start_step):
            next(iterator)
        again = make(num_steps=num_steps)[host]
        again.set_state(json.loads(json.dumps(iterator.get_state())))
        return again

    check_batches(
        loader,
        num_examples=len(lengths),
        num_dropped=len(lengths) - len(kept_indices(lengths, plan)),
        buckets=plan.buckets,
        max_tokens=plan.max_tokens,
        num_hosts=num_hosts,
        resume_at=range(3) if num_hosts == 1 else range(0, 9, 4),
    )


def test_stream_end_waits_for_each_of_the_longest_buckets():
    sizes = [{"a": 4, "b": 4}, {"a": 8, "b": 4}, {"a": 4, "b": 9}]
    plan = jb.BucketPlan.from_shapes([(2, size) for size in sizes])
    short, first, second = plan.buckets
    end = jb.stream.StreamEnd(plan, delay=0)
    steps = [(first, 0), (second, 3), (second, 0), (second, 0), (short, 0)]
    steps += [(first, 2), ((short, first), 0), (second, 0)]
    assert [end.reached(*step) for step in steps] == [False] * 7 + [True]


def test_stream_end_of_the_first_plan_ends_under_later_plans():
    first = jb.BucketPlan.from_shapes([(2, {"a": 8, "b": 4}), (2, {"a": 4, "b": 8})])
    later = jb.BucketPlan.from_shapes([(2, {"a": 4, "b": 4}), (2, {"a": 8, "b": 8})])
    end = jb.stream.StreamEnd(first, delay=0)
    short, longest = later.buckets
    steps = [(first.buckets[0], 0), (short, 0), (longest, 1), (short, 0), (longest, 0)]
    assert [end.reached(*step) for step in steps] == [False] * 4 + [True]


def test_each_of_the_longest_buckets_has_a_minimum_share():
    sizes = [{"a": 4, "b": 4}, {"a": 8, "b": 4}, {"a": 4, "b": 9}]
    plan = jb.BucketPlan.from_shapes([(2, size) for size in sizes])
    least = MIN_SHARE_OF_LONGEST / 2
    rare = np.array([[4, 4]] * 7996 + [[8, 4]] * 2 + [[4, 9]] * 2)
    assert bucket_shares(plan, rare, None) == [1 - 2 * least, least, least]
    # The second share is below the minimum only once the third has been raised.
    lengths = np.array([[4, 4]] * 9840 + [[8, 4]] * 158 + [[4, 9]] * 2)
    assert bucket_shares(plan, lengths, None) == [1 - 2 * least, least, least]
    even = np.array([[4, 4]] * 4 + [[8, 4]] * 2 + [[4, 9]] * 2)
    want = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]
    assert bucket_shares(plan, even, None) == want


# Lengths that change


@pytest.mark.exhaustive
def test_a_drift_contains_a_plan_that_the_stream_can_adopt(monkeypatch):
    monkeypatch.setattr(drift_module, "_WINDOW", 512)
    rng = np.random.default_rng(0)
    sizes = [{"source": 4, "target": 4}, {"source": 30, "target": 8}]
    sizes += [{"source": 9, "target": 32}]
    plan = jb.BucketPlan.from_shapes(
        [(16, size) for size in sizes], max_tokens=1024, overlong="drop"
    )
    before = rng.integers(3, 5, (300, 2))
    after = np.stack([rng.integers(13, 16, 1200), rng.integers(1, 3, 1200)], axis=1)
    lengths = np.concatenate([before, [[30, 31]], after])
    columns = {"sequences": sequences_of(plan), "pool_size": 64}
    drifts: list[jb.stream.Drift] = []
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        lengths=by_name(before),
        on_drift=drifts.append,
        **columns,
    )
    batches = list(dataset)
    (drift,) = drifts
    assert [x.shape for x in drift.lengths.values()] == [(512,)] * 2
    for share, of_plan in [(drift.padding, plan), (drift.new_padding, drift.plan)]:
        assert share == pytest.approx(jb.report(of_plan, drift.lengths).padding)
    assert drift.padding > drift.new_padding + 0.05
    assert "the last 512 lengths have" in str(drift)
    dataset = jb.stream_batches(
        stream(lengths),
        {0: plan, drift.step: drift.plan},
        lengths={0: by_name(before), drift.step: drift.lengths},
        on_drift=None,
        **columns,
    )
    adopted = list(dataset)
    assert_same(adopted[: drift.step], batches[: drift.step])
    assert {x.bucket for x in adopted[drift.step :]} <= set(drift.plan.buckets)
    indices = [i for batch in adopted for i in indices_in(batch, lengths, plan)]
    assert sorted(indices) == [i for i in range(len(lengths)) if i != 300]
    assert len(adopted) < len(batches)


# Errors

PAIR = {"source": 8, "target": 4}
PLAN = jb.BucketPlan.from_shapes([(2, PAIR), (2, {"source": 4, "target": 8})])


def other_plan(source: int, target: int, **options) -> dict[int, jb.BucketPlan]:
    """Returns plans of which the second has only one shape."""
    size = {"source": source, "target": target}
    return {0: PLAN, 5: jb.BucketPlan.from_shapes([(2, size)], **options)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pack": True},
            "`pack=True` requires examples with one length, but the plan from step 0 "
            "has the sequences ['source', 'target']. Remove `pack`",
        ),
        (
            {"sequences": ["source"]},
            "`sequences=['source']` must be a mapping with the features of each of "
            "['source', 'target'].",
        ),
        (
            {"sequences": {"source": [], "targets": []}},
            "`sequences={'source': [], 'targets': []}` must be a mapping with",
        ),
        (
            {"sequences": {"source": [], "target": ["weights", "weights"]}},
            "repeats a feature. Name each feature once.",
        ),
        (
            {"plan": {0: PLAN, 5: jb.BucketPlan.from_shapes([(2, 8)])}},
            "`plan[5]` has the sequences [], but the first plan has ['source', "
            "'target']. Plan with the same sequences.",
        ),
        (
            {"plan": other_plan(9, 8)},
            "`plan[5]` has `max_seq_len={'source': 9, 'target': 8}`, but the first "
            "plan has {'source': 8, 'target': 8}",
        ),
        (
            {"plan": other_plan(8, 8, overlong="drop")},
            "`plan[5]` has `overlong='drop'`, but the first plan has 'error'",
        ),
        (
            {
                "plan": {
                    0: jb.BucketPlan.from_shapes([(2, {"source": 8, "target": 8})]),
                    5: PLAN,
                }
            },
            "`plan[5]` has no bucket that holds `seq_len={'source': 8, 'target': 8}`, "
            "as the first plan has, so it cannot hold all pending examples. Add such",
        ),
        (
            {"lengths": [3, 4]},
            "`lengths` is a list, but the plan has the sequences ['source', 'target']. "
            "Pass a mapping",
        ),
        (
            {"lengths": {"source": [3], "video": [4]}},
            "`lengths` has the sequences ['source', 'video'], but the plan has",
        ),
        (
            {"lengths": {0: {"source": [3], "target": [4]}, 7: {}}},
            "`lengths` has steps [0, 7], but `plan` has [0].",
        ),
        (
            {"lengths": {"source": [9], "target": [4]}},
            "`lengths['source'][0]=9` is beyond all buckets, `seq_len['source']=8`.",
        ),
        ({"shard": jb.data.RowShard((0,), 2)}, "`lengths` is missing. Several proc"),
        ({"pool_size": 1}, "smaller than the 2 rows of bucket [2, source 4, target 8]"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    given = {"plan": PLAN, "pool_size": 8, **options}
    plan = given.pop("plan")
    with pytest.raises(ValueError, match=re.escape(message)):
        jb.stream_batches(stream(np.array([[3, 4]])), plan, **given)


def test_a_plan_with_one_length_takes_no_mapping():
    plan = jb.BucketPlan.from_shapes([(2, 8)])
    with pytest.raises(ValueError, match="names several sequences, which requires a"):
        jb.stream_batches(
            stream(np.array([[3, 4]])), plan, pool_size=8, sequences=SEQUENCES
        )


def dropping(policies) -> jb.BucketPlan:
    shapes = [(bucket.batch_size, bucket.seq_len) for bucket in PLAN.buckets]
    return jb.BucketPlan.from_shapes(shapes, overlong=policies)


@pytest.mark.parametrize(
    ("plan", "lengths", "message"),
    [
        (
            PLAN,
            [3, 9],
            "length 9 of 'target' is beyond all buckets, `seq_len['target']=8`. Plan "
            "with a larger `max_seq_len`, or choose `overlong='drop'`, "
            "`overlong='truncate'` or `overlong='truncate_left'`.",
        ),
        (
            dropping({"source": "drop", "target": "error"}),
            [3, 9],
            "length 9 of 'target' is beyond all buckets",
        ),
        (
            PLAN,
            [8, 8],
            "no bucket holds the lengths {'source': 8, 'target': 8} together. Plan "
            "with a bucket that does, or choose `overlong='drop'`.",
        ),
        (PLAN, [8, 0], "The example has length 0 in 'target'. Remove empty examples"),
    ],
)
def test_an_example_that_no_bucket_holds_is_rejected_with_its_index(
    plan, lengths, message
):
    examples = stream(np.array([[3, 4], [4, 3], lengths]))
    dataset = jb.stream_batches(
        examples, plan, pool_size=8, sequences=sequences_of(plan)
    )
    message = f"Example 2 of epoch 0 of the stream: {message}"
    for iterator in (iter(dataset), iter(dataset)):
        with pytest.raises(ValueError, match=re.escape(message)):
            next(iterator)


def test_an_example_without_a_sequence_is_rejected_with_its_index():
    examples = stream(np.array([[3, 4]])).map(
        lambda x: {name: x[name] for name in ("source", "weights")}
    )
    dataset = jb.stream_batches(examples, PLAN, pool_size=8)
    message = "Example 0 of epoch 0 of the stream: `sequences['target']=['target']`: "
    with pytest.raises(ValueError, match=re.escape(message)):
        next(iter(dataset))


def test_a_stream_without_kept_examples_is_rejected():
    plan = dropping({"source": "drop", "target": "error"})
    dataset = jb.stream_batches(
        # The second one is also too long in the sequence with the policy "error".
        stream(np.array([[9, 3], [9, 9], [9, 3]])),
        plan,
        pool_size=8,
        sequences=sequences_of(plan),
    )
    message = "or none that is kept.*`overlong={'source': 'drop', 'target': 'error'}`"
    with pytest.raises(ValueError, match=message):
        next(iter(dataset))


def test_a_sample_of_lengths_needs_two_sequences():
    examples = stream(np.array([[3, 4]]))
    message = "`sequences` is a mapping with the sequences ['source']. Name at least"
    with pytest.raises(ValueError, match=re.escape(message)):
        jb.stream.sample_lengths(examples, 5, sequences={"source": []})


def test_hosts_with_different_sequences_are_rejected():
    lengths, threads = np.array([[3, 4], [4, 3]] * 20), Threads(2)
    hosts = [
        iter(
            jb.stream_batches(
                stream(lengths, first=100 * host),
                PLAN,
                pool_size=8,
                lengths=by_name(lengths),
                shard=jb.data.RowShard((host,), 2),
                processes=threads.of(host),
                sequences={"source": [], "target": ["weights"]},
                **options,
            )
        )
        for host, options in enumerate([{}, {"pad_value": {"target": 1}}])
    ]

    def check_rejected(host):
        message = "pad value is 0 in process 0, {'target': 1} in 1"
        with pytest.raises(ValueError, match=re.escape(message)):
            next(host)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(check_rejected, hosts))


def test_hosts_may_start_with_images_of_different_sizes():
    def images(host):
        sizes = np.random.default_rng(host).integers(1, 8, (20, 2))
        return [{"image": np.full(shape, host)} for shape in sizes.tolist()]

    names, threads = ("height", "width"), Threads(2)
    hosts = [
        iter(
            jb.stream_batches(
                grain.MapDataset.source(images(host)).to_iter_dataset(),
                jb.BucketPlan.from_shapes([(4, dict.fromkeys(names, 8))]),
                pool_size=8,
                lengths={name: [8, 4] for name in names},
                shard=jb.data.RowShard((host,), 2),
                processes=threads.of(host),
                sequences={name: ["image"] for name in names},
                on_drift=None,
            )
        )
        for host in range(2)
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        buckets = list(pool.map(lambda host: [batch.bucket for batch in host], hosts))
    assert buckets[0] == buckets[1] != []


def test_a_state_with_other_sequences_is_rejected():
    lengths = np.array([[3, 4], [4, 3]] * 9)
    make = functools.partial(jb.stream_batches, stream(lengths), PLAN, pool_size=8)
    saved = iter(make(sequences=sequences_of(PLAN)))
    next(saved)
    message = "sequences {'source': ['source'], 'target': ['target', 'weights']} -> "
    with pytest.raises(ValueError, match=re.escape(message)):
        iter(make()).set_state(saved.get_state())
