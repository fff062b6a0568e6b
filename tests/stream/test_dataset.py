"""Streams in one process: every example once, policies, epochs and errors."""

import re

import grain
import numpy as np
import pytest
from stream_cases import (
    OPTIONS,
    SOME_OPTIONS,
    Numbers,
    batches_of,
    exhaustive,
    hosts_of,
    indices_in,
    make_case,
    smallest_pool,
    steps_of,
    stream,
    through_json,
)

import jaxbucket as jb
from jaxbucket.stream.examples import epoch_seed


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [0, *exhaustive(range(1, 8))])
def test_every_example_is_in_one_row_of_a_planned_shape(seed, options):
    lengths, plan, rng = make_case(seed)
    epochs = int(rng.integers(1, 4))
    dataset = batches_of(
        stream(lengths),
        plan,
        pool_size=smallest_pool(plan, options) * int(rng.integers(1, 5)),
        num_epochs=epochs,
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


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_with_all_examples_gives_the_buckets_of_a_schedule(seed):
    lengths, plan, _ = make_case(seed, size=200)
    dataset = jb.stream_batches(stream(lengths), plan, pool_size=1000)
    buckets = sorted(batch.bucket for batch in dataset)
    schedule = jb.BatchSchedule(plan, lengths)
    assert buckets == sorted(schedule[step].bucket for step in range(len(schedule)))


def test_an_overdue_example_comes_next():
    rng = np.random.default_rng(0)
    # Few examples are long, and eight long ones fill a batch.
    lengths = np.where(rng.random(4000) < 0.002, 16, rng.integers(1, 5, 4000))
    plan = jb.BucketPlan((jb.Bucket(32, 4), jb.Bucket(8, 16)), max_tokens=128)
    iterator = iter(jb.stream_batches(stream(lengths), plan, pool_size=64))
    waits = []
    for batch in iterator:
        waits.append(iterator.counts.arrived - min(indices_in(batch)))
    assert 16 * 64 < max(waits) <= 16 * 64 + 64 + 32 * 2


@pytest.mark.parametrize("best_fit", [True, False])
def test_packed_rows_equal_a_reference_with_plain_lists(best_fit):
    lengths, _, _ = make_case(3, size=600)
    plan = jb.BucketPlan((jb.Bucket(4, 64),), max_tokens=256)
    pool_size, most = 50, 5
    dataset = jb.stream_batches(
        stream(lengths),
        plan,
        pool_size=pool_size,
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
    hosts = hosts_of(
        *(lengths, plan, [1, 2], 80), meet=False, num_steps=200, pad_value=-7, **options
    )
    loss = tokens = 0
    for host in hosts:
        for batch in (batch for micro in steps_of(host) for batch in micro):
            features, mask = batch.features["tokens"], batch.mask
            assert (features[~mask] == -7).all()
            loss += int((features * mask).sum())
            tokens += int(mask.sum())
    # These are the sums over all examples, so rows without an example add nothing.
    source = Numbers(lengths)
    assert loss == sum(int(source[i]["tokens"].sum()) for i in range(150))
    assert tokens == lengths.sum()


def test_grain_mixes_streams_and_resumes():
    parts = {}
    for name, seed in (("a", 1), ("b", 2)):
        lengths, plan, _ = make_case(seed, size=80)
        parts[name] = batches_of(stream(lengths), plan, pool_size=60, num_epochs=None)
    mixture = grain.IterDataset.mix(parts, {"a": 0.75, "b": 0.25})
    iterator = iter(mixture)
    for _ in range(21):
        next(iterator)
    want = [next(iterator) for _ in range(20)]
    again = iter(mixture)
    for _ in range(21):
        next(again)
    state = through_json(again.get_state())
    again = iter(mixture)
    again.set_state(state)
    for batch, other in zip(again, want, strict=False):
        np.testing.assert_array_equal(batch.features["index"], other.features["index"])
    a, b = (state["parents"][name]["counts"]["read"] for name in "ab")
    assert a > 2 * b > 0


@pytest.mark.parametrize("max_segments", [None, 4])
@pytest.mark.parametrize("overlong", ["drop", "truncate", "truncate_left", "split"])
def test_overlong_examples_are_counted(overlong, max_segments):
    lengths = np.random.default_rng(2).integers(1, 60, 300)
    limits = {"max_tokens": 160, "num_buckets": 3, "max_seq_len": 20}
    plan = jb.plan_buckets(lengths, sample=True, overlong=overlong, **limits)
    options = {"pool_size": 40, "max_segments_per_row": max_segments}
    iterator = iter(jb.stream_batches(stream(lengths), plan, **options))
    parts: dict[int, list[int]] = {}
    unbatch = {"sequences": ["tokens"], "max_segments": max_segments}
    for batch in iterator:
        for part in jb.data.unbatch(batch, **unbatch):
            parts.setdefault(int(part["index"]), []).extend(part["tokens"].tolist())
    counts, overlong_lengths = iterator.counts, lengths[lengths > 20]
    num_overlong = counts.dropped + counts.truncated + counts.split
    assert (counts.read, num_overlong) == (300, len(overlong_lengths))
    for index, length in enumerate(lengths):
        want = ((index * 31 + np.arange(length)) % 1000).tolist()
        if length > 20:
            cut = {"truncate": want[:20], "truncate_left": want[-20:]}
            want = {"drop": [], "split": want, **cut}[overlong]
        assert sorted(parts.get(index, [])) == sorted(want)
    if overlong in cut:
        assert counts.truncated_tokens == (overlong_lengths - 20).sum()
    if overlong == "split":
        assert counts.arrived == sum(-(-n // 20) for n in lengths.tolist())


# Epochs


def test_each_epoch_has_its_own_seed():
    lengths, plan, _ = make_case(5, size=90)
    seeds = []

    def epoch(number: int, seed: int) -> grain.IterDataset:
        seeds.append((number, seed))
        source = grain.MapDataset.source(Numbers(lengths)).shuffle(seed)
        return source.to_iter_dataset(grain.ReadOptions(num_threads=0))

    dataset = batches_of(epoch, plan, pool_size=40, num_epochs=3, seed=7)
    indices = [index for batch in dataset for index in indices_in(batch)]
    assert sorted(indices) == sorted([*range(90)] * 3)
    assert sorted(set(seeds)) == [(n, epoch_seed(7, n)) for n in range(3)]
    # Golden values, because runs that resume from a checkpoint depend on them.
    assert [epoch_seed(7, n) for n in range(2)] == [523953235, 2805459032]
    assert indices[:90] != indices[90:180]


def test_an_endless_stream_repeats():
    lengths, plan, _ = make_case(4, size=20)
    dataset = batches_of(
        stream(lengths), plan, pool_size=30, num_epochs=None, num_steps=200
    )
    batches = list(dataset)
    assert len(batches) == 200
    assert all(batch.num_examples == batch.bucket.batch_size for batch in batches)


# Memory


class ReusingIterator(grain.DatasetIterator):
    """Examples of three tokens, all in one array that is overwritten."""

    def __init__(self, size: int):
        super().__init__()
        self._numbers = iter(range(size))
        self._tokens = np.zeros(3, np.int32)

    def __next__(self):
        self._tokens[:] = next(self._numbers)
        return {"tokens": self._tokens}

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


class ReusingDataset(grain.IterDataset):
    def __iter__(self):
        return ReusingIterator(8)


def test_a_stream_may_reuse_its_arrays():
    plan = jb.BucketPlan.from_shapes([(4, 3)])
    dataset = jb.stream_batches(ReusingDataset(), plan, pool_size=8)
    tokens = np.concatenate([batch.features["tokens"][:, 0] for batch in dataset])
    assert sorted(tokens.tolist()) == list(range(8))


def test_pending_examples_do_not_keep_larger_arrays_in_memory():
    def part(example):
        whole = np.zeros(10**6, np.int32)
        return {**example, "tokens": whole[: len(example["tokens"])]}

    lengths, plan, _ = make_case(8, size=100)
    iterator = iter(jb.stream_batches(stream(lengths).map(part), plan, pool_size=80))
    next(iterator)
    pending = iterator._pool.pending()
    assert pending and all(x.example["tokens"].base is None for x in pending)


# Errors


@pytest.mark.parametrize("is_epoch", [False, True])
def test_an_error_of_the_stream_names_the_example(is_epoch):
    def broken(example):
        if example["index"] == 17:
            raise OSError("row is bad")
        return example

    def epoch(number, seed):
        del seed
        if number:
            raise OSError("row is bad")
        return stream(np.full(8, 3))

    plan = jb.BucketPlan.from_shapes([(4, 3)])
    dataset = epoch if is_epoch else stream(np.full(40, 3)).map(broken)
    dataset = batches_of(dataset, plan, pool_size=8, num_epochs=2)
    name = "0 of epoch 1" if is_epoch else "17 of epoch 0"
    indices = []
    with pytest.raises(OSError, match=f"row is bad\nThis is example {name}"):
        for batch in dataset:
            indices += indices_in(batch)
    assert len(set(indices)) == len(indices) <= 17


@pytest.mark.parametrize(
    ("last", "options", "match"),
    [
        ({"x": np.zeros(9)}, {}, "`max_seq_len`"),
        ({"x": np.zeros(0)}, {}, "`sequences`"),
        ({"y": 3}, {}, "no sequence feature"),
        ({"y": 3}, {"sequences": ["x"]}, "`sequences`"),
        ({"x": np.zeros(3, np.int64)}, {}, "int64"),
        (None, {}, "NoneType"),
    ],
)
def test_a_wrong_example_is_named(last, options, match):
    plan = jb.BucketPlan.from_shapes([(4, 4)])
    examples = [{"x": np.zeros(1)}, {"x": np.zeros(2)}, "last"]
    source = grain.MapDataset.source(examples).to_iter_dataset()
    source = source.map(lambda x: last if isinstance(x, str) else x)
    dataset = batches_of(source, plan, pool_size=4, **options)
    with pytest.raises(
        ValueError, match=f"{match}[^$]*(example 2 of epoch 0|\\(0, 2\\))"
    ):
        list(dataset)


def test_an_empty_stream_is_refused():
    plan = jb.BucketPlan.from_shapes([(4, 4)], overlong="drop")
    empty, long = stream(np.zeros(0, int)), stream(np.array([9, 9]))
    for dataset in (empty, long, lambda epoch, seed: empty if epoch else stream([3])):
        batches = batches_of(dataset, plan, pool_size=4, num_epochs=None)
        with pytest.raises(ValueError, match="`overlong='drop'`"):
            list(batches)
    with pytest.raises(ValueError, match="no example"):
        jb.stream.sample_lengths(empty, 10)
    with pytest.raises(ValueError, match="`like`"):
        _ = jb.stream_batches(empty, plan, pool_size=4).example


@pytest.mark.parametrize("sequences", [None, ["x"], {"x": ["x"], "y": ["y"]}])
def test_a_sample_of_arrays_with_an_axis_too_many_is_refused(sequences):
    examples = [{"x": np.zeros((1, n)), "y": np.zeros(1)} for n in (5, 3, 7)]
    dataset = grain.MapDataset.source(examples).to_iter_dataset()
    examples = jb.stream.ExampleStream(dataset, sequences=sequences)
    with pytest.raises(ValueError, match=r"All lengths are 1, because feature 'x'"):
        jb.stream.sample_lengths(examples, 2)


PLAN = jb.BucketPlan((jb.Bucket(8, 4), jb.Bucket(2, 16)), max_tokens=32)
LONGER = jb.BucketPlan((jb.Bucket(1, 32),), max_tokens=32)
HALF = {"shard": jb.data.RowShard((0,), 2)}
PAIR = jb.BucketPlan.from_shapes([(2, {"source": 8, "target": 4})])
OTHER_PAIR = jb.BucketPlan.from_shapes([(2, {"source": 4, "target": 8})])


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"pool_size": 7}, "pool_size=7"),
        ({"accumulate": 3, "pool_size": 23}, "pool_size=23"),
        ({"pool_size": 0}, "pool_size=0"),
        ({"policy": "best"}, "policy='best'"),
        ({"group": "odd"}, "group='odd'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"num_epochs": 0}, "num_epochs=0"),
        ({"num_steps": 1.5}, "num_steps=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"transform": 3}, "transform"),
        ({"pad_value": "0"}, "pad_value"),
        ({"max_segments_per_row": 0}, "max_segments_per_row=0"),
        ({"max_segments_per_row": 2, "plan": PAIR}, "max_segments_per_row=2"),
        ({"sequences": {"tokens": [], "x": []}}, "sequences"),
        ({"sequences": ["source"], "plan": PAIR}, "sequences"),
        (HALF, "lengths"),
        ({"lengths": [17]}, "lengths[0]=17"),
        ({"lengths": {0: [3], 2: [3]}}, "lengths"),
        ({"lengths": [3], "plan": PAIR}, "lengths"),
        ({**HALF, "lengths": [3]}, "processes"),
        ({"plan": "plan.json"}, "plan"),
        ({"plan": {1: PLAN}}, "plan"),
        ({"plan": {}}, "plan"),
        ({"plan": {0: PLAN, 7.5: PLAN}}, "plan"),
        ({"plan": {0: PLAN, 5: LONGER}}, "plan[5]"),
        ({"plan": {0: PAIR, 5: OTHER_PAIR}}, "plan[5]"),
        ({"plan": {0: PAIR, 5: PLAN}}, "plan[5]"),
        ({"sequences": {"tokens": []}}, "sequences"),
        ({"dataset": [1, 2]}, "dataset"),
        ({"dataset": grain.MapDataset.range(3)}, "dataset"),
    ],
)
def test_wrong_arguments_are_named(options, argument):
    given = {"dataset": stream(np.array([3, 9])), "plan": PLAN, "pool_size": 8}
    with pytest.raises(ValueError, match=re.escape(f"`{argument}")):
        batches_of(**{**given, **options})


def test_batches_are_not_made_in_workers():
    dataset = jb.stream_batches(stream(np.array([3])), PLAN, pool_size=8)
    with pytest.raises(ValueError, match="workers"):
        dataset.set_slice(slice(0, None, 2))
