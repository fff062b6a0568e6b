"""Tests of overlong examples in packed rows, and of plans of several sequences."""

import itertools

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.base.table import table_text
from jaxbucket.packing.row_search import RowSearch
from jaxbucket.plan.limits import Limits

NAMES = ("source", "target")
POLICIES = ("drop", "truncate", "truncate_left")


def examples_of(lengths):
    """Returns examples whose first entries, modulo 1,000, count up from 0."""
    columns = lengths if isinstance(lengths, dict) else {"x": lengths}
    rows = zip(*columns.values(), strict=True)
    return [
        {name: 1000 * i + np.arange(n) for name, n in zip(columns, row, strict=True)}
        for i, row in enumerate(rows)
    ]


def cut(x, limit, policy):
    if policy == "drop" and len(x) > limit:
        return None
    return x[-limit:] if policy == "truncate_left" else x[:limit]


def by_index(batches, max_segments):
    """Returns the examples of an epoch by their index; each must occur once."""
    found = {}
    for batch in batches:
        for example in jb.data.unbatch(batch, max_segments=max_segments):
            index = int(next(iter(example.values()))[0]) // 1000
            assert index not in found
            found[index] = example
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("in_file", [False, True])
def test_packed_rows_follow_the_policy_for_overlong_examples(policy, in_file, tmp_path):
    lengths = np.random.default_rng(0).integers(1, 60, 150)
    source = examples = examples_of(lengths)
    if in_file:
        source = jb.data.write_token_file(tmp_path / "tokens", examples)
    packing = jb.packing.pack(lengths, 40, overlong=policy)
    plan = jb.plan_buckets(
        packing.row_lengths,
        max_tokens=320,
        boundaries=packing.seq_lens,
        overlong=policy,
    )
    schedule = jb.BatchSchedule(plan, lengths, packing=packing, seed=1)
    found = by_index(jb.batch_dataset(source, schedule), schedule.max_segments)
    expected = {i: cut(x["x"], 40, policy) for i, x in enumerate(examples)}
    expected = {i: x for i, x in expected.items() if x is not None}
    assert found.keys() == expected.keys()
    for index, tokens in expected.items():
        np.testing.assert_array_equal(found[index]["x"], tokens)
    numbers, plain = schedule.report(), jb.report(plan, lengths)
    assert numbers.dropped_examples == plain.dropped_examples
    assert numbers.truncated_tokens == plain.truncated_tokens
    assert numbers.packed_examples == len(expected)


@pytest.mark.parametrize("zipped", [False, True])
def test_each_sequence_of_packed_rows_follows_its_policy(zipped, tmp_path):
    rng = np.random.default_rng(1)
    lengths = {name: rng.integers(1, 30, 120) for name in NAMES}
    policies = {"source": "truncate_left", "target": "drop"}
    source = examples = examples_of(lengths)
    if zipped:
        source = jb.data.zip_sources(
            jb.data.write_token_file(
                tmp_path / name, ({name: x[name]} for x in examples)
            )
            for name in NAMES
        )
    choice = jb.plan_packing(
        lengths, max_tokens=256, max_seq_len=24, pack="always", overlong=policies
    )
    schedule = jb.BatchSchedule(choice.plan, lengths, packing=choice.packing)
    found = by_index(jb.batch_dataset(source, schedule), schedule.max_segments)
    kept = np.flatnonzero(lengths["target"] <= 24)
    assert sorted(found) == kept.tolist()
    for index in kept:
        for name in NAMES:
            expected = cut(examples[index][name], 24, policies[name])
            np.testing.assert_array_equal(found[index][name], expected)
    report = schedule.report()
    assert report.dropped_examples == len(examples) - len(kept)
    assert report.epoch_cost == choice.report.epoch_cost
    assert choice.report.dropped_examples == report.dropped_examples


def test_a_curriculum_of_packed_rows_leaves_out_dropped_examples():
    lengths = np.array([3, 9, 5, 4])
    packing = jb.packing.pack(lengths, 8, overlong="drop")
    plan = jb.plan_buckets(
        packing.row_lengths, max_tokens=8, boundaries=(8,), overlong="drop"
    )
    order = jb.Curriculum(lengths, jb.schedule.LinearPacing(start=1 / 3, duration=9))
    schedule = jb.BatchSchedule(plan, lengths, packing=packing, order=order)
    # A third of the kept examples is open: the row of the easiest one comes first.
    assert [sorted(x.rows[x.rows >= 0]) for x in schedule] == [[3], [0, 2]]
    with pytest.raises(ValueError, match="`lengths` that take part. The data"):
        other = jb.packing.pack(lengths, 8, overlong="truncate")
        jb.BatchSchedule(plan, lengths, packing=other)
    with pytest.raises(ValueError, match="`max_seq_len=8` is shorter than every"):
        jb.packing.pack([9, 9], 8, overlong="drop")


def pairs_problem(seed, size=300):
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(2.5, 0.7, size)).astype(int) + 1
    target = (source * np.exp(rng.normal(0, 0.4, size))).astype(int) + 1
    return {"source": np.minimum(source, 64), "target": np.minimum(target, 48)}


def pair_cost(batch_size, seq_lens):
    """The operations of an encoder and a decoder of one layer of width 8."""
    s, t = seq_lens["source"], seq_lens["target"]
    return batch_size * 8 * (8 * 84 * (s + t) + 12 * (s * s + t * t + s * t))


@pytest.mark.parametrize("seed", range(2))
def test_packed_shapes_cost_about_as_little_as_the_best_of_a_grid(seed):
    lengths = pairs_problem(seed)
    options = {"max_tokens": 1024, "seq_len_multiple": 8, "cost_fn": pair_cost}
    choice = jb.plan_packing(lengths, num_buckets=2, pack="always", **options)
    matrix = np.stack(list(lengths.values()), axis=1)
    limits = Limits(sequences=NAMES, **options)
    search = RowSearch(matrix, limits, 10**6, False)
    grid = itertools.product(range(16, 65, 16), range(16, 49, 16))
    pairs = [[shape, search.last] for shape in grid if shape != search.last]
    best = min(search.of_all(shapes).cost for shapes in pairs)
    assert choice.epoch_costs["packed"] <= 1.04 * best


@pytest.mark.parametrize("block_sparse", [False, True])
@pytest.mark.parametrize("longest", [None, {"source": 128, "target": 96}])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (1, 2))]
)
def test_a_packed_plan_of_several_sequences_is_trained_as_it_was_planned(
    seed, longest, block_sparse
):
    lengths = pairs_problem(seed, size=120)
    choice = jb.plan_packing(
        lengths,
        max_tokens={"source": 512, "target": 384},
        max_seq_len=longest,
        num_buckets=3,
        batch_size_multiple=2,
        cost_fn=pair_cost,
        block_sparse=block_sparse,
        pack="always",
    )
    assert choice.report.epoch_cost == pytest.approx(choice.epoch_costs["packed"])
    assert choice.epoch_costs["packed"] < choice.epoch_costs["padded"]
    assert all(bucket.batches for bucket in choice.report.buckets[:-1])
    rows = [bucket.examples for bucket in choice.report.buckets]
    assert rows == list(choice.rows)
    schedule = jb.BatchSchedule(choice.plan, lengths, packing=choice.packing)
    assert schedule.report().epoch_cost == pytest.approx(choice.report.epoch_cost)
    rows = np.concatenate([batch.rows.ravel() for batch in schedule])
    assert sorted(rows[rows >= 0]) == list(range(120))


def test_rows_of_several_sequences_are_packed_if_that_costs_less():
    lengths = pairs_problem(5, size=60)
    options = {"max_tokens": 512, "cost_fn": pair_cost, "num_buckets": 2}
    choice = jb.plan_packing(lengths, **options)
    assert choice.is_packed and choice.packing is not None
    assert "T of target" in table_text(choice) and "because" in choice.reason
    never = jb.plan_packing(lengths, pack="never", **options)
    assert never.packing is None and not never.plan.packed
    assert never.plan == jb.plan_buckets(lengths, **options)
    with pytest.raises(ValueError, match="`max_tokens=16`"):
        jb.plan_packing(lengths, max_tokens=16)


@pytest.mark.parametrize(
    ("pack", "overlong", "max_seq_len"),
    [
        ("auto", "truncate", 32),
        ("never", {"source": "truncate", "target": "drop"}, None),
        ("always", {"source": "drop", "target": "truncate_left"}, 32),
        ("never", "truncate", None),
        ("always", "truncate", None),
    ],
)
def test_the_last_bucket_holds_the_longest_truncated_sequences(
    pack, overlong, max_seq_len
):
    lengths = {"source": [30] * 8 + [2] * 8, "target": [2] * 8 + [30] * 8}
    choice = jb.plan_packing(
        lengths,
        max_tokens=256,
        num_buckets=3,
        max_seq_len=max_seq_len,
        overlong=overlong,
        pack=pack,
    )
    schedule = jb.BatchSchedule(choice.plan, lengths, packing=choice.packing)
    rows = np.concatenate([batch.rows.ravel() for batch in schedule])
    assert sorted(rows[rows >= 0]) == list(range(16))
