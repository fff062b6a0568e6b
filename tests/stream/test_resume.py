"""Streams resume at every step, from small states that are checked."""

import itertools
import json
import sys

import grain
import numpy as np
import pytest
from stream_cases import (
    OPTIONS,
    SOME_OPTIONS,
    Numbers,
    assert_same,
    batches_of,
    exhaustive,
    indices_in,
    make_case,
    smallest_pool,
    steps_of,
    stream,
    through_json,
)

import jaxbucket as jb

check_resume = grain.experimental.assert_equal_output_after_checkpoint
PLAN = jb.BucketPlan((jb.Bucket(8, 4), jb.Bucket(2, 16)), max_tokens=32)

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
    limits = {"max_tokens": 150, "num_buckets": 3, "max_seq_len": 30}
    plan = jb.plan_buckets(lengths, sample=True, overlong=overlong, **limits)
    pool = smallest_pool(plan, options) + 9
    check_resume(
        batches_of(stream(lengths), plan, pool_size=pool, num_epochs=2, **options)
    )


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_a_threaded_and_filtered_stream_resumes(is_prefetched):
    lengths, plan, _ = make_case(13, size=120)
    source = grain.MapDataset.source(Numbers(lengths)).shuffle(3)
    threaded = source.to_iter_dataset(grain.ReadOptions(2, 4))
    filtered = threaded.filter(lambda x: x["index"] % 3 > 0)
    dataset = jb.stream_batches(filtered, plan, pool_size=60)
    if is_prefetched:
        prefetch = grain.experimental.ThreadPrefetchIterDataset
        dataset = prefetch(dataset, prefetch_buffer_size=3)
    check_resume(dataset)


def test_a_state_is_small_json():
    lengths, plan, _ = make_case(14, size=2000)
    dataset = jb.stream_batches(stream(lengths), plan, pool_size=100)
    iterator = iter(dataset)
    for _ in range(30):
        next(iterator)
    state = iterator.get_state()
    assert len(state["pending"].split()) <= 100
    assert len(json.dumps(state)) < 100 * 4 + 3000
    rest = list(iterator)
    again = iter(dataset)
    again.set_state(through_json(state))
    assert_same(list(again), rest)


def test_state_before_returns_the_states_of_earlier_steps():
    lengths, plan, _ = make_case(15, size=800)
    dataset = batches_of(stream(lengths), plan, pool_size=80, num_epochs=2)
    iterator, states = iter(dataset), []
    for step in range(100):
        states.append(iterator.get_state())
        next(iterator)
        for late in range(min(step + 1, 20)):
            assert iterator.state_before(step - late) == states[step - late]
    for step in (35, 101):
        with pytest.raises(ValueError, match=f"`step={step}`"):
            iterator.state_before(step)


def test_dropped_examples_take_no_memory():
    lengths = np.full(4_000, 9)
    lengths[[0, -1]] = 3
    plan = jb.BucketPlan.from_shapes([(1, 3)], overlong="drop")
    iterator = iter(jb.stream_batches(stream(lengths), plan, pool_size=8))
    assert len(list(iterator)) == 2
    assert len(iterator._reader._snapshots) < 5


def test_few_examples_are_read_again_even_if_a_length_is_rare():
    """With several processes, its bucket may be thousands of steps away."""
    lengths = np.full(10_000, 2)
    lengths[5] = 7
    sample = np.repeat([2, 7, 15], [200_000, 1, 10])
    plan = jb.BucketPlan.from_shapes([(16, 2), (8, 7), (4, 15)])
    host = iter(
        jb.stream_batches(
            stream(lengths),
            plan,
            pool_size=32,
            lengths=sample,
            shard=jb.data.RowShard((0,), 2),
            num_steps=300,
        )
    )
    assert any(5 in indices_in(next(host)) for _ in range(150))
    states = []
    for _ in range(100):
        next(host)
        states.append(host.get_state())
    assert all(
        x["counts"]["read"] - x["snapshot"]["counts"]["read"] < 600 for x in states
    )
    assert len(host._reader._snapshots) < 200


# Other plans and numbers of epochs


@pytest.mark.parametrize(
    "options", [{}, {"max_segments_per_row": 5}, {"accumulate": 2}], ids=str
)
@pytest.mark.parametrize("parts", [2, *exhaustive([1])])
def test_a_new_plan_takes_effect_at_its_step(parts, options):
    lengths, plan, _ = make_case(50, size=100, multiple=2)
    new = jb.BucketPlan.from_shapes([(8, 9), (4, plan.max_seq_len)])
    dataset = jb.stream_batches(
        stream(lengths),
        {0: plan, 3: new},
        pool_size=smallest_pool(plan, options) + 20,
        lengths=lengths,
        shard=jb.data.RowShard((0,), parts),
        num_steps=8 if parts > 1 else None,
        **options,
    )
    check_resume(dataset)
    indices = []
    for step, micro in enumerate(steps_of(dataset)):
        for batch in micro:
            bucket = jb.Bucket(batch.bucket.batch_size * parts, batch.bucket.seq_len)
            assert bucket in (new if step >= 3 else plan).buckets
            indices += indices_in(batch)
    assert len(set(indices)) == len(indices)
    if parts == 1:
        assert sorted(indices) == list(range(len(lengths)))


def test_a_state_resumes_with_a_new_plan_at_a_later_step():
    lengths, plan, _ = make_case(51, size=300)
    new = jb.BucketPlan.from_shapes([(6, plan.max_seq_len)])
    iterator = iter(jb.stream_batches(stream(lengths), plan, pool_size=90))
    before = [next(iterator) for _ in range(5)]
    state = iterator.get_state()
    again = iter(jb.stream_batches(stream(lengths), {0: plan, 5: new}, pool_size=90))
    again.set_state(state)
    after = list(again)
    assert {batch.bucket for batch in after} == set(new.buckets)
    indices = [i for batch in [*before, *after] for i in indices_in(batch)]
    assert sorted(indices) == list(range(300))
    early = jb.stream_batches(stream(lengths), {0: plan, 4: new}, pool_size=90)
    with pytest.raises(ValueError, match="plans .* from step 0 -> .* from step 4"):
        iter(early).set_state(state)


def test_the_number_of_epochs_may_change_until_the_stream_has_ended():
    plan = jb.BucketPlan.from_shapes([(2, 3)])

    def iterator(epochs):
        dataset = stream(np.full(11, 3))
        return iter(batches_of(dataset, plan, pool_size=4, num_epochs=epochs))

    before, expected = iterator(1), list(iterator(2))
    states = [before.get_state() for _ in before]
    num_resumed = 0
    # Each state is that after a step.
    for step, state in enumerate(states, 1):
        after = iterator(2)
        if not state["counts"]["ended"]:
            after.set_state(state)
            assert_same(list(after), expected[step:])
            num_resumed += 1
            continue
        with pytest.raises(ValueError, match="num epochs 1 -> 2"):
            after.set_state(state)
        again = iterator(1)
        again.set_state(state)
        assert again.get_state() == state and len(list(again)) == 6 - step
    assert 0 < num_resumed < len(states) == 6


# Refused states


@pytest.mark.parametrize(
    "options",
    [
        {"pool_size": 17},
        {"policy": "first"},
        {"accumulate": 2},
        {"accumulate": 2, "group": "mixed"},
        {"max_segments_per_row": 3},
        {"sequences": ["tokens"]},
        {"pad_value": 1},
        {"seed": 4},
        {"transform": lambda example, rng: example},
        {"plan": jb.BucketPlan.from_shapes([(4, 16)])},
        {"shard": jb.data.RowShard((0,), 2), "lengths": [3], "num_steps": 9},
    ],
)
def test_a_state_with_different_options_is_refused(options):
    given = {"dataset": stream(np.full(50, 3)), "plan": PLAN, "pool_size": 16}
    dataset, other = batches_of(**given), batches_of(**{**given, **options})
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    with pytest.raises(ValueError, match="Cannot resume at step 1"):
        iter(other).set_state(state)
    if "plan" not in options and "shard" not in options:
        with pytest.raises(ValueError, match="Cannot resume"):
            dataset.position(1).check_same(other.position(1))
    assert other.fingerprint != dataset.fingerprint


@pytest.mark.parametrize("state", [None, {}, {"next_index": 3}])
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(ValueError, match="`state`"):
        iter(batches_of(stream([3]), PLAN, pool_size=8)).set_state(state)


# With a pool of 8, no example is pending after a step.
@pytest.mark.parametrize("pool_size", [8, 40])
@pytest.mark.parametrize("change", ["order", "contents", "lengths", "number"])
def test_a_stream_that_has_changed_is_refused(pool_size, change):
    plan = jb.BucketPlan.from_shapes([(8, 8)])

    def iterator(is_changed):
        order = np.random.default_rng(int(change == "order" and is_changed))
        order = order.permutation(60).tolist()
        source = [{"tokens": np.full(8, i)} for i in order]
        if is_changed and change == "contents":
            source = [{"tokens": x["tokens"] + 1} for x in source]
        if is_changed and change == "lengths":
            source = [{"tokens": x["tokens"][:7]} for x in source]
        if is_changed and change == "number":
            source = source[:7]
        dataset = grain.MapDataset.source(source).to_iter_dataset()
        return iter(jb.stream_batches(dataset, plan, pool_size=pool_size))

    before, after = iterator(False), iterator(True)
    for _ in range(3):
        next(before)
        state = before.get_state()
        with pytest.raises((ValueError, IndexError), match="has changed|out of range"):
            after.set_state(state)
        # The iterator is unusable until a valid state is set.
        for use in (after.__next__, after.get_state):
            with pytest.raises(ValueError, match="state that was set was rejected"):
                use()


# Failed steps


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
def test_the_state_of_a_failed_step_is_the_state_before_it(options):
    lengths, plan, rng = make_case(41, size=120)
    options = {"pool_size": 2 * smallest_pool(plan, options), **options}
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
            with pytest.raises(error):
                for batches in iterator:
                    steps += steps_of([batches])
            with pytest.raises((OSError, RuntimeError), match="network|interrupted"):
                next(iterator)
            state = through_json(iterator.get_state())
            broken["at"] = -1
            iterator.set_state(state)
            assert_same(steps + steps_of(iterator), whole)


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [OPTIONS[k] for k in (0, 2, 4)], ids=str)
def test_an_interrupt_never_loses_examples_silently(options):
    lengths, plan, _ = make_case(43, size=80)
    options = {"pool_size": 2 * smallest_pool(plan, options), **options}
    dataset = jb.stream_batches(stream(lengths), {0: plan, 2: plan}, **options)
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
        start = json.loads(state["position"])["step"]
        assert_same(steps_of(after), whole[start:])
    assert lines > 23 and num_lost < lines // 23
