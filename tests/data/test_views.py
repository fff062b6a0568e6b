"""Views of token files equal the same operations on a list of the examples."""

import pickle

import jax
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket import Bucket
from jaxbucket.data import (
    collate_rows,
    concat_then_split,
    concatenate,
    join_examples,
    select,
    split_source,
    write_token_file,
    zip_sources,
)
from jaxbucket.data.source import contents
from jaxbucket.data.token_source import TokenSource
from jaxbucket.packing import pack

SEQUENCES = ["tokens", "frames"]
LENGTHS = np.random.default_rng(0).integers(1, 30, 40)


def make_examples(lengths=LENGTHS, only_sequences=False) -> list[dict]:
    """Examples with unique tokens and, unless they are joined, other features."""
    starts = np.cumsum(lengths) - lengths
    sequences = [
        {
            "tokens": np.arange(start, start + n, dtype=np.int32),
            "frames": np.random.default_rng(start).normal(size=(n, 3)),
        }
        for start, n in zip(starts, lengths, strict=True)
    ]
    if only_sequences:
        return sequences
    return [
        {**example, "number": np.int64(i), "speaker": np.full(4, i / 7)}
        for i, example in enumerate(sequences)
    ]


def known(source) -> dict:
    """Returns the arguments that a list of examples needs."""
    if isinstance(source, TokenSource):
        return {}
    return {"lengths": [len(x["tokens"]) for x in source], "sequences": SEQUENCES}


def split(source, longest=8):
    return split_source(source, longest, **known(source))


def join(source, longest=40):
    documents = np.arange(len(source)) // 7
    return join_examples(source, longest, documents=documents, **known(source))


def part(source):
    return select(source, np.random.default_rng(1).permutation(len(source))[:15])


def cut(source):
    return concat_then_split(source, 16, seed=3, **known(source))


# Name -> operations, from first to last.
CHAINS = {
    "file": [],
    "split": [split],
    "split twice": [lambda x: split(x, 20), lambda x: split(x, 8)],
    "selected": [part],
    "split of selected": [part, split],
    "selected of split": [split, part],
    "cut": [cut],
    "cut of selected": [part, cut],
    "joined": [join],
    "split of joined": [join, split],
    "joined of selected": [part, join],
    "cut of joined": [join, cut],
    "selected of twice": [lambda x: concatenate([x, x]), part],
    "split of twice": [lambda x: concatenate([x, split(x)]), lambda x: split(x, 5)],
}
CASES = [(name, files) for name in CHAINS for files in (1, 3)]


def made(name: str, source):
    for operation in CHAINS[name]:
        source = operation(source)
    return source


def token_files(folder, examples, count):
    parts = np.array_split(np.arange(len(examples)), count)
    files = [
        write_token_file(
            folder / f"file-{number}-of-{count}",
            [examples[i] for i in part],
            sequences=SEQUENCES,
        )
        for number, part in enumerate(parts)
    ]
    return concatenate(files) if count > 1 else files[0]


def assert_same(result, expected) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert (np.asarray(x).dtype, np.shape(x)) == (np.asarray(y).dtype, np.shape(y))
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("name", "count"), CASES)
def test_a_view_equals_the_operations_on_a_list(tmp_path, name, count):
    examples = make_examples(only_sequences="joined" in name)
    plain = made(name, examples)
    view = made(name, token_files(tmp_path, examples, count))
    assert len(view) == len(plain)
    for index in range(len(plain)):
        expected = {x: np.asarray(y) for x, y in plain[index].items()}
        assert_same(view[index], expected)
    lengths = [len(example["tokens"]) for example in plain]
    assert view.lengths.tolist() == lengths
    if hasattr(plain, "examples"):
        assert plain.lengths.tolist() == lengths
        assert view.examples.tolist() == plain.examples.tolist()
    for index in (-1, len(view)):
        with pytest.raises(IndexError, match="`index="):
            view[index]
    with pytest.raises(ValueError, match="read-only"):
        view.lengths[0] = 1
    again = pickle.loads(pickle.dumps(view))
    assert contents(again) == contents(view)


@pytest.mark.parametrize(("name", "count"), CASES)
def test_collate_equals_collate_rows(tmp_path, name, count):
    """Also with rows that are empty, near the end of the file, too long, or packed."""
    examples = make_examples(only_sequences="joined" in name)
    view = made(name, token_files(tmp_path, examples, count))
    if not isinstance(view, TokenSource):
        # Joined examples that are not adjacent in a file.
        assert name == "joined of selected" or count > 1
        return
    rng = np.random.default_rng(len(name))
    for case in range(12):
        bucket = Bucket(int(rng.integers(1, 7)), int(rng.integers(1, 40)))
        rows = rng.integers(-1, len(view), bucket.batch_size)
        rows[:1] = len(view) - 1
        side = ["truncate", "truncate_left"][case % 2]
        pad = [0, {"frames": 0.5, "tokens": 9}][case // 2 % 2]
        options = {"pad_value": pad, side: True}
        picked = [None if row < 0 else view[row] for row in rows]
        like = {"like": view[0], "sequences": SEQUENCES}
        result = view.collate(rows, bucket, **options)
        assert_same(result, collate_rows(picked, bucket, **like, **options))
        assert all(leaf.flags.writeable for leaf in jax.tree.leaves(result))
        packed = np.full((2, 3), -1)
        packed[0, :3], packed[1, :1] = rng.integers(0, len(view), (2, 3))[0], [0]
        rows = [[view[i] for i in row if i >= 0] for row in packed]
        assert_same(
            view.collate(packed, Bucket(2, 200), pad_value=pad),
            collate_rows(rows, Bucket(2, 200), max_segments=3, pad_value=pad, **like),
        )


def test_a_split_has_every_token_in_order():
    source = split(make_examples())
    expected = [
        min(8, int(n) - start) for n in LENGTHS for start in range(0, int(n), 8)
    ]
    assert source.lengths.tolist() == expected
    tokens = np.concatenate([chunk["tokens"] for chunk in source])
    np.testing.assert_array_equal(tokens, np.arange(LENGTHS.sum()))
    assert source.examples.tolist() == [int(chunk["number"]) for chunk in source]


def test_all_cut_rows_but_the_last_are_full():
    source = cut(make_examples())
    tokens = np.concatenate([piece["tokens"] for piece in source])
    assert sorted(tokens) == list(range(LENGTHS.sum()))
    rows = source.packing.row_lengths
    assert set(rows[:-1]) == {16} and rows.sum() == LENGTHS.sum()
    assert source.packing.num_examples == len(source) < len(LENGTHS) + len(rows)
    other = concat_then_split(make_examples(), 16, lengths=LENGTHS, sequences=SEQUENCES)
    assert contents(other) != contents(source) == contents(cut(make_examples()))


@pytest.mark.parametrize("seed", range(5))
def test_blocks_have_as_many_examples_of_a_document_as_fit(seed):
    rng = np.random.default_rng(seed)
    lengths, documents = rng.integers(1, 30, 60), np.sort(rng.integers(0, 5, 60))
    blocks, size = [], 0
    for index, n in enumerate(lengths):
        if not index or size + n > 40 or documents[index] != documents[index - 1]:
            blocks.append(0)
            size = 0
        size += n
        blocks[-1] = size
    examples = make_examples(lengths, only_sequences=True)
    source = join_examples(examples, 40, lengths=lengths, documents=documents)
    assert source.lengths.tolist() == blocks
    tokens = np.concatenate([block["tokens"] for block in source])
    np.testing.assert_array_equal(tokens, np.arange(lengths.sum()))


def test_fingerprints_depend_on_the_data_and_the_operation(tmp_path):
    examples = make_examples(only_sequences=True)
    for source in (examples, token_files(tmp_path, examples, 1)):
        found = [contents(made(name, source)) for name in CHAINS]
        # Chunks of chunks are chunks.
        assert len(set(found)) >= len(found) - 1
        assert contents(split(source, 9)) != contents(split(source, 8))
        selected = [select(source, [0, 1, 2, i, 39]) for i in (3, 4)]
        assert contents(selected[0]) != contents(selected[1])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: split_source(x, 0, lengths=LENGTHS), "max_seq_len"),
        (lambda x: split_source(x, 8), "lengths"),
        (lambda x: split_source(x, 8, lengths=LENGTHS[1:]), "lengths"),
        (lambda x: split_source(x, 8, lengths=LENGTHS + 1)[0], r"source\[0\]"),
        (lambda x: join_examples(x, 8, lengths=LENGTHS, documents=[1]), "documents"),
        (lambda x: join_examples(make_examples(), 8, lengths=LENGTHS), "source"),
        (lambda x: concat_then_split(x, 8, lengths=LENGTHS, seed=-1), "seed=-1"),
        (lambda x: select(x, []), "selected"),
        (lambda x: select(x, [40]), "selected"),
        (lambda x: select(x, [True]), "selected"),
        (lambda x: concatenate([]), "sources"),
    ],
)
def test_invalid_arguments_are_refused(make, name):
    with pytest.raises(ValueError, match=f"`{name}"):
        make(make_examples(only_sequences=True))


def test_arguments_must_agree_with_a_token_file(tmp_path):
    file = token_files(tmp_path, make_examples(), 1)
    other = write_token_file(tmp_path / "other", [{"tokens": np.arange(3)}])
    for make, name in [
        (lambda: split_source(file, 8, sequences=["tokens"]), "sequences="),
        (lambda: jb.measure_lengths(file, sequences=["tokens"]), "sequences="),
        (lambda: split_source(file, 8, lengths=LENGTHS + 1), r"lengths\["),
        (lambda: join_examples(file, 8), "source"),
        (lambda: concatenate([file, other]), r"sources\[1\]"),
        (lambda: zip_sources([file]), "sources"),
        (lambda: zip_sources([file, other]), "sources"),
        (lambda: zip_sources([file, make_examples()]), "sources"),
        (lambda: zip_sources([other, other]), "sources"),
    ]:
        with pytest.raises(ValueError, match=f"`{name}"):
            make()


@pytest.mark.parametrize(
    "rows", [[0, 1, 2], [0, 40], [0, -2], [0.0, 1.0], [True, False], 7, [[0], [-2]]]
)
def test_invalid_rows_are_refused(tmp_path, rows):
    file = token_files(tmp_path, make_examples(), 1)
    with pytest.raises(ValueError, match="`rows="):
        file.collate(rows, Bucket(2, 40))


def test_rows_that_are_too_long_or_have_a_gap_are_refused(tmp_path):
    file = token_files(tmp_path, make_examples(), 1)
    longest = int(LENGTHS.argmax())
    with pytest.raises(ValueError, match="`seq_len=28`[^$]*row 1"):
        file.collate([-1, longest], Bucket(2, int(LENGTHS.max()) - 1))
    with pytest.raises(ValueError, match="`rows="):
        file.collate([[0, -1, 1]], Bucket(1, 99))


@pytest.mark.parametrize("make", [join_examples, split_source])
@pytest.mark.parametrize("changed", [{"tokens": [1, 2]}, {"other": [[1]] * 5}, None])
def test_an_example_that_does_not_fit_is_named(make, changed):
    examples = [{"tokens": np.arange(5)} for _ in range(6)]
    examples[1] = changed
    source = make(examples, 10, lengths=np.full(6, 5), sequences=["tokens"])
    with pytest.raises(ValueError, match=r"`source\[1\]`"):
        list(source)


# Zipped files


SIDES = {"source": ["source", "weights"], "target": ["target"]}
PAIRS = [
    {
        "source": np.arange(n, dtype=np.int32),
        "weights": np.linspace(0, 1, n),
        "target": np.full(1 + 3 * n % 17, n, np.uint8),
    }
    for n in LENGTHS
]


def zipped(folder):
    def write(side, names):
        examples = ({name: x[name] for name in names} for x in PAIRS)
        return write_token_file(folder / side, examples, sequences=names)

    return zip_sources([write(side, names) for side, names in SIDES.items()])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlong": "drop", "max_seq_len": 20},
        {"overlong": {"source": "truncate_left", "target": "truncate"}},
        "packed",
        "selected",
        "concatenated",
    ],
)
def test_zipped_files_equal_a_list_of_all_features(tmp_path, options):
    source, pairs = zipped(tmp_path), PAIRS
    if options == "selected":
        source, pairs = select(source, [3, 1, 30, 7]), [PAIRS[i] for i in (3, 1, 30, 7)]
    if options == "concatenated":
        source, pairs = concatenate([source, source]), [*PAIRS, *PAIRS]
    lengths = source.lengths
    assert {x: y.tolist() for x, y in lengths.items()} == {
        side: [len(x[side]) for x in pairs] for side in SIDES
    }
    assert_same(source[2], pairs[2])
    limits = {"max_seq_len": 25, **options} if isinstance(options, dict) else {}
    limits = limits if limits.get("overlong") else {}
    plan = jb.plan_buckets(lengths, max_tokens=600, num_buckets=3, **limits)
    schedule = jb.BatchSchedule(plan, lengths, seed=1)
    if options == "packed":
        shape = {"source": 64, "target": 64}
        plan = jb.BucketPlan.from_shapes([(4, shape)], packed=True)
        packing = pack(lengths, shape)
        schedule = jb.BatchSchedule(plan, lengths, packing=packing, seed=1)
    pads = {"pad_value": {"weights": -1.0, "target": 255}}
    for shard in (None, jb.data.RowShard((0,), 1)):
        result = jb.batch_dataset(source, schedule, shard=shard, **pads)
        expected = jb.batch_dataset(
            pairs, schedule, shard=shard, sequences=SIDES, **pads
        )
        assert_same(list(result), list(expected))


def test_a_transform_of_zipped_files_may_add_a_sequence(tmp_path):
    source = zipped(tmp_path)
    plan = jb.plan_buckets(source.lengths, max_tokens=600)
    schedule = jb.BatchSchedule(plan, source.lengths)
    batch = jb.batch_dataset(
        source,
        schedule,
        sequences={**SIDES, "target": ["target", "labels"]},
        transform=lambda x, rng: {**x, "labels": x["target"] + 1},
    )[0]
    real = batch.segment_ids["target"] > 0
    np.testing.assert_array_equal(
        batch.features["labels"], batch.features["target"] + real
    )


def test_a_schedule_must_have_the_lengths_and_sequences_of_the_files(tmp_path):
    source = zipped(tmp_path)
    changed = {**source.lengths, "target": source.lengths["target"] + 1}
    cases = [
        (source.lengths["source"], {}, "source"),
        (changed, {}, "source"),
        (source.lengths, {"sequences": {"source": [], "target": []}}, "sequences="),
    ]
    for lengths, options, name in cases:
        plan = jb.plan_buckets(lengths, max_tokens=600)
        with pytest.raises(ValueError, match=f"`{name}"):
            jb.batch_dataset(source, jb.BatchSchedule(plan, lengths), **options)
