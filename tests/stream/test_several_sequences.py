"""Streams of examples with several sequences, against plain lists and numpy."""

import functools
import itertools

import grain
import numpy as np
import pytest
import scipy.optimize
from stream_cases import (
    OPTIONS,
    assert_resume,
    assert_same,
    batches_of,
    drive,
    exhaustive,
    hosts_of,
    smallest_pool,
    steps_of,
    through_json,
)

import jaxbucket as jb
from jaxbucket.base.policies import TRUNCATING
from jaxbucket.stream.drain import cheapest_batches

NAMES = ("source", "target", "video")
# The second feature is as long as the target.
SEQUENCES = {"source": [], "target": ["weights"], "video": []}
# Rows of several sequences are not packed in streams.
PADDED = OPTIONS[:4]
SOME_PADDED = [PADDED[0], PADDED[3], *exhaustive(PADDED[1:3])]


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
    kept = []
    for name, n, policy in zip(plan.sequences, lengths, plan.policies, strict=True):
        longest = max(bucket.seq_len[name] for bucket in plan.buckets)
        if n > longest and policy == "error":
            return "error"
        kept.append(min(n, longest) if policy in TRUNCATING else n)
    if holding(kept, plan):
        return kept
    return None if "drop" in plan.policies else "error"


def kept_part(index: int, lengths, plan) -> dict[str, np.ndarray]:
    """Returns the part of an example that is in a batch."""
    example = make_example(index, lengths)
    kept = kept_lengths(lengths, plan)
    rows = zip(plan.sequences, lengths, kept, plan.policies, strict=True)
    for name, n, size, policy in rows:
        start = n - size if policy == "truncate_left" else 0
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


# One host


@pytest.mark.parametrize("options", PADDED, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2, 3, *exhaustive(range(4, 20))])
def test_every_example_is_in_one_row_of_a_planned_shape(seed, options):
    lengths, plan, rng = make_case(seed)
    dataset = batches_of(
        stream(lengths),
        plan,
        pool_size=smallest_pool(plan, options) * int(rng.integers(1, 5)),
        sequences=sequences_of(plan),
        num_epochs=2,
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
@pytest.mark.parametrize("seed", [0, 1, *exhaustive(range(2, 12))])
def test_batches_equal_a_reference_with_plain_lists(seed, policy):
    lengths, plan, _ = make_case(seed, size=120)
    pool = max(int((plan.batch_sizes - 1).sum()) + 1, smallest_pool(plan, {}))
    options = {"pool_size": pool, "policy": policy, "sequences": sequences_of(plan)}
    dataset = batches_of(stream(lengths), plan, **options)
    want = list(oracle(lengths, plan, pool, policy, 16 * pool))
    assert len(want) > 10
    for batch, (bucket, indices) in zip(dataset, want, strict=policy == "first"):
        assert batch.bucket == plan.buckets[bucket]
        assert indices_in(batch, lengths, plan) == indices


@pytest.mark.parametrize("seed", [*range(3), *exhaustive(range(3, 30))])
def test_a_pool_with_all_examples_costs_little_more_than_a_schedule(seed):
    lengths, plan, _ = make_case(seed, size=60, overlong="drop")
    options = {"pool_size": 1000, "sequences": sequences_of(plan)}
    dataset = batches_of(stream(lengths), plan, **options)
    tokens = sum(batch.bucket.num_tokens for batch in dataset)
    assert tokens <= 1.02 * jb.report(plan, by_name(lengths)).padded_tokens


def test_a_loader_and_a_transform_make_examples_with_several_sequences():
    lengths, plan, _ = make_case(2, size=60)

    def shorter(example, rng):
        size = int(rng.integers(1, len(example["source"]) + 1))
        return {**example, "source": example["source"][:size]}

    def epoch(number: int, seed: int) -> grain.IterDataset:
        order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
        loader = [make_example(i, lengths[i].tolist()) for i in order]
        return jb.stream.from_loader([loader[:40], loader[40:]], list)

    examples = jb.stream.ExampleStream(
        epoch, num_epochs=2, sequences=sequences_of(plan), transform=shorter, seed=5
    )
    sample = jb.stream.sample_lengths(examples, 100)
    assert list(sample) == list(plan.sequences) and len(sample["source"]) == 60
    assert sample["source"].dtype == np.int32
    assert (np.sort(sample["source"]) <= np.sort(lengths[:, 0])).all()
    assert sorted(sample["target"]) == sorted(lengths[:, 1])
    dataset = jb.stream_batches(examples, plan, pool_size=40)
    batches = list(dataset)
    assert sum(batch.num_examples for batch in batches) == 120
    iterator = iter(dataset)
    for _ in range(7):
        next(iterator)
    again = iter(dataset)
    again.set_state(through_json(iterator.get_state()))
    assert_same(list(again), batches[7:])
    recent = again.recent_lengths()
    assert list(recent) == list(plan.sequences) and len(recent["target"]) > 20


# Several hosts


SHARES = [[1, 1, 1], [1, 4], [5, 0, 1]]


@pytest.mark.parametrize("options", SOME_PADDED, ids=str)
@pytest.mark.parametrize("seed", [4, *exhaustive([3, *range(5, 12)])])
def test_hosts_with_processes_end_together_and_resume(seed, options):
    shares = SHARES[seed % 3]
    lengths, plan, rng = make_case(seed + 40, size=60, multiple=len(shares))
    pool = smallest_pool(plan, options) * int(rng.integers(1, 4))

    make = functools.partial(
        hosts_of,
        *(lengths, plan, shares, pool),
        sample=by_name(lengths),
        make=stream,
        like=make_example(0, [1] * lengths.shape[1]),
        sequences=sequences_of(plan),
        **options,
    )
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
        assert_resume(make, start, whole)


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


# Errors

PAIR = {"source": 8, "target": 4}
PLAN = jb.BucketPlan.from_shapes([(2, PAIR), (2, {"source": 4, "target": 8})])


@pytest.mark.parametrize(
    ("overlong", "lengths"),
    [
        ("error", [3, 9]),
        ({"source": "drop", "target": "error"}, [3, 9]),
        ("error", [8, 8]),
    ],
)
def test_an_example_that_no_bucket_holds_is_named(overlong, lengths):
    shapes = [(bucket.batch_size, bucket.seq_len) for bucket in PLAN.buckets]
    plan = jb.BucketPlan.from_shapes(shapes, overlong=overlong)
    examples = stream(np.array([[3, 4], [4, 3], lengths]))
    dataset = batches_of(examples, plan, pool_size=8, sequences=sequences_of(plan))
    with pytest.raises(ValueError, match="`max_seq_len`[^$]*example 2 of epoch 0"):
        next(iter(dataset))


def test_hosts_may_start_with_images_of_different_sizes():
    def images(part, first):
        sizes = np.random.default_rng(first).integers(1, 8, (len(part), 2))
        source = [{"image": np.full(shape, first)} for shape in sizes.tolist()]
        return grain.MapDataset.source(source).to_iter_dataset()

    names = ("height", "width")
    hosts = hosts_of(
        np.zeros(40),
        jb.BucketPlan.from_shapes([(4, dict.fromkeys(names, 8))]),
        *([1, 1], 8),
        sample={name: [8, 4] for name in names},
        make=images,
        like=None,
        sequences={name: ["image"] for name in names},
    )
    one, two = ([x.bucket for (x,) in steps] for steps in drive(hosts))
    assert one == two != []
