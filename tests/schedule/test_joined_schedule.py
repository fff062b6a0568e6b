"""Schedules one after another: planned changes of plan, order and accumulation."""

import numpy as np
import pytest
from schedule_cases import assert_same, draws_of, seeds

import jaxbucket as jb
from jaxbucket import Bucket, BucketPlan, JoinedSchedule, Mixture, batch_dataset
from jaxbucket.data import concatenate

LENGTHS = np.random.default_rng(0).integers(1, 33, 150)


def plan_of(max_tokens: int, num_buckets: int = 3, **options) -> BucketPlan:
    return jb.plan_buckets(
        LENGTHS, max_tokens=max_tokens, num_buckets=num_buckets, **options
    )


def schedule_of(max_tokens: int, multiple: int = 2, **options) -> jb.BatchSchedule:
    plan = plan_of(max_tokens, batch_size_multiple=multiple)
    return jb.BatchSchedule(plan, LENGTHS, **options)


def random_phases(seed: int) -> dict[int, jb.BatchSchedule]:
    """Returns up to four schedules, some of which start when an epoch ends.

    Some have a part of the examples.
    """
    rng = np.random.default_rng(seed)
    phases, step = {}, 0
    for number in range(rng.integers(1, 5)):
        phase = schedule_of(
            int(rng.choice([64, 128, 200])),
            order=str(rng.choice(["spread", "shuffled", "source", "ascending"])),
            accumulate=int(rng.choice([1, 1, 3])),
            seed=number,
            subset=np.arange(100) if rng.random() < 0.3 else None,
        )
        phases[step] = phase
        epochs = int(rng.integers(1, 3)) * len(phase)
        step += epochs if rng.random() < 0.5 else int(rng.integers(1, epochs + 1))
    return phases


@pytest.mark.parametrize("seed", seeds(4, 25))
def test_each_step_is_that_of_its_schedule(seed):
    phases = random_phases(seed)
    joined = JoinedSchedule(phases)
    # A plain list of all steps, and of the steps at which epochs start.
    ends = [*list(phases)[1:], list(phases)[-1] + 40]
    expected, starts = [], []
    for (start, phase), end in zip(phases.items(), ends, strict=True):
        for step in range(start, end):
            expected.append(phase.micro_batches(step - start))
            if (step - start) % len(phase) == 0:
                starts.append(step)
    assert len(joined) == (starts[1] if len(starts) > 1 else len(phases[0]))
    order = np.random.default_rng(seed).permutation(len(expected))
    for step in order.tolist():
        result = joined.micro_batches(step)
        assert_same(result, expected[step])
        assert joined.epoch_at(step) == np.searchsorted(starts, step, "right") - 1
        assert isinstance(joined[step], tuple) == (joined.accumulate > 1)
        assert {x.bucket for x in result} <= set(joined.buckets)
    assert [joined.epoch_start(x) for x in range(len(starts))] == starts
    assert joined.accumulate == max(x.accumulate for x in phases.values())


def test_the_buckets_are_those_of_all_plans():
    few, many = schedule_of(64), schedule_of(128)
    joined = JoinedSchedule({0: few, 3: many, 9: few})
    assert joined.plans == (few.plan, many.plan)
    assert set(joined.buckets) == {*few.plan.buckets, *many.plan.buckets}
    with pytest.raises(ValueError, match="has 2 plans, but a single one is needed"):
        _ = joined.plan
    # Equal plans are one.
    assert JoinedSchedule({0: few, 3: few}).plan == few.plan


def source_of(lengths) -> list[dict]:
    return [{"x": np.full(n, i), "index": np.array(i)} for i, n in enumerate(lengths)]


def test_num_epochs_ends_with_an_epoch():
    first, second = schedule_of(64), schedule_of(128, seed=1)
    joined = JoinedSchedule({0: first, len(first): second})
    dataset = batch_dataset(source_of(LENGTHS), joined, num_epochs=3)
    assert len(dataset) == len(first) + 2 * len(second)
    assert len(batch_dataset(source_of(LENGTHS), joined)) == len(first)
    rest = batch_dataset(source_of(LENGTHS), joined, start_step=len(first) + 1)
    assert len(rest) == len(second) - 1


def test_a_batch_sampler_has_the_batches_of_each_epoch():
    first, second = schedule_of(64), schedule_of(128, accumulate=2)
    sampler = jb.schedule.BatchSampler(JoinedSchedule({0: first, len(first): second}))
    for epoch, size in enumerate((len(first), 2 * len(second), 2 * len(second))):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler) == size
        assert sorted(i for x in sampler for i in x) == list(range(len(LENGTHS)))


def test_random_numbers_do_not_repeat_after_a_change():
    phase = schedule_of(64)
    joined = JoinedSchedule({0: phase, len(phase): phase})
    (first,), (second,) = draws_of(joined, 0), draws_of(joined, len(phase))
    assert first == draws_of(phase, 0)[0]
    assert first.rng(3, 0).integers(2**60) != second.rng(3, 0).integers(2**60)


def test_a_run_resumes_with_another_change_at_a_later_step():
    old, new = schedule_of(64, accumulate=2), schedule_of(128)
    source = source_of(LENGTHS)

    def dataset(schedule):
        return batch_dataset(source, schedule, num_steps=30)

    plain = dataset(old)
    joined = dataset(JoinedSchedule({0: old, 7: new}))
    twice = dataset(JoinedSchedule({0: old, 7: new, 20: old}))
    rest = joined.resume(plain.position(7))
    assert len(rest) == 23
    (batch,), (expected,) = rest[0], joined[7]
    np.testing.assert_array_equal(batch.features["x"], expected.features["x"])
    joined.resume(plain.position(5))
    plain.resume(joined.position(7))
    twice.resume(joined.position(20))
    # Not if the change is at an earlier step.
    for dataset_, position in (
        (joined, plain.position(8)),
        (plain, joined.position(8)),
        (dataset(JoinedSchedule({0: old, 8: new})), joined.position(8)),
        (joined, twice.position(21)),
    ):
        with pytest.raises(ValueError, match="or the schedule has changed"):
            dataset_.resume(position)
    assert len({x.schedule.fingerprint for x in (plain, joined, twice)}) == 3


def test_states_of_iterators_belong_to_the_whole_schedule():
    old, new = schedule_of(64), schedule_of(128)
    first, other = (
        batch_dataset(
            source_of(LENGTHS), JoinedSchedule({0: old, step: new}), num_steps=30
        ).to_iter_dataset()
        for step in (7, 8)
    )
    iterator, restored = iter(first), iter(other)
    for _ in range(10):
        next(iterator)
    restored.set_state(iterator.get_state())
    with pytest.raises(ValueError, match="or the schedule has changed"):
        next(restored)


def test_phases_nest():
    first, second = schedule_of(64, order="ascending"), schedule_of(128)
    inner = JoinedSchedule({0: first, len(first): second})
    outer = JoinedSchedule({0: first, 3: inner})
    flat = JoinedSchedule({0: first, 3: first, 3 + len(first): second})
    for step in range(4 * len(first)):
        np.testing.assert_array_equal(outer[step].rows, flat[step].rows)
        assert outer.epoch_at(step) == flat.epoch_at(step)
        assert draws_of(outer, step) == draws_of(flat, step)
    assert [outer.epoch_start(x) for x in range(5)] == [
        flat.epoch_start(x) for x in range(5)
    ]
    # A run of the inner schedule may get a change later.
    changed = JoinedSchedule({0: inner, 5000: first})
    for step in (0, 1, len(first), len(first) + 1, 5000):
        assert changed.before(step).fingerprint == inner.before(step).fingerprint


def test_packed_rows_and_mixtures_may_change():
    packings = [jb.packing.pack(LENGTHS, size) for size in (40, 64)]
    packed = [
        jb.BatchSchedule(
            jb.plan_buckets([x.seq_lens[-1]], max_tokens=256), LENGTHS, packing=x
        )
        for x in packings
    ]
    joined = JoinedSchedule({0: packed[0], 3: packed[1]})
    most = max(x.max_segments for x in packings)
    assert joined.max_segments == most
    assert {joined[step].rows.shape[1] for step in range(6)} == {most}
    halves = [LENGTHS[:70], LENGTHS[70:]]
    plan = plan_of(64)
    mixed = Mixture([jb.BatchSchedule(plan, x) for x in halves], [1, 1])
    joined = JoinedSchedule({0: mixed, 5: schedule_of(64)})
    source = concatenate([source_of(LENGTHS)[:70], source_of(LENGTHS)[70:]])
    assert len(list(batch_dataset(source, joined, num_steps=8))) == 8


PACKING = jb.packing.pack([3, 4], 8)
SMALL = BucketPlan((Bucket(2, 8),), max_tokens=16)
LEFT = BucketPlan((Bucket(1, 4),), max_tokens=4, overlong="truncate_left")
RIGHT = BucketPlan((Bucket(2, 4),), max_tokens=8, overlong="truncate")


def pairs(a: str, b: str) -> jb.BatchSchedule:
    plan = BucketPlan((Bucket(2, {a: 8, b: 8}),), max_tokens=32)
    return jb.BatchSchedule(plan, {a: [3, 4], b: [1, 1]})


def mixture(**options):
    return Mixture({"a": jb.BatchSchedule(SMALL, [3, 4])}, {"a": 1}, **options)


@pytest.mark.parametrize(
    "schedules",
    [
        lambda x: [x],
        lambda x: {},
        lambda x: {1: x},
        lambda x: {0: x, 5: x, 3: x},
        lambda x: {0: [x]},
        lambda x: {0: x, 3: mixture()},
        lambda x: {0: x, 3: jb.BatchSchedule(SMALL, [3, 5])},
        lambda x: {0: pairs("a", "b"), 3: pairs("a", "c")},
        lambda x: {0: x, 3: jb.BatchSchedule(SMALL, [3, 4], packing=PACKING)},
        lambda x: {i: jb.BatchSchedule(p, [3, 4]) for i, p in enumerate((LEFT, RIGHT))},
    ],
)
def test_invalid_changes_are_refused(schedules):
    with pytest.raises(ValueError, match="`schedules"):
        JoinedSchedule(schedules(jb.BatchSchedule(SMALL, [3, 4])))
