"""Curricula on streams: hard examples wait until they are open."""

import functools
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


def test_states_of_the_stream_are_kept_only_for_pending_examples():
    values = np.ones(3000)
    values[[70, 100, 700]] = 9, 8, 9
    dataset = easy_first(stream_of(values), float, lambda n: 1 if n < 2000 else 9)
    iterator = iter(dataset)
    whole = list(dataset)
    for step in range(2500):
        if step in (50, 80, 720, 1999, 2001, 2400):
            again = iter(dataset)
            again.set_state(iterator.get_state())
            assert list(again) == whole[step:]
        if 800 < step < 2000:
            # Before the pending examples, two of which share a state, and the latest.
            kept = [x.number for x in iterator._snapshots]
            assert kept[:2] == [64, 640] and len(kept) == 3
        next(iterator)
    assert len(iterator._snapshots) == 1


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
    served, before, state = [], 0, {}
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
        (
            (stream_of([1]), 3, float),
            "`difficulty_fn=3` is not a function. Pass a function of an example",
        ),
        (
            (stream_of([1]), float, 0.5),
            "`limit=0.5` is not a function. Pass a function of the number of examples",
        ),
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pending": None}, "`pending=None`, which is not a list. Pass a state as"),
        ({"pending": ["a"]}, "`pending[0]='a'`, which is not a count. Pass"),
        ({"pending": [90]}, "`pending=[90]`, but these indices must increase from at"),
        ({"pending": [89, 89]}, "`pending=[89, 89]`, but these indices must increase"),
        ({"pending": []}, "`read=90`, but `yielded=61` examples and 0 in `pending`"),
        ({"first": "x"}, "`first='x'`, which is not a count"),
        ({"first": 62}, "least `first=62` to less than `read=90`. Pass a state as"),
        ({"pending": [], "first": 91}, "at least `first=91` to less than `read=90`"),
        ({"read": 3}, "`first=0` to less than `read=3`"),
        ({"read": -5}, "`read=-5`, which is not a count"),
        ({"read": 91}, "`read=91`, but `yielded=61` examples and 29 in `pending` make"),
        ({"yielded": True}, "`yielded=True`, which is not a count"),
        ({"yielded": 62}, "`yielded=62` examples and 29 in `pending` make 91. Pass"),
        ({"checksum": 0.5}, "`checksum=0.5`, which is not a count"),
    ],
)
def test_a_modified_state_is_refused_and_changes_nothing(change, message):
    dataset = easy_first(stream_of(range(100)), float, lambda n: 59, max_pending=30)
    iterator, other = iter(dataset), iter(dataset)
    for _ in range(61):
        next(iterator)
    state = iterator.get_state()
    assert state["pending"] == list(range(61, 90))
    begun = [next(other) for _ in range(7)]
    with pytest.raises(ValueError, match=re.escape(message)):
        other.set_state(state | change)
    assert begun + list(other) == list(range(100))


def saved_state(values, num_read=90) -> dict:
    iterator = iter(easy_first(stream_of(values), float, float))
    for _ in range(num_read):
        next(iterator)
    return json.loads(json.dumps(iterator.get_state()))


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        (range(80), {}, "fewer examples than the 90 that had been read"),
        (range(1, 101), {}, "has changed: examples 64 to 89 differ from those"),
        ([*range(89), 95], {}, "has changed: examples 64 to 89 differ from those"),
        (range(100), {"first": 70}, "has changed: examples 70 to 89 differ"),
        (range(100), {"stream": {}}, "rejects its own state, `stream={}`: KeyError"),
        (range(100), {"stream": None}, "rejects its own state, `stream=None`: Type"),
    ],
)
def test_an_iterator_does_not_continue_after_a_state_that_does_not_fit(
    values, change, message
):
    state = saved_state(range(100))
    iterator = iter(easy_first(stream_of(values), float, float))
    with pytest.raises(ValueError, match=re.escape(message)):
        iterator.set_state(state | change)
    for function in (iterator.__next__, iterator.get_state):
        with pytest.raises(ValueError, match="state that was set was rejected"):
            function()
    iterator.set_state(saved_state(values, num_read=5))
    assert list(iterator) == list(values)[5:]


def stop_at(place, value):
    return next(iter([])) if value == place else value


@pytest.mark.parametrize("place", [0, 29])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("difficulty_fn", "`difficulty_fn` raised StopIteration for example {}, which"),
        ("limit", "`limit` raised StopIteration for {} examples, which would look"),
        ("map", "Example {} of the stream of `easy_first` cannot be read: a function"),
    ],
)
def test_a_stop_iteration_in_a_function_is_not_the_end(function, message, place):
    stop = functools.partial(stop_at, place)
    stream = stream_of(range(70))
    if function == "map":
        stream = stream.map(stop)
    dataset = easy_first(
        stream,
        stop if function == "difficulty_fn" else float,
        stop if function == "limit" else lambda count: 10,
    )
    with pytest.raises(RuntimeError, match=re.escape(message.format(place))):
        list(dataset)


def test_an_example_whose_difficulty_fails_is_not_lost():
    fails = [True]

    def difficulty(example):
        if example == 70 and fails:
            raise OSError("disk gone")
        return example

    # The examples from 60 on wait.
    iterator = iter(easy_first(stream_of(range(100)), difficulty, lambda count: 59))
    before = [next(iterator) for _ in range(60)]
    with pytest.raises(OSError, match="disk gone"):
        next(iterator)
    with pytest.raises(RuntimeError, match="failed at example 70 of the stream of"):
        next(iterator)
    fails.clear()
    iterator.set_state(json.loads(json.dumps(iterator.get_state())))
    assert before + list(iterator) == list(range(100))


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
    iterator, batches, state = iter(mixed), [], {}
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
