"""Streams: batches, exact resume, and several hosts until all streams end."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pickle
import re
import subprocess
import sys
import threading
from fractions import Fraction

import cloudpickle
import grain
import jax
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.stream import drift as drift_module
from jaxbucket.stream.bucket_sequence import (
    MIN_SHARE_OF_LONGEST,
    BucketSequence,
    bucket_shares,
)
from jaxbucket.stream.epochs import epoch_seed
from jaxbucket.testing import check_batches


def exhaustive(values):
    """Returns parameters that run only with `-m exhaustive`."""
    return [pytest.param(x, marks=pytest.mark.exhaustive) for x in values]


OPTIONS = [
    {},
    {"policy": "first"},
    {"accumulate": 3},
    {"accumulate": 2, "group": "mixed"},
    {"pack": True},
    {"pack": True, "policy": "first"},
    {"pack": True, "accumulate": 2, "group": "mixed", "max_segments_per_row": 3},
]
SOME_OPTIONS = [
    *(OPTIONS[k] for k in (0, 1, 3, 6)),
    *exhaustive(OPTIONS[k] for k in (2, 4, 5)),
]


class Numbers:
    """Examples of given lengths, with tokens that depend on their index."""

    def __init__(self, lengths: np.ndarray, first: int = 0):
        self.lengths = lengths
        self.first = first

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number = self.first + int(index)
        tokens = (number * 31 + np.arange(self.lengths[index])) % 1000
        return {"tokens": tokens.astype(np.int32), "index": np.int32(number)}


def stream(lengths: np.ndarray, first: int = 0) -> grain.IterDataset:
    source = grain.MapDataset.source(Numbers(lengths, first))
    return source.to_iter_dataset(grain.ReadOptions(num_threads=0))


def steps_of(batches) -> list[tuple[jb.Batch, ...]]:
    return [(x,) if isinstance(x, jb.Batch) else x for x in batches]


def indices_in(batch: jb.Batch) -> list[int]:
    """Checks the tokens of a batch, and returns the indices of its examples."""
    is_packed = batch.features["index"].ndim == 2
    max_segments = batch.features["index"].shape[1] if is_packed else None
    examples = jb.data.unbatch(batch, sequences=["tokens"], max_segments=max_segments)
    for example in examples:
        index = int(example["index"])
        want = (index * 31 + np.arange(len(example["tokens"]))) % 1000
        assert example["tokens"].tolist() == want.tolist()
    return [int(example["index"]) for example in examples]


def make_case(seed: int, size: int | None = None, multiple: int = 1, longest: int = 60):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 400)) if size is None else size
    lengths = np.minimum(1 + rng.geometric(3 / longest, size), longest)
    plan = jb.plan_buckets(
        np.append(lengths, longest),
        sample=True,
        max_tokens=longest * multiple * int(rng.integers(2, 7)),
        num_buckets=int(rng.integers(1, 6)),
        batch_size_multiple=multiple,
    )
    return lengths, plan, rng


def smallest_pool(plan: jb.BucketPlan, options: dict) -> int:
    num_micro_batches = options.get("accumulate", 1)
    if options.get("group") == "mixed":
        num_micro_batches = 1
    return int(plan.batch_sizes.max()) * num_micro_batches


# One host


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [0, 1, *exhaustive(range(2, 8))])
def test_every_example_is_in_one_row_of_a_planned_shape(seed, options):
    lengths, plan, rng = make_case(seed)
    pool = smallest_pool(plan, options) * int(rng.integers(1, 5))
    epochs = int(rng.integers(1, 4))
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=pool,
        lengths=lengths,
        num_epochs=epochs,
        on_drift=None,
        **options,
    )
    indices = []
    for micro in steps_of(dataset):
        assert len(micro) == options.get("accumulate", 1)
        for batch in micro:
            assert batch.bucket in plan.buckets
            assert batch.bucket.num_tokens <= plan.max_tokens
            indices += indices_in(batch)
        if options.get("group", "same") == "same":
            assert len({batch.bucket for batch in micro}) == 1
        assert sum(batch.num_examples for batch in micro) > 0
    assert sorted(indices) == sorted([*range(len(lengths))] * epochs)


def oracle(lengths, plan, pool_size, policy, max_wait):
    """Yields the bucket and the examples of every batch, using plain lists."""
    pool, arrived, rest = [], 0, list(enumerate(lengths.tolist()))
    sizes = plan.batch_sizes.tolist()
    while True:
        while len(pool) < pool_size and rest:
            pool.append(rest.pop(0))
            arrived += 1
        if not pool:
            return
        by_bucket = [
            [i for i, n in pool if plan.assign([n])[0] == k] for k in range(len(plan))
        ]
        full = [len(x) // b for x, b in zip(by_bucket, sizes, strict=True)]
        oldest = next(k for k, x in enumerate(by_bucket) if pool[0][0] in x)
        if policy == "first" or arrived - pool[0][0] > max_wait:
            bucket = oldest
        elif max(full):
            fullest = [k for k, number in enumerate(full) if number == max(full)]
            bucket = min(fullest, key=lambda k: by_bucket[k][0])
        else:
            return
        indices = [i for k in range(bucket, -1, -1) for i in by_bucket[k]]
        indices = indices[: sizes[bucket]]
        pool = [pair for pair in pool if pair[0] not in indices]
        yield bucket, indices


@pytest.mark.parametrize("policy", ["closest", "first"])
@pytest.mark.parametrize("seed", [0, 1, *exhaustive(range(2, 6))])
def test_batches_equal_a_reference_with_plain_lists(seed, policy):
    lengths, plan, rng = make_case(seed, size=500)
    pool = int((plan.batch_sizes - 1).sum()) + 1 + int(rng.integers(0, 50))
    pool = max(pool, int(plan.batch_sizes.max()))
    dataset = jb.stream_batches(
        stream(lengths), plan, pool_size=pool, policy=policy, max_wait=2 * pool
    )
    want = list(oracle(lengths, plan, pool, policy, 2 * pool))
    assert len(want) > 3
    for batch, (bucket, indices) in zip(dataset, want, strict=policy == "first"):
        assert batch.bucket == plan.buckets[bucket]
        assert indices_in(batch) == indices


def test_a_large_pool_leaves_no_row_empty_before_the_end():
    lengths, plan, _ = make_case(1, size=3000)
    pool = int((plan.batch_sizes - 1).sum()) + 1
    dataset = jb.stream_batches(
        stream(lengths), plan, pool_size=pool, max_wait=10**6, on_drift=None
    )
    batches = list(dataset)
    rows = sum(batch.bucket.batch_size for batch in batches[: -len(plan)])
    assert rows == sum(batch.num_examples for batch in batches[: -len(plan)])


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_with_all_examples_gives_the_buckets_of_a_schedule(seed):
    lengths, plan, _ = make_case(seed, size=200)
    dataset = jb.stream_batches(stream(lengths), plan, pool_size=1000)
    buckets = sorted(batch.bucket for batch in dataset)
    schedule = jb.BatchSchedule(plan, lengths)
    want = sorted(schedule[step].bucket for step in range(len(schedule)))
    assert buckets == want


def test_max_wait_bounds_the_waiting_time():
    rng = np.random.default_rng(0)
    # One in two hundred examples is long, and eight long ones fill a batch.
    lengths = np.where(rng.random(6000) < 0.005, 16, rng.integers(1, 5, 6000))
    plan = jb.BucketPlan((jb.Bucket(32, 4), jb.Bucket(8, 16)), max_tokens=128)
    iterator = iter(
        jb.stream_batches(
            stream(lengths), plan, pool_size=64, max_wait=150, on_drift=None
        )
    )
    waits = []
    for batch in iterator:
        waits.append(iterator.counts.arrived - min(indices_in(batch)))
    assert 150 < max(waits) <= 150 + 64 + 32 * 2


@pytest.mark.parametrize("best_fit", [True, False])
def test_packed_rows_equal_a_reference_with_plain_lists(best_fit):
    lengths, _, rng = make_case(3, size=600)
    plan = jb.BucketPlan((jb.Bucket(4, 64),), max_tokens=256)
    pool_size, most = 50, 5
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=pool_size,
        pack=True,
        policy="closest" if best_fit else "first",
        max_segments_per_row=most,
    )
    pool, rest = [], list(enumerate(lengths.tolist()))
    for batch in dataset:
        while len(pool) < pool_size and rest:
            pool.append(rest.pop(0))
        want = []
        for row in range(4):
            room = 64
            for segment in range(most):
                fitting = [pair for pair in pool if pair[1] <= room]
                if not fitting:
                    break
                chosen = fitting[0]
                if best_fit and (row or segment):
                    longest = max(n for _, n in fitting)
                    chosen = next(pair for pair in fitting if pair[1] == longest)
                pool.remove(chosen)
                want.append(chosen[0])
                room -= chosen[1]
        assert indices_in(batch) == want
    assert not pool and not rest


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
def test_padding_has_the_pad_value_and_is_masked(options):
    lengths, plan, _ = make_case(6, size=150, multiple=2)
    hosts = hosts_of(lengths, plan, [1, 2], 80, pad_value=-7, **options)
    loss = tokens = 0
    for _ in range(200):
        for host in hosts:
            for batch in steps_of([next(host)])[0]:
                features, mask = batch.features["tokens"], batch.mask
                assert (features[~mask] == -7).all()
                loss += int((features * mask).sum())
                tokens += int(mask.sum())
    # These are the sums over all examples, so rows without an example add nothing.
    source = Numbers(lengths)
    assert loss == sum(int(source[i]["tokens"].sum()) for i in range(150))
    assert tokens == lengths.sum()


def test_the_histogram_counts_recent_lengths():
    lengths, plan, _ = make_case(7, size=300)
    iterator = iter(jb.stream_batches(stream(lengths), plan, pool_size=90))
    assert [x.tolist() for x in iterator.histogram()] == [[], []]
    for _ in iterator:
        pass
    values, counts = iterator.histogram()
    want = np.unique(lengths, return_counts=True)
    assert (values.tolist(), counts.tolist()) == tuple(x.tolist() for x in want)


def test_pending_examples_do_not_keep_larger_arrays_in_memory():
    def part(example):
        whole = np.zeros(10**6, np.int32)
        return {**example, "tokens": whole[: len(example["tokens"])]}

    lengths, plan, _ = make_case(8, size=100)
    dataset = jb.stream_batches(stream(lengths).map(part), plan, pool_size=80)
    iterator = iter(dataset)
    next(iterator)
    pending = iterator._pool.pending()
    assert pending and all(x.example["tokens"].base is None for x in pending)


# Overlong examples


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("overlong", ["drop", "truncate", "truncate_left", "split"])
def test_overlong_examples_are_counted(overlong, pack):
    lengths = np.random.default_rng(2).integers(1, 60, 300)
    plan = jb.plan_buckets(
        lengths,
        sample=True,
        max_tokens=160,
        num_buckets=3,
        max_seq_len=20,
        overlong=overlong,
    )
    iterator = iter(
        jb.stream_batches(
            stream(lengths), plan, pool_size=40, pack=pack, max_segments_per_row=4
        )
    )
    parts: dict[int, list[int]] = {}
    for batch in iterator:
        most = 4 if pack else None
        for part in jb.data.unbatch(batch, sequences=["tokens"], max_segments=most):
            parts.setdefault(int(part["index"]), []).extend(part["tokens"].tolist())
    counts, overlong_lengths = iterator.counts, lengths[lengths > 20]
    assert (counts.read, counts.dropped + counts.truncated + counts.split) == (
        300,
        len(overlong_lengths),
    )
    for index, length in enumerate(lengths):
        want = ((index * 31 + np.arange(length)) % 1000).tolist()
        if length > 20:
            cut = {"truncate": want[:20], "truncate_left": want[-20:]}
            want = {"drop": [], "split": want, **cut}[overlong]
        assert sorted(parts.get(index, [])) == sorted(want)
    if overlong in cut:
        assert counts.truncated_tokens == (overlong_lengths - 20).sum()
    if overlong == "split":
        assert counts.arrived == len(jb.plan.chunk_lengths(lengths, 20))


def test_an_overlong_example_is_rejected_with_its_index():
    plan = jb.plan_buckets([4], sample=True, max_tokens=16)
    dataset = jb.stream_batches(stream(np.array([3, 4, 9])), plan, pool_size=4)
    message = "Example 2 of epoch 0 of the stream: length 9 is beyond the last bucket, "
    with pytest.raises(ValueError, match=re.escape(message)):
        list(dataset)


# Epochs


def test_each_epoch_has_its_own_seed():
    lengths, plan, _ = make_case(5, size=90)
    seeds = []

    def epoch(number: int, seed: int) -> grain.IterDataset:
        seeds.append((number, seed))
        source = grain.MapDataset.source(Numbers(lengths)).shuffle(seed)
        return source.to_iter_dataset(grain.ReadOptions(num_threads=0))

    dataset = jb.stream_batches(epoch, plan, pool_size=40, num_epochs=3, seed=7)
    indices = [index for batch in dataset for index in indices_in(batch)]
    assert sorted(indices) == sorted([*range(90)] * 3)
    assert sorted(set(seeds)) == [(n, epoch_seed(7, n)) for n in range(3)]
    # Golden values, because runs that resume from a checkpoint depend on them.
    assert [epoch_seed(7, n) for n in range(2)] == [523953235, 2805459032]
    assert indices[:90] != indices[90:180]


def test_an_endless_stream_repeats():
    lengths, plan, _ = make_case(4, size=20)
    dataset = jb.stream_batches(
        stream(lengths), plan, pool_size=30, num_epochs=None, num_steps=200
    )
    assert len(list(dataset)) == 200
    again = jb.stream_batches(stream(lengths), plan, pool_size=30, num_epochs=None)
    endless = list(itertools.islice(iter(again), 250))
    assert all(batch.num_examples == batch.bucket.batch_size for batch in endless)


# Resume


def check_resume(dataset) -> None:
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


# Quick tests cover each option and policy, exhaustive tests all pairs of them.
PAIRS = [
    pytest.param(
        overlong, options, marks=[] if (i - k) % 3 == 0 else pytest.mark.exhaustive
    )
    for i, options in enumerate(OPTIONS)
    for k, overlong in enumerate(["truncate", "drop", "split"])
]


@pytest.mark.parametrize(("overlong", "options"), PAIRS, ids=str)
def test_resuming_at_every_step_yields_the_remaining_batches(overlong, options):
    lengths, _, _ = make_case(11, size=60)
    plan = jb.plan_buckets(
        lengths,
        sample=True,
        max_tokens=150,
        num_buckets=3,
        max_seq_len=30,
        overlong=overlong,
    )
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=smallest_pool(plan, options) + 9,
        lengths=lengths,
        num_epochs=2,
        on_drift=None,
        **options,
    )
    check_resume(dataset)


@pytest.mark.parametrize(
    "options",
    [*OPTIONS[::3], *exhaustive(OPTIONS[1::3]), *exhaustive(OPTIONS[2::3])],
    ids=str,
)
def test_a_part_of_the_rows_resumes_at_every_step(options):
    lengths, plan, _ = make_case(12, size=60, multiple=2)
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=smallest_pool(plan, options) + 9,
        lengths=lengths,
        shard=jb.data.RowShard((1,), 2),
        num_steps=12,
        on_drift=None,
        **options,
    )
    check_resume(dataset)


def test_a_threaded_and_filtered_stream_resumes():
    lengths, plan, _ = make_case(13, size=120)
    source = grain.MapDataset.source(Numbers(lengths)).shuffle(3)
    threaded = source.to_iter_dataset(grain.ReadOptions(2, 4))
    filtered = threaded.filter(lambda x: x["index"] % 3 > 0)
    check_resume(jb.stream_batches(filtered, plan, pool_size=60))


def test_a_state_is_small_json():
    lengths, plan, _ = make_case(14, size=2000)
    dataset = jb.stream_batches(stream(lengths), plan, pool_size=100)
    iterator = iter(dataset)
    for _ in range(30):
        next(iterator)
    state = iterator.get_state()
    assert len(state["waiting"].split()) <= 100
    assert len(json.dumps(state)) < 100 * 4 + 1000
    rest = list(iterator)
    again = iter(dataset)
    again.set_state(json.loads(json.dumps(state)))
    assert_same(list(again), rest)


def assert_same(batches, want) -> None:
    assert len(batches) == len(want)
    for a, b in zip(batches, want, strict=True):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def test_state_before_returns_the_states_of_earlier_steps():
    lengths, plan, _ = make_case(15, size=800)
    dataset = jb.stream_batches(stream(lengths), plan, pool_size=80, num_epochs=2)
    iterator, states = iter(dataset), []
    for step in range(100):
        states.append(iterator.get_state())
        next(iterator)
        for late in range(min(step + 1, 20)):
            assert iterator.state_before(step - late) == states[step - late]
    with pytest.raises(ValueError, match="`step=35` has no state: .* of steps 36 to"):
        iterator.state_before(35)
    with pytest.raises(ValueError, match="`step=101` has no state: only those of"):
        iterator.state_before(101)


# Several hosts


def hosts_of(lengths, plan, shares, pool_size, threads=None, sample=None, **options):
    """Returns an iterator for each host, over its share of the examples."""
    ends = np.cumsum(shares) * len(lengths) // sum(shares)
    starts = [0, *ends[:-1].tolist()]
    options = {"num_steps": None if threads else math.inf, **options}
    return [
        iter(
            jb.stream_batches(
                stream(lengths[start:end], first=start),
                plan,
                pool_size=pool_size,
                lengths=lengths if sample is None else sample,
                shard=jb.data.RowShard((host,), len(shares)),
                processes=threads and threads.of(host),
                on_drift=None,
                like={"tokens": np.zeros(1, np.int32), "index": np.int32(0)},
                **options,
            )
        )
        for host, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [1, 2, *exhaustive([0, 3, 4])])
def test_hosts_are_in_lockstep_until_stream_end_stops_them(seed, options):
    lengths, plan, rng = make_case(seed, multiple=4)
    shares = [[1, 1, 1, 1], [1, 2, 3, 4], [5, 0, 0, 1]][seed % 3]
    pool = smallest_pool(plan, options) * int(rng.integers(1, 3))
    hosts = hosts_of(lengths, plan, shares, pool, **options)
    end, indices, steps = jb.stream.StreamEnd(plan, delay=0), [], []
    while True:
        at_hosts = [steps_of([next(host)])[0] for host in hosts]
        buckets = []
        for parts in zip(*at_hosts, strict=True):
            assert len({part.bucket for part in parts}) == 1
            size, seq_len = parts[0].bucket.batch_size, parts[0].bucket.seq_len
            buckets.append(jb.Bucket(4 * size, seq_len))
            indices += [index for part in parts for index in indices_in(part)]
        assert set(buckets) <= set(plan.buckets)
        tokens = sum(part.num_tokens for parts in at_hosts for part in parts)
        steps.append(tokens)
        if end.reached(buckets, tokens):
            break
    assert sorted(indices) == list(range(len(lengths)))
    assert all(host.ended for host in hosts)
    # The longest bucket ends the run, so few empty steps follow the last example.
    num_empty = len(steps) - 1 - max(i for i, tokens in enumerate(steps) if tokens)
    assert num_empty <= hosts[0]._run.phases[0].sequence.longest_gap(len(plan) - 1)


@pytest.mark.parametrize("seed", range(20))
def test_every_bucket_occurs_in_proportion_to_its_share_without_long_gaps(seed):
    rng = np.random.default_rng(seed)
    weights = [int(x) for x in rng.integers(1, 1 + 10 ** int(rng.integers(1, 4)), 6)]
    shares = [Fraction(x, sum(weights)) for x in weights]
    sequence = BucketSequence(shares, seed)
    size = 20_000
    picked = np.array([sequence[seed * 10**6 + index] for index in range(size)])
    for bucket, share in enumerate(shares):
        places = np.flatnonzero(picked == bucket)
        assert abs(len(places) - size * share) < 6
        if size > 3 * sequence.longest_gap(bucket):
            assert np.diff(places).max() <= sequence.longest_gap(bucket)


@pytest.mark.parametrize("workers", [2, 3, 5, 8, 13, 21, 34, 64])
def test_every_worker_gets_every_bucket(workers):
    sequence = BucketSequence([Fraction(31, 32), Fraction(1, 32)])
    for worker in (0, workers - 1):
        steps = range(worker, 10_000 * workers, workers)
        places = np.flatnonzero([sequence[step] for step in steps])
        assert np.diff(places, prepend=-1).max() <= 64 * workers


def test_bucket_shares_count_batches_with_a_minimum_for_the_longest():
    plan = jb.BucketPlan((jb.Bucket(8, 4), jb.Bucket(2, 16)), max_tokens=32)
    lengths = np.array([4] * 800 + [16] * 100)
    assert bucket_shares(plan, lengths, None) == [Fraction(2, 3), Fraction(1, 3)]
    rare = np.array([4] * 8000 + [16])
    assert bucket_shares(plan, rare, None)[1] == MIN_SHARE_OF_LONGEST


class Threads:
    """Lets threads of a test exchange values like the processes of a run."""

    def __init__(self, count: int):
        self.count = count
        self.values = [""] * count
        self.barrier = threading.Barrier(count, timeout=60)
        self.num_gathers = 0

    def of(self, index: int) -> "Thread":
        return Thread(self, index)


@dataclasses.dataclass
class Thread:
    """The process group of one thread."""

    all: Threads
    index: int

    @property
    def count(self) -> int:
        return self.all.count

    def gather(self, name: str, value: str) -> list[str]:
        assert re.fullmatch(r"stream \d+, reading \d+", name)
        self.all.values[self.index] = value
        if self.all.barrier.wait() == 0:
            self.all.num_gathers += 1
        values = list(self.all.values)
        self.all.barrier.wait()
        return values


def in_threads(functions):
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return [x.result() for x in [pool.submit(f) for f in functions]]


def drive(hosts, steps: int | None = None):
    """Returns the steps of each host, by default until all of them end."""
    return in_threads(
        [lambda host=host: steps_of(itertools.islice(host, steps)) for host in hosts]
    )


def hosts_with_processes(lengths, plan, shares, pool_size, **options):
    threads = Threads(len(shares))
    hosts = hosts_of(lengths, plan, shares, pool_size, threads=threads, **options)
    return threads, hosts


def indices_of(steps) -> list[int]:
    return [i for micro in steps for batch in micro for i in indices_in(batch)]


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [1, 2, *exhaustive([0, 3, 4, 5])])
def test_hosts_with_processes_end_together_and_serve_every_example(seed, options):
    lengths, plan, rng = make_case(seed + 60, multiple=4)
    shares = [[1, 1, 1, 1], [1, 2, 3, 4], [5, 0, 0, 1]][seed % 3]
    pool = smallest_pool(plan, options) * int(rng.integers(1, 4))
    threads, hosts = hosts_with_processes(lengths, plan, shares, pool, **options)
    at_hosts = drive(hosts)
    for parts in zip(*at_hosts, strict=True):
        for micro in zip(*parts, strict=True):
            assert len({part.bucket for part in micro}) == 1
    tokens = [
        sum(int(part.num_tokens) for micro in parts for part in micro)
        for parts in zip(*at_hosts, strict=True)
    ]
    # No step follows the last example.
    assert tokens[-1] > 0
    indices = [index for steps in at_hosts for index in indices_of(steps)]
    assert sorted(indices) == list(range(len(lengths)))
    assert all(host.ended for host in hosts)
    # After the end, hosts do not communicate any more.
    num_gathers = threads.num_gathers
    assert drive(hosts) == [[]] * 4
    assert threads.num_gathers == num_gathers


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [0, *exhaustive([1, 2])])
def test_hosts_with_processes_resume_at_every_step(seed, options):
    lengths, plan, _ = make_case(seed + 20, size=200, multiple=3)
    pool = smallest_pool(plan, options)
    make = functools.partial(
        hosts_with_processes, lengths, plan, [1, 2, 3], pool, **options
    )
    whole = drive(make()[1])
    for start in range(0, len(whole[0]) + 1, 5):
        _, before = make()
        # Hosts load ahead of the step that is saved.
        drive(before, start + 3)
        states = [json.dumps(host.state_before(start)) for host in before]
        _, after = make()
        for host, state in zip(after, states, strict=True):
            host.set_state(json.loads(state))
        for rest, steps in zip(drive(after), whole, strict=True):
            assert_same(rest, steps[start:])


def test_processes_that_read_the_same_examples_are_refused():
    lengths = np.array([3, 5, 2, 7])
    plan = jb.BucketPlan.from_shapes([(4, 8)])
    threads = Threads(2)
    hosts = [
        iter(
            jb.stream_batches(
                stream(lengths),
                plan,
                pool_size=4,
                lengths=lengths,
                shard=jb.base.batch.RowShard((index,), 2),
                processes=threads.of(index),
            )
        )
        for index in range(2)
    ]

    def refused(host):
        with pytest.raises(ValueError, match="same 4 examples.*shard=jb.sharding.loc"):
            next(host)
        return True

    assert (
        in_threads([functools.partial(refused, host) for host in hosts]) == [True] * 2
    )


def test_a_stream_is_not_resumed_by_another_number_of_processes():
    lengths = np.array([3, 5, 2, 7])
    plan = jb.BucketPlan.from_shapes([(4, 8)])
    options = {"pool_size": 8, "lengths": lengths}
    of_one = jb.stream_batches(stream(lengths), plan, **options)
    of_two = jb.stream_batches(
        stream(lengths),
        plan,
        **options,
        shard=jb.base.batch.RowShard((0,), 2),
        processes=Threads(2).of(0),
    )
    message = "was read by 2 processes, and now by 1. Streams resume only with the same"
    with pytest.raises(ValueError, match=message):
        of_two.position(3).check_same(of_one.position(3))
    for name in ("processes", "later_plans"):
        now = of_one.position(3)
        schedule = {k: v for k, v in now.schedule.items() if k != name}
        earlier = dataclasses.replace(now, schedule=schedule)
        with pytest.raises(ValueError, match=f"no .'{name}'.: .* an earlier version"):
            earlier.check_same(now)
    with pytest.raises(ValueError, match="parts 1 -> 2.* only with the same number"):
        iter(of_two).set_state(iter(of_one).get_state())


def padded(steps) -> int:
    return sum(batch.mask.size for micro in steps for batch in micro)


@pytest.mark.parametrize("seed", range(10))
def test_draining_the_pools_costs_little_more_than_the_minimum(seed):
    """The pools hold all examples, so the whole run drains them."""
    lengths, plan, _ = make_case(seed + 90, size=60, multiple=2, longest=20)
    _, hosts = hosts_with_processes(lengths, plan, [1, 2], 100)
    at_hosts = drive(hosts)
    counts = [
        np.bincount(plan.assign(part), minlength=len(plan))
        for part in (lengths[:20], lengths[20:])
    ]
    # Only remainders move to longer buckets. Moving more rows may cost slightly less.
    assert padded(at_hosts[0]) * 2 <= 1.02 * least_cost(plan, counts)


def least_cost(plan, counts) -> int:
    """Returns the least cost of batches that hold all examples, by trying all."""
    needs = np.max([np.cumsum(x[::-1])[::-1] for x in counts], axis=0)
    rows, costs = plan.batch_sizes // 2, plan.costs
    # The least cost by the number of rows, from the longest bucket on.
    best = {0: 0}
    for k in reversed(range(len(plan))):
        next_best: dict[int, int] = {}
        for num_rows, cost in best.items():
            fewest = max(0, -(-int(needs[k] - num_rows) // int(rows[k])))
            for batches in range(fewest, -(-int(needs[0]) // int(rows[k])) + 1):
                total = num_rows + batches * int(rows[k])
                total_cost = cost + batches * int(costs[k])
                if total_cost < next_best.get(total, total_cost + 1):
                    next_best[total] = total_cost
        best = next_best
    return min(best.values())


def test_buckets_without_pending_examples_are_skipped():
    """If all examples are long, short buckets are left out."""
    lengths = np.full(400, 15)
    plan = jb.BucketPlan.from_shapes([(12, 3), (6, 7), (2, 15)])
    sample = np.repeat([3, 7, 15], [900, 50, 1])
    _, hosts = hosts_with_processes(lengths, plan, [1, 1], 32, sample=sample)
    (steps, _) = drive(hosts)
    assert [batch.bucket.seq_len for (batch,) in steps] == [15] * 200


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("sample", ["short", "long"])
def test_hosts_lose_no_example_if_the_sample_differs(sample, options):
    lengths, plan, _ = make_case(33, size=300, multiple=2)
    given = np.full(100, 1 if sample == "short" else plan.max_seq_len)
    pool = smallest_pool(plan, options)
    options = {"max_segments_per_row": 4, **options} if "pack" in options else options
    _, hosts = hosts_with_processes(
        lengths, plan, [1, 1], pool, sample=given, **options
    )
    indices = [i for steps in drive(hosts) for i in indices_of(steps)]
    assert sorted(indices) == list(range(300))


def test_processes_need_fewer_steps_than_stream_end():
    # One host has all long examples, so the longest bucket needs many steps.
    lengths = np.repeat([3, 7, 15], [600, 200, 40])
    shares, pool = [1, 1, 1], 64
    plan = jb.BucketPlan.from_shapes([(18, 3), (9, 7), (3, 15)])
    _, communicating = hosts_with_processes(lengths, plan, shares, pool)
    num_steps = len(drive(communicating)[0])
    hosts, end, steps = (
        hosts_of(lengths, plan, shares, pool),
        jb.stream.StreamEnd(plan),
        0,
    )
    while True:
        parts = [next(host) for host in hosts]
        steps += 1
        if end.reached(parts[0].bucket, sum(part.num_tokens for part in parts)):
            break
    assert num_steps < 0.8 * steps


def test_processes_work_with_new_plans_and_num_steps():
    lengths, plan, _ = make_case(34, size=300, multiple=2)
    other = jb.BucketPlan.from_shapes([(4, plan.max_seq_len)])
    pool = int(plan.batch_sizes.max())
    for options in ({}, {"num_steps": 7}, {"accumulate": 2, "group": "mixed"}):
        _, hosts = hosts_with_processes(
            *(lengths, {0: plan, 5: other, 9: plan}, [1, 2], 2 * pool), **options
        )
        one, two = drive(hosts)
        assert [[x.bucket for x in micro] for micro in one] == [
            [x.bucket for x in micro] for micro in two
        ]
        if "num_steps" in options:
            assert len(one) == 7
        else:
            assert sorted(indices_of(one) + indices_of(two)) == list(range(300))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_size": 101}, "pool size is 100 in process 0, 101 in 1"),
        ({"seed": 5}, "seed is 0 in process 0, 5 in 1"),
        ({"num_steps": 9}, "num steps is None in process 0, 9 in 1"),
        ({"lengths": [3] * 60}, "plans is .* from step 0 in process 0, .* in 1"),
        ({"pad_value": np.nan}, "pad value is 0 in process 0, nan in 1"),
        (
            {"pad_value": {"tokens": 7}},
            "pad value is 0 in process 0, {'tokens': 7} in 1",
        ),
    ],
)
def test_hosts_with_different_options_are_rejected(changes, message):
    lengths, plan, _ = make_case(35, size=60, multiple=2)
    threads = Threads(2)
    hosts = [
        iter(
            jb.stream_batches(
                stream(lengths),
                plan,
                **{
                    **{"pool_size": 100, "lengths": lengths},
                    **{"shard": jb.data.RowShard((host,), 2), "on_drift": None},
                    **(changes if host else {}),
                },
                processes=threads.of(host),
            )
        )
        for host in range(2)
    ]

    def check_rejected(host):
        match = f"have different stream configurations: {message}"
        with pytest.raises(ValueError, match=match):
            next(host)

    in_threads([lambda host=host: check_rejected(host) for host in hosts])


def test_hosts_with_different_features_steps_or_streams_are_rejected():
    lengths, plan, _ = make_case(36, size=60, multiple=2)

    def host(threads, index, source, step=0, parts=None, sequences=None):
        iterator = iter(
            jb.stream_batches(
                source,
                plan,
                pool_size=100,
                lengths=lengths,
                shard=jb.data.RowShard((index,) if parts is None else parts, 2),
                sequences=sequences,
                processes=threads.of(index),
            )
        )
        for _ in range(step):
            iterator.set_state({**iterator.get_state(), "step": step})
        return iterator

    def check_rejected(iterator, message):
        with pytest.raises(ValueError, match=message):
            next(iterator)

    def check(make, message):
        threads = Threads(2)
        hosts = [make(threads, index) for index in range(2)]
        in_threads([lambda x=x: check_rejected(x, message) for x in hosts])

    longer = stream(lengths).map(lambda x: {**x, "index": np.int64(x["index"])})
    check(
        lambda threads, index: host(
            threads, index, longer if index else stream(lengths)
        ),
        "features are {'index': 'int32.*} in process 0, {'index': 'int64.*} in 1",
    )

    def with_vector(size):
        return stream(lengths).map(lambda x: {**x, "v": np.zeros(size)})

    check(
        lambda threads, index: host(
            *(threads, index, with_vector(3 + index)), sequences=["tokens"]
        ),
        r"'v': 'float64\[3\]'} in process 0, .*'v': 'float64\[4\]'} in 1",
    )
    check(
        lambda threads, index: host(threads, index, stream(lengths), step=index),
        "step is 0 in process 0, 1 in 1",
    )
    check(
        lambda threads, index: host(threads, index, stream(lengths[index:]), 0, (0,)),
        r"processes 0 and 1 have the same rows, \[0\], but different streams",
    )
    check(
        lambda threads, index: host(threads, index, stream(lengths[index:]), 0, (0, 1)),
        r"processes 0 and 1 have the same rows, \[0, 1\], but different streams",
    )


def test_a_host_without_examples_gets_the_features_of_others():
    lengths, plan, _ = make_case(37, size=50, multiple=2)
    threads = Threads(2)
    hosts = [
        iter(
            jb.stream_batches(
                stream(np.zeros(0, int) if host else lengths),
                plan,
                pool_size=50,
                lengths=lengths,
                shard=jb.data.RowShard((host,), 2),
                processes=threads.of(host),
            )
        )
        for host in range(2)
    ]
    one, two = drive(hosts)
    assert len(indices_of(one)) == 50 and not indices_of(two)
    assert two[0][0].features["tokens"].dtype == np.int32
    # A restored state has the features as well.
    for host in hosts:
        host.set_state(json.loads(json.dumps(host.state_before(1))))
    assert_same(drive(hosts)[1], two[1:])


def test_hosts_that_resume_at_different_steps_are_rejected():
    """Hosts compare their steps after restoring a state, even inside a round."""
    lengths, plan, _ = make_case(39, size=300, multiple=2)
    pool = 20 * int(plan.batch_sizes.max())
    lengths = np.tile(lengths, 20)
    states = []
    for _ in range(2):
        _, hosts = hosts_with_processes(lengths, plan, [1, 1], pool)
        drive(hosts, 25)
        states.append([hosts[0].state_before(20), hosts[1].state_before(22)])
    assert json.loads(states[0][0]["round"])[0] == 16
    _, hosts = hosts_with_processes(lengths, plan, [1, 1], pool)
    for host, state in zip(hosts, states[0], strict=True):
        host.set_state(state)

    def check_rejected(host):
        with pytest.raises(ValueError, match="step is 20 in process 0, 22 in 1"):
            next(host)

    in_threads([lambda host=host: check_rejected(host) for host in hosts])


# The round follows the sequence with a small pool, and drains the pools with a large.
@pytest.mark.parametrize("pool", [40, 200])
@pytest.mark.parametrize("start", [5, 9, 13, 14])
def test_a_plan_adopted_inside_a_round_starts_a_new_round(start, pool):
    lengths = np.random.default_rng(5).integers(1, 33, 200)
    plan = jb.plan_buckets(
        lengths, sample=True, max_tokens=256, num_buckets=3, batch_size_multiple=2
    )
    for other in ([(8, 17), (4, 32)], [(8, 32)], [(20, 5), (8, 11), (6, 20), (4, 32)]):
        plans = {0: plan, 14: jb.BucketPlan.from_shapes(other)}
        make = functools.partial(
            hosts_with_processes, lengths, shares=[1, 1], pool_size=pool
        )
        _, whole = make(plan=plans)
        want = drive(whole)
        _, before = make(plan=plan)
        drive(before, 15)
        states = [json.loads(json.dumps(x.state_before(start))) for x in before]
        assert json.loads(states[0]["round"])
        _, after = make(plan=plans)
        for host, state in zip(after, states, strict=True):
            host.set_state(state)
        for rest, steps in zip(drive(after), want, strict=True):
            assert_same(rest, steps[start:])


def test_a_round_with_an_unknown_bucket_is_rejected():
    lengths, plan, _ = make_case(42, size=300, multiple=2)
    _, hosts = hosts_with_processes(
        lengths, plan, [1, 1], 4 * int(plan.batch_sizes.max())
    )
    drive(hosts, 3)
    state = hosts[0].get_state()
    for wrong in ("[0, 16, 89, null]", "[0, 16, -1, [[90, 1]]]"):
        with pytest.raises(ValueError, match="its round has bucket 90, but the plan"):
            hosts[0].set_state({**state, "round": wrong})
    assert hosts[0].get_state() == state


@pytest.mark.parametrize("first", ["8x6", "packed"])
@pytest.mark.parametrize("size", [9, 42, 300])
def test_few_steps_at_the_end_are_empty(first, size):
    plan = jb.BucketPlan.from_shapes([(8, 6)])
    options = {"pack": True, "max_segments_per_row": 4} if first == "packed" else {}
    lengths = np.full(size, 2 if options else 6)
    _, hosts = hosts_with_processes(lengths, plan, [1, 1], 16, **options)
    tokens = [
        sum(x[0].num_tokens for x in step) for step in zip(*drive(hosts), strict=True)
    ]
    assert sum(n == 0 for n in tokens) <= 3
    assert tokens.index(min(tokens)) > len(tokens) - 5


def test_a_single_process_ignores_processes():
    lengths, plan, _ = make_case(38, size=50)
    options = {"pool_size": 50, "processes": jb.Processes()}
    dataset = jb.stream_batches(stream(lengths), plan, **options)
    dataset.set_slice(slice(0, None, 2))
    assert len(indices_of(steps_of(dataset))) == 25


def test_processes_are_rejected_in_workers():
    lengths, plan, _ = make_case(38, size=50)
    dataset = jb.stream_batches(
        stream(lengths), plan, pool_size=50, processes=Threads(2).of(0)
    )
    for use in (
        lambda: dataset.set_slice(slice(0, None, 2)),
        lambda: pickle.dumps(dataset),
    ):
        with pytest.raises(ValueError, match="`processes` cannot be used in a worker"):
            use()


def test_like_is_required_if_a_host_has_no_examples():
    lengths, plan, _ = make_case(32, size=50, multiple=2)
    options = {"shard": jb.data.RowShard((1,), 2), "lengths": lengths, "pool_size": 50}
    options["num_steps"] = math.inf
    empty = stream(np.zeros(0, int))
    with pytest.raises(ValueError, match="no example, so the features of its empty"):
        next(iter(jb.stream_batches(empty, plan, **options)))
    like = Numbers(lengths)[3]
    batch = next(iter(jb.stream_batches(empty, plan, like=like, **options)))
    assert batch.num_tokens == 0
    assert batch.features["tokens"].dtype == np.int32


def test_stream_end_is_delayed_and_looks_only_at_the_longest_bucket():
    plan = jb.BucketPlan((jb.Bucket(4, 8), jb.Bucket(2, 16)), max_tokens=32)
    end = jb.stream.StreamEnd(plan, delay=2)
    short, long = plan.buckets
    steps = [(short, 0), (long, 3), ((short, long), np.int32(0)), (short, 0), (long, 9)]
    assert [end.reached(*step) for step in steps] == [False] * 4 + [True]
    with pytest.raises(ValueError, match="`delay=-1` must not be negative"):
        jb.stream.StreamEnd(plan, delay=-1)


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_streams_pass_the_checks_of_any_loader(num_hosts, options):
    lengths, plan, _ = make_case(34, size=120, multiple=2)
    make = functools.partial(
        hosts_of,
        lengths,
        plan,
        [1] * num_hosts,
        smallest_pool(plan, options) + 10,
        num_steps=None if num_hosts == 1 else 90,
        **options,
    )

    def loader(host: int, start_step: int):
        iterator = make()[host]
        for _ in range(start_step):
            next(iterator)
        again = make()[host]
        again.set_state(json.loads(json.dumps(iterator.get_state())))
        return again

    check_batches(
        loader,
        num_examples=120,
        buckets=plan.buckets,
        max_tokens=plan.max_tokens,
        num_hosts=num_hosts,
        resume_at=range(0, 12, 3) if num_hosts == 2 else range(0, 4),
    )


# Workers


# A separate script, because workers import the main module.
WORKERS = """
import json
import grain
import numpy as np
import jaxbucket as jb
from absl import flags


class Numbers:
    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"tokens": np.full(self.lengths[index], index), "index": np.int32(index)}


def stream(lengths):
    source = grain.MapDataset.source(Numbers(lengths))
    return source.to_iter_dataset(grain.ReadOptions(num_threads=0))


def loaded(dataset, state=None, number=10**6):
    # Batches are copied, because they are in the memory of workers.
    iterator, batches = iter(dataset), []
    if state is not None:
        iterator.set_state(json.loads(state))
    while len(batches) < number and (batch := next(iterator, None)) is not None:
        parts = ({name: np.array(x) for name, x in y.items()} for y in batch)
        batches.append(jb.Batch(*parts))
    state = json.dumps(iterator.get_state())
    iterator.close()
    return batches, state


def assert_same(batches, want):
    assert len(batches) == len(want), (len(batches), len(want))
    for a, b in zip(batches, want):
        for x, y in zip(a, b):
            assert all(np.array_equal(x[name], y[name]) for name in x | y)


def indices(batches):
    real = [x.features["index"][x.mask.any(axis=1)] for x in batches]
    return np.concatenate(real).tolist()


def main():
    flags.FLAGS.mark_as_parsed()
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 300)
    plan = jb.plan_buckets(
        lengths, sample=True, max_tokens=320, num_buckets=3, batch_size_multiple=2
    )
    part = jb.stream_batches(
        stream(lengths), plan, pool_size=64, lengths=lengths, num_steps=40,
        shard=jb.data.RowShard((0,), 2),
    )
    whole, _ = loaded(part)
    for workers in (1, 3):
        dataset = part.mp_prefetch(grain.MultiprocessingOptions(workers))
        batches, _ = loaded(dataset)
        # The step determines the bucket, whichever worker loads it.
        assert [x.bucket for x in batches] == [x.bucket for x in whole]
        assert len(set(indices(batches))) == len(indices(batches))
        for step in (2,) if workers > 1 else ():
            before, state = loaded(dataset, None, step)
            after, _ = loaded(dataset, state)
            assert_same([*before, *after], batches)
    by_epoch = jb.stream_batches(
        lambda epoch, seed: stream(lengths), plan, pool_size=60, num_epochs=2
    )
    batches, _ = loaded(by_epoch.mp_prefetch(grain.MultiprocessingOptions(2)))
    assert sorted(indices(batches)) == sorted([*range(300)] * 2)
    # Workers that read the stream do not change the batches.
    prefetched = stream(lengths).mp_prefetch(grain.MultiprocessingOptions(2))
    dataset = jb.stream_batches(prefetched, plan, pool_size=60)
    want, _ = loaded(jb.stream_batches(stream(lengths), plan, pool_size=60))
    before, state = loaded(dataset, None, 5)
    after, _ = loaded(dataset, state)
    assert_same([*before, *after], want)
    print("all tests passed")


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_together_serve_every_example_once(workers):
    """Simulates how Grain pickles a dataset and slices it in each worker."""
    lengths, plan, _ = make_case(44, size=90, multiple=2)
    options = {"pool_size": 64, "lengths": lengths, "on_drift": None}
    part = jb.stream_batches(
        *(stream(lengths), plan),
        shard=jb.data.RowShard((0,), 2),
        num_steps=12,
        **options,
    )
    whole = list(part)

    def shares(dataset):
        copies = [cloudpickle.loads(cloudpickle.dumps(dataset)) for _ in range(workers)]
        for index, copy in enumerate(copies):
            copy.set_slice(slice(index, None, workers))
        return copies

    by_worker = [list(share) for share in shares(part)]
    for worker, batches in enumerate(by_worker):
        # The step determines the bucket, whichever worker loads it.
        assert [x.bucket for x in batches] == [x.bucket for x in whole[worker::workers]]
    indices = [
        i for batches in by_worker for batch in batches for i in indices_in(batch)
    ]
    assert len(set(indices)) == len(indices)
    for share in shares(part):
        check_resume(share)
        # Grain gives workers the state of the dataset before it is sliced.
        iterator = iter(share)
        iterator.set_state(iter(part).get_state())
        next(iterator)
    for source in (lambda epoch, seed: stream(lengths), stream(lengths)):
        dataset = jb.stream_batches(source, plan, num_epochs=2, **options)
        indices = [i for share in shares(dataset) for x in share for i in indices_in(x)]
        assert sorted(indices) == sorted([*range(90)] * 2)


@pytest.mark.exhaustive
def test_grain_workers_yield_the_same_batches(tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.stdout.endswith("all tests passed\n"), run.stdout + run.stderr


def test_thread_prefetch_resumes():
    lengths, plan, _ = make_case(42, size=60)
    dataset = jb.stream_batches(stream(lengths), plan, pool_size=60)
    check_resume(
        grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=3)
    )


# Plans that change, and lengths that drift


@pytest.mark.parametrize("options", [{}, {"pack": True}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("parts", [2, *exhaustive([1])])
def test_a_new_plan_takes_effect_at_its_step(parts, options):
    lengths, plan, _ = make_case(50, size=100, multiple=2)
    longest = plan.max_seq_len
    new = jb.BucketPlan.from_shapes([(8, 9), (4, longest)])
    dataset = jb.stream_batches(
        stream(lengths),
        {0: plan, 3: new},
        pool_size=smallest_pool(plan, options) + 20,
        lengths=lengths,
        shard=jb.data.RowShard((0,), parts),
        num_steps=16 if parts > 1 else None,
        on_drift=None,
        **options,
    )
    check_resume(dataset)
    indices = []
    for step, micro in enumerate(steps_of(dataset)):
        for batch in micro:
            size, seq_len = batch.bucket.batch_size, batch.bucket.seq_len
            assert (
                jb.Bucket(size * parts, seq_len) in (new if step >= 3 else plan).buckets
            )
            indices += indices_in(batch)
    assert len(set(indices)) == len(indices)
    if parts == 1:
        assert sorted(indices) == list(range(len(lengths)))


def test_a_new_plan_keeps_the_max_segments_of_the_first():
    plan = jb.BucketPlan.from_shapes([(2, 16)])
    dataset = jb.stream_batches(
        stream(np.full(64, 2)),
        {0: plan, 1: jb.BucketPlan.from_shapes([(4, 16)])},
        pool_size=20,
        pack=True,
        lengths={0: [4, 4, 4], 1: [2] * 8},
    )
    shapes = [batch.features["index"].shape for batch in dataset]
    assert shapes[:2] == [(2, 3), (4, 3)] and dataset.max_segments == 3


def test_a_state_resumes_with_a_new_plan_at_a_later_step():
    lengths, plan, _ = make_case(51, size=300)
    new = jb.BucketPlan.from_shapes([(6, plan.max_seq_len)])
    iterator = iter(jb.stream_batches(stream(lengths), plan, pool_size=90))
    before = [next(iterator) for _ in range(5)]
    state = iterator.get_state()
    changed = jb.stream_batches(stream(lengths), {0: plan, 5: new}, pool_size=90)
    again = iter(changed)
    again.set_state(state)
    after = list(again)
    assert {batch.bucket for batch in after} == set(new.buckets)
    indices = [i for batch in [*before, *after] for i in indices_in(batch)]
    assert sorted(indices) == list(range(300))
    early = jb.stream_batches(stream(lengths), {0: plan, 4: new}, pool_size=90)
    with pytest.raises(ValueError, match="plans .* from step 0 -> .* from step 4"):
        iter(early).set_state(state)


def test_workers_resume_with_plans_from_the_next_step_of_the_run_on():
    lengths, plan, _ = make_case(51, size=300)
    new = jb.BucketPlan.from_shapes([(6, plan.max_seq_len)])

    def worker(*starts):
        plans = {0: plan} | dict.fromkeys(starts, new)
        dataset = jb.stream_batches(stream(lengths), plans, pool_size=90)
        state = iter(dataset).get_state()
        dataset.set_slice(slice(2, None, 3))
        return iter(dataset), state

    iterator, _ = worker()
    steps_of(itertools.islice(iterator, 2))  # Steps 2 and 5 of the run.
    for start in (6, 7, 8):
        worker(start)[0].set_state(iterator.get_state())
    message = "at step 8, .* from step 5. Use .* `plan={0: old, step: new}`"
    with pytest.raises(ValueError, match=message):
        worker(5)[0].set_state(iterator.get_state())
    # Workers that served no step have the state of the dataset before it was sliced.
    iterator, state = worker(1)
    iterator.set_state(state)
    assert next(iterator).bucket in new.buckets


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares 2,048 lengths instead of 16,384, so that short streams may drift."""
    monkeypatch.setattr(drift_module, "_WINDOW", 2048)


def read_all(all_lengths, plan, **options):
    dataset = jb.stream_batches(stream(all_lengths), plan, pool_size=600, **options)
    return list(dataset)


@pytest.mark.exhaustive
def test_drift_issues_a_warning():
    plan = jb.BucketPlan.from_shapes([(64, 4), (64, 32)])
    with pytest.warns(
        jb.stream.DriftWarning, match=r"Lengths have drifted .* the last 16384"
    ):
        read_all(np.full(17_500, 20), plan)


def test_a_drift_is_reported_once_with_figures_and_a_plan(small_window):
    rng = np.random.default_rng(0)
    sample = rng.integers(1, 9, 2000)
    lengths = np.concatenate([rng.integers(1, 9, 2500), rng.integers(17, 24, 7500)])
    plan = jb.plan_buckets(
        np.append(sample, 32), sample=True, max_tokens=2048, num_buckets=3
    )
    drifts: list[jb.stream.Drift] = []
    read_all(lengths, plan, lengths=sample, on_drift=drifts.append)
    (drift,) = drifts
    assert drift.padding > drift.new_padding + 0.05
    assert drift.padding == pytest.approx(jb.report(plan, drift.lengths).padding)
    assert drift.planned_padding == pytest.approx(jb.report(plan, sample).padding)
    assert drift.plan.max_seq_len == plan.max_seq_len
    assert drift.plan.max_tokens == plan.max_tokens
    assert drift.new_padding == pytest.approx(
        jb.report(drift.plan, drift.lengths).padding
    )


def test_lengths_as_planned_do_not_warn(small_window):
    rng = np.random.default_rng(1)
    sample, lengths = rng.integers(1, 33, 2000), rng.integers(1, 33, 6000)
    plan = jb.plan_buckets(sample, sample=True, max_tokens=2048, num_buckets=4)
    read_all(lengths, plan, lengths=sample)


def test_a_sequence_for_other_lengths_is_reported_as_drift(small_window):
    rng = np.random.default_rng(2)
    sample = np.where(rng.random(4000) < 0.5, 4, 32)
    lengths = np.full(10_000, 32)
    plan = jb.plan_buckets(
        sample, sample=True, max_tokens=1024, num_buckets=2, batch_size_multiple=2
    )
    drifts: list[jb.stream.Drift] = []
    iterator = iter(
        jb.stream_batches(
            stream(lengths),
            plan,
            pool_size=512,
            lengths=sample,
            shard=jb.data.RowShard((0,), 2),
            num_steps=math.inf,
            on_drift=drifts.append,
        )
    )
    while not drifts:
        next(iterator)
    assert drifts[0].empty_rows > 0.3


# Errors


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("seed", range(6))
def test_an_exception_in_the_stream_names_the_example(seed):
    lengths, plan, rng = make_case(seed + 60, size=200)
    place = int(rng.integers(200))

    def broken(example):
        if example["index"] == place:
            raise BrokenError("row is bad")
        return example

    dataset = jb.stream_batches(
        stream(lengths).map(broken), plan, pool_size=smallest_pool(plan, {}) + 20
    )
    message = (
        f"Example {place} of epoch 0 of the stream cannot be read: BrokenError: row"
    )
    indices = []
    with pytest.raises(RuntimeError, match=re.escape(message)) as raised:
        for batch in dataset:
            indices += indices_in(batch)
    assert isinstance(raised.value.__cause__, BrokenError)
    assert len(set(indices)) == len(indices) and (not indices or max(indices) < place)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_stop_iteration_in_the_stream_is_not_its_end(seed, below, threads):
    lengths, plan, rng = make_case(seed + 70, size=100)
    place = int(rng.integers(100))

    def broken(example):
        return next(iter([])) if example["index"] == place else example

    source, options = grain.MapDataset.source(Numbers(lengths)), grain.ReadOptions
    if below:
        dataset = source.map(broken).to_iter_dataset(options(threads, 4))
    else:
        dataset = source.to_iter_dataset(options(threads, 4)).map(broken)
    dataset = jb.stream_batches(dataset, plan, pool_size=70)
    message = f"Example {place} of epoch 0 of the stream cannot be read: a function of"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        list(dataset)


class Counting(grain.DatasetIterator):
    """A custom iterator that raises StopIteration inside a helper method."""

    def __init__(self, number: int):
        super().__init__()
        self._places = iter(range(number))

    def __next__(self):
        return {"tokens": np.full(3, self._next_place())}

    def _next_place(self):
        return next(self._places)

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


class CountingDataset(grain.IterDataset):
    def __iter__(self):
        return Counting(20)


def test_a_custom_iterator_may_end_inside_a_method():
    plan = jb.plan_buckets([4], sample=True, max_tokens=16)
    batches = list(jb.stream_batches(CountingDataset(), plan, pool_size=4))
    assert sum(batch.num_examples for batch in batches) == 20


def test_an_example_without_a_length_is_rejected_with_its_index():
    plan = jb.plan_buckets([4], sample=True, max_tokens=16)
    examples = [{"x": [1]}, {"x": [2, 3]}, {"y": 3}]
    source = grain.MapDataset.source(examples).to_iter_dataset()
    for options, message in [
        (
            {},
            "Example 2 of epoch 0 of the stream: The example has no sequence feature",
        ),
        (
            {"sequences": ["x"]},
            "Example 2 of epoch 0 of the stream: `sequences=['x']`: ['x'] are not ",
        ),
    ]:
        dataset = jb.stream_batches(source, plan, pool_size=4, **options)
        with pytest.raises(ValueError, match=re.escape(message)):
            list(dataset)
    with pytest.raises(ValueError, match="Example 2 of epoch 0 of the stream:"):
        jb.stream.sample_lengths(source, 10)


@pytest.mark.parametrize("epochs", [1, 3, None])
def test_a_function_that_returns_none_does_not_end_the_stream(epochs):
    plan = jb.plan_buckets([4], sample=True, max_tokens=16)
    source = stream(np.array([3, 4, 2, 1])).map(lambda x: x if x["index"] < 2 else None)
    dataset = jb.stream_batches(source, plan, pool_size=4, num_epochs=epochs)
    with pytest.raises(ValueError, match="Example 2 of epoch 0 .* is a NoneType, not"):
        list(dataset)


def test_an_example_of_a_different_dtype_is_rejected_with_its_index():
    plan = jb.plan_buckets([4], sample=True, max_tokens=16)
    examples = [{"x": np.zeros(n, np.int32)} for n in (1, 2, 3)]
    examples[2] = {"x": np.zeros(3, np.int64)}
    source = grain.MapDataset.source(examples).to_iter_dataset()
    with pytest.raises(
        ValueError, match="Example 2 of epoch 0 of the stream: Row 0: fe"
    ):
        list(jb.stream_batches(source, plan, pool_size=4))


def test_an_empty_stream_is_rejected():
    plan = jb.plan_buckets([4], sample=True, max_tokens=16)
    empty = stream(np.zeros(0, int))
    for epochs in (1, None):
        dataset = jb.stream_batches(empty, plan, pool_size=4, num_epochs=epochs)
        with pytest.raises(
            ValueError, match="Epoch 0 of the stream has no example, or"
        ):
            next(iter(dataset))
    with pytest.raises(ValueError, match="Epoch 0 of the stream has no example"):
        jb.stream.sample_lengths(empty, 10)

    def later(epoch: int, seed: int) -> grain.IterDataset:
        return stream(np.array([3, 4])) if epoch == 0 else empty

    dataset = jb.stream_batches(later, plan, pool_size=4, num_epochs=None)
    with pytest.raises(ValueError, match="Epoch 1 of the stream has no example"):
        list(dataset)
    none_kept = jb.plan_buckets(
        [4, 9], sample=True, max_tokens=16, max_seq_len=4, overlong="drop"
    )
    dataset = jb.stream_batches(
        stream(np.array([9, 9])), none_kept, pool_size=4, num_epochs=None
    )
    with pytest.raises(ValueError, match="or none that is kept.*`overlong='drop'`"):
        list(dataset)


PLAN = jb.BucketPlan((jb.Bucket(8, 4), jb.Bucket(2, 16)), max_tokens=32)
LONGER = jb.BucketPlan((jb.Bucket(1, 32),), max_tokens=32)
HALF = {"shard": jb.data.RowShard((0,), 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_size": 7}, "`pool_size=7` is smaller than the 8 rows of bucket [8, 4]"),
        (
            {"accumulate": 3, "pool_size": 23},
            "`pool_size=23` is smaller than the 24 rows of 3 batches of bucket [8, 4]",
        ),
        ({"pool_size": 0}, "`pool_size=0` must be a positive integer."),
        ({"policy": "best"}, "`policy='best'`: choose 'closest' or 'first'."),
        ({"group": "odd"}, "`group='odd'`: choose 'same' or 'mixed'."),
        ({"accumulate": 0}, "`accumulate=0` must be a positive integer."),
        ({"num_epochs": 0}, "`num_epochs=0` must be a positive integer."),
        ({"num_steps": 1.5}, "`num_steps=1.5` is not an integer."),
        ({"max_wait": 0}, "`max_wait=0` must be a positive integer."),
        ({"seed": -1}, "`seed=-1` must be between 0 and"),
        ({"pack": True}, "`max_segments_per_row` is missing. It sets the shape of"),
        (HALF, "`lengths` is missing. Several processes share a sequence"),
        ({"shard": jb.data.RowShard((0,), 3)}, "cannot be split into 3 equal parts"),
        ({**HALF, "lengths": [3]}, "`processes` is missing. This process has only"),
        ({"processes": 4}, "`processes=4` has no `gather` method. Pass the `Pro"),
        ({"plan": {1: PLAN}}, "`plan` has first steps [1]. Include a plan for step 0."),
        ({"plan": {}}, "`plan` has first steps []"),
        ({"plan": {"a": PLAN}}, "`plan` has the key 'a', but its keys are first steps"),
        ({"plan": {0: PLAN, 7.5: PLAN}}, "`plan` has the key 7.5, but its keys are fi"),
        ({"plan": {0: PLAN, 5: "new"}}, "`plan[5]` is a str, not a `BucketPlan`"),
        (
            {"plan": {0: PLAN, 5: LONGER}},
            "`plan[5]` has `max_seq_len=32`, but the first plan has 16, which",
        ),
        (
            {"lengths": {0: [3], 2: [3]}},
            "`lengths` has steps [0, 2], but `plan` has [0].",
        ),
        ({"lengths": [17]}, "`lengths[0]=17` is beyond the last bucket"),
        ({"dataset": [1, 2]}, "`dataset` is a list, not a `grain.IterDataset`. Pass"),
        ({"dataset": grain.MapDataset.range(3)}, "not a `grain.IterDataset`. Pass `da"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    given = {"dataset": stream(np.array([3, 9])), "plan": PLAN, "pool_size": 8}
    given |= options
    dataset, plan = given.pop("dataset"), given.pop("plan")
    with pytest.raises(ValueError, match=re.escape(message)):
        jb.stream_batches(dataset, plan, **given)


class Shorter(grain.transforms.Map):
    def map(self, element):
        return {"x": element["x"][1:]}


def test_the_remedy_for_a_grain_data_loader_works():
    data_source = [{"x": np.ones(n, np.int32)} for n in (3, 9, 5, 4)]
    namespace = {"grain": grain, "data_source": data_source, "seed": 0}
    namespace["operations"] = [Shorter()]
    loader = grain.DataLoader(
        data_source=data_source,
        sampler=grain.samplers.SequentialSampler(4, grain.sharding.NoSharding()),
    )
    for call in (
        lambda given: jb.stream_batches(given, PLAN, pool_size=8),
        lambda given: jb.stream.sample_lengths(given, 4),
    ):
        with pytest.raises(ValueError, match="is a DataLoader, not a `grain") as error:
            call(loader)
        (advised,) = re.findall(r"`(grain\.Map[^`]*)`", str(error.value))
        call(eval(advised, namespace))
    lengths = jb.stream.sample_lengths(eval(advised, namespace), 4)
    assert sorted(lengths.tolist()) == [2, 3, 4, 8]


# A state of version 2, which every release with this version must read.
SAVED = json.loads("""{
    "format": "jaxbucket.stream", "version": 2, "step": 5, "read": 18,
    "next_place": 18, "waiting": "0 1 1 1 11 1 1 1", "tokens": 44,
    "checksum": 725996237, "snapshot_checksum": 0, "round": "null",
    "epoch": 0, "number": 0,
    "features": "{\\"tokens\\": [\\"int32\\", [1]], \\"index\\": [\\"int32\\", []]}",
    "counts": {
        "read": 0, "arrived": 0, "dropped": 0, "truncated": 0, "truncated_tokens": 0,
        "split": 0
    },
    "parent": {"next_index": 0},
    "traits": {
        "pool_size": 10, "policy": "closest", "parts": 1, "accumulate": 1,
        "group": "same", "pack": false, "max_wait": 160, "sequences": null,
        "pad_value": 0, "seed": 3, "plans": "ef14e50c4e2d985c from step 0",
        "processes_meet": false, "shard": [0], "worker": [0, 1]
    }
}""")


def test_saved_states_stay_readable():
    lengths = np.arange(60) % 16 + 1
    dataset = jb.stream_batches(stream(lengths), PLAN, pool_size=10, seed=3)
    iterator, again = iter(dataset), iter(dataset)
    steps_of(itertools.islice(iterator, 5))
    state = iterator.get_state()
    # Earlier states do not have this number.
    assert state["traits"].pop("num_epochs") == 0
    assert state == SAVED
    again.set_state(SAVED)
    assert_same(list(again), list(iterator))


@pytest.mark.parametrize(
    ("pool", "saved_round", "golden"),
    [
        (40, "[0, 10, -1, null]", "99691c1a9dd5e3b6"),
        (200, "[0, 65, -1, [[1, 60], [0, 5]]]", "5de1d203a5cc8d7b"),
    ],
)
def test_states_of_hosts_equal_golden_states(pool, saved_round, golden):
    _, hosts = hosts_with_processes(np.arange(160) % 16 + 1, PLAN, [1, 1], pool, seed=5)
    drive(hosts, 3)
    states = [host.get_state() for host in hosts]
    assert [state["round"] for state in states] == [saved_round] * 2
    # The state of Grain's own iterator is excluded, because it may change.
    states = [{k: v for k, v in state.items() if k != "parent"} for state in states]
    # Earlier states do not have this number, which is 0 until the stream has ended.
    num_epochs = [state["traits"].pop("num_epochs") for state in states]
    assert num_epochs == [int(pool > 160)] * 2
    text = json.dumps(states, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == golden


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_size": 20}, "pool size 16 -> 20"),
        ({"policy": "first"}, "policy closest -> first"),
        ({"seed": 3}, "seed 0 -> 3"),
        ({"accumulate": 2, "group": "mixed"}, "accumulate 1 -> 2; group same -> mixed"),
        ({"pack": True, "max_segments_per_row": 2}, "pack False -> True; plans "),
        ({"plan": jb.BucketPlan.from_shapes([(8, 4), (1, 16)])}, "plans "),
    ],
)
def test_a_state_with_different_options_is_rejected(options, message):
    lengths = np.full(60, 3)
    given = {"pool_size": 16, "plan": PLAN}
    iterator = iter(jb.stream_batches(stream(lengths), **given))
    next(iterator)
    state = iterator.get_state()
    other = iter(jb.stream_batches(stream(lengths), **{**given, **options}))
    with pytest.raises(ValueError, match=f"at step 1.*{message}") as error:
        other.set_state(state)
    assert ("To change the plan at" in str(error.value)) == ("plans " in message)
    # A refusal that takes no reading leaves the iterator unchanged.
    next(other)


def test_a_state_of_another_process_is_rejected():
    iterators = [
        iter(
            jb.stream_batches(
                *(stream(np.full(60, 3)), PLAN),
                pool_size=16,
                lengths=[3],
                num_steps=4,
                shard=jb.data.RowShard((part,), 2),
            )
        )
        for part in range(2)
    ]
    message = (
        r"shard \[0\] -> \[1\].* and each process from a state that it saved itself"
    )
    with pytest.raises(ValueError, match=message):
        iterators[1].set_state(iterators[0].get_state())


def test_invalid_states_are_rejected():
    lengths = np.full(60, 3)
    iterator = iter(jb.stream_batches(stream(lengths), PLAN, pool_size=16))
    next(iterator)
    state = iterator.get_state()
    for wrong in ({}, {"next_index": 3}, None, []):
        with pytest.raises(ValueError, match="`state` is not the state of a stream"):
            iterator.set_state(wrong)
    with pytest.raises(ValueError, match="`state` has version 7, but this"):
        iterator.set_state({**state, "version": 7})
    for name in set(state) - {"format", "version"}:
        incomplete = {key: value for key, value in state.items() if key != name}
        with pytest.raises(ValueError, match="`state` is truncated or modified"):
            iterator.set_state(incomplete)
    wrong = {
        "waiting": ["1 x", "3 -5", 7],
        "step": [-1, 1.5, True, "2", math.inf],
        "epoch": [-1, None],
        "counts": [{}, {"read": -1}, {**state["counts"], "read": math.inf}],
        "features": ["[1]", "{", '{"a": ["int99", []]}', '{"a": ["i4,f4", []]}']
        + ['{"a": ["int32", [-1]]}'],
        "round": ["a:b:c", "[1]", "[0, 5, -2, null]", '[0, 5, -1, [["x", 1]]]']
        + ["[0, 16, -1, []]", "[3, 2, 0, null]", "[0, NaN, 0, null]"]
        + ["[0, 1e999, 0, [[1e999, 1]]]"],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match="`state` is truncated or modified"):
                iterator.set_state({**state, name: value})
    pair = np.array([16, 16])
    for name in ("pool_size", "shard", "num_epochs"):
        traits = {**state["traits"], name: pair}
        with pytest.raises(ValueError, match=f"{name.replace('_', ' ')} .16 16. ->"):
            iterator.set_state({**state, "traits": traits})
    for name in ("format", "version"):
        with pytest.raises(ValueError, match="is not the state of|has version array"):
            iterator.set_state({**state, name: pair})
    # Invalid states leave the iterator unchanged.
    assert len(list(iterator)) > 0
    with pytest.raises(ValueError, match="rejects its own state at example 8 of epo"):
        iterator.set_state({**state, "parent": {}})
    iterator.set_state(state)
    assert len(list(iterator)) > 0


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
def test_the_state_of_a_failed_step_is_the_state_before_it(options):
    lengths, plan, rng = make_case(41, size=120)
    pool = 2 * smallest_pool(plan, options)
    options = {"lengths": lengths, "pool_size": pool, "on_drift": None, **options}
    whole = steps_of(jb.stream_batches(stream(lengths), plan, **options))
    broken = {"at": -1, "error": OSError}

    def read(example):
        if example["index"] == broken["at"]:
            raise broken["error"]("no network")
        return example

    dataset = jb.stream_batches(stream(lengths).map(read), plan, **options)
    for at in rng.choice(120, 6, replace=False).tolist():
        for error in (OSError, KeyboardInterrupt):
            broken.update(at=at, error=error)
            iterator = iter(dataset)
            steps = []
            with pytest.raises((RuntimeError, KeyboardInterrupt)):
                for batches in iterator:
                    steps += steps_of([batches])
            with pytest.raises(RuntimeError, match="cannot be read|was interrupted"):
                next(iterator)
            state = json.loads(json.dumps(iterator.get_state()))
            broken["at"] = -1
            iterator.set_state(state)
            assert_same(steps + steps_of(iterator), whole)


def test_a_stop_iteration_from_on_drift_does_not_end_the_stream(small_window):
    def stop(drift: jb.stream.Drift) -> None:
        raise StopIteration

    sample, lengths = np.full(100, 2), np.full(4000, 9)
    plan = jb.BucketPlan.from_shapes([(8, 2), (8, 32)])
    dataset = jb.stream_batches(
        stream(lengths), plan, pool_size=64, lengths=sample, on_drift=stop
    )
    with pytest.raises(RuntimeError, match="called in step .* raised StopIteration"):
        list(dataset)


class Interrupt:
    """Raises KeyboardInterrupt after a number of lines of the stream package."""

    def __init__(self, lines: int):
        self.lines = lines

    def __enter__(self):
        sys.settrace(self.call)

    def __exit__(self, *error):
        sys.settrace(None)

    def call(self, frame, event, argument):
        name = frame.f_globals.get("__name__", "")
        return self.line if name.startswith("jaxbucket.stream") else None

    def line(self, frame, event, argument):
        self.lines -= event == "line"
        if self.lines == 0:
            raise KeyboardInterrupt
        return self.line


@pytest.mark.parametrize(
    "options", [OPTIONS[0], *exhaustive([OPTIONS[2], OPTIONS[4]])], ids=str
)
def test_an_interrupt_never_loses_examples_silently(options):
    lengths, plan, _ = make_case(43, size=150)
    plans = {0: plan, 2: plan}
    options = {"lengths": lengths, "on_drift": None, **options}
    options["pool_size"] = 2 * smallest_pool(plan, options)
    dataset = jb.stream_batches(stream(lengths), plans, **options)
    whole = steps_of(dataset)
    num_lost = 0
    for lines in range(1, 2000, 23):
        iterator = iter(dataset)
        before = steps_of(itertools.islice(iterator, 2))
        try:
            with Interrupt(lines):
                before += steps_of([next(iterator)])
        except KeyboardInterrupt:
            pass
        else:
            break
        try:
            state = iterator.get_state()
        except RuntimeError as error:
            assert "interrupted while examples were moved from the pool" in str(error)
            num_lost += 1
            continue
        after = iter(dataset)
        after.set_state(state)
        # The interrupt may come when the step is complete, but not yet returned.
        start = 2 if state["step"] == 2 else 3
        assert_same(steps_of(after), whole[start:])
    assert lines > 23 and num_lost < lines // 23


def test_a_stream_with_different_tokens_is_rejected():
    lengths = np.random.default_rng(0).integers(1, 16, 90)
    states = []
    for first in (0, 500):
        source = stream(lengths, first=first)
        iterator = iter(jb.stream_batches(source, PLAN, pool_size=40))
        if states:
            with pytest.raises(ValueError, match=r"have other contents\. Make"):
                iterator.set_state(states[0])
            # The iterator is unusable until a valid state is set.
            for use in (iterator.__next__, iterator.get_state):
                with pytest.raises(ValueError, match="The last state that was set was"):
                    use()
        else:
            steps_of(itertools.islice(iterator, 5))
            states.append(iterator.state_before(2))


@pytest.mark.parametrize("change", [0, 1])
def test_a_stream_with_different_lengths_is_rejected(change):
    lengths = np.random.default_rng(0).integers(1, 16, 90)
    iterator = iter(jb.stream_batches(stream(lengths), PLAN, pool_size=40))
    next(iterator)
    state = iterator.get_state()
    other = lengths[:20] if change else np.maximum(lengths - 1, 1)
    again = iter(jb.stream_batches(stream(other), PLAN, pool_size=40))
    with pytest.raises(ValueError, match="The stream has changed: .* had been read"):
        again.set_state(state)


# With a pool of 8, no example is pending after a step.
@pytest.mark.parametrize("pool_size", [8, 16, 40])
def test_a_stream_in_another_order_is_rejected(pool_size):
    """All lengths are equal, so only the contents of examples differ."""
    plan = jb.BucketPlan.from_shapes([(8, 8)])

    def batches_of(order):
        source = [{"tokens": np.full(8, i)} for i in order]
        dataset = grain.MapDataset.source(source).to_iter_dataset()
        return jb.stream_batches(dataset, plan, pool_size=pool_size)

    orders = [np.random.default_rng(seed).permutation(60) for seed in (0, 1)]
    iterator = iter(batches_of(orders[0]))
    for _ in range(3):
        next(iterator)
        again = iter(batches_of(orders[1]))
        state = iterator.get_state()
        with pytest.raises(ValueError, match="have other contents.* loader shuf"):
            again.set_state(state)


def test_a_closed_iterator_raises():
    iterator = iter(jb.stream_batches(stream(np.array([3])), PLAN, pool_size=8))
    iterator.close()
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)


def test_positions_compare_options_but_not_streams():
    given = {"pool_size": 16, "lengths": [3, 9, 9]}
    one = jb.stream_batches(stream(np.array([3])), PLAN, **given)
    same_one = jb.stream_batches(stream(np.array([4])), PLAN, **given)
    assert one.position(3) == same_one.position(3)
    assert one.fingerprint == same_one.fingerprint
    other = jb.stream_batches(stream(np.array([3])), PLAN, **given, seed=1)
    assert one.fingerprint != other.fingerprint
    message = "schedule seed 0 -> 1. Restore the .* or save to a different folder.$"
    with pytest.raises(ValueError, match=message):
        one.position(3).check_same(other.position(3))
    again = jb.data.DataPosition.from_dict(
        json.loads(json.dumps(one.position(3).to_dict()))
    )
    one.position(3).check_same(again)


# Reused arrays, failing streams, rare lengths and drift


class ReusingIterator(grain.DatasetIterator):
    """Examples of three tokens, all in one array that is overwritten."""

    def __init__(self, size: int):
        super().__init__()
        self._size = size
        self._next = 0
        self._tokens = np.zeros(3, np.int32)

    def __next__(self):
        if self._next == self._size:
            raise StopIteration
        self._tokens[:] = self._next
        self._next += 1
        return {"tokens": self._tokens}

    def get_state(self):
        return {"next": self._next}

    def set_state(self, state):
        self._next = state["next"]


class ReusingDataset(grain.IterDataset):
    def __init__(self, size: int):
        super().__init__()
        self._size = size

    def __iter__(self):
        return ReusingIterator(self._size)


def test_a_stream_may_reuse_its_arrays():
    plan = jb.BucketPlan.from_shapes([(4, 3)])
    dataset = jb.stream_batches(ReusingDataset(8), plan, pool_size=8)
    tokens = np.concatenate([batch.features["tokens"][:, 0] for batch in dataset])
    assert sorted(tokens.tolist()) == list(range(8))


def failing_epoch(error):
    def epoch(number, seed):
        del seed
        if number:
            raise error
        return stream(np.full(8, 3))

    return epoch


@pytest.mark.parametrize("error", [StopIteration(), KeyError("k")], ids=repr)
def test_reading_the_example_raises_the_error_of_reading_batches(error):
    def fails(example):
        raise error

    dataset = grain.MapDataset.source([{"tokens": [1, 2]}]).map(fails)
    plan = jb.BucketPlan.from_shapes([(1, 2)])
    stream = jb.stream_batches(dataset.to_iter_dataset(), plan, pool_size=1)
    with pytest.raises(
        RuntimeError, match="^Example 0 of epoch 0 .*cannot be read"
    ) as a:
        _ = stream.example
    with pytest.raises(RuntimeError) as b:
        next(iter(stream))
    assert str(a.value) == str(b.value)


@pytest.mark.parametrize("error", [StopIteration(), OSError("no file")], ids=str)
def test_an_epoch_that_cannot_be_opened_is_named(error):
    plan = jb.BucketPlan.from_shapes([(4, 3)])
    dataset = jb.stream_batches(
        failing_epoch(error), plan, pool_size=4, num_epochs=None
    )
    with pytest.raises(RuntimeError, match="Epoch 1 of the stream cannot be opened"):
        list(dataset)
    for dataset, remedy in (([1, 2], "grain.Map"), (iter([1, 2]), "jb.stream.from_l")):
        other = jb.stream_batches(lambda epoch, seed, x=dataset: x, plan, pool_size=4)
        message = f"is a list.*, not a `grain.IterDataset`. Return `{remedy}"
        with pytest.raises(ValueError, match=message):
            list(other)


def test_a_stop_iteration_does_not_shorten_a_sample():
    def broken(example):
        if example["index"] == 5:
            raise StopIteration
        return example

    with pytest.raises(RuntimeError, match="Example 5 of epoch 0 .* StopIteration"):
        jb.stream.sample_lengths(stream(np.full(9, 3)).map(broken), 9)
    assert jb.stream.sample_lengths(stream(np.full(9, 3)), 5).tolist() == [3] * 5


def test_dropped_examples_take_no_memory():
    lengths = np.full(4_000, 9)
    lengths[[0, -1]] = 3
    plan = jb.BucketPlan.from_shapes([(1, 3)], overlong="drop")
    iterator = iter(jb.stream_batches(stream(lengths), plan, pool_size=8))
    assert len(list(iterator)) == 2
    assert len(iterator._reader._snapshots) < 5


def test_max_wait_holds_for_a_rare_length():
    """With several processes, its bucket may be thousands of steps away."""
    lengths = np.full(20_000, 2)
    lengths[5] = 7
    sample = np.repeat([2, 7, 15], [200_000, 1, 10])
    plan = jb.BucketPlan.from_shapes([(16, 2), (8, 7), (4, 15)])
    host = iter(
        jb.stream_batches(
            stream(lengths),
            plan,
            pool_size=32,
            max_wait=200,
            lengths=sample,
            shard=jb.data.RowShard((0,), 2),
            num_steps=math.inf,
            on_drift=None,
        )
    )
    steps = next(step for step in range(400) if 5 in indices_in(next(host)))
    assert steps < 150
    states = []
    for _ in range(500):
        next(host)
        states.append(host.get_state())
    assert all(x["read"] - x["counts"]["read"] < 500 for x in states)
    assert len(host._reader._snapshots) < 200


def test_numpy_numbers_are_accepted():
    lengths, plan, _ = make_case(3, size=50)
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=4 * plan.batch_sizes.max(),
        pad_value=np.float32(0),
    )
    iterator = iter(dataset)
    next(iterator)
    assert json.loads(json.dumps(iterator.get_state()))
    assert len(dataset.fingerprint) == 32


def test_nan_may_be_the_pad_value():
    source = [{"x": np.full(3, float(i))} for i in range(9)]
    dataset = grain.MapDataset.source(source).to_iter_dataset()
    plan = jb.BucketPlan.from_shapes([(2, 4)])
    iterator = iter(jb.stream_batches(dataset, plan, pool_size=4, pad_value=np.nan))
    next(iterator)
    state = iterator.get_state()
    rest = list(iterator)
    iterator.set_state(state)
    assert len(list(iterator)) == len(rest)


def test_each_feature_may_have_its_own_pad_value():
    def labelled(example):
        return {**example, "labels": example["tokens"].astype(np.float32)}

    lengths, plan, _ = make_case(3, size=50)

    def batches(pad_value, state=None):
        pool = 4 * plan.batch_sizes.max()
        dataset = stream(lengths).map(labelled)
        dataset = jb.stream_batches(dataset, plan, pool_size=pool, pad_value=pad_value)
        iterator = iter(dataset)
        if state is not None:
            iterator.set_state(json.loads(state))
        return dataset, iterator

    dataset, iterator = batches({"tokens": -7, "labels": np.nan})
    batch = next(iterator)
    assert (batch.features["tokens"][~batch.mask] == -7).all()
    assert np.isnan(batch.features["labels"][~batch.mask]).all()
    # The order of names does not matter, and states are JSON.
    state = json.dumps(iterator.get_state(), sort_keys=True)
    same, resumed = batches({"labels": float("nan"), "tokens": -7}, state)
    assert same.fingerprint == dataset.fingerprint
    for a, b in zip(resumed, iterator, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    with pytest.raises(ValueError, match="pad value {'labels': nan, 'tokens': -7} -> "):
        batches({"tokens": -7}, state)
    with pytest.raises(ValueError, match="^`pad_value=-7` would fill 2 features"):
        next(batches(-7)[1])


def test_a_resumed_run_keeps_its_first_features():
    def wider(example):
        dtype = np.int32 if example["index"] < 8 else np.int64
        return {**example, "tokens": example["tokens"].astype(dtype)}

    plan = jb.BucketPlan.from_shapes([(2, 3)])
    dataset = jb.stream_batches(stream(np.full(30, 3)).map(wider), plan, pool_size=2)
    iterator = iter(dataset)
    for _ in range(4):
        state = iterator.get_state()
        next(iterator)
    with pytest.raises(ValueError, match="Example 8 of epoch 0 of the stream"):
        next(iterator)
    # The iterator does not continue, because the examples of the step are lost.
    with pytest.raises(ValueError, match="Example 8 of epoch 0 of the stream"):
        next(iterator)
    resumed = iter(dataset)
    resumed.set_state(state)
    next(resumed)
    with pytest.raises(ValueError, match="Example 8 of epoch 0 of the stream"):
        next(resumed)


def test_a_run_may_be_resumed_with_fewer_epochs():
    plan = jb.BucketPlan.from_shapes([(2, 3)])

    def iterator(epochs):
        dataset = stream(np.full(10, 3))
        return iter(jb.stream_batches(dataset, plan, pool_size=2, num_epochs=epochs))

    before = iterator(5)
    for _ in range(17):
        next(before)
    after = iterator(2)
    after.set_state(before.get_state())
    assert len(list(after)) == 3


def test_examples_of_earlier_epochs_are_read_again_with_fewer_epochs():
    lengths = np.arange(100) % 8 + 1
    plan = jb.BucketPlan.from_shapes([(8, 4), (4, 8)])

    def iterator(epochs):
        dataset = stream(lengths)
        return iter(jb.stream_batches(dataset, plan, pool_size=40, num_epochs=epochs))

    before = iterator(3)
    states = [before.get_state() for _ in before]
    for step, state in enumerate(states, 1):
        after = iterator(1)
        if state["traits"]["num_epochs"] == 3:
            continue
        after.set_state(state)
        # The epoch that is being read is the last one.
        num_epochs = 1 + max(0, state["read"] - 1) // 100
        served = sum(batch.num_examples for batch in after)
        served += sum(
            batch.num_examples for batch in itertools.islice(iterator(3), step)
        )
        assert served == num_epochs * 100


def test_a_run_is_not_resumed_with_more_epochs_after_its_end():
    plan = jb.BucketPlan.from_shapes([(2, 3)])

    def iterator(epochs):
        dataset = stream(np.full(11, 3))
        return iter(jb.stream_batches(dataset, plan, pool_size=4, num_epochs=epochs))

    before, expected = iterator(1), list(iterator(2))
    states = [before.get_state() for _ in before]
    num_resumed = 0
    # Each state is that after a step.
    for step, state in enumerate(states, 1):
        after = iterator(2)
        if state["traits"]["num_epochs"] == 0:
            after.set_state(state)
            assert_same(list(after), expected[step:])
            num_resumed += 1
            continue
        with pytest.raises(ValueError, match="num epochs 1 -> 2. Use the previous opt"):
            after.set_state(state)
        again = iterator(1)
        again.set_state(state)
        assert again.get_state() == state and len(list(again)) == 6 - step
    assert 0 < num_resumed < len(states) == 6


def test_the_plan_of_a_drift_can_be_adopted(small_window):
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(200, 513, 500), rng.integers(1, 41, 4000)])
    plan = jb.plan_buckets(
        lengths[:500], sample=True, max_tokens=8192, num_buckets=3, max_seq_len=512
    )
    drifts: list[jb.stream.Drift] = []
    options = {"pool_size": 60, "on_drift": drifts.append}
    list(jb.stream_batches(stream(lengths), plan, **options))
    assert drifts[0].plan.batch_sizes.max() <= 60
    jb.stream_batches(
        stream(lengths), {0: plan, drifts[0].step: drifts[0].plan}, **options
    )


def packed_drift(sample, lengths, plan, **options):
    drifts: list[jb.stream.Drift] = []
    given = {"pool_size": 256, "lengths": sample, "pack": True, **options}
    dataset = jb.stream_batches(stream(lengths), plan, on_drift=drifts.append, **given)
    padding = [1 - batch.num_tokens / batch.bucket.num_tokens for batch in dataset]
    return drifts, padding


@pytest.mark.exhaustive
def test_a_drift_of_packed_rows_comes_with_a_better_plan(small_window):
    rng = np.random.default_rng(0)
    # Many short examples fill a row, but only one long example fits into it.
    sample, lengths = rng.integers(1, 65, 2000), rng.integers(300, 311, 6000)
    plan = jb.BucketPlan.from_shapes([(4, 512)])
    (drift,), padding = packed_drift(sample, lengths, plan, max_segments_per_row=64)
    assert drift.planned_padding < 0.02
    assert drift.padding == pytest.approx(np.mean(padding[:-1]), abs=0.01)
    assert drift.padding > 0.4
    assert drift.new_padding < 0.1 and drift.plan.max_seq_len == 512
    # The plan can be adopted, and has the reported share of padding.
    plans = {0: plan, 10: drift.plan}
    lengths = np.concatenate([sample, lengths])
    drifts, padding = packed_drift(sample, lengths, plans, max_segments_per_row=64)
    assert np.mean(padding[200:-10]) < drift.new_padding + 0.03


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["first", "closest"])
def test_a_small_pool_of_packed_rows_is_not_a_drift(small_window, policy):
    lengths = np.random.default_rng(0).integers(1, 9, 6000)
    plan = jb.BucketPlan.from_shapes([(4, 512)])
    drifts, padding = packed_drift(
        lengths[:2000], lengths, plan, pool_size=32, policy=policy
    )
    assert not drifts and np.mean(padding) > 0.5


def test_a_handmade_plan_is_not_a_drift(small_window):
    rng = np.random.default_rng(0)
    lengths = np.minimum(1 + rng.geometric(0.01, 6000), 512)
    plan = jb.BucketPlan.from_shapes([(8, 256), (4, 512)])
    drifts: list[jb.stream.Drift] = []
    options = {"lengths": lengths, "on_drift": drifts.append}
    list(jb.stream_batches(stream(lengths), plan, pool_size=64, **options))
    assert not drifts


@pytest.mark.parametrize("sequences", [None, ["x"], {"x": ["x"], "y": ["y"]}])
def test_a_sample_of_arrays_with_an_axis_too_many_is_refused(sequences):
    examples = [{"x": np.zeros((1, n)), "y": np.zeros(1)} for n in (5, 3, 7)]
    stream = grain.MapDataset.source(examples).to_iter_dataset()
    with pytest.raises(ValueError, match=r"All lengths are 1, because feature 'x'"):
        jb.stream.sample_lengths(stream, 2, sequences=sequences)


def test_a_plan_of_few_lengths_is_noticed():
    plan = jb.plan_buckets([4, 4, 4, 8], max_tokens=512)
    with pytest.warns(UserWarning, match="plan with `sample=True`"):
        jb.stream_batches(stream(np.array([4, 8])), plan, pool_size=4)
