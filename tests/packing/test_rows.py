"""Packed rows: packers, schedules, plans, batches and losses."""

import bisect
import itertools
import json
import pathlib

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.base.batch import EMPTY_ROW
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.permutation import fold, mix, mix_each, permute, permute_each
from jaxbucket.data.collate import row_segments
from jaxbucket.packing import row_choice
from jaxbucket.packing.best_fit import best_fit
from jaxbucket.packing.pattern import positions
from jaxbucket.packing.subset_sum import fewest_positions, fullest_rows
from jaxbucket.plan.reports.plots import plot_plan
from jaxbucket.schedule.balance import balance_rows


def seeds(quick, count):
    """Returns `count` seeds; all but the first `quick` are for exhaustive runs."""
    rest = (pytest.param(i, marks=pytest.mark.exhaustive) for i in range(quick, count))
    return [*range(quick), *rest]


def plain_best_fit(lengths, seq_lens, cap):
    """Returns (room, slots) of rows, from best fit with one example after the other."""
    open_rows: list[tuple[int, int]] = []
    closed = []
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(open_rows, (length, 0))
        if place < len(open_rows):
            room, segments = open_rows.pop(place)
        else:
            room, segments = seq_lens[bisect.bisect_left(seq_lens, length)], 0
        row = (room - length, segments + 1)
        if row[0] and row[1] < cap:
            bisect.insort(open_rows, row)
        else:
            closed.append(row)
    return sorted(closed + open_rows)


def packing_problem(seed):
    """Returns random lengths, one or several T, and a maximum number of segments."""
    rng = np.random.default_rng(seed)
    last = int(rng.choice([1, 5, 30, 300, 4000]))
    size = int(rng.choice([1, 7, 100, 3000]))
    lengths = np.minimum(1 + rng.geometric(min(1, 4 / last), size), last)
    seq_lens = np.unique(rng.integers(1, last + 1, int(rng.integers(0, 4))))
    seq_lens = [*seq_lens[seq_lens < lengths.max()].tolist(), int(lengths.max())]
    if rng.random() < 0.5:
        seq_lens[-1] += int(rng.integers(0, 3 * last))
    cap = int(rng.choice([1, 2, 5, 10**6]))
    return lengths.astype(np.int32), seq_lens, cap


def row_slots(packing):
    return [packing.slots(row) for row in range(packing.num_rows)]


# Packing


@pytest.mark.parametrize("seed", seeds(8, 60))
def test_pack_keeps_every_example_and_needs_no_more_rows_than_best_fit(seed):
    lengths, seq_lens, cap = packing_problem(seed)
    packing = jb.packing.pack(lengths, seq_lens, max_segments_per_row=cap)
    assert sorted(packing.slot_lengths) == sorted(lengths)
    positions = 0
    for slots in row_slots(packing):
        assert 1 <= len(slots) <= cap
        # A row has the shortest T that its longest example fits.
        seq_len = seq_lens[bisect.bisect_left(seq_lens, int(slots.max()))]
        assert slots.sum() <= seq_len
        positions += seq_len
    if cap == 10**6:
        # With a cap, the result depends on the choice among rows with equal room.
        plain = plain_best_fit(lengths, seq_lens, cap)
        rooms = sum(room for room, _ in plain)
        assert positions <= lengths.sum() + rooms
    assert packing.row_lengths.tolist() == [int(x.sum()) for x in row_slots(packing)]
    assert packing.row_segments.tolist() == [len(x) for x in row_slots(packing)]


def patterns_problem(seed):
    lengths, seq_lens, cap = packing_problem(seed)
    counted = LengthCounts(lengths)
    return (counted.lengths, counted.counts, seq_lens, cap), lengths


def sorted_rooms(patterns):
    rooms = [x.seq_len - sum(x.slots) for x in patterns for _ in range(x.rows)]
    return sorted(rooms)


@pytest.mark.parametrize("seed", seeds(8, 60))
def test_best_fit_agrees_with_a_plain_best_fit_decreasing(seed):
    problem, lengths = patterns_problem(seed)
    *_, seq_lens, cap = problem
    patterns = best_fit(*problem)
    slots = [n for x in patterns for n in x.slots * x.rows]
    assert sorted(slots) == sorted(lengths.tolist())
    assert max(len(x.slots) for x in patterns) <= cap
    if cap == 10**6:
        # Among rows with equal room, the packers may choose different ones.
        plain = plain_best_fit(lengths.tolist(), seq_lens, cap)
        assert sorted_rooms(patterns) == [room for room, _ in plain]


@pytest.mark.parametrize("seed", seeds(6, 40))
def test_each_of_the_fullest_rows_is_as_full_as_possible(seed):
    problem, lengths = patterns_problem(seed)
    *_, seq_lens, cap = problem
    left = sorted(lengths.tolist())
    for pattern in fullest_rows(*problem):
        longest = left[-1]
        seq_len = seq_lens[bisect.bisect_left(seq_lens, longest)]
        assert pattern.slots[0] == longest and pattern.seq_len == seq_len
        assert 0 <= seq_len - sum(pattern.slots) and len(pattern.slots) <= cap
        if cap == 10**6 and len(left) < 200:
            sums = {longest}
            for length in left[:-1]:
                sums |= {s + length for s in sums if s + length <= seq_len}
            assert sum(pattern.slots) == max(sums)
        for length in pattern.slots * pattern.rows:
            left.remove(length)
    assert not left


def plain_fewest_rows(lengths, seq_len):
    """Returns the bound L2 of Martello and Toth, computed by a loop over k."""
    bounds = []
    for k in {0, *lengths[lengths <= seq_len // 2].tolist()}:
        alone = lengths > seq_len - k
        large = ~alone & (lengths > seq_len // 2)
        small = (lengths >= k) & (lengths <= seq_len // 2)
        room = (seq_len - lengths[large]).sum()
        rest = -(-int(lengths[small].sum() - room) // seq_len)
        bounds.append(alone.sum() + large.sum() + max(0, rest))
    return max(bounds)


@pytest.mark.parametrize("seed", range(5))
def test_packers_need_at_least_as_many_rows_as_the_bound(seed):
    rng = np.random.default_rng(seed)
    seq_len = int(rng.integers(1, 60))
    lengths = rng.integers(1, seq_len + 1, int(rng.integers(1, 80)))
    counted = LengthCounts(lengths)
    values, counts = counted.lengths, counted.counts
    fewest = fewest_positions(values, counts, [seq_len])
    assert fewest == seq_len * plain_fewest_rows(lengths, seq_len)
    for packer in (best_fit, fullest_rows):
        assert positions(packer(values, counts, [seq_len], 10**6)) >= fewest


@pytest.mark.parametrize(
    ("name", "lengths", "max_seq_len"),
    [
        *(("lengths", x, [4, 8]) for x in ([], [3, 0], [3.5], [3, 9])),
        *(("max_seq_len", [3], x) for x in (0, [], 2.5)),
    ],
)
def test_invalid_arguments_of_pack_are_refused(name, lengths, max_seq_len):
    with pytest.raises(ValueError, match=f"`{name}"):
        jb.packing.pack(lengths, max_seq_len)


# Schedules


def packed_schedule(lengths, seq_lens, *, cap=None, rows=3, **options):
    packing = jb.packing.pack(lengths, seq_lens, max_segments_per_row=cap)
    plan = jb.plan_buckets(
        packing.row_lengths,
        max_tokens=rows * packing.seq_lens[-1],
        boundaries=packing.seq_lens,
    )
    return jb.BatchSchedule(plan, lengths, packing=packing, **options)


PACKED_ORDERS = (
    *("shuffled", "source", "descending"),
    jb.schedule.GroupedByLength(2),
)


@pytest.mark.parametrize("seed", seeds(6, 40))
def test_each_example_is_in_one_packed_row_per_epoch(seed):
    lengths, seq_lens, cap = packing_problem(seed)
    schedule = packed_schedule(
        lengths,
        seq_lens,
        cap=cap,
        seed=seed,
        order=PACKED_ORDERS[seed % len(PACKED_ORDERS)],
        accumulate=[1, 1, 2][seed % 3],
        group=["same", "mixed"][seed % 2],
    )
    for epoch in (0, 3):
        examples = []
        steps = range(schedule.epoch_start(epoch), schedule.epoch_start(epoch + 1))
        for indices in itertools.chain(*map(schedule.micro_batches, steps)):
            rows = indices.rows
            assert rows.shape == (indices.bucket.batch_size, schedule.max_segments)
            filled = rows != EMPTY_ROW
            # Empty slots come after all examples of a row.
            assert not (filled[:, 1:] & ~filled[:, :-1]).any()
            tokens = np.where(filled, lengths[rows], 0).sum(axis=1)
            assert tokens.max() <= indices.bucket.seq_len
            examples.append(rows[filled])
        assert sorted(np.concatenate(examples)) == list(range(len(lengths)))


def test_a_slot_takes_each_example_of_its_length_equally_often():
    # Each slot should have each of the eight examples in about 100 of 800 epochs.
    lengths = np.full(8, 4)
    schedule = packed_schedule(lengths, 4, rows=8, seed=5)
    counts = np.zeros((8, 8))
    for epoch in range(800):
        counts[np.arange(8), schedule[epoch].rows[:, 0]] += 1
    assert np.abs(counts - 100).max() < 45


def test_the_report_counts_rows_and_examples():
    lengths = [4, 4, 3, 5, 8, 2]
    schedule = packed_schedule(lengths, 8, rows=2)
    report = schedule.report()
    assert (report.examples, report.packed_examples) == (4, 6)
    assert report.real_tokens == sum(lengths)
    assert report.mask_bytes == 2 * 8 * 8
    assert "6 examples are packed in 4 rows" in report.summary
    assert json.loads(report.to_json())["mask_bytes"] == 128
    assert "packed" not in jb.BatchSchedule(schedule.plan, lengths).report().summary


def test_incompatible_packings_are_refused():
    lengths = np.array([3, 5, 2, 4])
    packing = jb.packing.pack(lengths, 8)
    plan, short = (jb.plan_buckets([n], max_tokens=16) for n in (8, 5))
    repeating = jb.Curriculum(lengths, replacement=True)
    for arguments, options in (
        ((plan, lengths[:3]), {"packing": packing}),
        ((plan, [3, 5, 3, 3]), {"packing": packing}),
        ((plan, lengths), {"packing": [[0, 1]]}),
        ((short, lengths), {"packing": packing}),
        ((plan, lengths), {"packing": packing, "order": repeating}),
    ):
        with pytest.raises(ValueError, match="`packing`"):
            jb.BatchSchedule(*arguments, **options)


# Balanced work


def longest_first(work, num_parts):
    """Returns work balanced for `num_parts` only, by longest processing time first."""
    parts = [[] for _ in range(num_parts)]
    for x in sorted(work.tolist(), reverse=True):
        free = [part for part in parts if len(part) < len(work) // num_parts]
        min(free, key=sum).append(x)
    return np.array(sum(parts, []))


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_balanced(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 2, 8, 12, 24, 64, 96]))
    work = rng.integers(0, 1000, size) ** 2
    order = balance_rows(work)
    assert sorted(order) == list(range(size))
    for num_parts in (2, 4, 8):
        if size % num_parts == 0:
            balanced = work[order].reshape(num_parts, -1).sum(axis=1).max()
            greedy = longest_first(work, num_parts).reshape(num_parts, -1)
            assert balanced <= 1.25 * greedy.sum(axis=1).max()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_work_of_devices_is_that_of_their_truncated_examples(accumulate):
    rng = np.random.default_rng(0)
    lengths = {name: rng.integers(1, 60, 300) for name in ("source", "target")}
    plan = jb.plan_buckets(
        lengths,
        max_tokens=640,
        max_seq_len=40,
        num_buckets=3,
        batch_size_multiple=4,
        overlong="truncate",
    )
    schedule = jb.BatchSchedule(plan, lengths, accumulate=accumulate, balance=True)
    for step in range(len(schedule)):
        expected = np.zeros((accumulate, 4), np.int64)
        for batch, devices in zip(schedule.micro_batches(step), expected, strict=True):
            for device, rows in enumerate(batch.rows.reshape(4, -1)):
                for row in rows[rows >= 0]:
                    sizes = (min(40, int(x[row])) for x in lengths.values())
                    devices[device] += sum(size**2 for size in sizes)
        work = schedule.device_work(step, num_devices=4)
        np.testing.assert_array_equal(work, expected.sum(axis=0))


# Permutations of many sizes


@pytest.mark.parametrize("largest", [3, 1024, 1025, 10**6, 2**40])
def test_permute_each_agrees_with_permute(largest):
    rng = np.random.default_rng(largest)
    which = rng.integers(0, 9, 300)
    sizes = rng.integers(1, largest, 9, endpoint=True)[which]
    keys = np.array([fold(i) for i in range(9)], np.uint64)[which]
    index = rng.integers(0, sizes)
    permuted = permute_each(index, sizes, keys)
    for i, size, key, result in zip(index, sizes, keys, permuted, strict=True):
        assert permute(np.array([i]), int(size), int(key))[0] == result
    numbers = np.array([0, 5, 2**40])
    assert mix_each(numbers, 77).tolist() == [mix(int(x) ^ 77) for x in numbers]


# Plans

QUADRATIC = jb.plan.TransformerCost(width=64, depth=2)


def epoch_cost(lengths, seq_lens, max_tokens, cost_fn=QUADRATIC):
    packing = jb.packing.pack(lengths, seq_lens)
    plan = jb.plan_buckets(
        packing.row_lengths,
        max_tokens=max_tokens,
        boundaries=seq_lens,
        cost_fn=cost_fn,
    )
    return jb.report(plan, packing.row_lengths).epoch_cost


@pytest.mark.parametrize("seed", range(3))
def test_a_packed_plan_is_about_as_cheap_as_the_best_pair_of_a_grid(seed):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(1 / 40, 400), 256)
    last = int(lengths.max())
    result = jb.plan_packing(
        lengths, max_tokens=2048, cost_fn=QUADRATIC, num_buckets=3, pack="always"
    )
    assert result.packing is not None
    seq_lens = result.plan.boundaries.tolist()
    assert tuple(seq_lens) == result.packing.seq_lens and len(seq_lens) <= 3
    # The reported costs are those of the rows and of the schedule.
    assert result.epoch_costs["packed"] == epoch_cost(lengths, seq_lens, 2048)
    schedule = jb.BatchSchedule(result.plan, lengths, packing=result.packing)
    assert result.epoch_costs["packed"] == schedule.report().epoch_cost
    assert result.report == schedule.report()
    assert result.epoch_costs["packed in one T"] == epoch_cost(lengths, [last], 2048)
    rows = np.bincount(result.plan.assign(result.packing.row_lengths), minlength=3)
    assert tuple(rows[: len(seq_lens)]) == result.rows
    assert np.dot(result.rows, result.segments) == pytest.approx(len(lengths))
    assert result.epoch_costs["packed"] <= result.epoch_costs["packed in one T"]
    # The greedy search may miss a slightly better pair of the grid.
    grid = [last // 4, last // 2, last * 3 // 4]
    pairs = [epoch_cost(lengths, [x, last], 2048) for x in grid]
    assert result.epoch_costs["packed"] <= 1.03 * min(pairs)


# A greedy search by mixed costs alone ends at rows that cost 6% and 8% more for the
# first two seeds.
@pytest.mark.parametrize("seed", [90, 127, 0])
def test_rows_that_mix_lengths_cost_at_most_one_percent_more(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    lengths = np.ceil(np.minimum(rng.lognormal(3.5, 1, 200), 500)).astype(int)
    costs = []
    for mixing in (0.01, 0.0):
        monkeypatch.setattr(row_choice, "_MIXING", mixing)
        choice = jb.plan_packing(
            lengths,
            max_tokens=1500,
            num_buckets=5,
            cost_fn=jb.plan.TransformerCost(64, 4, 256),
            pack="always",
        )
        costs.append(choice.epoch_costs["packed"])
    assert costs[0] <= 1.01 * costs[1]


def test_auto_chooses_the_cheaper_rows():
    lengths = np.repeat([30, 31, 32], 200)
    options = {"max_tokens": 1024, "max_seq_len": 512, "cost_fn": QUADRATIC}
    # Padded rows have little padding here, and longer rows would only cost more.
    padded = jb.plan_packing(lengths, **options)
    assert not padded.is_packed and padded.packing is None
    # `TokenCost` does not count attention, so nothing is said about it.
    assert "ttention" not in jb.plan_packing(lengths, max_tokens=1024).reason
    assert padded.reason.startswith(
        "Rows are padded, because packed rows do not cost less. Cost of an epoch: "
    )
    assert padded.reason.endswith(
        "Attention in packed rows is counted over whole rows."
    )
    assert padded.report == jb.report(padded.plan, lengths)
    assert padded.segments == (1.0,) * len(padded.plan)
    assert jb.plan_packing(lengths, **options, pack="always").is_packed
    uneven = np.random.default_rng(0).integers(1, 65, 600)
    packed = jb.plan_packing(uneven, **options)
    assert packed.is_packed and "because packed rows cost less" in packed.reason
    never = jb.plan_packing(uneven, **options, pack="never")
    assert not never.is_packed and never.epoch_costs == packed.epoch_costs
    assert never.reason.startswith("Rows are padded, because `pack='never'`. Cost of")
    loaded = json.loads(packed.to_json())
    assert loaded["epoch_costs"] == packed.epoch_costs and loaded["packed"]
    assert loaded["report"]["packed_examples"] == 600


def test_a_budget_may_allow_no_batch_of_short_rows():
    lengths = np.random.default_rng(0).integers(1, 1000, 2000)
    result = jb.plan_packing(
        lengths,
        max_tokens=lambda t: 16 * t if t > 64 else 4 * t,
        batch_size_multiple=8,
        cost_fn=lambda b, t: float(b * t * t),
        block_sparse=True,
    )
    assert result.plan.boundaries.min() > 64


def test_rows_longer_than_the_longest_example_are_tried():
    lengths = np.append(np.random.default_rng(0).integers(260, 512, 300), 512)
    limits = {"max_tokens": 4096, "batch_size_multiple": 4, "seq_len_multiple": 16}
    long = jb.plan_packing(lengths, **limits, pack="always")
    assert long.plan.max_seq_len > 512 and long.report.padding < 0.05
    assert all(bucket.num_tokens <= 4096 for bucket in long.plan.buckets)
    # Neither a limit of the user nor a smaller budget allows them.
    for options in ({"max_seq_len": 512}, {"max_tokens": 2400}):
        short = jb.plan_packing(lengths, **{**limits, **options}, pack="always")
        assert short.plan.max_seq_len == 512
    # Many short examples fill rows of the longest length.
    many = np.random.default_rng(0).integers(1, 97, 5000)
    assert jb.plan_packing(many, **limits, pack="always").plan.max_seq_len <= 96


def test_block_sparse_attention_makes_long_rows_cheap():
    lengths = np.random.default_rng(0).integers(1, 65, 3000)
    options = {"max_tokens": 8192, "max_seq_len": 1024, "cost_fn": QUADRATIC}
    dense = jb.plan_packing(lengths, **options, pack="always")
    sparse = jb.plan_packing(lengths, **options, pack="always", block_sparse=True)
    assert sparse.plan.max_seq_len > dense.plan.max_seq_len
    assert sparse.packing.fill > dense.packing.fill
    assert sparse.epoch_costs["packed in one T"] < dense.epoch_costs["packed in one T"]
    # The cost has only the pairs within examples.
    result = jb.plan_packing(
        lengths, **options, pack="always", block_sparse=True, num_buckets=1
    )
    (bucket,) = result.plan.buckets
    size, seq_len = bucket.batch_size, bucket.seq_len
    per_token, per_pair = 72 * 2 * 64**2, 12 * 2 * 64
    pairs = size * result.packing.row_work.mean()
    want = size * seq_len * per_token + per_pair * pairs
    assert result.plan.costs[0] == pytest.approx(want, rel=1e-6)


def test_a_plan_for_packed_rows_requires_its_packing():
    lengths = np.random.default_rng(0).integers(1, 65, 100)
    choice = jb.plan_packing(lengths, max_tokens=1024, pack="always")
    padded = jb.plan_packing(lengths, max_tokens=1024, pack="never")
    plan = choice.plan
    assert plan.packed and jb.BucketPlan.from_json(plan.to_json()) == plan
    assert not padded.plan.packed
    schedule = jb.BatchSchedule(plan, lengths, packing=choice.packing)
    assert schedule.report().summary.startswith(choice.report.summary.splitlines()[0])
    with pytest.raises(ValueError, match="`plan` is for packed rows. Pass the `pack"):
        jb.BatchSchedule(plan, lengths)
    with pytest.raises(ValueError, match="`plan` is for packed rows, and its padding"):
        jb.report(plan, lengths)
    stream = grain.MapDataset.source([{"x": [1]}]).to_iter_dataset()
    with pytest.raises(ValueError, match="`max_segments_per_row=None`"):
        jb.stream_batches(stream, plan, pool_size=2048)
    row_lengths = choice.packing.row_lengths
    assert plot_plan(plan, row_lengths).get_legend() is not None
    of_rows = plan.unpacked
    assert jb.BatchSchedule(of_rows, lengths).report().packed_examples == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pack", {"pack": "maybe"}),
        ("max_segments_per_row", {"max_segments_per_row": 0}),
        ("num_buckets", {"num_buckets": 0}),
        ("max_seq_len", {"max_seq_len": 5}),
        ("max_tokens", {"max_tokens": 5}),
        ("max_tokens", {"max_tokens": [64, 32]}),
    ],
)
def test_invalid_arguments_of_plan_packing_are_refused(name, options):
    given = {"max_tokens": 64, "pack": "always", **options}
    with pytest.raises(ValueError, match=f"`{name}"):
        jb.plan_packing([8, 7, 8, 8, 8, 8], **given)


# Batches


def make_examples(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(1, 100, n).astype(np.int32),
            "vectors": rng.normal(size=(n, 2)),
            "index": i,
            "label": np.float32([i, -i]),
        }
        for i, n in enumerate(lengths)
    ]


def assert_same_examples(examples, source):
    assert [int(x["index"]) for x in examples] == list(range(len(source)))
    for example, want in zip(examples, source, strict=True):
        assert example.keys() == want.keys()
        for name, value in want.items():
            np.testing.assert_array_equal(example[name], value)


SEQUENCES = ["tokens", "vectors"]


def load_batches(source, schedule, *, sequences=SEQUENCES, **options):
    return list(jb.batch_dataset(source, schedule, sequences=sequences, **options))


def unpack_examples(batches, schedule):
    examples = [
        example
        for batch in batches
        for example in jb.data.unbatch(
            batch, sequences=SEQUENCES, max_segments=schedule.max_segments
        )
    ]
    return sorted(examples, key=lambda example: example["index"])


@pytest.mark.parametrize("seed", seeds(6, 40))
def test_unbatch_returns_the_packed_examples(seed):
    lengths, seq_lens, cap = packing_problem(seed)
    lengths = lengths[:60]
    source = make_examples(lengths, seed)
    schedule = packed_schedule(lengths, [*seq_lens[:-1], 4000], cap=cap, seed=seed)
    batches = load_batches(source, schedule)
    assert_same_examples(unpack_examples(batches, schedule), source)
    for batch in batches:
        ids, positions = batch.segment_ids["tokens"], batch.positions["tokens"]
        assert ids.dtype == positions.dtype == np.int32
        starts = (ids > 0) & (np.diff(ids, axis=1, prepend=0) > 0)
        assert (positions[starts] == 0).all() and not positions[ids == 0].any()
        inside = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        assert (np.diff(positions, axis=1)[inside] == 1).all()
    assert sum(int(batch.num_examples) for batch in batches) == len(source)


def test_resuming_works_at_every_step_and_refuses_a_different_packing():
    lengths = np.random.default_rng(2).integers(1, 30, 100)
    source = make_examples(lengths)
    schedule = packed_schedule(lengths, 64, rows=4)
    options = {"sequences": SEQUENCES, "num_epochs": 2}
    dataset = jb.batch_dataset(source, schedule, **options)
    whole = list(dataset)
    for step in range(len(whole)):
        resumed = list(dataset.resume(dataset.position(step)))
        for a, b in zip(whole[step:], resumed, strict=True):
            jax.tree.map(np.testing.assert_array_equal, a, b)
    other = packed_schedule(lengths, 64, cap=3, rows=4)
    with pytest.raises(ValueError, match="packing"):
        jb.batch_dataset(source, other, **options).resume(dataset.position(1))
    without = jb.BatchSchedule(schedule.plan, lengths)
    with pytest.raises(ValueError, match="packing"):
        jb.batch_dataset(source, without, **options).resume(dataset.position(1))


@pytest.mark.parametrize("seed", seeds(6, 20))
def test_a_token_file_yields_the_same_packed_batches(seed, tmp_path: pathlib.Path):
    lengths, seq_lens, cap = packing_problem(seed)
    source = make_examples(lengths[:80], seed)
    schedule = packed_schedule(lengths[:80], [*seq_lens[:-1], 4000], cap=cap)
    file = jb.data.write_token_file(tmp_path / "f", source, sequences=SEQUENCES)
    pad = {"vectors": 0.5, "tokens": 7}
    want = load_batches(source, schedule, pad_value=pad)
    for a, b in zip(load_batches(file, schedule, pad_value=pad), want, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    both = jb.data.concatenate([file, file])
    twice = packed_schedule(np.tile(lengths[:80], 2), [*seq_lens[:-1], 4000], cap=cap)
    num_examples = sum(int(batch.num_examples) for batch in load_batches(both, twice))
    assert num_examples == 2 * len(source)


# Weights


@jax.jit
def sequence_weights(batch, where):
    return jb.attention.token_weights(batch, "sequence", where=where)


@pytest.mark.parametrize("seed", range(5))
def test_token_weights_agree_with_a_loop(seed):
    rng = np.random.default_rng(seed)
    lengths = np.zeros((4, 5), np.int64)
    for row in lengths:
        filled = rng.integers(1, 6, rng.integers(0, 6))
        row[: len(filled)] = filled
    ids, positions = row_segments(lengths, 26)
    batch = jb.Batch({}, {"x": jnp.asarray(ids)}, {"x": jnp.asarray(positions)})
    where = rng.random(ids.shape) < 0.7
    result = sequence_weights(batch, where)
    want = np.zeros(ids.shape)
    for row, segment in zip(*np.nonzero(lengths), strict=True):
        is_counted = (ids[row] == segment + 1) & where[row]
        want[row, is_counted] = 1 / max(is_counted.sum(), 1)
    np.testing.assert_allclose(result, want, rtol=1e-6)
    np.testing.assert_array_equal(
        jb.attention.token_weights(batch, where=where), (ids > 0) & where
    )
    with pytest.raises(ValueError, match="`per='row'`"):
        jb.attention.token_weights(batch, "row")  # pyright: ignore
