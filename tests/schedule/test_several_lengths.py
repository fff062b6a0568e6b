"""Schedules of examples that have several sequences, each with its own length."""

import numpy as np
import pytest
from schedule_cases import batches_of, real_rows, seeds

import jaxbucket as jb

NAMES = ("frames", "source", "target")
ORDERS = (
    *("spread", "shuffled", "source", "ascending", "descending", "curriculum"),
    jb.schedule.GroupedByLength(),
)
REMAINDERS = ("cheapest", "promote", "pad", "drop")


def random_problem(seed):
    """Returns lengths of 2 or 3 sequences, and a plan of random shapes for them."""
    rng = np.random.default_rng(seed)
    names = NAMES[: int(rng.integers(2, 4))]
    size, longest = int(rng.integers(1, 400)), int(rng.integers(1, 40))
    lengths = {name: rng.integers(1, longest + 1, size) for name in names}
    multiple = int(rng.choice([1, 2, 4]))
    shapes = rng.integers(1, longest + 1, (int(rng.integers(0, 7)), len(names)))
    shapes = np.unique(np.append(shapes, [[longest] * len(names)], axis=0), axis=0)
    sizes = multiple * rng.integers(1, 5, len(shapes))
    plan = jb.BucketPlan.from_shapes(
        (int(b), dict(zip(names, t.tolist(), strict=True)))
        for b, t in zip(sizes, shapes, strict=True)
    )
    return lengths, plan


def make_schedule(lengths, plan, seed, **options):
    order = options.pop("order", ORDERS[seed % len(ORDERS)])
    if order == "curriculum":
        order = jb.Curriculum(sum(lengths.values()))
    return jb.BatchSchedule(plan, lengths, seed=seed, order=order, **options)


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_an_epoch_has_every_example_once_and_the_numbers_of_its_report(seed):
    lengths, plan = random_problem(seed)
    remainder = REMAINDERS[seed // 7 % 3]
    accumulate, group = 1 + seed % 3, ("same", "mixed")[seed // 3 % 2]
    schedule = make_schedule(
        lengths, plan, seed, remainder=remainder, accumulate=accumulate, group=group
    )
    for epoch in range(2):
        batches = [(x.bucket, real_rows(x)) for x in batches_of(schedule, epoch)]
        assert {bucket for bucket, _ in batches} <= set(plan.buckets)
        for bucket, examples in batches:
            for name, column in lengths.items():
                assert (column[examples] <= bucket.seq_len[name]).all()
        drawn = np.concatenate([examples for _, examples in batches])
        assert sorted(drawn.tolist()) == list(range(len(schedule.lengths)))
    report = schedule.report()
    assert report.padded_tokens == sum(bucket.num_tokens for bucket, _ in batches)
    assert report.real_tokens == sum(int(x.sum()) for x in lengths.values())
    for part, bucket in zip(report.buckets, plan.buckets, strict=True):
        assert part.seq_len == bucket.seq_len
        assert part.batches == sum(bucket == x for x, _ in batches)


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_an_example_is_assigned_the_cheapest_row_that_holds_it(seed):
    lengths, plan = random_problem(seed)
    costs = plan.costs / plan.batch_sizes
    for example, index in enumerate(plan.assign(lengths)):
        holds = [
            all(lengths[name][example] <= t for name, t in bucket.seq_len.items())
            for bucket in plan.buckets
        ]
        assert holds[index]
        assert costs[index] == costs[holds].min()


@pytest.mark.parametrize(("hosts", "seed"), [(1, 0), (3, 1), (8, 0)])
def test_hosts_load_parts_of_the_same_batches(hosts, seed):
    rng = np.random.default_rng(seed)
    lengths = {name: rng.integers(1, 20, 200) for name in NAMES[: 2 + seed % 2]}
    shapes = [(24, dict.fromkeys(lengths, 10)), (24, dict.fromkeys(lengths, 20))]
    plan = jb.BucketPlan.from_shapes(shapes)
    schedule = jb.BatchSchedule(plan, lengths, seed=seed)
    source = [
        {name: np.full(int(column[i]), i) for name, column in lengths.items()}
        | {"index": np.int32(i)}
        for i in range(200)
    ]

    def loader(host, start):
        shard = jb.data.RowShard((host,), hosts)
        return jb.batch_dataset(source, schedule, shard=shard, start_step=start)

    jb.testing.check_batches(
        loader,
        num_examples=200,
        buckets=plan.buckets,
        max_tokens=plan.max_tokens,
        num_hosts=hosts,
        resume_at=(1, len(schedule) - 1),
    )


@pytest.mark.parametrize("policy", ["truncate", "truncate_left"])
@pytest.mark.parametrize("seed", seeds(10, 30))
def test_too_long_sequences_follow_the_policy_of_their_side(seed, policy):
    lengths, plan = random_problem(300 + seed)
    longest = {name: max(1, t // 2) for name, t in plan.buckets[-1].seq_len.items()}
    names = list(lengths)
    policies = dict.fromkeys(names, policy) | {names[0]: "drop"}
    plan = jb.BucketPlan.from_shapes([(4, longest)], overlong=policies)
    is_kept = lengths[names[0]] <= longest[names[0]]
    np.testing.assert_array_equal(plan.assign(lengths) >= 0, is_kept)
    if not is_kept.any():
        return
    report = jb.report(plan, lengths)
    cut = {name: np.minimum(x, longest[name])[is_kept] for name, x in lengths.items()}
    assert report.dropped_examples == np.count_nonzero(~is_kept)
    assert report.real_tokens == sum(int(x.sum()) for x in cut.values())
    whole = sum(x[is_kept].astype(int) for x in lengths.values())
    lost = whole - sum(cut.values())
    assert report.truncated_examples == np.count_nonzero(lost)
    assert report.truncated_tokens == lost.sum()
    source = [
        {name: np.arange(int(column[i])) for name, column in lengths.items()}
        for i in range(len(is_kept))
    ]
    schedule = jb.BatchSchedule(plan, lengths, order="source")
    rows = [
        x
        for batch in jb.batch_dataset(source, schedule)
        for x in jb.data.unbatch(batch)
    ]
    for row, example in zip(rows, np.flatnonzero(is_kept), strict=True):
        for name in names:
            size = min(lengths[name][example], longest[name])
            expected = np.arange(lengths[name][example])
            expected = expected[:size] if policy == "truncate" else expected[-size:]
            np.testing.assert_array_equal(row[name], expected)


# Invalid input


def test_an_example_that_no_bucket_holds_is_refused():
    plan = jb.BucketPlan.from_shapes([(1, {"a": 8, "b": 2}), (1, {"a": 2, "b": 8})])
    with pytest.raises(ValueError, match="`lengths` of example 1"):
        plan.assign({"a": [8, 3], "b": [1, 3]})
    with pytest.raises(ValueError, match=r"`lengths\['b'\]\[0\]=9`"):
        plan.assign({"a": [1], "b": [9]})


TWO = {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("name", "shapes", "fields"),
    [
        ("sequences", [(1, TWO), (1, 9)], {}),
        ("sequences", [(1, TWO), (1, {"a": 3, "c": 3})], {}),
        ("seq_len", [(1, TWO)] * 2, {}),
        ("seq_len", [(1, {"a": 2, "b": 0})], {}),
        ("sequences", [(1, {"a": 2})], {}),
        ("max_tokens", [(2, TWO)], {"max_tokens": 9}),
        ("max_tokens", [(2, TWO)], {"max_tokens": {"a": 9, "b": 5}}),
        ("seq_len_multiple", [(2, TWO)], {"seq_len_multiple": {"a": 1, "b": 2}}),
        ("overlong", [(1, TWO)], {"overlong": "split"}),
        ("overlong", [(1, TWO)], {"overlong": {"a": "drop", "b": "cut"}}),
        ("overlong", [(1, TWO)], {"overlong": {"a": "drop", "c": "drop"}}),
        (
            "overlong",
            [(1, {"a": 9, "b": 2}), (1, {"a": 2, "b": 9})],
            {"overlong": {"a": "drop", "b": "truncate_left"}},
        ),
    ],
)
def test_plans_with_invalid_sequences_are_refused(name, shapes, fields):
    with pytest.raises(ValueError, match=name):
        jb.BucketPlan.from_shapes(shapes, **fields)


# Balance


@pytest.mark.parametrize("seed", seeds(6, 20))
def test_balanced_rows_are_those_of_the_same_batch(seed):
    lengths, plan = random_problem(seed)
    plain, balanced = (
        make_schedule(lengths, plan, seed, balance=balance) for balance in (False, True)
    )
    assert plain.fingerprint != balanced.fingerprint
    for step in range(len(plain)):
        assert plain[step].bucket == balanced[step].bucket
        np.testing.assert_array_equal(
            np.sort(plain[step].rows), np.sort(balanced[step].rows)
        )


@pytest.mark.parametrize(
    "lengths",
    [
        np.full((4, 2), 2.5),
        np.zeros((2, 2), int),
        np.ones((4, 3), int),
        np.ones((0, 2), int),
    ],
)
def test_columns_of_lengths_are_checked(lengths):
    plan = jb.BucketPlan.from_shapes([(1, {"a": 2, "b": 2})])
    with pytest.raises(ValueError, match="`lengths"):
        jb.BatchSchedule(plan, lengths)


def test_packed_rows_must_fit_one_bucket_in_all_sequences():
    rng = np.random.default_rng(0)
    lengths = {"a": rng.integers(1, 16, 60), "b": rng.integers(1, 16, 60)}
    packing = jb.packing.pack(lengths, {"a": 32, "b": 32})
    shapes = [(4, {"a": 32, "b": 24}), (4, {"a": 24, "b": 32})]
    plan = jb.BucketPlan.from_shapes(shapes, overlong="drop")
    with pytest.raises(ValueError, match="`packing`"):
        jb.BatchSchedule(plan, lengths, packing=packing)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("truncate", {"truncate": ["a", "x"]}),
        ("seq_len", {"truncate": "ab"}),
        ("truncate_left", {"truncate_left": ["a", "x"]}),
        ("truncate_left", {"truncate": True, "truncate_left": "a"}),
    ],
)
def test_only_sequences_can_be_truncated(name, options):
    bucket, row = jb.Bucket(1, {"a": 1, "ab": 2}), {"a": [1, 1], "ab": [1, 1, 1]}
    with pytest.raises(ValueError, match=f"`{name}"):
        jb.data.collate_rows([row], bucket, **options)
