"""Indices of batches for PyTorch, against the schedule."""

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.base.row_shard import RowShard

LENGTHS = np.random.default_rng(0).integers(1, 30, 200)


def make_schedule(**options):
    plan = jb.plan_buckets(
        LENGTHS, max_tokens=240, num_buckets=3, batch_size_multiple=4
    )
    return jb.BatchSchedule(plan, LENGTHS, seed=1, **options)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_parts_of_all_processes_are_every_example_once(num_parts, accumulate):
    schedule = make_schedule(accumulate=accumulate)
    samplers = [
        jb.schedule.BatchSampler(schedule, RowShard((part,), num_parts))
        for part in range(num_parts)
    ]
    epochs = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [list(sampler) for sampler in samplers]
        assert {len(b) for b in batches} == {len(samplers[0])}
        seen = [index for part in batches for batch in part for index in batch]
        assert sorted(seen) == list(range(len(LENGTHS)))
        for *parts, bucket in zip(*batches, samplers[0].buckets(), strict=True):
            longest = max(LENGTHS[sum(parts, [])], default=0)
            assert longest <= bucket.seq_len
            assert all(len(x) <= bucket.batch_size // num_parts for x in parts)
        epochs.append(batches)
    assert epochs[0] != epochs[1]


def test_packed_examples_are_listed_row_by_row():
    choice = jb.plan_packing(LENGTHS, max_tokens=240, pack="always")
    schedule = jb.BatchSchedule(choice.plan, LENGTHS, packing=choice.packing)
    seen = sum(jb.schedule.BatchSampler(schedule), [])
    assert sorted(seen) == list(range(len(LENGTHS)))


# Workers are forked, and other tests of the same process may have imported jax.
@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_loads_the_batches(num_workers):
    data = pytest.importorskip("torch.utils.data")
    schedule = make_schedule()
    source = [{"x": np.full(n, i)} for i, n in enumerate(LENGTHS)]
    sampler = jb.schedule.BatchSampler(schedule)
    loader = data.DataLoader(
        source, batch_sampler=sampler, collate_fn=list, num_workers=num_workers
    )
    got = [[int(x["x"][0]) for x in batch] for batch in loader]
    assert got == list(sampler)
    # Whole batches, padded, by step.
    dataset = jb.batch_dataset(source, schedule)
    loader = data.DataLoader(
        dataset, batch_size=None, collate_fn=_unchanged, num_workers=num_workers
    )
    for step, batch in enumerate(loader):
        want = dataset[step]
        assert batch.bucket == want.bucket
        np.testing.assert_array_equal(batch.features["x"], want.features["x"])
    assert step == len(schedule) - 1


def test_a_process_without_an_example_gets_an_empty_list():
    # The last batches have fewer examples than rows.
    schedule = jb.BatchSchedule(make_schedule().plan, LENGTHS[:161], seed=1)
    samplers = [
        jb.schedule.BatchSampler(schedule, RowShard((part,), 4)) for part in range(4)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert [x.count([]) for x in batches] == [0, 0, 1, 2]
    assert {len(x) for x in batches} == {len(samplers[0])}
    data = pytest.importorskip("torch.utils.data")
    for sampler in samplers:
        loader = data.DataLoader(range(161), batch_sampler=sampler, collate_fn=list)
        assert list(loader) == list(sampler)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("schedule", (jb.Mixture({"a": make_schedule()}, {"a": 1}),)),
        ("shard", (make_schedule(), 0)),
        ("batch_size", (make_schedule(), RowShard((0,), 3))),
        ("epoch", (make_schedule(), None, -1)),
    ],
)
def test_wrong_arguments_are_refused(name, arguments):
    with pytest.raises(ValueError, match=f"`{name}"):
        jb.schedule.BatchSampler(*arguments)


def _unchanged(batch):
    return batch
