"""Every reader keeps the last tokens of examples that are too long."""

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.data.source import RowSource, SpanSource

LAST = 8
PAD = {"tokens": 9, "frames": 0.5}


def make_examples(lengths):
    rng = np.random.default_rng(len(lengths))
    return [
        {
            "tokens": rng.integers(0, 100, n).astype(np.int32),
            "frames": rng.standard_normal((n, 2)).astype(np.float32),
            "label": np.int64(i),
        }
        for i, n in enumerate(lengths)
    ]


def expected_features(examples, rows, bucket):
    """The oracle: each row is the end of its example, followed by padding."""
    num_rows, seq_len = bucket.batch_size, bucket.seq_len
    tokens = np.full((num_rows, seq_len), PAD["tokens"], np.int32)
    frames = np.full((num_rows, seq_len, 2), PAD["frames"], np.float32)
    label = np.zeros(num_rows, np.int64)
    for row, index in enumerate(rows):
        if index >= 0:
            example = examples[index]
            for padded, name in ((tokens, "tokens"), (frames, "frames")):
                end = example[name][-seq_len:]
                padded[row, : len(end)] = end
            label[row] = example["label"]
    return {"tokens": tokens, "frames": frames, "label": label}


class Rows:
    """A source that gathers whole rows, but no spans."""

    sequences = ("tokens", "frames")

    def __init__(self, examples):
        self.examples = examples
        self.lengths = np.array([len(x["tokens"]) for x in examples], np.int32)

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]

    def collate(self, rows, bucket, *, pad_value, truncate):
        raise AssertionError("`collate` keeps the first tokens.")


def token_file(folder, examples):
    sequences = ["tokens", "frames"]
    return jb.data.write_token_file(folder, examples, sequences=sequences)


@pytest.fixture(params=["list", "rows", "file", "files", "chunks", "file chunks"])
def source(request, tmp_path):
    """A source of examples of up to 20 tokens, in six kinds."""
    lengths = np.random.default_rng(1).integers(1, 21, 60)
    examples = make_examples(lengths)
    if request.param == "list":
        return examples
    if request.param == "rows":
        return Rows(examples)
    if request.param == "files":
        return jb.data.concatenate(
            [
                token_file(tmp_path / "a", examples[:25]),
                token_file(tmp_path / "b", examples[25:]),
            ]
        )
    sequences = ["tokens", "frames"]
    if request.param == "chunks":
        return jb.data.split_source(examples, 13, lengths=lengths, sequences=sequences)
    file = token_file(tmp_path / "file", examples)
    return file if request.param == "file" else jb.data.split_source(file, 13)


def lengths_of(source):
    return np.array([len(example["tokens"]) for example in source])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_have_the_last_tokens(source, accumulate):
    examples, lengths = list(source), lengths_of(source)
    shapes = [(8, 4), (4, LAST)]
    plan = jb.BucketPlan.from_shapes(shapes, overlong="truncate_left")
    assert plan == jb.BucketPlan.from_json(plan.to_json())
    schedule = jb.BatchSchedule(plan, lengths, accumulate=accumulate)
    options = {"sequences": ["tokens", "frames"], "pad_value": PAD}
    whole = jb.batch_dataset(source, schedule, **options)
    # The second process of two reads the other half of the rows.
    shard = jb.data.RowShard(parts=(1,), num_parts=2)
    half = jb.batch_dataset(source, schedule, shard=shard, **options)
    for step in range(schedule.steps_per_epoch):
        micro = schedule.micro_batches(step)
        batches, halves = whole[step], half[step]
        if accumulate == 1:
            batches, halves = (batches,), (halves,)
        for indices, batch, part in zip(micro, batches, halves, strict=True):
            expected = expected_features(examples, indices.rows, indices.bucket)
            kept = np.minimum(lengths[indices.rows], indices.bucket.seq_len)
            kept[indices.rows < 0] = 0
            middle = indices.bucket.batch_size // 2
            for name, values in expected.items():
                np.testing.assert_array_equal(batch.features[name], values)
                np.testing.assert_array_equal(part.features[name], values[middle:])
                assert batch.features[name].dtype == values.dtype
            mask = np.arange(indices.bucket.seq_len) < kept[:, None]
            ids, positions = batch.segment_ids["tokens"], batch.positions["tokens"]
            np.testing.assert_array_equal(ids, mask.astype(int))
            np.testing.assert_array_equal(positions, mask * np.arange(mask.shape[1]))


def test_token_files_and_their_chunks_gather_the_last_tokens(source, monkeypatch):
    """Sources of spans are not read one example at a time."""
    plan = jb.BucketPlan.from_shapes([(4, LAST)], overlong="truncate_left")
    schedule = jb.BatchSchedule(plan, lengths_of(source))
    dataset = jb.batch_dataset(
        source, schedule, sequences=["tokens", "frames"], pad_value=PAD
    )
    if isinstance(source, SpanSource):
        monkeypatch.setattr(type(source), "__getitem__", None)
        assert dataset[0].num_tokens > 0
    else:
        assert not isinstance(source, RowSource) or isinstance(source, Rows)


@pytest.mark.parametrize("seed", range(20))
def test_lengths_and_reports_are_those_of_truncate(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, int(rng.integers(1, 60)))
    options = {"max_tokens": 160, "max_seq_len": int(rng.integers(1, 40))}
    plans = [
        jb.plan_buckets(lengths, num_buckets=3, overlong=overlong, **options)
        for overlong in ("truncate", "truncate_left")
    ]
    first, last = plans
    assert last.buckets == first.buckets and last.fingerprint != first.fingerprint
    assert (first.truncates, first.truncates_left) == (True, False)
    assert (last.truncates, last.truncates_left) == (False, True)
    np.testing.assert_array_equal(last.assign(lengths), first.assign(lengths))
    kept = last.kept_lengths(lengths)
    np.testing.assert_array_equal(kept, first.kept_lengths(lengths))
    np.testing.assert_array_equal(kept, np.minimum(lengths, last.max_seq_len))
    assert jb.report(last, lengths).to_dict() == jb.report(first, lengths).to_dict()


def test_each_of_several_sequences_has_its_own_policy():
    source = [
        {"prompt": np.arange(p), "answer": np.arange(a), "weights": np.ones(a)}
        for p, a in ((9, 3), (2, 9), (3, 2), (9, 9), (4, 12))
    ]
    sequences = {"prompt": ["prompt"], "answer": ["answer", "weights"]}
    lengths = jb.measure_lengths(source, sequences=sequences, progress=False)
    plan = jb.plan_buckets(
        lengths,
        max_tokens=64,
        num_buckets=2,
        max_seq_len={"prompt": 4, "answer": 8},
        overlong={"prompt": "truncate_left", "answer": "truncate"},
    )
    assert (plan.truncates, plan.truncates_left) == (["answer"], ["prompt"])
    assert plan == jb.BucketPlan.from_json(plan.to_json())
    schedule = jb.BatchSchedule(plan, lengths)
    dataset = jb.batch_dataset(source, schedule, sequences=sequences)
    seen = []
    for indices, batch in zip(schedule, dataset, strict=False):
        rows = jb.data.unbatch(batch, sequences=sequences)
        for index, row in zip(indices.rows[indices.rows >= 0], rows, strict=True):
            seen.append(int(index))
            np.testing.assert_array_equal(row["prompt"], source[index]["prompt"][-4:])
            np.testing.assert_array_equal(row["answer"], source[index]["answer"][:8])
            assert len(row["weights"]) == len(row["answer"])
    assert sorted(seen) == list(range(len(source)))


def test_packed_rows_of_examples_that_fit_are_the_same():
    lengths = np.random.default_rng(0).integers(1, LAST + 1, 40)
    source = make_examples(lengths)
    packing = jb.packing.pack(lengths, LAST)
    batches = []
    for overlong in ("error", "truncate_left"):
        plan = jb.BucketPlan.from_shapes([(4, LAST)], overlong=overlong)
        schedule = jb.BatchSchedule(plan, lengths, packing=packing)
        dataset = jb.batch_dataset(source, schedule, sequences=["tokens", "frames"])
        batches.append([dataset[step] for step in range(len(dataset))])
    for one, other in zip(*batches, strict=True):
        for name, values in one.features.items():
            np.testing.assert_array_equal(values, other.features[name])


def test_examples_of_packed_rows_are_truncated_one_by_one():
    rows = [[{"x": [1, 2, 3]}], [{"x": [4]}, {"x": [5]}]]
    batch = jb.data.collate_rows(
        rows, jb.Bucket(2, 2), truncate_left=True, max_segments=2
    )
    np.testing.assert_array_equal(batch.features["x"], [[2, 3], [4, 5]])
