"""Mixtures of several schedules by weight."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from jaxbucket import (
    BatchSchedule,
    Bucket,
    BucketPlan,
    Curriculum,
    Mixture,
    batch_dataset,
    plan_buckets,
)
from jaxbucket.data import concatenate, write_token_file
from jaxbucket.schedule.mixture import Turns

SIZES = (300, 40, 7)


def seeds(quick, count):
    """Returns `count` seeds; all but the first `quick` are for exhaustive runs."""
    rest = (pytest.param(i, marks=pytest.mark.exhaustive) for i in range(quick, count))
    return [*range(quick), *rest]


def components(**options) -> list[BatchSchedule]:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 10 * k + 30, size) for k, size in enumerate(SIZES)]
    plan = plan_buckets(
        np.concatenate(lengths), max_tokens=400, num_buckets=3, batch_size_multiple=2
    )
    return [
        BatchSchedule(plan, component_lengths, seed=seed, **options)
        for seed, component_lengths in enumerate(lengths)
    ]


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_shares_of_turns_are_right_to_within_one_turn(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    shares = [rng.random(count) + 1e-3, 10.0 ** rng.integers(-2, 3, count)][seed % 2]
    turns = Turns([Fraction(repr(float(share))) for share in shares])
    exact = shares / shares.sum()
    np.testing.assert_allclose(turns.parts / turns.period, exact, atol=2e-5)
    num_turns = 2 * turns.period if turns.period < 5000 else 5000
    who = np.array([turns.at(turn)[0] for turn in range(num_turns)])
    had = np.cumsum(who[:, None] == np.arange(count), axis=0)
    # The number of turns that each member has had before a turn.
    before = had[np.arange(num_turns), who] - 1
    assert [turns.at(turn)[1] for turn in range(num_turns)] == before.tolist()
    for index in range(count):
        for number in {1, 2, had[-1, index]} & set(range(1, had[-1, index] + 1)):
            assert had[turns.until(index, number) - 1, index] == number
            assert turns.at(turns.until(index, number) - 1) == (index, number - 1)
    due = np.arange(1, num_turns + 1)[:, None] * turns.parts / turns.period
    off = np.vstack([np.zeros(count), had - due])
    bound = 1 - 1 / max(2 * count - 2, 1) + 1e-9
    assert abs(off).max() <= bound
    # The error over a window is the difference of the errors at its two ends.
    assert (off.max(axis=0) - off.min(axis=0)).max() <= 2 * bound


def test_turns_of_large_numbers_are_exact():
    turns = Turns([Fraction(x, 10) for x in (7, 2, 1)])
    assert turns.parts.tolist() == [7, 2, 1]
    far = 10**15
    for turn in range(100):
        who, number = turns.at(turn)
        assert turns.at(far + turn) == (who, number + far * [7, 2, 1][who] // 10)


@pytest.mark.parametrize("order", ["shuffled", "source", "curriculum"])
def test_each_component_keeps_its_own_order(order):
    if order == "curriculum":
        plan = components()[0].plan
        schedules = [
            BatchSchedule(plan, x.lengths, order=Curriculum(x.lengths))
            for x in components()
        ]
    else:
        schedules = components(order=order)
    mixture = Mixture(schedules, [5, 2, 1])
    starts = np.cumsum([0, *SIZES])
    seen = [0] * len(schedules)
    for step in range(2 * len(mixture)):
        index = mixture.component_at(step)
        expected = schedules[index][seen[index]]
        seen[index] += 1
        result = mixture[step]
        assert result.bucket == expected.bucket
        np.testing.assert_array_equal(
            result.rows, np.where(expected.rows < 0, -1, expected.rows + starts[index])
        )
    # Every component has completed at least two of its own epochs.
    assert min(n / len(x) for n, x in zip(seen, schedules, strict=True)) >= 2


def test_an_epoch_ends_when_every_component_has_completed_one():
    for weights in ([5, 2, 1], [1, 1, 1], [0.01, 1, 3]):
        schedules = components()
        mixture = Mixture(schedules, weights)
        who = [mixture.component_at(step) for step in range(len(mixture))]
        done = [who.count(i) / len(x) for i, x in enumerate(schedules)]
        assert min(done) == 1
        # Some component completes its epoch only with the last step of the mixture.
        is_done = [who[:-1].count(i) >= len(x) for i, x in enumerate(schedules)]
        assert not all(is_done)


@pytest.mark.parametrize(
    "by",
    [
        "tokens",
        pytest.param("steps", marks=pytest.mark.exhaustive),
        pytest.param("examples", marks=pytest.mark.exhaustive),
    ],
)
def test_weights_are_proportional_to_the_chosen_unit(by):
    schedules = components()
    weights = np.array([0.5, 0.3, 0.2])
    mixture = Mixture(schedules, weights.tolist(), by=by)
    starts = np.cumsum([0, *SIZES])
    had = np.zeros(3)
    for step in range(6000):
        index, rows = mixture.component_at(step), mixture[step].rows
        rows = rows[rows >= 0]
        assert np.all((starts[index] <= rows) & (rows < starts[index + 1]))
        had[index] += {
            "steps": 1,
            "tokens": mixture.lengths[rows].sum(),
            "examples": len(rows),
        }[by]
    np.testing.assert_allclose(had / had.sum(), weights, atol=5e-3)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_micro_batches_are_consecutive_batches(accumulate):
    single = Mixture(components(), [5, 2, 1])
    several = Mixture(components(), [5, 2, 1], accumulate=accumulate)
    assert len(several) == -(-len(single) // accumulate)
    batches = itertools.chain.from_iterable(
        several.micro_batches(step) for step in range(20)
    )
    for step, batch in enumerate(batches):
        assert batch.bucket == single[step].bucket
        np.testing.assert_array_equal(batch.rows, single[step].rows)


def test_steps_of_accumulating_components_stay_whole():
    mixture = Mixture(components(accumulate=3), [5, 2, 1])
    assert mixture.accumulate == 3
    for step in range(40):
        assert len({batch.bucket for batch in mixture[step]}) == 1
        assert len(mixture[step]) == 3


def test_accumulating_components_have_steps_of_several_buckets():
    lengths = np.random.default_rng(0).integers(1, 101, 2000)
    plan = plan_buckets(lengths, max_tokens=400, num_buckets=4)

    def share_of_single_buckets(together, **options):
        schedules = [BatchSchedule(plan, lengths, **options) for _ in range(2)]
        mixture = Mixture(schedules, [1, 1], accumulate=together)
        steps = [mixture.micro_batches(step) for step in range(400)]
        return np.mean([len({x.bucket for x in micro}) == 1 for micro in steps])

    # Orders with equal counts keep in step, which the documentation says.
    assert share_of_single_buckets(2) == 1
    assert share_of_single_buckets(1, accumulate=2, group="mixed") < 0.1


def examples(lengths: np.ndarray, first: int) -> list[dict]:
    return [
        {"tokens": np.full(n, first + i, np.int32), "index": np.array(first + i)}
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("kind", ["list", "token file", "both"])
def test_batches_contain_the_examples_of_all_components(tmp_path, kind):
    schedules = components()
    mixture = Mixture(schedules, [5, 2, 1], accumulate=2)
    sources = []
    for index, schedule in enumerate(schedules):
        source = examples(schedule.lengths, sum(SIZES[:index]))
        if kind == "token file" or (kind == "both" and index == 1):
            source = write_token_file(tmp_path / str(index), source)
        sources.append(source)
    dataset = batch_dataset(concatenate(sources), mixture, num_steps=40)
    for step, micro in enumerate(dataset):
        for batch, indices in zip(micro, mixture[step], strict=True):
            assert batch.bucket == indices.bucket
            real = indices.rows >= 0
            np.testing.assert_array_equal(
                batch.features["index"][real], indices.rows[real]
            )
            tokens = np.where(batch.mask, indices.rows[:, None], 0)
            np.testing.assert_array_equal(batch.features["tokens"], tokens)
            np.testing.assert_array_equal(
                batch.mask.sum(axis=1)[real], mixture.lengths[indices.rows[real]]
            )


def test_a_mixture_resumes_where_it_stopped():
    schedules = components()
    source = concatenate([examples(x.lengths, 0) for x in schedules])
    dataset = batch_dataset(source, Mixture(schedules, [5, 2, 1]), num_steps=30)
    whole = list(dataset)
    position = dataset.position(17)
    rest = list(dataset.resume(position))
    for a, b in zip(whole[17:], rest, strict=True):
        np.testing.assert_array_equal(a.features["index"], b.features["index"])
    other = batch_dataset(source, Mixture(schedules, [5, 2, 2]), num_steps=30)
    with pytest.raises(ValueError, match=r"schedule weights \[5.0, 2.0, 1.0\] -> \[5"):
        other.resume(position)


def test_the_fingerprint_depends_on_all_options():
    schedules = components()
    mixtures = [
        Mixture(schedules, [5, 2, 1]),
        Mixture(schedules[::-1], [5, 2, 1]),
        Mixture(schedules, [5, 2, 2]),
        Mixture(schedules, [5, 2, 1], by="tokens"),
        Mixture(schedules, [5, 2, 1], accumulate=2),
        Mixture(components(order="source"), [5, 2, 1]),
    ]
    assert len({mixture.fingerprint for mixture in mixtures}) == len(mixtures)
    assert Mixture(components(), [5, 2, 1]).fingerprint == mixtures[0].fingerprint


PLAN = BucketPlan((Bucket(2, 8),), max_tokens=16)
OTHER = BucketPlan((Bucket(1, 8),), max_tokens=16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: Mixture([], []), "`weights` has 0 entries for 0 schedules"),
        (lambda x: Mixture([x], [1, 2]), "`weights` has 2 entries for 1 schedules"),
        (lambda x: Mixture([x], [0]), r"`weights\[0\]=0.0` must be positive"),
        (lambda x: Mixture([x] * 2, [1, -2]), r"`weights\[1\]=-2.0` must be"),
        (lambda x: Mixture([x], [float("nan")]), r"`weights\[0\]=nan` must be"),
        (
            lambda x: Mixture([x] * 2, [1, 1e-7]),
            "`weights`: component 1 has 0.00655 of 65536 steps, which cannot be round",
        ),
        (lambda x: Mixture([x] * 2, [1, 1e-5]), "component 1 has 0.655 of 65536"),
        (lambda x: Mixture([x], ["a"]), r"`weights\[0\]='a'` is not a number"),
        (lambda x: Mixture([x], [None]), r"`weights\[0\]=None` is not a number"),
        (lambda x: Mixture([[1]], [1]), r"`schedules\[0\]` is a list, not a `Batch"),
        (
            lambda x: Mixture([Mixture([x], [1])], [1]),
            r"`schedules\[0\]` is a Mixture, .* pass its components",
        ),
        (lambda x: Mixture([x], [1], by="rows"), "`by='rows'`: choose 'steps'"),
        (
            lambda x: Mixture([x, BatchSchedule(OTHER, [3])], [1, 1]),
            "`schedules` have different plans. Plan once",
        ),
        (
            lambda x: Mixture([x, BatchSchedule(PLAN, [3], accumulate=2)], [1, 1]),
            r"`schedules` have `accumulate` of \[1, 2\], and the mixture has 1",
        ),
        (
            lambda x: Mixture(
                [BatchSchedule(PLAN, [3], accumulate=2)], [1], accumulate=2
            ),
            r"`schedules` have `accumulate` of \[2\], and the mixture has 2",
        ),
    ],
)
def test_invalid_mixtures_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(BatchSchedule(PLAN, [3, 4]))


def test_incompatible_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`sources` is empty"):
        concatenate([])
    files = [
        write_token_file(tmp_path / name, [{name: np.arange(3)}]) for name in ("x", "y")
    ]
    with pytest.raises(
        ValueError, match="`sources` differ in their sequence .*same ones"
    ):
        concatenate(files)
    with pytest.raises(IndexError, match="`index=2` must be from 0 to 1"):
        concatenate([["a"], ["b"]])[2]
