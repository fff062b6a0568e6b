"""Splitting long examples into chunks loses no token, from any kind of source."""

import dataclasses
import json
import pickle
import re

import jax
import matplotlib
import numpy as np
import pytest
from click.testing import CliRunner

import jaxbucket as jb
from jaxbucket import (
    BatchSchedule,
    Bucket,
    BucketPlan,
    batch_dataset,
    plan_buckets,
    report,
)
from jaxbucket.cli import main
from jaxbucket.data import (
    RowShard,
    TokenFile,
    collate_rows,
    concatenate,
    split_source,
    write_token_file,
)
from jaxbucket.data.source import RowSource, contents
from jaxbucket.plan import chunk_lengths
from jaxbucket.plan.reports.plots import plot_lengths, plot_plan
from jaxbucket.testing import check_batches

matplotlib.use("agg")

SEQUENCES = ["tokens", "frames"]
HOSTS = (1, 2, 3, 8)
# Seeds of random cases.
SEEDS = [
    *range(4),
    *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 12)),
]


def make_examples(lengths) -> list[dict]:
    """Examples with unique tokens, and features of other kinds."""
    rng = np.random.default_rng(0)
    starts = np.cumsum(lengths) - lengths
    return [
        {
            "tokens": np.arange(start, start + n, dtype=np.int32),
            "frames": rng.normal(size=(n, 3)).astype(np.float32),
            "example": np.int64(number),
            "speaker": rng.normal(size=4),
        }
        for number, (start, n) in enumerate(zip(starts, lengths, strict=True))
    ]


def random_lengths(seed: int) -> np.ndarray:
    """Short lengths, multiples of the chunk size, and much longer ones."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 4, 60]))
    some = rng.integers(1, 40, size), rng.integers(1, 6, size) * 8
    return np.where(rng.random(size) < 0.7, *some)


def split_examples(examples: list[dict], longest: int) -> list[dict]:
    """The reference implementation of splitting."""
    chunks = []
    for example in examples:
        for start in range(0, len(example["tokens"]), longest):
            parts = {name: example[name][start : start + longest] for name in SEQUENCES}
            chunks.append({**example, **parts})
    return chunks


KINDS = ["list", "file", "files", "split twice", "split files"]


@pytest.fixture(name="split")
def split_fixture(tmp_path):
    """Returns a function `(kind, examples, longest)` -> source of chunks."""

    def file(examples, number=0) -> TokenFile:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}-{number}"
        return write_token_file(path, examples, sequences=SEQUENCES)

    def split(kind, examples, longest):
        if kind == "list":
            lengths = [len(example["tokens"]) for example in examples]
            return split_source(examples, longest, lengths=lengths, sequences=SEQUENCES)
        if kind == "file":
            return split_source(file(examples), longest)
        if kind == "split twice":
            return split_source(split_source(file(examples), 3 * longest), longest)
        half = len(examples) // 2
        files = [file(part) for part in (examples[:half], examples[half:]) if part]
        if kind == "files":
            return split_source(concatenate(files), longest)
        return concatenate([split_source(part, longest) for part in files])

    return split


def assert_same(result, expected) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert (np.asarray(x).dtype, np.shape(x)) == (np.asarray(y).dtype, np.shape(y))
        np.testing.assert_array_equal(x, y)


# Lengths


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("longest", [1, 7, 8, 40, 2**40])
def test_all_chunks_but_the_last_of_an_example_are_full(seed, longest):
    lengths = random_lengths(seed)
    expected = [
        min(longest, int(n) - start) for n in lengths for start in range(0, n, longest)
    ]
    for dtype in (np.uint8, np.int16, np.int32, np.int64):
        chunks = chunk_lengths(lengths.astype(dtype), longest)
        assert chunks.dtype == np.int32
        assert chunks.tolist() == expected


def test_many_lengths_are_split_like_few():
    lengths = np.random.default_rng(0).integers(1, 100, 200_000)
    chunks = chunk_lengths(lengths, 16)
    counts = -(-lengths // 16)
    parts = np.add.reduceat(chunks, np.cumsum(counts) - counts)
    np.testing.assert_array_equal(parts, lengths)
    assert len(chunks) == counts.sum() and 1 <= chunks.min() <= chunks.max() == 16


def test_the_maximum_length_can_be_split():
    chunks = chunk_lengths([2**31 - 1, 1], 2**30)
    assert chunks.tolist() == [2**30, 2**30 - 1, 1]
    assert chunk_lengths([2**31 - 1], 2**31 - 1).tolist() == [2**31 - 1]


@pytest.mark.parametrize(
    ("lengths", "longest", "message"),
    [
        ([3], 0, "`max_seq_len=0` must be a positive integer"),
        ([3], 2.0, "`max_seq_len=2.0` is not an integer"),
        ([3, 0], 2, "`lengths[1]=0`: a length must be between 1"),
        ([], 2, "`lengths` is empty"),
        ([1.5], 2, "`lengths[0]=1.5` is not an integer"),
    ],
)
def test_invalid_lengths_and_sizes_are_refused(lengths, longest, message):
    for function in (
        lambda: chunk_lengths(lengths, longest),
        lambda: split_source([{}] * len(lengths), longest, lengths=lengths),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            function()


# Sources


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_token_is_in_one_chunk_and_in_order(split, kind, seed):
    lengths = random_lengths(seed)
    examples = make_examples(lengths)
    longest = [1, 8, 13, 100][seed % 4]
    source = split(kind, examples, longest)
    chunks = [source[index] for index in range(len(source))]
    assert source.lengths.tolist() == [len(chunk["tokens"]) for chunk in chunks]
    assert source.lengths.tolist() == chunk_lengths(lengths, longest).tolist()
    tokens = np.concatenate([chunk["tokens"] for chunk in chunks])
    np.testing.assert_array_equal(tokens, np.arange(lengths.sum()))
    for chunk, expected in zip(chunks, split_examples(examples, longest), strict=True):
        assert chunk.keys() == expected.keys()
        assert_same(chunk, {name: np.asarray(x) for name, x in expected.items()})


@pytest.mark.parametrize("seed", SEEDS)
def test_example_of_maps_chunks_to_examples(split, seed):
    lengths = random_lengths(seed)
    source = split("list", make_examples(lengths), 8)
    examples, numbers = source.example_of(range(len(source)))
    assert examples.tolist() == [int(chunk["example"]) for chunk in source]
    before = np.cumsum(lengths) - lengths
    firsts = [int(chunk["tokens"][0]) for chunk in source]
    assert (before[examples] + 8 * numbers).tolist() == firsts
    # Empty rows stay -1; any shape and any integer dtype are allowed.
    rows = np.array([[-1, 0], [len(source) - 1, -1]], np.int16)
    of_rows, which = source.example_of(rows)
    assert of_rows.tolist() == [[-1, 0], [examples[-1], -1]]
    assert which.tolist() == [[-1, 0], [numbers[-1], -1]]
    assert (of_rows.dtype, which.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 3], "`indices` has 3. Pass indices from 0 to 2, or -1 for an empty row"),
        ([-2], "`indices` has -2. Pass indices from 0 to 2"),
        ([0.0], "`indices` has dtype float64. Pass integer indices"),
    ],
)
def test_example_of_refuses_invalid_indices(indices, message):
    source = split_source([{"x": [1, 2, 3]}, {"x": [4]}], 2, lengths=[3, 1])
    with pytest.raises(ValueError, match=re.escape(message)):
        source.example_of(indices)


@pytest.mark.parametrize("kind", ["list", "file"])
def test_an_index_out_of_range_is_refused(split, kind):
    source = split(kind, make_examples([20, 3]), 8)
    assert repr(source).endswith("(4 chunks of at most 8 of 2 examples)")
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"`index={index}` must be from 0 to 3"):
            source[index]
    with pytest.raises(ValueError, match="read-only"):
        source.lengths[0] = 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "list"])
@pytest.mark.parametrize("seed", SEEDS)
def test_collate_equals_collate_rows_of_the_chunks(split, kind, seed):
    rng = np.random.default_rng(seed)
    examples = make_examples(random_lengths(seed))
    longest = int(rng.choice([1, 8, 13, 100]))
    source = split(kind, examples, longest)
    chunks = split_examples(examples, longest)
    assert isinstance(source, RowSource) and source.sequences == tuple(SEQUENCES)
    for _ in range(10):
        # Includes batches of empty rows, and chunks longer than the bucket.
        bucket = Bucket(int(rng.integers(1, 9)), int(rng.integers(1, longest + 3)))
        rows = rng.integers(-1, len(chunks), bucket.batch_size)
        pad = [0, {"tokens": 7}, {"frames": 0.5, "tokens": 9}][rng.integers(3)]
        options = {"pad_value": pad, "truncate": True}
        expected = collate_rows(
            [None if row < 0 else chunks[row] for row in rows],
            bucket,
            like=chunks[0],
            sequences=SEQUENCES,
            **options,
        )
        assert_same(source.collate(rows, bucket, **options), expected)


@pytest.mark.parametrize("kind", ["file", "files", "split twice"])
def test_invalid_rows_are_refused(split, kind):
    source = split(kind, make_examples([20, 3, 8]), 8)
    for rows, message in (
        ([0, 1, 2], "`rows` has 3 entries, but bucket [2, 8] has 2 rows"),
        ([0, 5], "`rows` has values from 0 to 5. They must be from 0 to 4"),
        ([0, -2], "`rows` has values from -2 to 0. They must be from 0 to 4"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            source.collate(rows, Bucket(2, 8))
    with pytest.raises(ValueError, match="Row 1 has length 8, beyond `seq_len=7`"):
        source.collate([3, 1], Bucket(2, 7))


@pytest.mark.parametrize(
    ("row", "begin", "length", "message"),
    [
        (0, 15, 6, "Row 1: a span of 6 tokens from token 15 is not within example 0"),
        (0, -1, 2, "Row 1: a span of 2 tokens from token -1 is not within example 0"),
        (0, 2, 0, "Row 1: a span of 0 tokens from token 2 is not within example 0"),
        (0, 0, 9, "Row 1 has length 9, beyond `seq_len=8`"),
        (3, 0, 1, "`rows` has values from 0 to 3. They must be from 0 to 2"),
    ],
)
def test_invalid_spans_are_refused(tmp_path, row, begin, length, message):
    examples = make_examples([20, 3, 8])
    file = write_token_file(tmp_path / "file", examples, sequences=SEQUENCES)
    spans = np.array([0, row]), np.array([0, begin]), np.array([4, length])
    for source in (file, split_source(file, 20)):
        with pytest.raises(ValueError, match=re.escape(message)):
            source.collate_spans(*spans, Bucket(2, 8))


@pytest.mark.parametrize("kind", ["file", "files", "split twice"])
def test_spans_do_not_extend_into_the_next_chunk(split, kind):
    source = split(kind, make_examples([20, 3, 8]), 8)
    rows, begins, lengths = (
        np.array([1, -1, 3]),
        np.array([2, 99, 1]),
        np.array([6, 0, 2]),
    )
    batch = source.collate_spans(rows, begins, lengths, Bucket(3, 6))
    tokens = batch.features["tokens"][batch.mask].tolist()
    assert tokens == [10, 11, 12, 13, 14, 15, 21, 22]
    with pytest.raises(
        ValueError, match="a span of 6 tokens from token 3 is not within"
    ):
        source.collate_spans(rows, begins + 1, lengths, Bucket(3, 6))


class ExampleRows:
    """A source that gathers whole examples with `collate`, but no spans."""

    sequences = ("tokens",)

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int32)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"tokens": np.arange(self.lengths[index]), "speaker": np.ones(4)}

    def collate(self, rows, bucket, *, pad_value, truncate):
        raise AssertionError("`collate` must not be called.")


def test_a_source_without_spans_is_read_one_example_at_a_time():
    source = split_source(ExampleRows([5, 2]), 3)
    assert not isinstance(source, RowSource)
    assert [chunk["tokens"].tolist() for chunk in source] == [[0, 1, 2], [3, 4], [0, 1]]
    assert source[1]["speaker"].shape == (4,)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_have_the_same_chunks(split, kind):
    examples = make_examples(random_lengths(2))
    source = split(kind, examples, 8)
    text = pickle.dumps(source)
    copy = pickle.loads(text)
    assert_same([copy[i] for i in range(len(copy))], list(source))
    assert copy.lengths.tolist() == source.lengths.tolist()
    assert copy.fingerprint == source.fingerprint
    if kind != "list":
        # The pickle contains neither tokens nor chunks.
        assert len(text) < 1500
        rows, bucket = np.arange(-1, 9), Bucket(10, 8)
        assert_same(copy.collate(rows, bucket), source.collate(rows, bucket))


def test_fingerprints_depend_on_the_data_and_the_chunk_size(split, tmp_path):
    examples = make_examples([20, 3, 8, 30])
    changed = [dict(example) for example in examples]
    changed[2]["tokens"] = changed[2]["tokens"] + 1
    moved = make_examples([20, 8, 3, 30])
    for kind in KINDS:
        same = split(kind, examples, 8).fingerprint
        assert same == split(kind, examples, 8).fingerprint
        others = [
            split(kind, examples, 9),
            split(kind, examples, 100),
            split(kind, changed, 8),
            split(kind, moved, 8),
        ]
        assert len({same, *(other.fingerprint for other in others)}) == 5
        assert contents(split(kind, examples, 8)) != contents(others[2])
    # Chunks with the same lengths, whose examples differ only outside the sample.
    one, two = (
        split_source([{"x": np.zeros(n)} for n in lengths], 4, lengths=lengths)
        for lengths in ([4, 4, 8, *[4] * 47], [4, 8, 4, *[4] * 47])
    )
    assert one.lengths.tolist() == two.lengths.tolist()
    assert one.fingerprint != two.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`lengths` is missing, .*Pass `lengths=jb.measure_lengths.source.`"),
        ({"lengths": [3]}, "`lengths` has 1 entries, but `source` has 2 examples"),
        ({"lengths": [3, 1, 1]}, "`lengths` has 3 entries, but `source` has 2 examp"),
    ],
)
def test_lengths_that_do_not_match_the_source_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        split_source([{"x": [1, 2, 3]}, {"x": [4]}], 2, **options)


def test_arguments_must_agree_with_a_token_file(tmp_path):
    file = write_token_file(tmp_path / "file", [{"x": [1, 2, 3]}, {"x": [4]}])
    assert split_source(file, 2, lengths=[3, 1], sequences=["x"]).lengths[1] == 1
    with pytest.raises(ValueError, match=r"`source\[1\]` has length 1, but `lengths\["):
        split_source(file, 2, lengths=[3, 2])
    with pytest.raises(
        ValueError, match=r"`sequences=\['y'\]`, but the source has \['x'"
    ):
        split_source(file, 2, sequences=["y"])


def fail():
    raise OSError("disk gone")


class Broken(list):
    def __getitem__(self, index):
        example = super().__getitem__(index)
        return example() if callable(example) else example


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"x": [1, 2]}, r"has length 2, but `lengths\[1\]=5`.*Measure the len"),
        ({"x": [1] * 6}, r"has length 6, but `lengths\[1\]=5`.*Measure the len"),
        (
            {"x": 3},
            r"cannot be split: The example has no sequence feature am",
        ),
        ([1, 2], "cannot be split: The example is a list"),
        (
            {"x": [1] * 5, "y": [1]},
            "cannot be split: .* sequences of different lengths",
        ),
        (fail, "cannot be read: OSError: disk gone"),
    ],
)
def test_an_example_that_has_changed_is_named(example, message):
    source = split_source(Broken([{"x": [1, 2]}, example]), 2, lengths=[2, 5])
    assert source[0]["x"].tolist() == [1, 2]
    for chunk in (1, 2, 3):
        pattern = r"`source\[1\]`, before it was split, " + message
        with pytest.raises(ValueError, match=pattern):
            source[chunk]


def test_the_lengths_passed_are_copied():
    lengths = np.array([3, 5], np.int32)
    source = split_source([{"x": np.arange(n)} for n in (3, 5)], 2, lengths=lengths)
    lengths[:] = 1
    assert [chunk["x"].tolist() for chunk in source] == [
        [0, 1],
        [2],
        [0, 1],
        [2, 3],
        [4],
    ]


# Plans and epochs


def random_split(seed: int) -> tuple[BucketPlan, np.ndarray]:
    """A random plan that splits examples, and random lengths, for all host counts."""
    rng = np.random.default_rng(seed)
    lengths = random_lengths(seed)
    multiple = int(rng.choice([1, 4]))
    last = int(rng.choice([4, 8, 20, 48]))
    plan = plan_buckets(
        lengths,
        max_tokens=last * 24 * int(rng.integers(1, 3)),
        num_buckets=int(rng.integers(1, 4)),
        batch_size_multiple=24,
        seq_len_multiple=multiple,
        max_seq_len=last,
        boundaries=["optimal", "quantile", "geometric"][seed % 3],
        overlong="split",
    )
    return plan, lengths


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_is_made_for_chunks(seed):
    plan, lengths = random_split(seed)
    chunks = chunk_lengths(lengths, plan.max_seq_len)
    of_chunks = plan_buckets(
        chunks,
        max_tokens=plan.max_tokens,
        num_buckets=seed % 4 + 1,
        seq_len_multiple=plan.seq_len_multiple,
        max_seq_len=plan.max_seq_len,
    )
    same = plan_buckets(
        lengths,
        max_tokens=plan.max_tokens,
        num_buckets=seed % 4 + 1,
        seq_len_multiple=plan.seq_len_multiple,
        max_seq_len=plan.max_seq_len,
        overlong="split",
    )
    assert same == dataclasses.replace(of_chunks, overlong="split")
    assert BucketPlan.from_json(same.to_json()) == same
    assert same.fingerprint != of_chunks.fingerprint


def test_examples_are_split_at_the_last_boundary():
    plan = plan_buckets(
        [5, 17, 40], max_tokens=64, boundaries=[8, 16], overlong="split"
    )
    assert plan.buckets == (Bucket(3, 8), Bucket(3, 16))
    assert report(plan, [5, 17, 40]).chunks == 2 + 3


class Indexed:
    """Chunks with their index as a feature."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return {**self.source[index], "index": np.array(index)}


@pytest.mark.parametrize("num_hosts", HOSTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_batches_of_chunks_satisfy_all_invariants(split, num_hosts, seed):
    plan, lengths = random_split(seed)
    source = split("list", make_examples(lengths), plan.max_seq_len)
    schedule = BatchSchedule(plan, source.lengths, seed=seed)

    def loader(host, start_step):
        return batch_dataset(
            Indexed(source),
            schedule,
            shard=RowShard((host,), num_hosts),
            start_step=start_step,
            sequences=SEQUENCES,
        )

    check_batches(
        loader,
        num_examples=len(source),
        buckets=plan.buckets,
        max_tokens=plan.max_tokens,
        num_hosts=num_hosts,
    )


def real_tokens(batches) -> np.ndarray:
    tokens = [batch.features["tokens"][batch.mask] for batch in batches]
    return np.sort(np.concatenate(tokens))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_epoch_has_every_token_of_the_corpus_once(split, kind, seed):
    plan, lengths = random_split(seed)
    source = split(kind, make_examples(lengths), plan.max_seq_len)
    schedule = BatchSchedule(plan, source.lengths, seed=seed)
    sequences = SEQUENCES if kind == "list" else None
    for num_hosts in HOSTS:
        hosts = [
            batch_dataset(
                source, schedule, shard=RowShard((h,), num_hosts), sequences=sequences
            )
            for h in range(num_hosts)
        ]
        for epoch in (0, 1):
            steps = range(epoch * len(schedule), (epoch + 1) * len(schedule))
            batches = [host[step] for host in hosts for step in steps]
            np.testing.assert_array_equal(
                real_tokens(batches), np.arange(lengths.sum())
            )


@pytest.mark.parametrize("kind", ["list", "file", "files"])
def test_a_run_resumes_at_every_step(split, kind):
    lengths = np.random.default_rng(1).integers(1, 30, 25)
    plan = plan_buckets(lengths, max_tokens=32, max_seq_len=8, overlong="split")
    source = split(kind, make_examples(lengths), plan.max_seq_len)
    sequences = SEQUENCES if kind == "list" else None

    def dataset():
        schedule = BatchSchedule(plan, source.lengths, seed=3)
        return batch_dataset(source, schedule, num_epochs=2, sequences=sequences)

    batches = list(dataset())
    assert len(batches) > 20
    for start in range(len(batches)):
        rest = dataset().resume(dataset().position(start))
        assert_same(list(rest), batches[start:])


def test_a_position_with_a_different_chunk_size_is_refused(split):
    examples = make_examples([20, 3, 8, 30])
    plan = BucketPlan((Bucket(2, 40),), max_tokens=80, overlong="split")

    def dataset(longest):
        source = split("file", examples, longest)
        return batch_dataset(source, BatchSchedule(plan, source.lengths))

    position = dataset(8).position(1)
    dataset(8).resume(position)
    with pytest.raises(ValueError, match="data"):
        dataset(9).resume(position)
    # Also if neither splits an example, because longer examples may be added later.
    unsplit = dataset(30).position(1)
    with pytest.raises(ValueError, match="data"):
        dataset(31).resume(unsplit)


def test_raw_lengths_are_refused_with_the_line_to_paste():
    source = [{"x": np.arange(n)} for n in (3, 9, 5, 20)]
    lengths = np.array([3, 9, 5, 20])
    plan = plan_buckets(lengths, max_tokens=16, max_seq_len=8, overlong="split")
    message = re.escape(
        "`lengths[1]=9` is beyond the last bucket, `seq_len=8`, and the plan has "
        "`overlong='split'`. Split the source first: `source = "
        "jb.data.split_source(source, 8, lengths=lengths)`. Then use `source.lengths`."
    )
    for use in (plan.check, plan.assign, lambda x: BatchSchedule(plan, x)):
        with pytest.raises(ValueError, match=message) as error:
            use(lengths)
    lines = re.findall("`(source = .*?)`", str(error.value))
    names = {"jb": jb, "source": source, "lengths": lengths}
    exec(lines[0], names)
    pasted = names["source"]
    schedule = BatchSchedule(plan, pasted.lengths)
    batches = list(batch_dataset(pasted, schedule))
    assert sum(int(batch.num_tokens) for batch in batches) == lengths.sum()
    message = (
        "for 7 lengths. If they are lengths of chunks, use `source = jb.data.split_so"
    )
    with pytest.raises(ValueError, match=message):
        batch_dataset(source, schedule)


def test_the_error_for_long_examples_suggests_splitting():
    with pytest.raises(ValueError, match="'truncate_left'` or `overlong='split'`"):
        plan_buckets([9], max_tokens=16, max_seq_len=8)


# Reports, pictures and the command


@pytest.mark.parametrize("seed", range(30))
def test_a_report_counts_split_examples_and_chunks(seed):
    plan, lengths = random_split(seed)
    chunks = chunk_lengths(lengths, plan.max_seq_len)
    over = lengths > plan.max_seq_len
    epoch = report(plan, lengths)
    assert epoch.split_examples == over.sum()
    assert epoch.chunks == sum(-(-n // plan.max_seq_len) for n in lengths[over])
    assert epoch.real_tokens == lengths.sum() and epoch.examples == len(chunks)
    assert (epoch.dropped_examples, epoch.truncated_examples) == (0, 0)
    of_chunks = report(plan, chunks)
    assert of_chunks == dataclasses.replace(epoch, split_examples=0, chunks=0)
    batches = list(BatchSchedule(plan, chunks))
    assert epoch.steps_per_epoch == len(batches)
    assert epoch.padded_tokens == sum(batch.bucket.num_tokens for batch in batches)
    line = (
        f"{over.sum()} examples are too long and are split into {epoch.chunks} chunks."
    )
    assert (line in epoch.summary) == bool(over.any())
    assert "split" not in of_chunks.summary
    fields = json.loads(epoch.to_json())
    assert (fields["split_examples"], fields["chunks"]) == (over.sum(), epoch.chunks)


def test_chunks_that_do_not_fit_into_memory_are_counted():
    # Their lengths alone would take 78 TiB.
    lengths = np.full(10_000, 2**31 - 1, np.int32)
    plan = plan_buckets(lengths, max_tokens=64, max_seq_len=1, overlong="split")
    number = 10_000 * (2**31 - 1)
    epoch = report(plan, lengths)
    assert epoch.examples == epoch.chunks == epoch.real_tokens == number
    assert epoch.steps_per_epoch == -(-number // 64)
    message = f"yields {number} chunks, whose lengths need 80000.0 GiB"
    with pytest.raises(ValueError, match=f"`max_seq_len=1` {message}.* Raise `max_seq"):
        chunk_lengths(lengths, 1)


@pytest.mark.parametrize("overlong", ["drop", "truncate", "truncate_left"])
def test_other_policies_do_not_split(overlong):
    plan = BucketPlan((Bucket(1, 8),), max_tokens=8, overlong=overlong)
    epoch = report(plan, [8, 10, 20])
    assert (epoch.split_examples, epoch.chunks) == (0, 0)


@pytest.mark.parametrize("lengths", [[1, 2, 4, 4, 5, 8, 50], [5, 8, 8] + [8, 8, 2]])
def test_plots_show_chunks(lengths):
    plan = BucketPlan((Bucket(4, 4), Bucket(2, 8)), max_tokens=16, overlong="split")
    chunks = chunk_lengths(lengths, 8)
    ax = plot_lengths(plan, lengths, bins=8)
    real, padding = ([bar.get_height() for bar in bars] for bars in ax.containers)
    assert real == [n * np.count_nonzero(chunks == n) for n in range(1, 9)]
    assert sum(padding) == (plan.boundaries[plan.assign(chunks)] - chunks).sum()
    (drawn,) = [
        c for c in plot_plan(plan, lengths).collections if "real" in c.get_label()
    ]
    x, y = drawn.get_paths()[0].vertices.T
    area = abs(np.sum(x * np.roll(y, 1) - y * np.roll(x, 1))) / 2
    between = np.sort(chunks)
    steps = 100 / (len(chunks) - 1)
    assert area == pytest.approx(((between[1:] + between[:-1]) / 2).sum() * steps)


def test_the_plan_command_splits(tmp_path):
    lengths = [100, 700, 512, 1025]
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    paths = [str(tmp_path / name) for name in ("lengths.txt", "plan.json", "plan.png")]
    options = ["--max-tokens", "4096", "--overlong", "split", "--max-seq-len", "512"]
    line = "2 examples are too long and are split into 5 chunks."
    run = CliRunner().invoke(main, ["plan", paths[0], *options, "-o", paths[1]])
    assert run.exit_code == 0 and line in run.output
    run = CliRunner().invoke(main, ["report", paths[1], paths[0], "--plot", paths[2]])
    assert run.exit_code == 0 and line in run.output
    assert (tmp_path / "plan.png").stat().st_size > 1000
    run = CliRunner().invoke(main, ["report", paths[1], paths[0], "--json"])
    written = json.loads(run.output)
    assert written["plan"]["overlong"] == "split"
    assert (written["report"]["split_examples"], written["report"]["chunks"]) == (2, 5)
