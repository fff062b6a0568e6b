"""A folder of arrays against the examples that were written, and what breaks it."""

import json
import pickle
import shutil

import jax
import numpy as np
import pytest

from jaxbucket import (
    BatchSchedule,
    Bucket,
    RowShard,
    TokenFile,
    batch_dataset,
    collate_rows,
    measure_lengths,
    plan_buckets,
    write_token_file,
)


def make_examples(seed: int, count: int = 60, longest: int = 40) -> list[dict]:
    """Tokens, a feature beside them, and two that are one for each example."""
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


def assert_equal(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


def test_every_example_comes_back(path, examples):
    file = TokenFile(path)
    assert len(file) == len(examples)
    assert file.lengths.tolist() == [len(x["tokens"]) for x in examples]
    for index, example in enumerate(examples):
        got = file[index]
        assert got.keys() == example.keys()
        assert_equal(got, {name: np.asarray(x) for name, x in example.items()})
    for index in (-1, len(examples)):
        with pytest.raises(IndexError, match=f"`index={index}` is not from 0 to 59"):
            file[index]


def test_numpy_reads_it_without_us(path, examples):
    tokens = np.load(path / "tokens.npy")
    assert tokens.tolist() == np.concatenate([x["tokens"] for x in examples]).tolist()
    assert np.load(path / "offsets.npy")[-1] == len(tokens)


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_gathered_as_collate_rows_does(tmp_path, seed):
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([1, 5, 40, 600]))
    examples = make_examples(seed, int(rng.choice([1, 3, 50])), longest)
    file = write_token_file(tmp_path / "file", examples, sequences=SEQUENCES)
    for _ in range(20):
        # Windows that reach beyond the end; rows that are empty, all of them even.
        bucket = Bucket(int(rng.integers(1, 9)), int(rng.integers(1, 2 * longest + 1)))
        rows = rng.integers(-1, len(examples), bucket.batch_size)
        pad = [0, {"tokens": 7}, {"frames": 0.5, "tokens": 9}][rng.integers(3)]
        picked = [None if row < 0 else examples[row] for row in rows]
        want = collate_rows(
            picked,
            bucket,
            like=examples[0],
            sequences=SEQUENCES,
            pad_value=pad,
            truncate=True,
        )
        got = file.collate(rows, bucket, pad_value=pad, truncate=True)
        assert_equal(got, want)
        for leaf in jax.tree.leaves(got):
            # Nobody else's, and nothing of the file's.
            assert leaf.flags.writeable and not isinstance(leaf, np.memmap)


def test_a_schedule_has_the_same_batches_from_it(path, examples):
    file = TokenFile(path)
    lengths = measure_lengths(examples, sequences=SEQUENCES, progress=False)
    assert measure_lengths(file, progress=False).tolist() == lengths.tolist()
    plan = plan_buckets(lengths, max_tokens=320, num_buckets=3, batch_size_multiple=4)
    schedule = BatchSchedule(plan, lengths, seed=1)
    for shard in (RowShard(), RowShard((1, 3), 4)):
        ours = batch_dataset(file, schedule, shard=shard)
        listed = batch_dataset(examples, schedule, shard=shard, sequences=SEQUENCES)
        for step in range(2 * len(schedule)):
            assert_equal(ours[step], listed[step])


def test_what_it_was_measured_by_must_be_it(path):
    file = TokenFile(path)
    lengths = file.lengths.copy()
    lengths[7] += 1
    plan = plan_buckets(lengths, max_tokens=320)
    message = r"`source\[7\]` has length .*, but `lengths\[7\]=.*Measure again"
    with pytest.raises(ValueError, match=message):
        batch_dataset(file, BatchSchedule(plan, lengths))
    for sequences in (["tokens"], ["label"]):
        with pytest.raises(ValueError, match=r"the source has \['tokens', 'frames'\]"):
            measure_lengths(file, sequences=sequences)


def test_another_process_maps_it_anew(path, examples):
    text = pickle.dumps(TokenFile(path))
    assert len(text) < 500
    assert_equal(pickle.loads(text)[3]["tokens"], examples[3]["tokens"])


def test_its_fingerprint_is_of_all_it_holds(tmp_path, examples):
    def written(name, examples):
        file = write_token_file(tmp_path / name, examples, sequences=SEQUENCES)
        return file.fingerprint

    same = [dict(example) for example in examples]
    assert written("a", examples) == written("b", same)
    same[30]["label"] = np.int32(10)
    assert written("c", same) != written("a2", examples)


@pytest.mark.parametrize("name", ["tokens", "offsets", "label"])
@pytest.mark.parametrize("cut", [1, 10**9])
def test_a_file_that_was_cut_is_refused(path, name, cut):
    file = path / f"{name}.npy"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-cut])
    message = rf"{name}.npy has {max(0, size - cut)} bytes, but {size} were written"
    with pytest.raises(ValueError, match=message):
        TokenFile(path)


def test_a_file_of_the_same_size_that_is_no_array_is_named(path):
    file = path / "tokens.npy"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(ValueError, match="tokens.npy is no array of numpy: .*again"):
        TokenFile(path)


def test_a_file_that_is_missing_is_named(path):
    (path / "frames.npy").unlink()
    with pytest.raises(ValueError, match="frames.npy is missing"):
        TokenFile(path)


def test_changed_contents_are_found_by_reading_all(path):
    TokenFile(path).verify()
    file = path / "tokens.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="tokens.npy is not what was written"):
        TokenFile(path).verify()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "is no token file"),
        ("{", "is no token file"),
        ("[]", 'has no "format": "jaxbucket.TokenFile"'),
        ('{"format": "jaxbucket.TokenFile", "version": 2}', "has version 2; this jax"),
        ('{"format": "jaxbucket.TokenFile", "version": 1}', "its index lacks 'files'"),
        (
            '{"format": "jaxbucket.TokenFile", "version": 1, "files": {}, '
            '"sequences": ["x"]}',
            "its index lacks .*'offsets' or a sequence",
        ),
    ],
)
def test_a_foreign_folder_is_refused(path, index, message):
    (path / "index.json").unlink()
    if index is not None:
        (path / "index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        TokenFile(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 1, 2], r"`rows` has 3 entries, but bucket \[2, 40\] has 2 rows. Give"),
        ([0, 60], "`rows` has 0 to 60: they must be from 0 to 59, or -1"),
        ([0, -2], "`rows` has -2 to 0: they must be from 0 to 59, or -1"),
    ],
)
def test_rows_that_are_not_there_are_refused(path, rows, message):
    with pytest.raises(ValueError, match=message):
        TokenFile(path).collate(rows, Bucket(2, 40))


def test_an_example_beyond_the_bucket_is_refused(path):
    file = TokenFile(path)
    longest = int(file.lengths.argmax())
    bucket = Bucket(2, int(file.lengths.max()) - 1)
    with pytest.raises(ValueError, match="Row 1 has length .*, beyond `seq_len="):
        file.collate(np.array([-1, longest]), bucket)


def test_padding_that_a_feature_cannot_hold_is_refused(path):
    with pytest.raises(ValueError, match="`pad_value=-1`: feature 'tokens' is uint16"):
        TokenFile(path).collate(np.array([0]), Bucket(1, 40), pad_value={"tokens": -1})
    with pytest.raises(ValueError, match="`pad_value=-1` would fill 2 features"):
        TokenFile(path).collate(np.array([0]), Bucket(1, 40), pad_value=-1)


def tokens(*lengths: int) -> list[dict]:
    return [{"tokens": np.ones(n, np.int32)} for n in lengths]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "`examples` is empty"),
        (tokens(3, 0), "Row 1 has length 0"),
        ([*tokens(3), {"tokens": np.ones(3)}], "Row 1: feature 'tokens' is float64"),
        ([*tokens(3), {"other": np.ones(3)}], r"Row 1 has features \['other'\]"),
        ([{"a/b": np.ones(2)}], "Feature 'a/b' cannot be a file of this name"),
        ([{"offsets": np.ones(2)}], "Feature 'offsets' cannot be a file of this name"),
        ([{"x": np.array(["a", None], object)}], "Feature 'x' is object, which"),
        ([{"x": np.ones(2, "M8[s]")}], r"Feature 'x' is datetime64\[s\], which"),
        ([{"label": np.int32(1)}], r"The example \['label'\] has no sequence"),
        ([[1, 2]], "The example is a list, not a dict of arrays"),
    ],
)
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, examples, message):
    with pytest.raises(ValueError, match=message):
        write_token_file(tmp_path / "file", examples)
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_the_way_leaves_nothing_behind(tmp_path):
    def failing():
        yield from tokens(1, 2)
        raise KeyError("record 2")

    with pytest.raises(KeyError, match="record 2"):
        write_token_file(tmp_path / "file", failing())
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_written_over(path, examples):
    with pytest.raises(ValueError, match="`path=.* exists already: name another"):
        write_token_file(path, examples, sequences=SEQUENCES)
    assert len(TokenFile(path)) == len(examples)


def test_it_may_be_moved(path, examples, tmp_path):
    before = TokenFile(path).fingerprint
    shutil.move(path, tmp_path / "elsewhere")
    assert TokenFile(tmp_path / "elsewhere").fingerprint == before
    assert json.loads((tmp_path / "elsewhere" / "index.json").read_text())
