"""Curricula on streams: hard examples wait until they are open."""

import json
import math
import re

import grain
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.schedule import ByValue, LinearPacing
from jaxbucket.stream import easy_first
from jaxbucket.stream.epochs import slice_stream


def stream_of(values) -> grain.IterDataset:
    return grain.MapDataset.source(list(values)).to_iter_dataset()


def plain_order(values, limit, max_pending) -> list:
    """Returns the order of (difficulty, index) pairs, from the definition."""
    source, waiting, result = list(zip(values, range(len(values)), strict=True)), [], []
    while source or waiting:
        bound = limit(len(result))
        is_open = [x for x in waiting if x[0] <= bound]
        if is_open or len(waiting) >= max_pending or not source:
            chosen = min(waiting)
            waiting.remove(chosen)
            result.append(chosen)
        elif source[0][0] <= bound:
            result.append(source.pop(0))
        else:
            waiting.append(source.pop(0))
    return result


LIMITS = {
    "rising": ByValue(LinearPacing(0, steps=150), low=5, high=60),
    "cycles": lambda count: 10 + count % 40,
    "closed": lambda count: -1,
    "open": lambda count: math.inf,
}


CASES = [(name, size) for name in LIMITS for size in (1, 20, 1000)]
QUICK = [("rising", 1000), ("cycles", 20)]


@pytest.mark.parametrize(
    ("limit", "max_pending"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.exhaustive)
        for case in CASES
    ],
)
def test_examples_come_in_the_order_of_the_definition(limit, max_pending):
    values = np.random.default_rng(0).integers(0, 60, 300).tolist()
    pairs = list(zip(values, range(300), strict=True))
    dataset = easy_first(
        stream_of(pairs), lambda x: x[0], LIMITS[limit], max_pending=max_pending
    )
    order = [tuple(x) for x in dataset]
    assert order == plain_order(values, LIMITS[limit], max_pending)
    assert sorted(order) == sorted(pairs)
    if limit == "rising" and max_pending == 1000:
        # Nothing comes early while the stream lasts.
        bounds = [LIMITS[limit](count) for count in range(300)]
        early = [x[0] > y for x, y in zip(order, bounds, strict=True)]
        assert not any(early[:150])
    iterator, done = iter(dataset), 0
    for step in (0, 1, 64, 150, 300):
        for _ in range(step - done):
            next(iterator)
        done = step
        again = iter(dataset)
        again.set_state(json.loads(json.dumps(iterator.get_state())))
        # Twice, as for a run that is resumed again before it has read anything.
        repeated = iter(dataset)
        repeated.set_state(again.get_state())
        for resumed in (again, repeated):
            assert [tuple(x) for x in resumed] == order[step:]


@pytest.mark.exhaustive
def test_states_of_the_stream_are_kept_only_for_pending_examples():
    values = [1] * 100 + [9] + [1] * 5000
    limit = {False: 0, True: 9}
    dataset = easy_first(stream_of(values), float, lambda n: limit[n > 1000] + 1)
    iterator = iter(dataset)
    for _ in range(900):
        next(iterator)
    # The example of index 100 is pending.
    assert len(iterator._snapshots) >= 800 // 64
    for _ in range(4000):
        next(iterator)
    assert len(iterator._snapshots) <= 2


def length(example) -> int:
    return len(example["x"])


@pytest.mark.parametrize("pack", [False, True])
def test_batches_have_each_example_once_and_short_ones_first(pack):
    lengths = np.random.default_rng(1).integers(1, 33, 200)
    source = [{"x": np.full(n, i), "index": i} for i, n in enumerate(lengths)]
    limit = ByValue(LinearPacing(0, steps=100), low=8, high=32)
    plan = jb.BucketPlan.from_shapes([(8, 32)])
    options = {"pack": pack, "lengths": lengths if pack else None}
    dataset = jb.stream_batches(
        easy_first(stream_of(source), length, limit), plan, pool_size=32, **options
    )
    iterator = iter(dataset)
    served, state = [], None
    for number, batch in enumerate(iterator):
        rows = np.asarray(batch.features["index"]), batch.segment_ids["x"]
        served += np.unique(batch.features["x"][rows[1] > 0]).tolist()
        if number == 2:
            state = iterator.get_state()
            before = len(served)
    assert sorted(served) == list(range(200))
    # The pool holds back some, but the limit is that of the examples before it.
    assert lengths[served[:16]].max() <= limit(16 + 32)
    again = iter(dataset)
    again.set_state(json.loads(json.dumps(state)))
    rest = [
        i
        for batch in again
        for i in np.unique(batch.features["x"][batch.segment_ids["x"] > 0]).tolist()
    ]
    assert rest == served[before:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], float, float), "`stream` is a list, not a `grain.IterDataset`"),
        ((stream_of([1]), 3, float), "`difficulty_fn=3` is not a function"),
        ((stream_of([1]), float, 0.5), "`limit=0.5` is not a function"),
        (
            (stream_of([1]), float, ByValue(LinearPacing(start=0, epochs=2), 0, 9)),
            "`limit` is a pacing function over epochs, but is called with the number "
            "of examples. Pass one with `steps=`",
        ),
        (
            (stream_of([1]), float, LinearPacing(tokens=9)),
            "`limit` is a pacing function over tokens",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        easy_first(*arguments)


def test_a_capacity_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="`max_pending=0` must be"):
        easy_first(stream_of([1]), float, float, max_pending=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "hard"])
def test_a_difficulty_that_is_not_a_number_is_refused(value):
    dataset = easy_first(stream_of([1, 2]), lambda x: value, float)
    with pytest.raises(ValueError, match="`difficulty_fn` returns .* for example 0"):
        next(iter(dataset))


def test_a_limit_that_is_not_a_number_is_refused():
    dataset = easy_first(stream_of([1, 2]), float, lambda count: math.nan)
    with pytest.raises(ValueError, match="`limit` returns nan for 0 examples. Return"):
        next(iter(dataset))


@pytest.mark.parametrize("state", [{}, None, 3, {"stream": {}, "read": 1}])
def test_a_state_of_something_else_is_refused(state):
    iterator = iter(easy_first(stream_of([1]), float, float))
    with pytest.raises(ValueError, match=r"`state` is not a state .* `get_state\(\)`"):
        iterator.set_state(state)
    assert next(iterator) == 1


def test_a_stream_with_fewer_examples_than_before_is_refused():
    iterator = iter(easy_first(stream_of(range(100)), float, float))
    for _ in range(90):
        next(iterator)
    shorter = iter(easy_first(stream_of(range(80)), float, float))
    with pytest.raises(ValueError, match="fewer examples than the 90 that had been"):
        shorter.set_state(iterator.get_state())


def test_streams_with_plans_of_their_own_are_mixed_and_resumed():
    """By Grain, which takes the streams in a fixed order."""
    rng = np.random.default_rng(0)
    plans = {
        "tokens": jb.BucketPlan.from_shapes([(4, 16)]),
        "frames": jb.BucketPlan.from_shapes([(2, 20)]),
    }
    streams = [
        jb.stream_batches(
            stream_of([{name: np.full(n, i)} for i, n in enumerate(lengths)]),
            plans[name],
            pool_size=16,
            num_epochs=None,
        )
        for name, lengths in (
            ("tokens", rng.integers(1, 17, 90)),
            ("frames", rng.integers(1, 21, 40)),
        )
    ]
    mixed = grain.IterDataset.mix(streams, weights=[3, 1])
    iterator, batches, state = iter(mixed), [], None
    for step in range(40):
        if step == 17:
            state = json.loads(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    names = [next(iter(x.features)) for x in batches]
    assert [names[:n].count("frames") for n in (8, 20, 40)] == [2, 5, 10]
    for name, batch in zip(names, batches, strict=True):
        assert batch.bucket in plans[name].buckets
    again = iter(mixed)
    again.set_state(state)
    for name, batch in zip(names[17:], batches[17:], strict=True):
        np.testing.assert_array_equal(batch.features[name], next(again).features[name])


def test_workers_order_their_shares():
    stream = jb.stream.easy_first(
        grain.MapDataset.range(20).to_iter_dataset(), lambda x: -x, lambda count: -99
    )
    slice_stream(stream, slice(1, None, 2), False)
    assert list(stream) == list(range(19, 0, -2))


def test_the_end_of_a_stream_is_read_once():
    reads = []

    def read(x):
        reads.append(x)
        return x

    stream = grain.MapDataset.range(128).to_iter_dataset().map(read)
    iterator = iter(jb.stream.easy_first(stream, lambda x: x, lambda count: -1))
    first = next(iterator)
    snapshots = len(iterator._snapshots)
    assert [first, *iterator] == list(range(128)) == reads
    assert len(iterator._snapshots) <= snapshots
