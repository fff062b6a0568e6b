"""Mixtures of several schedules by weight."""

import json
from fractions import Fraction

import numpy as np
import pytest
from schedule_cases import assert_same, draws_of, seeds

from jaxbucket import (
    BatchSchedule,
    Bucket,
    BucketPlan,
    Curriculum,
    JoinedSchedule,
    Mixture,
    batch_dataset,
    plan_buckets,
)
from jaxbucket.data import RowShard, concatenate
from jaxbucket.packing import pack
from jaxbucket.schedule.spread import Turns

SIZES = (300, 40, 7)


def components(**options) -> list[BatchSchedule]:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 10 * k + 30, size) for k, size in enumerate(SIZES)]
    plan = plan_buckets(
        np.concatenate(lengths),
        sample=True,
        max_tokens=400,
        num_buckets=3,
        batch_size_multiple=2,
    )
    if options.get("order") == "curriculum":
        return [BatchSchedule(plan, x, order=Curriculum(x)) for x in lengths]
    return [
        BatchSchedule(plan, component_lengths, seed=seed, **options)
        for seed, component_lengths in enumerate(lengths)
    ]


def counts_of(mixture: Mixture, num_steps: int) -> np.ndarray:
    """Checks that components go on with their own batches, and counts these.

    Returns:
      `[num_steps, components]` integers.
    """
    starts = np.cumsum([0, *SIZES])
    counts = np.zeros((num_steps, len(SIZES)), int)
    for step in range(num_steps):
        for batch in mixture.micro_batches(step):
            index = int(np.searchsorted(starts, batch.rows.max(), "right")) - 1
            expected = mixture.schedules[index][int(counts[:, index].sum())]
            assert batch.bucket == expected.bucket
            rows = np.where(expected.rows < 0, -1, expected.rows + starts[index])
            np.testing.assert_array_equal(batch.rows, rows)
            counts[step, index] += 1
    return counts


@pytest.mark.parametrize("order", ["shuffled", "source", "curriculum"])
def test_each_component_keeps_its_own_order(order):
    schedules = components(order=order)
    mixture = Mixture(schedules, [5, 2, 1])
    counts = counts_of(mixture, 2 * len(mixture))
    names = [mixture.name_at(step) for step in range(len(counts))]
    assert names == counts.argmax(axis=1).tolist()
    # Every component has completed at least two of its own epochs.
    assert (counts.sum(axis=0) >= [2 * len(x) for x in schedules]).all()


@pytest.mark.parametrize(
    "weights",
    [[5, 2, 1], [1, 1, 1], [0.01, 1, 3], {0: [1, 1, 1], 2: [1, 1, 0]}],
    ids=str,
)
def test_an_epoch_ends_when_every_component_has_completed_one(weights):
    schedules = components()
    mixture = Mixture(schedules, weights)
    who = [mixture.name_at(step) for step in range(len(mixture))]
    if isinstance(weights, dict):
        # The last one is left out too early to complete an epoch.
        del schedules[2]
    assert min(who.count(i) / len(x) for i, x in enumerate(schedules)) == 1
    # Some component completes its epoch only with the last step of the mixture.
    assert not all(who[:-1].count(i) >= len(x) for i, x in enumerate(schedules))


def test_micro_batches_are_consecutive_batches():
    single = Mixture(components(), [5, 2, 1])
    several = Mixture(components(), [5, 2, 1], accumulate=3)
    assert len(several) == -(-len(single) // 3)
    batches = [x for step in range(20) for x in several.micro_batches(step)]
    assert_same(batches, [single[step] for step in range(60)])


@pytest.mark.parametrize("seed", seeds(9, 90))
def test_turns_keep_to_shares_that_change_and_members_go_on(seed):
    rng = np.random.default_rng(seed)
    count, periods = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    starts = np.append(0, np.cumsum(rng.integers(1, 80, periods - 1))).tolist()
    size = periods, count
    shares = [
        rng.random(size) + 1e-3,
        10.0 ** rng.integers(-2, 3, size),
        rng.integers(0, 5, size) / 4,
    ][seed % 3]
    shares[np.arange(periods), rng.integers(count, size=periods)] = 1
    exact = [[Fraction(repr(float(x))) for x in row] for row in shares]
    turns = Turns(starts, exact)
    num_turns = starts[-1] + 1500
    had, due, last = np.zeros((3, count))
    for turn in range(num_turns):
        if turn in starts:
            last, due = had.copy(), np.zeros(count)
            share = shares[starts.index(turn)]
        member, number = turns.at(turn)
        assert number == had[member]
        had[member] += 1
        due += share / share.sum()
        assert abs(had - last - due).max() < (1 if count <= 2 else 2)
        if turn < 200:
            # The first turn after which the member has had as many.
            assert turns.until(member, number + 1) == turn + 1
    for member in range(count):
        if shares[-1][member] == 0:
            assert turns.until(member, int(had[member]) + 1) is None
        assert turns.before(num_turns)[member] == had[member]


def test_weights_change_at_steps_and_components_go_on():
    weights = {0: [1, 0, 0], 10: [1, 1, 0], 31: [2, 1, 1]}
    counts = counts_of(Mixture(components(), weights, accumulate=2), 60)
    assert counts[:10].sum(axis=0).tolist() == [20, 0, 0]
    assert counts[10:31].sum(axis=0).tolist() == [21, 21, 0]
    np.testing.assert_allclose(counts[31:].sum(axis=0), [29, 14.5, 14.5], atol=1)


def test_a_run_resumes_with_other_weights_at_a_later_step():
    schedules = components()
    old = Mixture(schedules, [2, 1, 1])
    new = Mixture(schedules, {0: [2, 1, 1], 10: [1, 0, 3]})
    source = concatenate([examples(x.lengths, 0) for x in schedules])
    plain, changed = (batch_dataset(source, x, num_steps=30) for x in (old, new))
    assert len(changed.resume(plain.position(10))) == 20
    for dataset, position in (
        (plain, changed.position(11)),
        (changed, plain.position(11)),
    ):
        with pytest.raises(ValueError, match="schedule has changed"):
            dataset.resume(position)


def test_the_report_counts_what_each_component_contributes():
    schedules = dict(zip("abc", components(), strict=True))
    mixture = Mixture(schedules, {"a": 2, "b": 1, "c": 1})
    num_steps = 4 * max(map(len, schedules.values()))
    report = mixture.report(num_steps)
    for part, schedule in zip(report.components, schedules.values(), strict=True):
        steps = [schedule[step].rows for step in range(part.steps)]
        rows = np.concatenate(steps)
        rows = rows[rows >= 0]
        assert part.epochs == part.steps / len(schedule)
        assert abs(part.examples - len(rows)) <= len(schedule.lengths)
        if part.steps % len(schedule) == 0:
            assert part.examples == len(rows)
            assert part.real_tokens == schedule.lengths[rows].sum()
    assert sum(x.steps for x in report.components) == num_steps
    assert sum(report.token_shares) == pytest.approx(1)
    assert [x["name"] for x in report.to_dict()["components"]] == list("abc")
    assert str(report).count("\n") >= 5 and f"{num_steps:,} steps." in str(report)
    assert json.loads(report.to_json()) == json.loads(json.dumps(report.to_dict()))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_sources_by_name_have_the_batches_of_concatenated_ones(num_hosts):
    """The random numbers of a transform, too."""
    names = ("a", "b", "c")
    sources = [examples(x.lengths, 0) for x in components()]
    options = {"weights": [2, 1, 1], "accumulate": 2}
    plain = Mixture(components(), **options)
    options["weights"] = dict(zip(names, options["weights"], strict=True))
    named = Mixture(dict(zip(names, components(), strict=True)), **options)

    def add_noise(example, rng):
        return {**example, "noise": rng.integers(2**60)}

    for host in range(num_hosts):
        shard = RowShard((host,), num_hosts)
        settings = {"shard": shard, "transform": add_noise, "num_steps": 25}
        one = batch_dataset(concatenate(sources), plain, **settings)
        each = batch_dataset(
            dict(zip(names[::-1], sources[::-1], strict=True)),
            named,
            **settings,
        )
        resumed = each.resume(each.position(11))
        for step, micro in enumerate(one):
            others = [each[step], *([resumed[step - 11]] if step > 10 else [])]
            for other in others:
                for a, b in zip(micro, other, strict=True):
                    for name in ("tokens", "noise"):
                        np.testing.assert_array_equal(
                            a.features[name], b.features[name]
                        )


def test_components_with_names_have_options_of_their_own():
    plan = plan_buckets([4], sample=True, max_tokens=8)
    schedules = {x: BatchSchedule(plan, [4, 3]) for x in ("text", "audio")}
    mixture = Mixture(schedules, {"text": 1, "audio": 1})
    sources = {
        "text": [{"tokens": np.ones(n, int)} for n in (4, 3)],
        "audio": [{"frames": np.ones((n, 2))} for n in (4, 3)],
    }

    def double(example, rng):
        return {**example, "frames": 2 * example["frames"]}

    dataset = batch_dataset(
        sources,
        mixture,
        sequences={"text": ["tokens"], "audio": ["frames"]},
        pad_value={"text": 7, "audio": -1},
        transform={"text": None, "audio": double},
    )
    text, audio = sorted(dataset, key=lambda x: "frames" in x.features)
    assert sorted(np.unique(text.features["tokens"])) == [1, 7]
    assert sorted(np.unique(audio.features["frames"])) == [-1, 2]
    assert dataset.position(0).schedule["transform"]["audio"].endswith("double")
    assert sorted(dataset.example) == ["audio", "text"]


SAME = BatchSchedule(PLAN := BucketPlan((Bucket(2, 8),), max_tokens=16), [3, 4])


@pytest.mark.parametrize(
    ("source", "mixture"),
    [
        ([{"x": [1]}], {"a": SAME}),
        ({"b": [{"x": [1]}]}, {"a": SAME}),
        ({"a": [{"x": [1]}]}, [SAME]),
        ({"a": iter([])}, {"a": SAME}),
        ({"a": [{"x": [1]}]}, {"a": SAME}),
    ],
)
def test_sources_that_do_not_fit_the_mixture_are_refused(source, mixture):
    weights = {"a": 1} if isinstance(mixture, dict) else [1]
    with pytest.raises(ValueError, match="`source`"):
        batch_dataset(source, Mixture(mixture, weights))


def test_the_component_of_an_unreadable_example_is_named():
    source = {"a": [{"x": [1, 2, 3]}, {"x": [1, 2]}]}
    dataset = batch_dataset(source, Mixture({"a": SAME}, {"a": 1}))
    with pytest.raises(ValueError, match=r"`source\[1\]`") as error:
        list(dataset)
    assert "This is the component 'a' of the mixture." in error.value.__notes__


def examples(lengths: np.ndarray, first: int) -> list[dict]:
    return [
        {"tokens": np.full(n, first + i, np.int32), "index": np.array(first + i)}
        for i, n in enumerate(lengths)
    ]


def test_the_fingerprint_depends_on_all_options():
    schedules = components()
    mixtures = [
        Mixture(schedules, [5, 2, 1]),
        Mixture(schedules[::-1], [5, 2, 1]),
        Mixture(schedules, [5, 2, 2]),
        Mixture(schedules, [5, 2, 1], accumulate=2),
        Mixture(schedules, {0: [5, 2, 1], 31: [2, 1, 1]}),
        Mixture(schedules, {0: [5, 2, 1], 31: [2, 1, 2]}),
        Mixture(components(order="source"), [5, 2, 1]),
    ]
    assert len({mixture.fingerprint for mixture in mixtures}) == len(mixtures)
    assert Mixture(components(), [5, 2, 1]).fingerprint == mixtures[0].fingerprint


PAIRS = BatchSchedule(
    BucketPlan((Bucket(2, {"a": 8, "b": 8}),), max_tokens=32), {"a": [3], "b": [1]}
)
PACKED = BatchSchedule(PLAN, [3], packing=pack([3], 8))
REPEATING = BatchSchedule(PLAN, [3, 4], order=Curriculum([1, 2], replacement=True))
TRUNCATE = [
    (BucketPlan((Bucket(size, 4),), max_tokens=16, overlong=policy), [9])
    for size, policy in ((1, "truncate"), (2, "truncate_left"))
]


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("schedules", lambda x: Mixture([], [])),
        ("weights", lambda x: Mixture({0: x}, {0: 1})),
        ("schedules", lambda x: Mixture([[1]], [1])),
        ("schedules", lambda x: Mixture({"a": [1]}, {"a": 1})),
        ("schedules", lambda x: Mixture([Mixture({"a": x}, {"a": 1})], [1])),
        ("schedules", lambda x: Mixture([x, nested(x)], [1, 1]).report()),
        ("schedules", lambda x: Mixture([x, PAIRS], [1, 1])),
        ("schedules", lambda x: Mixture([x, PACKED], [1, 1])),
        ("schedules", lambda x: Mixture([BatchSchedule(*y) for y in TRUNCATE], [1, 1])),
        (
            "schedules",
            lambda x: Mixture([x, BatchSchedule(PLAN, [3], accumulate=2)], [1, 1]),
        ),
        ("replacement", lambda x: Mixture([x, REPEATING], [1, 1]).report()),
        ("weights", lambda x: Mixture([x], [1, 2])),
        ("weights", lambda x: Mixture([x], [0])),
        ("weights", lambda x: Mixture([x] * 2, [1, -2])),
        ("weights", lambda x: Mixture([x], [float("nan")])),
        ("weights", lambda x: Mixture([x, x], [1e-300, 1])),
        ("weights", lambda x: Mixture([x], ["0.5"])),
        ("weights", lambda x: Mixture([x], [True])),
        ("weights", lambda x: Mixture([x] * 2, 1)),
        ("weights", lambda x: Mixture([x], {0: 0.5})),
        ("weights", lambda x: Mixture({"a": x}, [1])),
        ("weights", lambda x: Mixture({"a": x}, {"a": 1, "c": 1})),
        ("weights", lambda x: Mixture([x], {3: [1]})),
        ("weights", lambda x: Mixture([x], {0: [1], 9: [1], 4: [1]})),
        ("weights", lambda x: Mixture([x], {0: [1], 9.5: [1]})),
        ("weights", lambda x: Mixture([x, x], {0: [1, 0], 4: [0, 0]})),
        ("num_steps", lambda x: Mixture([x], [1]).report(0)),
    ],
)
def test_invalid_mixtures_are_refused(argument, make):
    with pytest.raises(ValueError, match=f"`{argument}"):
        make(BatchSchedule(PLAN, [3, 4]))


def nested(schedule) -> Mixture:
    return Mixture([schedule, schedule], [2, 1])


def test_mixtures_and_changes_nest():
    a, b, c = components()
    changing = JoinedSchedule({0: a, 5: BatchSchedule(a.plan, a.lengths, seed=9)})
    inner = Mixture([changing, b], [2, 1])
    outer = Mixture([inner, c], [3, 1])
    joined = JoinedSchedule({0: outer, 4: Mixture([inner, c], [1, 1], accumulate=2)})
    source = concatenate([examples(x.lengths, 0) for x in (a, b, c)])
    flat = Mixture([a, b, c], [2, 1, 1])
    assert joined.data_fingerprint == flat.data_fingerprint
    steps = batch_dataset(source, joined, num_steps=40)
    seen = {}
    for step in range(40):
        for number, batch in enumerate(joined.micro_batches(step)):
            rows = batch.rows[batch.rows >= 0]
            assert joined.lengths[rows].max() <= batch.bucket.seq_len
            assert steps[step][number].num_examples == len(rows)
            part = int(np.searchsorted(np.cumsum(SIZES), rows[0], "right"))
            seen.setdefault(part, []).append(rows)
    # The second component goes through its own epochs in the first schedule.
    assert set(seen) == {0, 1, 2}
    for step in range(4):
        index, number = outer._turns.at(step)
        expected = [inner, c][index][number].rows
        start = [0, len(inner.lengths)][index]
        rows = np.where(expected < 0, -1, expected + start)
        np.testing.assert_array_equal(joined[step][0].rows, rows)
        draws, own = draws_of(outer, step)[0], draws_of([inner, c][index], number)[0]
        assert draws == own
