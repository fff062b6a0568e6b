"""Several hosts, as threads: the same buckets, one end, exact resume, refusals."""

import functools
from fractions import Fraction

import numpy as np
import pytest
from stream_cases import (
    LIKE,
    SOME_OPTIONS,
    Numbers,
    Threads,
    assert_resume,
    assert_same,
    batches_of,
    drive,
    each_refuses,
    exhaustive,
    hosts_of,
    indices_of,
    make_case,
    smallest_pool,
    stream,
    through_json,
)

import jaxbucket as jb
from jaxbucket.stream.bucket_sequence import (
    MIN_SHARE_OF_LONGEST,
    BucketSequence,
    bucket_shares,
)
from jaxbucket.testing import check_batches

SHARES = [[1, 1, 1, 1], [1, 2, 3, 4], [5, 0, 0, 1]]


@pytest.mark.parametrize("seed", range(5))
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
        longest_gap = 2 / share
        if size > 3 * longest_gap:
            assert np.diff(places).max() <= longest_gap + 1


ONE = jb.BucketPlan((jb.Bucket(8, 4), jb.Bucket(2, 16)), max_tokens=32)
SIZES = [{"a": 4, "b": 4}, {"a": 8, "b": 4}, {"a": 4, "b": 9}]
SEVERAL = jb.BucketPlan.from_shapes([(2, size) for size in SIZES])
# With several sequences, two buckets are among the longest.
LEAST = MIN_SHARE_OF_LONGEST / 2


@pytest.mark.parametrize(
    ("plan", "numbers", "shares"),
    [
        (ONE, {4: 800, 16: 100}, ["2/3", "1/3"]),
        (ONE, {4: 8000, 16: 1}, [1 - 2 * LEAST, 2 * LEAST]),
        (SEVERAL, {(4, 4): 4, (8, 4): 2, (4, 9): 2}, ["1/2", "1/4", "1/4"]),
        (SEVERAL, {(4, 4): 7996, (8, 4): 2, (4, 9): 2}, [1 - 2 * LEAST, LEAST, LEAST]),
        # The second is below the minimum only once the third has been raised.
        (
            SEVERAL,
            {(4, 4): 9840, (8, 4): 158, (4, 9): 2},
            [1 - 2 * LEAST, LEAST, LEAST],
        ),
    ],
)
def test_bucket_shares_count_batches_with_a_minimum_for_the_longest(
    plan, numbers, shares
):
    lengths = np.repeat(list(numbers), list(numbers.values()), axis=0)
    assert bucket_shares(plan, lengths, None) == [Fraction(share) for share in shares]


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [1, 2, *exhaustive([0, 3, 4, 5])])
def test_hosts_end_together_and_serve_every_example(seed, options):
    lengths, plan, rng = make_case(seed + 60, multiple=4)
    pool = smallest_pool(plan, options) * int(rng.integers(1, 4))
    hosts = hosts_of(lengths, plan, SHARES[seed % 3], pool, **options)
    at_hosts = drive(hosts)
    tokens = []
    for parts in zip(*at_hosts, strict=True):
        for micro in zip(*parts, strict=True):
            assert len({part.bucket for part in micro}) == 1
        tokens.append(sum(part.num_tokens for micro in parts for part in micro))
    # No step follows the last example.
    assert tokens[-1] > 0
    indices = [index for steps in at_hosts for index in indices_of(steps)]
    assert sorted(indices) == list(range(len(lengths)))
    assert all(host.ended for host in hosts)
    # After the end, hosts do not communicate any more.
    threads = hosts[0]._run.processes.all
    num_gathers = threads.num_gathers
    assert drive(hosts) == [[]] * 4
    assert threads.num_gathers == num_gathers


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [0, *exhaustive([1, 2])])
def test_hosts_resume_at_every_step(seed, options):
    lengths, plan, _ = make_case(seed + 20, size=200, multiple=3)
    pool = smallest_pool(plan, options)
    make = functools.partial(hosts_of, lengths, plan, [1, 2, 3], pool, **options)
    whole = drive(make())
    for start in range(0, len(whole[0]) + 1, 5):
        assert_resume(make, start, whole)


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
def test_hosts_that_do_not_meet_are_in_lockstep_until_num_steps(options):
    lengths, plan, _ = make_case(34, size=120, multiple=2)
    pool = smallest_pool(plan, options) + 10
    make = functools.partial(hosts_of, lengths, plan, [1, 1], pool, meet=False)

    def loader(host: int, start_step: int):
        iterator = make(num_steps=90, **options)[host]
        for _ in range(start_step):
            next(iterator)
        again = make(num_steps=90, **options)[host]
        again.set_state(through_json(iterator.get_state()))
        return again

    check_batches(
        loader,
        num_examples=120,
        buckets=plan.buckets,
        max_tokens=plan.max_tokens,
        num_hosts=2,
        resume_at=range(8),
    )


def test_buckets_without_pending_examples_are_skipped():
    """If all examples are long, short buckets are left out."""
    plan = jb.BucketPlan.from_shapes([(12, 3), (6, 7), (2, 15)])
    sample = np.repeat([3, 7, 15], [900, 50, 1])
    hosts = hosts_of(np.full(400, 15), plan, [1, 1], 32, sample=sample)
    (steps, _) = drive(hosts)
    assert [batch.bucket.seq_len for (batch,) in steps] == [15] * 200


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("sample", ["short", "long"])
def test_hosts_lose_no_example_if_the_sample_differs(sample, options):
    lengths, plan, _ = make_case(33, size=300, multiple=2)
    given = np.full(100, 1 if sample == "short" else plan.max_seq_len)
    pool = smallest_pool(plan, options)
    hosts = hosts_of(lengths, plan, [1, 1], pool, sample=given, **options)
    indices = [i for steps in drive(hosts) for i in indices_of(steps)]
    assert sorted(indices) == list(range(300))


@pytest.mark.parametrize(
    "options", [{}, {"num_steps": 7}, {"accumulate": 2, "group": "mixed"}], ids=str
)
def test_hosts_work_with_new_plans_and_num_steps(options):
    lengths, plan, _ = make_case(34, size=300, multiple=2)
    other = jb.BucketPlan.from_shapes([(4, plan.max_seq_len)])
    plans, pool = {0: plan, 5: other, 9: plan}, 2 * int(plan.batch_sizes.max())
    one, two = drive(hosts_of(lengths, plans, [1, 2], pool, **options))
    buckets = [[[x.bucket for x in micro] for micro in steps] for steps in (one, two)]
    assert buckets[0] == buckets[1]
    if "num_steps" in options:
        assert len(one) == 7
    else:
        assert sorted(indices_of(one) + indices_of(two)) == list(range(300))


# The round follows the sequence with a small pool, and drains the pools with a large.
@pytest.mark.parametrize("pool", [40, 200])
@pytest.mark.parametrize("start", [5, 14])
def test_a_plan_adopted_inside_a_round_starts_a_new_round(start, pool):
    lengths = np.random.default_rng(5).integers(1, 33, 200)
    plan = jb.plan_buckets(
        lengths, sample=True, max_tokens=256, num_buckets=3, batch_size_multiple=2
    )
    make = functools.partial(hosts_of, lengths, shares=[1, 1], pool_size=pool)
    for other in ([(8, 32)], [(20, 5), (8, 11), (6, 20), (4, 32)]):
        plans = {0: plan, 14: jb.BucketPlan.from_shapes(other)}
        changed = functools.partial(make, plan=plans)
        before = functools.partial(make, plan=plan)
        assert_resume(changed, start, drive(changed()), before)


@pytest.mark.parametrize("max_segments", [None, 4])
@pytest.mark.parametrize("size", [9, 42, 300])
def test_few_steps_at_the_end_are_empty(max_segments, size):
    plan = jb.BucketPlan.from_shapes([(8, 6)])
    lengths = np.full(size, 2 if max_segments else 6)
    options = {"max_segments_per_row": max_segments}
    hosts = hosts_of(lengths, plan, [1, 1], 16, **options)
    tokens = [
        sum(x[0].num_tokens for x in step) for step in zip(*drive(hosts), strict=True)
    ]
    assert sum(n == 0 for n in tokens) <= 3
    assert tokens.index(min(tokens)) > len(tokens) - 5


def test_a_host_without_examples_gets_the_features_of_others():
    lengths, plan, _ = make_case(37, size=50, multiple=2)
    make = functools.partial(hosts_of, lengths, plan, [1, 0], 50, like=None)
    hosts = make()
    one, two = drive(hosts)
    assert len(indices_of(one)) == 50 and not indices_of(two)
    assert two[0][0].features["tokens"].dtype == np.int32
    # So does a host that resumes.
    after = make()
    for host, loaded in zip(after, hosts, strict=True):
        host.set_state(through_json(loaded.state_before(1)))
    assert_same(drive(after)[1], two[1:])


def test_like_is_required_if_a_host_has_no_example():
    lengths, plan, _ = make_case(32, size=50, multiple=2)
    make = functools.partial(hosts_of, lengths, plan, [1, 0], 50, meet=False)
    with pytest.raises(ValueError, match="`like`"):
        next(make(like=None, num_steps=3)[1])
    batch = next(make(like=Numbers(lengths)[3], num_steps=3)[1])
    assert batch.num_tokens == 0 and batch.features["tokens"].dtype == np.int32


# Refusals

LENGTHS, PLAN, _ = make_case(35, size=60, multiple=2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pool_size": 101}, "pool size 100 -> 101"),
        ({"num_steps": 9}, "num steps None -> 9"),
        ({"lengths": [3] * 60}, "plans .* -> "),
        ({"seed": 5}, "seed 0 -> 5"),
        ({"pad_value": np.nan}, "pad value 0 -> nan"),
        ({"index": np.int64}, "feature index int32.* -> int64"),
        ({"first": 0, "parts": (0,)}, r"have the same rows, \[0\], but different"),
        ({"first": 0}, "the same 60 examples"),
    ],
)
def test_hosts_that_differ_are_refused(changes, match):
    threads = Threads(2)

    def host(index, first=100, parts=None, dtype=np.int32, **changes):
        offset = first if index else 0
        cut = 1 if parts else 0
        examples = stream(LENGTHS[cut * index :], offset)
        examples = jb.stream.ExampleStream(
            examples.map(lambda x: {**x, "index": dtype(x["index"])}),
            **{x: changes.pop(x) for x in ("seed", "pad_value") if x in changes},
        )
        options = {"pool_size": 100, "lengths": LENGTHS, **changes}
        shard = jb.data.RowShard(parts or (index,), 2)
        options |= {"shard": shard, "processes": threads.of(index)}
        return iter(jb.stream_batches(examples, PLAN, **options))

    if "index" in changes:
        changes = {"dtype": changes["index"]}
    same = {name: changes[name] for name in ("first", "parts") if name in changes}
    each_refuses([host(0, **same), host(1, **changes)], match)


def test_hosts_that_resume_at_different_steps_are_refused():
    """Hosts compare their steps after restoring a state, even inside a round."""
    lengths, plan, _ = make_case(39, size=300, multiple=2)
    make = functools.partial(
        hosts_of, np.tile(lengths, 20), plan, [1, 1], 20 * int(plan.batch_sizes.max())
    )
    before, after = make(), make()
    drive(before, 25)
    for host, loaded, step in zip(after, before, (20, 22), strict=True):
        host.set_state(loaded.state_before(step))
    each_refuses(after, "step 20 -> 22")


def test_a_stream_is_not_resumed_by_another_number_of_processes():
    lengths = np.array([3, 5, 2, 7])
    plan = jb.BucketPlan.from_shapes([(4, 8)])
    options = {"pool_size": 8, "lengths": lengths}
    of_one = jb.stream_batches(stream(lengths), plan, **options)
    shard = jb.data.RowShard((0,), 2)
    options |= {"shard": shard, "processes": Threads(2).of(0)}
    of_two = jb.stream_batches(stream(lengths), plan, **options)
    with pytest.raises(ValueError, match="processes 2 -> 1"):
        of_two.position(3).check_same(of_one.position(3))
    with pytest.raises(ValueError, match="processes 1 -> 2"):
        iter(of_two).set_state(iter(of_one).get_state())


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"group": "mixed", "accumulate": 2}]
)
def test_devices_of_a_host_may_share_rows(options):
    lengths = np.random.default_rng(3).integers(1, 65, 203)
    # With eight devices, rows have one, two and four of them.
    plan = jb.BucketPlan.from_shapes([(8, 16), (4, 32), (2, 64)])
    threads = Threads(2)
    hosts = [
        iter(
            batches_of(
                stream(lengths[host::2], first=100 * host),
                plan,
                shard=jb.data.RowShard(
                    range(4 * host, 4 * host + 4), 8, cuts=(1, 2, 4)
                ),
                processes=threads.of(host),
                pool_size=32,
                like=LIKE,
                lengths=lengths,
                **options,
            )
        )
        for host, parts in enumerate([(0, 1, 2, 3), (4, 5, 6, 7)])
    ]
    steps = drive(hosts)
    shapes = [[batch.bucket for step in host for batch in step] for host in steps]
    assert shapes[0] == shapes[1]
    assert set(shapes[0]) == {jb.Bucket(4, 16), jb.Bucket(2, 32), jb.Bucket(1, 64)}
    for host, own in enumerate(steps):
        size = len(lengths[host::2])
        assert sorted(indices_of(own)) == list(range(100 * host, 100 * host + size))


def test_hosts_with_streams_of_their_own_cannot_share_a_row():
    plan = jb.BucketPlan.from_shapes([(8, 16), (1, 128)])
    shard = jb.data.RowShard((0, 1, 2, 3), 8, cuts=(1, 2, 4, 8))
    with pytest.raises(ValueError, match="`shard`"):
        batches_of(stream([5] * 20), plan, shard=shard, pool_size=32, like=LIKE)
