"""Blocks of whole examples, against fairseq's block modes and from any source."""

import pickle
import re

import jax
import numpy as np
import pytest

from jaxbucket import BatchSchedule, Bucket, batch_dataset, plan_buckets
from jaxbucket.data import (
    RowShard,
    collate_rows,
    concatenate,
    join_examples,
    split_source,
    write_token_file,
)
from jaxbucket.data.source import PackedSource, RowSource, SpanSource
from jaxbucket.testing import check_batches

SEEDS = [
    *range(4),
    *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 25)),
]


def make_examples(lengths, seed=0):
    """Examples with unique tokens, and a second sequence."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(lengths) - lengths
    return [
        {
            "tokens": np.arange(start, start + n, dtype=np.int32),
            "frames": rng.normal(size=(n, 2)).astype(np.float32),
        }
        for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]


def random_case(seed):
    """Returns lengths, T, and the document of each example or None."""
    rng = np.random.default_rng(seed)
    size, longest = int(rng.choice([1, 2, 30, 100])), int(rng.choice([1, 8, 30]))
    lengths = rng.integers(1, longest, size, endpoint=True)
    max_seq_len = int(rng.choice([1, longest, 3 * longest, 2**40]))
    documents = np.cumsum(rng.random(size) < 0.2)
    # Only changes matter, not the order of the numbers.
    return lengths, max_seq_len, [None, documents, documents % 3][seed % 3]


def fairseq_blocks(lengths, max_seq_len, documents):
    """The modes "complete" and "complete_doc" of fairseq's `TokenBlockDataset`."""
    blocks, block, total = [], [], 0
    for example, length in enumerate(lengths.tolist()):
        is_border = (
            documents is not None
            and example > 0
            and documents[example] != documents[example - 1]
        )
        if block and (total + length > max_seq_len or is_border):
            blocks.append(block)
            block, total = [], 0
        block.append(example)
        total += length
    return [*blocks, block]


def joined(examples, blocks):
    """The reference implementation of joining."""
    return [
        {
            name: np.concatenate([examples[i][name] for i in block])
            for name in examples[0]
        }
        for block in blocks
    ]


def assert_same(result, expected):
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture(name="file")
def file_fixture(tmp_path):
    """Returns a function that writes a token file."""

    def file(examples):
        return write_token_file(tmp_path / str(len(list(tmp_path.iterdir()))), examples)

    return file


@pytest.mark.parametrize("seed", range(60))
def test_the_blocks_are_those_of_fairseq(seed):
    lengths, max_seq_len, documents = random_case(seed)
    source = [{"tokens": np.zeros(n, np.int8)} for n in lengths]
    blocks = join_examples(source, max_seq_len, lengths=lengths, documents=documents)
    want = fairseq_blocks(lengths, max_seq_len, documents)
    splits = blocks.example_splits.tolist()
    assert splits == [block[0] for block in want] + [len(lengths)]
    assert blocks.lengths.tolist() == [int(lengths[block].sum()) for block in want]
    assert blocks.lengths.dtype == np.int32 and len(blocks) == len(want)


@pytest.mark.parametrize("kind", ["list", "file"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_has_the_tokens_of_its_examples(seed, kind, file):
    lengths, max_seq_len, documents = random_case(seed)
    examples = make_examples(lengths)
    options = {"documents": documents}
    if kind == "list":
        source = join_examples(examples, max_seq_len, lengths=lengths, **options)
    else:
        source = join_examples(file(examples), max_seq_len, **options)
    want = joined(examples, fairseq_blocks(lengths, max_seq_len, documents))
    assert_same(list(source), want)
    copy = pickle.loads(pickle.dumps(source))
    assert_same(list(copy), want)
    assert copy.lengths.tolist() == source.lengths.tolist()
    assert copy.fingerprint == source.fingerprint


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_of_a_file_are_those_of_its_blocks(seed, file):
    rng = np.random.default_rng(seed)
    lengths, max_seq_len, documents = random_case(seed)
    examples = make_examples(lengths)
    source = join_examples(file(examples), max_seq_len, documents=documents)
    assert all(isinstance(source, x) for x in (RowSource, PackedSource, SpanSource))
    blocks = joined(examples, fairseq_blocks(lengths, max_seq_len, documents))
    for _ in range(4):
        bucket = Bucket(int(rng.integers(1, 6)), int(rng.integers(1, 40)))
        rows = rng.integers(-1, len(blocks), bucket.batch_size)
        options = {"pad_value": {"tokens": 7}, "truncate": True}
        some = [None if row < 0 else blocks[row] for row in rows]
        want = collate_rows(some, bucket, like=blocks[0], **options)
        assert_same(source.collate(rows, bucket, **options), want)
    # Two blocks in one packed row.
    bucket = Bucket(1, int(source.lengths[[0, -1]].sum()))
    want = collate_rows([[blocks[0], blocks[-1]]], bucket, max_segments=2)
    assert_same(source.collate(np.array([[0, len(blocks) - 1]]), bucket), want)


def test_blocks_can_be_split_truncated_and_concatenated(file):
    lengths = np.array([3, 4, 25, 2, 9])
    examples = make_examples(lengths)
    source = join_examples(file(examples), 12)
    assert source.lengths.tolist() == [7, 25, 11]
    chunks = split_source(source, 12)
    tokens = [chunk["tokens"].tolist() for chunk in chunks]
    assert list(map(len, tokens)) == [7, 12, 12, 1, 11]
    assert sum(tokens, []) == list(range(43))
    plan = plan_buckets(
        source.lengths, max_tokens=24, max_seq_len=12, overlong="truncate_left"
    )
    batches = batch_dataset(source, BatchSchedule(plan, source.lengths))
    seen = np.concatenate([x.features["tokens"][x.mask] for x in batches])
    assert sorted(seen) == [*range(7), *range(20, 43)]
    both = concatenate([source, join_examples(file(examples[:2]), 12)])
    assert isinstance(both, RowSource) and both.lengths.tolist() == [7, 25, 11, 7]
    # Chunks and blocks provide their lengths, also if they are read one at a time.
    parts = split_source(examples, 5, lengths=lengths)
    again = join_examples(join_examples(parts, 10), 20)
    assert again.lengths.tolist() == [17, 17, 9]
    assert_same(again[2]["tokens"], np.arange(34, 43, dtype=np.int32))


@pytest.mark.parametrize("kind", ["list", "file"])
def test_batches_of_blocks_satisfy_all_invariants(kind, file):
    lengths = np.random.default_rng(0).integers(1, 12, 120)
    examples = [{"tokens": np.full(n, i)} for i, n in enumerate(lengths)]
    source = file(examples) if kind == "file" else examples
    blocks = join_examples(source, 24, lengths=lengths)
    plan = plan_buckets(blocks.lengths, max_tokens=96, batch_size_multiple=2)
    schedule = BatchSchedule(plan, blocks.lengths, seed=1)
    # The first token of a block identifies it.
    number = {int(blocks[i]["tokens"][0]): i for i in range(len(blocks))}

    def loader(host, start_step):
        shard = RowShard((host,), 2)
        dataset = batch_dataset(blocks, schedule, shard=shard, start_step=start_step)
        return dataset.map(with_index)

    def with_index(batch):
        first = batch.features["tokens"][:, 0].tolist()
        index = np.array([number[x] for x in first])
        return batch._replace(features={**batch.features, "index": index})

    check_batches(
        loader,
        num_examples=len(blocks),
        buckets=plan.buckets,
        max_tokens=96,
        num_hosts=2,
        resume_at=[1],
    )


def test_the_fingerprint_depends_on_the_data_and_the_blocks(file):
    examples = make_examples(np.array([3, 2, 4, 1]))
    changed = [*examples[:3], {**examples[3], "tokens": examples[3]["tokens"] + 1}]
    for make in (lambda x: x, file):
        sources = [
            join_examples(make(examples), 5, lengths=[3, 2, 4, 1]),
            # The same blocks, which new examples might change.
            join_examples(make(examples), 6, lengths=[3, 2, 4, 1]),
            join_examples(
                make(examples), 5, documents=[0, 1, 1, 1], lengths=[3, 2, 4, 1]
            ),
            join_examples(make(changed), 5, lengths=[3, 2, 4, 1]),
        ]
        assert len({x.fingerprint for x in sources}) == 4
        same = join_examples(make(examples), 5, lengths=[3, 2, 4, 1])
        assert same.fingerprint == sources[0].fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": None}, "`lengths` is missing, and the source does not provide"),
        ({"lengths": [3]}, "`source` has 2 examples. Pass the lengths of the examples "
         "before they are joined."),
        ({"max_seq_len": 0}, "`max_seq_len=0` must be a positive integer"),
        ({"documents": [1]}, "`documents` is int64[1]. Pass an integer for each of the "
         "2 examples, the number of its document."),
        ({"documents": [0.0, 1.0]}, "`documents` is float64[2]. Pass an integer"),
        ({"documents": 1}, "`documents` is int64[]. Pass an integer"),
        ({"sequences": ["x"]}, "`source[0]` has the features ['y'], which are not "
         "sequences and would have several values in a block. Remove them, or put"),
        ({"sequences": ["z"]}, "`source[0]`, before it was joined, cannot be joined: "),
        ({"lengths": [2, 1]}, "`source[0]`, before it was joined, has length 3"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(options, message):
    source = [{"x": [1, 2, 3], "y": [1, 2, 3]}, {"x": [4], "y": [4]}]
    arguments = {"max_seq_len": 8, "lengths": [3, 1], **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        join_examples(source, arguments.pop("max_seq_len"), **arguments)


def test_values_of_whole_examples_are_refused(file):
    examples = [{"x": np.arange(n), "label": np.array(n)} for n in (3, 1)]
    for source in (examples, file(examples)):
        with pytest.raises(ValueError, match=r"`source\[0\]` has the features \['lab"):
            join_examples(source, 8, lengths=[3, 1])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"x": np.zeros(2, np.int64)}, "has length 2, but `lengths[1]=1`"),
        (
            {"x": np.zeros(1)},
            "cannot be joined with `source[0]`: Row 1: feature 'x' is",
        ),
        ({"y": np.zeros(1)}, "cannot be joined with `source[0]`: Row 1 has features"),
    ],
)
def test_an_example_that_does_not_fit_its_block_is_named(example, message):
    source = [{"x": np.zeros(3, np.int64)}, example]
    blocks = join_examples(source, 8, lengths=[3, 1])
    with pytest.raises(ValueError, match=rf"`source\[1\]`.*{re.escape(message)}"):
        blocks[0]


@pytest.mark.parametrize("kind", ["list", "file"])
def test_blocks_are_a_read_only_sequence(kind, file):
    lengths = np.array([3, 4, 5])
    examples = make_examples(lengths)
    source = file(examples) if kind == "file" else examples
    blocks = join_examples(source, 7, lengths=lengths)
    assert repr(blocks) == "BlockSource(2 blocks of at most 7 of 3 examples)"
    lengths[:] = 1
    assert blocks[0]["tokens"].tolist() == list(range(7))
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"`index={index}` must be from 0 to 1"):
            blocks[index]
    for array in (blocks.lengths, blocks.example_splits):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
