"""Token files contain the examples that were written, and detect damage."""

import pickle
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxbucket import BatchSchedule, batch_dataset, measure_lengths, plan_buckets
from jaxbucket.data import (
    TokenFile,
    concat_then_split,
    concatenate,
    split_source,
    write_token_file,
)
from jaxbucket.packing import pack


def make_examples(seed: int, count: int = 60, longest: int = 40) -> list[dict]:
    """Two sequence features, and two with one value for each example."""
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(0, 60_000, n).astype(np.uint16),
            "frames": rng.normal(size=(n, 3)).astype(np.float32),
            "label": np.int32(rng.integers(9)),
            "speaker": rng.normal(size=4),
        }
        for n in rng.integers(1, longest, count, endpoint=True)
    ]


SEQUENCES = ["tokens", "frames"]


@pytest.fixture(name="examples")
def examples_fixture() -> list[dict]:
    return make_examples(0)


@pytest.fixture(name="path")
def path_of_file(tmp_path, examples):
    write_token_file(tmp_path / "file", examples, sequences=SEQUENCES)
    return tmp_path / "file"


def assert_equal(result, expected) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


def test_numpy_reads_a_token_file_without_the_library(path, examples):
    tokens = np.load(path / "tokens.npy")
    assert tokens.tolist() == np.concatenate([x["tokens"] for x in examples]).tolist()
    offsets = np.load(path / "offsets.npy")
    assert offsets[0] == 0 and offsets[-1] == len(tokens)
    assert measure_lengths(TokenFile(path)).tolist() == np.diff(offsets).tolist()


@pytest.mark.parametrize("lengths", [[2, 5, 7, 4], [3, 3, 3, 3]])
def test_sequences_of_the_file_also_apply_to_examples_read_one_at_a_time(
    tmp_path, lengths
):
    examples = [
        {"tokens": np.arange(n), "meta": np.full(3, index)}
        for index, n in enumerate(lengths)
    ]
    file = write_token_file(tmp_path / "file", examples, sequences=["tokens"])
    plan = plan_buckets(lengths, max_tokens=16)
    schedule = BatchSchedule(plan, lengths, order="source")
    expected = batch_dataset(file, schedule)[0]
    transformed = batch_dataset(file, schedule, transform=lambda example, rng: example)
    assert_equal(transformed[0], expected)

    packing = pack(lengths, 16)
    plan = plan_buckets(packing.row_lengths, max_tokens=32, boundaries=[16])
    schedule = BatchSchedule(plan, lengths, packing=packing)
    expected = batch_dataset(file, schedule)[0]
    for source in (
        concatenate([file]),
        split_source(file, 16),
        split_source(examples, 16, lengths=lengths, sequences=["tokens"]),
    ):
        assert_equal(batch_dataset(source, schedule)[0], expected)

    for parts in (
        concat_then_split(file, 4, lengths=lengths),
        concat_then_split(examples, 4, lengths=lengths, sequences="tokens"),
    ):
        plan = plan_buckets(parts.packing.row_lengths, max_tokens=8, boundaries=[4])
        schedule = BatchSchedule(plan, parts.lengths, packing=parts.packing)
        batch = batch_dataset(parts, schedule)[0]
        assert batch.features["tokens"].shape == (2, 4)
        max_segments = parts.packing.max_segments
        assert batch.features["meta"].shape == (2, max_segments, 3)


def test_a_pickled_file_is_refused_if_it_was_replaced(path, examples, monkeypatch):
    monkeypatch.chdir(path.parent)
    text = pickle.dumps(TokenFile(path.name))
    assert len(text) < 500
    monkeypatch.chdir("/")
    assert_equal(pickle.loads(text)[3]["tokens"], examples[3]["tokens"])
    shutil.rmtree(path)
    with pytest.raises(ValueError, match="is not a token file"):
        pickle.loads(text)
    write_token_file(path, examples[::-1], sequences=SEQUENCES)
    with pytest.raises(ValueError, match="has changed since it was opened"):
        pickle.loads(text)


def test_the_fingerprint_depends_on_all_contents(tmp_path, examples):
    def fingerprint(name, examples):
        file = write_token_file(tmp_path / name, examples, sequences=SEQUENCES)
        return file.fingerprint

    same = [dict(example) for example in examples]
    assert fingerprint("a", examples) == fingerprint("b", same)
    same[30]["label"] = np.int32(10)
    assert fingerprint("c", same) != fingerprint("a2", examples)


def tokens(*lengths: int) -> list[dict]:
    return [{"tokens": np.ones(n, np.int32)} for n in lengths]


def failing():
    yield from tokens(1, 2)
    raise ValueError("record 2")


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "`examples`"),
        (tokens(3, 0), "`sequences`[^$]*example 1"),
        ([*tokens(3), {"tokens": np.ones(3)}], "'tokens': 'float64[^$]*example 1"),
        ([*tokens(3), {"other": np.ones(3)}], "'other'[^$]*example 1"),
        ([{"a/b": np.ones(2)}], "'a/b'"),
        ([{"offsets": np.ones(2)}], "'offsets'"),
        ([{"x": np.array(["a", None], object)}], "'x' is object"),
        ([{"x": np.ones(2, "M8[s]")}], "'x' is datetime64"),
        ([{"x": np.ones(2, ml_dtypes.bfloat16)}], "'x' is bfloat16"),
        ([{"x": np.ones(2, ml_dtypes.int4)}], "'x' is int4"),
        ([{"label": np.int32(1)}], "`sequences`"),
        ([[1, 2]], "not a `Mapping`"),
        (failing(), "record 2"),
    ],
)
def test_examples_that_cannot_be_written_leave_no_files(tmp_path, examples, message):
    with pytest.raises(ValueError, match=message):
        write_token_file(tmp_path / "file", examples)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_overwritten(path, examples):
    with pytest.raises(ValueError, match="`path=.* already exists. Pass a new path"):
        write_token_file(path, examples, sequences=SEQUENCES)
    assert len(TokenFile(path)) == len(examples)


# Detecting damage


def test_a_missing_or_changed_file_is_refused(path):
    def rewrite(name, change):
        file = path / name
        content = file.read_bytes()
        change(file)
        with pytest.raises(ValueError, match="again"):
            TokenFile(path)
        file.write_bytes(content)

    for name in ("tokens", "frames", "label", "offsets"):
        file, last = f"{name}.npy", path / f"{name}.npy"
        size = last.stat().st_size
        rewrite(file, lambda x: x.unlink())
        rewrite(file, lambda x: x.write_bytes(x.read_bytes()[:-1]))
        rewrite(file, lambda x: x.write_bytes(x.read_bytes() + b"0"))
        rewrite(file, lambda x, size=size: x.write_bytes(b"x" * size))
        rewrite(file, lambda x: x.write_bytes((path / "speaker.npy").read_bytes()))
    for text in ("{", "null", "[]", '{"format": "jaxbucket.TokenFile"}', "9" * 5000):
        rewrite("index.json", lambda x, text=text: x.write_text(text))
    rewrite("index.json", lambda x: x.unlink())
    for old, new in [("label", "b"), ('"version": 2', '"version": 3')]:
        changed = (path / "index.json").read_text().replace(old, new)
        rewrite("index.json", lambda x, text=changed: x.write_text(text))


def test_decreasing_offsets_are_refused(tmp_path):
    # Outside the pages that opening checks.
    path = write_token_file(tmp_path / "file", [{"a": [1]}] * 50_000).path
    with (path / "offsets.npy").open("r+b") as file:
        file.seek(100_000)
        file.write(np.int64(2**60).tobytes())
    file = TokenFile(path)
    with pytest.raises(ValueError, match="file.* has examples of"):
        _ = file.lengths
