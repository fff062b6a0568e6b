import re

import grain
import numpy as np
import pytest

from jaxbucket import BatchSchedule, batch_dataset, plan_buckets
from jaxbucket.data import RowShard, unbatch


class Source:
    """Examples of given lengths, computed on demand. Records the reads."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.read.append(index)
        tokens = (index * 31 + np.arange(self.lengths[index])) % 1000
        return {"tokens": tokens.astype(np.int32), "index": np.int32(index)}


def make_job(seed: int = 0, **options) -> tuple[Source, BatchSchedule]:
    lengths = np.random.default_rng(seed).integers(1, 60, 150)
    plan = plan_buckets(lengths, max_tokens=960, num_buckets=3, batch_size_multiple=8)
    return Source(lengths), BatchSchedule(plan, lengths, seed=seed, **options)


def test_batches_contain_the_examples_of_the_schedule(problem):
    source, schedule = Source(problem.lengths), BatchSchedule(*problem, seed=2)
    dataset = batch_dataset(source, schedule)
    assert len(dataset) == len(schedule)
    longest = problem.plan.max_seq_len
    for step in range(0, len(dataset), 1 + len(dataset) // 20):
        batch, indices = dataset[step], schedule[step]
        assert batch.bucket == indices.bucket
        examples = iter(unbatch(batch, sequences=["tokens"]))
        for row in indices.rows:
            if row >= 0:
                result, expected = next(examples), source[row]
                assert result["index"] == row
                assert (
                    result["tokens"].tolist() == expected["tokens"][:longest].tolist()
                )
        assert next(examples, None) is None


def test_only_the_examples_of_the_shard_are_read():
    source, schedule = make_job()
    shard = RowShard((1, 6), 8)
    dataset = batch_dataset(source, schedule, shard=shard)
    dataset[0]
    for step in range(1, 5):
        source.read.clear()
        dataset[step]
        indices = schedule[step]
        rows = indices.rows[shard.rows(indices.bucket.batch_size)]
        assert source.read == rows[rows >= 0].tolist()


def test_a_run_ends_with_the_epoch_it_starts_in():
    source, schedule = make_job()
    size = len(schedule)
    assert len(batch_dataset(source, schedule)) == size
    assert len(batch_dataset(source, schedule, start_step=3)) == size - 3
    assert len(batch_dataset(source, schedule, start_step=size)) == size
    assert len(batch_dataset(source, schedule, start_step=5, num_steps=5)) == 0


def test_the_dataset_supports_the_map_dataset_interface():
    source, schedule = make_job()
    dataset = batch_dataset(source, schedule)
    assert isinstance(dataset, grain.MapDataset)
    assert [b.bucket for b in dataset[2:6:2]] == [dataset[2].bucket, dataset[4].bucket]
    tokens = dataset.map(lambda batch: int(batch.num_tokens))
    assert sum(tokens) == source.lengths.sum()


def test_sequences_and_pad_value_are_applied():
    source = [
        {"x": np.arange(2), "v": np.arange(3)},
        {"x": np.arange(4), "v": np.ones(3, int)},
    ]
    plan = plan_buckets([2, 4], max_tokens=8, num_buckets=1)
    schedule = BatchSchedule(plan, [2, 4], order="source")
    dataset = batch_dataset(source, schedule, sequences=["x"], pad_value=-7)
    assert dataset[0].features["x"].tolist() == [[0, 1, -7, -7], [0, 1, 2, 3]]
    assert dataset[0].features["v"].tolist() == [[0, 1, 2], [1, 1, 1]]


def test_an_example_that_changed_since_it_was_measured_is_refused():
    source, schedule = make_job()
    index = int(schedule[0].rows[0])
    source.lengths = source.lengths.copy()
    source.lengths[index] += 1
    message = (
        f"`source[{index}]` has length {source.lengths[index]}, but `lengths[{index}]="
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        batch_dataset(source, schedule)[0]


def test_a_source_may_reuse_its_arrays():
    lengths, array = [3, 1, 4, 2, 5], np.zeros(5, np.int32)

    class ReusedArray:
        def __len__(self):
            return len(lengths)

        def __getitem__(self, index):
            array[:] = index
            return {"x": array[: lengths[index]]}

    # The longest example fills a batch of its own.
    plan = plan_buckets(lengths, max_tokens=5, num_buckets=2)
    schedule = BatchSchedule(plan, lengths)
    dataset = batch_dataset(ReusedArray(), schedule)
    batches = [dataset[step] for step in range(len(schedule))]
    for batch, indices in zip(batches, schedule, strict=True):
        arrays = [example["x"].tolist() for example in unbatch(batch)]
        assert arrays == [[i] * lengths[i] for i in indices.rows if i >= 0]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"source": iter(())}, "source"),
        ({"source": [{"x": [1]}]}, "source"),
        ({"source": {"a": [{"x": [1]}]}}, "source"),
        ({"schedule": [1]}, "schedule"),
        ({"shard": (0, 2)}, "shard"),
        ({"shard": RowShard((0,), 3, ("data",))}, "batch_size="),
        ({"start_step": -1}, "start_step=-1"),
        ({"start_step": 6, "num_steps": 5}, "start_step=6"),
        ({"start_step": 1.5}, "start_step=1.5"),
        ({"num_steps": 2.0}, "num_steps=2.0"),
        ({"num_steps": 5, "num_epochs": 1}, "num_steps=5"),
        ({"num_epochs": 0}, "num_epochs=0"),
        ({"pad_value": "x"}, "pad_value='x'"),
        ({"transform": 3}, "transform"),
    ],
)
def test_invalid_arguments_are_refused(arguments, name):
    source, schedule = make_job()
    with pytest.raises(ValueError, match=f"`{name}"):
        batch_dataset(**{"source": source, "schedule": schedule} | arguments)


def test_an_invalid_index_is_refused():
    with pytest.raises(IndexError, match="`index=-1`"):
        batch_dataset(*make_job())[-1]


# Resuming


def test_a_position_beyond_the_end_of_the_run_is_refused():
    source = [{"x": [1]}]
    schedule = BatchSchedule(plan_buckets([1], max_tokens=1), [1])
    position = batch_dataset(source, schedule, num_steps=9).position(9)
    with pytest.raises(ValueError, match="ends at step 5, before .* step 9"):
        batch_dataset(source, schedule, num_steps=5).resume(position)


def test_changes_are_reported_before_the_end_of_the_run():
    source, schedule = make_job(1)
    position = batch_dataset(source, schedule, num_steps=900).position(900)
    other_plan = plan_buckets(source.lengths, max_tokens=640, batch_size_multiple=8)
    for other, message in (
        (BatchSchedule(schedule.plan, source.lengths, seed=2), "schedule seed 1 -> 2"),
        (BatchSchedule(other_plan, source.lengths, seed=1), "plan max tokens 960 -> "),
    ):
        with pytest.raises(ValueError, match=message):
            batch_dataset(source, other, num_steps=5).resume(position)
