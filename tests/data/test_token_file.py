"""Token files contain the examples that were written, and detect damage."""

import json
import pickle
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxbucket import (
    BatchSchedule,
    Bucket,
    batch_dataset,
    measure_lengths,
    plan_buckets,
)
from jaxbucket.data import (
    RowShard,
    TokenFile,
    collate_rows,
    concat_then_split,
    concatenate,
    split_source,
    token_index,
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


def test_every_example_is_read_back(path, examples):
    file = TokenFile(path)
    assert len(file) == len(examples)
    assert file.lengths.tolist() == [len(x["tokens"]) for x in examples]
    assert not measure_lengths(file).flags.writeable
    for index, example in enumerate(examples):
        result = file[index]
        assert result.keys() == example.keys()
        assert_equal(result, {name: np.asarray(x) for name, x in example.items()})
    for index in (-1, len(examples)):
        with pytest.raises(IndexError, match=f"`index={index}` must be from 0 to 59"):
            file[index]


def test_numpy_reads_a_token_file_without_the_library(path, examples):
    tokens = np.load(path / "tokens.npy")
    assert tokens.tolist() == np.concatenate([x["tokens"] for x in examples]).tolist()
    assert np.load(path / "offsets.npy")[-1] == len(tokens)


@pytest.mark.parametrize("seed", range(30))
def test_collate_equals_collate_rows(tmp_path, seed):
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([1, 5, 40, 600]))
    examples = make_examples(seed, int(rng.choice([1, 3, 50])), longest)
    file = write_token_file(tmp_path / "file", examples, sequences=SEQUENCES)
    for _ in range(20):
        # Includes windows beyond the end of the file, and batches of empty rows.
        bucket = Bucket(int(rng.integers(1, 9)), int(rng.integers(1, 2 * longest + 1)))
        rows = rng.integers(-1, len(examples), bucket.batch_size)
        pad = [0, {"tokens": 7}, {"frames": 0.5, "tokens": 9}][rng.integers(3)]
        picked = [None if row < 0 else examples[row] for row in rows]
        expected = collate_rows(
            picked,
            bucket,
            like=examples[0],
            sequences=SEQUENCES,
            pad_value=pad,
            truncate=True,
        )
        result = file.collate(rows, bucket, pad_value=pad, truncate=True)
        assert_equal(result, expected)
        for leaf in jax.tree.leaves(result):
            # The arrays are new, and not views of the file.
            assert leaf.flags.writeable and not isinstance(leaf, np.memmap)


def test_batches_are_those_of_a_list_of_the_examples(path, examples):
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


def test_lengths_and_sequences_of_a_schedule_must_match_the_file(path):
    file = TokenFile(path)
    lengths = file.lengths.copy()
    lengths[7] += 1
    plan = plan_buckets(lengths, max_tokens=320)
    message = (
        r"`source\[7\]` has length .*, but `lengths\[7\]=.*Measure the lengths again"
    )
    with pytest.raises(ValueError, match=message):
        batch_dataset(file, BatchSchedule(plan, lengths))
    for sequences in (["tokens"], ["label"]):
        with pytest.raises(ValueError, match=r"the source has \['tokens', 'frames'\]"):
            measure_lengths(file, sequences=sequences)


def test_a_single_sequence_may_be_a_string_and_repeated_names_are_refused(tmp_path):
    examples = tokens(3, 2, 4)
    file = write_token_file(tmp_path / "file", examples, sequences="tokens")
    assert file.sequences == ("tokens",)
    assert measure_lengths(file, sequences="tokens").tolist() == [3, 2, 4]
    assert len(split_source(file, 2, sequences="tokens")) == 5
    schedule = BatchSchedule(plan_buckets(file.lengths, max_tokens=12), file.lengths)
    assert len(batch_dataset(file, schedule, sequences="tokens")) == 3
    message = r"`sequences=\['tokens', 'tokens'\]` repeats a feature"
    for source in (file, examples):
        with pytest.raises(ValueError, match=message):
            measure_lengths(source, sequences=["tokens"] * 2, progress=False)
    with pytest.raises(ValueError, match=message):
        write_token_file(tmp_path / "twice", examples, sequences=["tokens"] * 2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pickled_file_is_mapped_again_in_another_process(path, examples):
    text = pickle.dumps(TokenFile(path))
    assert len(text) < 500
    assert_equal(pickle.loads(text)[3]["tokens"], examples[3]["tokens"])


def test_a_pickled_file_is_refused_if_it_was_replaced(path, examples, monkeypatch):
    monkeypatch.chdir(path.parent)
    text = pickle.dumps(TokenFile(path.name))
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


@pytest.mark.parametrize("name", ["tokens", "offsets", "label"])
@pytest.mark.parametrize("num_bytes", [1, 10**9])
def test_a_truncated_file_is_refused(path, name, num_bytes):
    file = path / f"{name}.npy"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-num_bytes])
    message = (
        rf"{name}.npy has {max(0, size - num_bytes)} bytes, but {size} were written"
    )
    with pytest.raises(ValueError, match=message):
        TokenFile(path)


def test_a_file_that_is_not_an_array_is_named(path):
    file = path / "tokens.npy"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(
        ValueError, match="tokens.npy is not a numpy array file: .*again"
    ):
        TokenFile(path)


def test_a_missing_file_is_named(path):
    (path / "frames.npy").unlink()
    with pytest.raises(ValueError, match="frames.npy is missing"):
        TokenFile(path)


def test_verify_detects_changed_contents(path):
    TokenFile(path).verify()
    file = path / "tokens.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="tokens.npy has changed since"):
        TokenFile(path).verify()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "is not a token file"),
        ("{", "is not a token file"),
        (b"\xff\xfe{", "is not a token file"),
        (b'{"format": "\xe4"}', "is not a token file"),
        ("[" * 100_000, "is not a token file"),
        ("9" * 5_000, "is not a token file"),
        ("null", 'has no "format": "jaxbucket.TokenFile"'),
        ("[]", 'has no "format": "jaxbucket.TokenFile"'),
        ('{"format": "jaxbucket.TokenFile", "version": 2}', "has version 2; this jax"),
        ('{"format": "jaxbucket.TokenFile", "version": 1}', "its seal is missing"),
        (
            '{"format": "jaxbucket.TokenFile", "version": 1, "files": {}, '
            '"sequences": ["x"]}',
            "its seal is missing or wrong",
        ),
    ],
)
def test_a_folder_without_a_valid_index_is_refused(path, index, message):
    (path / "index.json").unlink()
    if index is not None:
        content = index.encode() if isinstance(index, str) else index
        (path / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TokenFile(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 1, 2], r"`rows` has 3 entries, but bucket \[2, 40\] has 2 rows. Pass"),
        ([0, 60], "`rows` has values from 0 to 60. They must be from 0 to 59, or"),
        ([0, -2], "`rows` has values from -2 to 0. They must be from 0 to 59, or"),
        ([0.0, 1.0], "`rows` has dtype float64. Pass integers"),
        ([True, False], "`rows` has dtype bool. Pass integers"),
        (["0", "1"], "`rows` has dtype <U1. Pass integers"),
        (7, r"`rows` has 0 dimensions. Pass `\[B\]"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "chunks", "concatenation"])
def test_invalid_rows_are_refused(path, kind, rows, message):
    source = {
        "file": TokenFile,
        "chunks": lambda path: split_source(TokenFile(path), 40),
        "concatenation": lambda path: concatenate([TokenFile(path)]),
    }[kind](path)
    with pytest.raises(ValueError, match=message):
        source.collate(rows, Bucket(2, 40))


@pytest.mark.parametrize(
    "dtype",
    [
        *(np.int8, np.uint8, np.uint64),
        pytest.param(np.uint16, marks=pytest.mark.exhaustive),
    ],
)
def test_rows_may_have_any_integer_dtype(tmp_path, dtype):
    last = int(np.iinfo(dtype).max) if np.dtype(dtype).itemsize < 8 else 300
    # More examples than the dtype can index.
    examples = [{"tokens": np.full(3, index)} for index in range(last + 5)]
    file = write_token_file(tmp_path / "file", examples)
    for source in (file, split_source(file, 2), concatenate([file, file])):
        rows = np.array([last, 0, last - 1])
        assert_equal(
            source.collate(rows.astype(dtype), Bucket(3, 3)),
            source.collate(rows, Bucket(3, 3)),
        )
    begins, lengths = (np.array([x], dtype) for x in (2, last if last < 256 else 255))
    with pytest.raises(ValueError, match="is not within example"):
        file.collate_spans(np.array([0], dtype), begins, lengths, Bucket(1, 300))


def test_an_example_longer_than_the_bucket_is_refused(path):
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
        ([{"a/b": np.ones(2)}], "Feature 'a/b' cannot be stored as a file"),
        ([{"offsets": np.ones(2)}], "Feature 'offsets' cannot be stored as a file"),
        ([{"x": np.array(["a", None], object)}], "Feature 'x' is object, which"),
        ([{"x": np.ones(2, "M8[s]")}], r"Feature 'x' is datetime64\[s\], which"),
        ([{"x": np.ones(2, ml_dtypes.bfloat16)}], "'x' is bfloat16, .*cannot store it"),
        (
            [{"x": np.ones(2, ml_dtypes.float8_e5m2)}],
            "'x' is float8_e5m2, .*cannot store",
        ),
        ([{"x": np.ones(2, ml_dtypes.int4)}], "'x' is int4, .*store its bits"),
        (
            [{"x": np.broadcast_to(np.uint8(0), 2**31)}],
            "Row 0 has length 2147483648, beyond 2147483647. Split it",
        ),
        ([{"label": np.int32(1)}], r"has no sequence feature among \['label'\]"),
        ([[1, 2]], "The example is a list, not a dict of arrays"),
    ],
)
def test_examples_that_cannot_be_written_leave_no_files(tmp_path, examples, message):
    with pytest.raises(ValueError, match=message):
        write_token_file(tmp_path / "file", examples)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_writing_leaves_no_files(tmp_path):
    def failing():
        yield from tokens(1, 2)
        raise KeyError("record 2")

    with pytest.raises(KeyError, match="record 2"):
        write_token_file(tmp_path / "file", failing())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_overwritten(path, examples):
    with pytest.raises(ValueError, match="`path=.* already exists. Pass a new path"):
        write_token_file(path, examples, sequences=SEQUENCES)
    assert len(TokenFile(path)) == len(examples)


def test_a_token_file_may_be_moved(path, examples, tmp_path):
    before = TokenFile(path).fingerprint
    shutil.move(path, tmp_path / "elsewhere")
    assert TokenFile(tmp_path / "elsewhere").fingerprint == before
    assert json.loads((tmp_path / "elsewhere" / "index.json").read_text())


# Detecting damage


def edit_index(path, change, sealed: bool = False) -> None:
    """Changes the index, and updates its seal if `sealed`."""
    file = path / "index.json"
    index = json.loads(file.read_text())
    change(index)
    if sealed:
        index["seal"] = token_index._seal(index)
    file.write_text(json.dumps(index))


def put_header(file, **changes) -> None:
    """Replaces the header by a different one of the same size."""
    with file.open("r+b") as opened:
        np.lib.format.read_magic(opened)
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(opened)
        end = opened.tell()
        header = {"descr": dtype.str, "fortran_order": fortran_order, "shape": shape}
        opened.seek(0)
        np.lib.format.write_array_header_1_0(opened, header | changes)
        assert opened.tell() == end


def numbers(seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [
        {
            "a": rng.integers(0, 99, n, dtype=np.int32),
            "b": rng.integers(0, 99, n, dtype=np.int32),
        }
        for n in rng.integers(1, 500, 200)
    ]


def test_a_different_dtype_of_the_same_size_is_refused(tmp_path):
    path = write_token_file(tmp_path / "file", numbers()).path
    put_header(path / "a.npy", descr="<f4")
    with pytest.raises(ValueError, match=r"a.npy is <f4\[.*, but <i4\[.* was written"):
        TokenFile(path)


@pytest.mark.parametrize("size", [3, 200])
def test_swapped_arrays_of_two_features_are_refused(tmp_path, size):
    path = write_token_file(tmp_path / "file", numbers()[:size]).path
    (path / "a.npy").rename(path / "c.npy")
    (path / "b.npy").rename(path / "a.npy")
    (path / "c.npy").rename(path / "b.npy")
    with pytest.raises(
        ValueError, match="a.npy has changed since .* a different feature"
    ):
        TokenFile(path)


@pytest.mark.parametrize(
    "name", ["../file/a", "/etc/a", "a/b", "..", "", "a\n", "a\0b", ".", "x/../a"]
)
def test_names_that_lead_out_of_the_folder_are_refused(path, name):
    def lead_out(index):
        index["files"][name] = index["files"].pop("tokens")
        index["sequences"][0] = name

    edit_index(path, lead_out, sealed=True)
    with pytest.raises(
        ValueError, match=r"index.json names .*, which is not a valid name"
    ):
        TokenFile(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["sequences"].reverse(), "its seal is missing or wrong"),
        (lambda x: x["files"].pop("label"), "its seal is missing or wrong"),
        (lambda x: x.update(seal=[1]), "its seal is missing or wrong"),
        (lambda x: x.pop("seal"), "its seal is missing or wrong"),
    ],
)
def test_a_changed_index_is_refused(path, change, message):
    edit_index(path, change)
    with pytest.raises(ValueError, match=rf"index.json .*{message}.*write it again"):
        TokenFile(path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("frames", {"shape": (10, 3)}, "frames.npy is <f4.10, 3., but <f4"),
        ("frames", {"fortran_order": True}, "frames.npy has changed since"),
        ("tokens", {"descr": "|O"}, "tokens.npy is .O.*, but <u2.* was written"),
        ("offsets", {"descr": "<f8"}, "offsets.npy is <f8.*, but <i8.* was written"),
    ],
)
def test_a_changed_header_is_refused(path, name, changes, message):
    put_header(path / f"{name}.npy", **changes)
    with pytest.raises(ValueError, match=rf"{message}.*Write the token file again"):
        TokenFile(path)


def test_decreasing_offsets_are_refused(tmp_path):
    # Outside the pages that opening checks.
    path = write_token_file(tmp_path / "file", [{"a": [1]}] * 50_000).path
    with (path / "offsets.npy").open("r+b") as file:
        file.seek(100_000)
        file.write(np.int64(2**60).tobytes())
    file = TokenFile(path)
    with pytest.raises(
        ValueError, match="offsets.npy has examples of .* so it was changed"
    ):
        _ = file.lengths


class Pickled:
    """An object that must not be unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def damage(rng: np.random.Generator, path) -> None:
    """Damages a token file at random."""
    names = ["tokens", "frames", "label", "speaker", "offsets"]
    one, other = rng.choice(names, 2, replace=False)
    file = path / f"{one}.npy"
    content = bytearray(file.read_bytes())
    kind = rng.integers(9)
    if kind == 0:
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    elif kind == 1:
        del content[rng.integers(len(content)) :]
    elif kind == 2:
        content = bytearray((path / f"{other}.npy").read_bytes())
    elif kind == 3:
        # It may have the same size.
        foreign = path / "foreign.npy"
        np.save(foreign, rng.integers(0, 9, len(content) // 8 - 16))
        content = bytearray(foreign.read_bytes())
        foreign.unlink()
    elif kind == 4:
        foreign = path / "foreign.npy"
        np.save(foreign, np.array([Pickled()] * 3, object), allow_pickle=True)
        content = bytearray(foreign.read_bytes().ljust(len(content), b" "))
        foreign.unlink()
    elif kind == 5:
        start = rng.integers(128)
        content[start : start + 9] = rng.bytes(9)
    else:
        file = path / "index.json"
        content = bytearray(file.read_bytes())
        for _ in range(rng.integers(1, 4)):
            start = rng.integers(len(content))
            if kind == 6:
                content[start] = rng.integers(256)
            elif kind == 7:
                del content[start : start + rng.integers(1, 40)]
            else:
                pieces = [b"[", b"{", b"-1", b"null", b'"', b"1e999", b"tokens", b"../"]
                content[start:start] = pieces[rng.integers(len(pieces))]
    file.write_bytes(bytes(content))


def test_a_damaged_file_is_refused_or_reads_as_written(tmp_path):
    examples = make_examples(1, 12, 9)
    written = write_token_file(tmp_path / "file", examples, sequences=SEQUENCES).path
    expected = [dict(TokenFile(written)[index]) for index in range(len(examples))]
    path, refused = tmp_path / "damaged", 0
    for seed in range(120):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(written, path)
        damage(np.random.default_rng(seed), path)
        try:
            file = TokenFile(path)
            _ = file.lengths
        except ValueError as error:
            assert str(path) in str(error) and "again" in str(error), error
            assert "allow_pickle" not in str(error)
            refused += 1
            continue
        # All pages of such a small file are checked.
        for index, example in enumerate(expected):
            assert_equal(file[index], example)
    assert refused > 90


def test_opening_checks_some_pages_and_verify_checks_all(tmp_path):
    examples = [{"a": np.arange(1000)}] * 300
    path = write_token_file(tmp_path / "file", examples).path
    file = path / "a.npy"
    content = bytearray(file.read_bytes())
    for place, is_checked in ((len(content) // 30, False), (-3, True)):
        content[place] ^= 1
        file.write_bytes(bytes(content))
        with pytest.raises(ValueError, match="a.npy has changed since"):
            TokenFile(path) if is_checked else TokenFile(path).verify()
