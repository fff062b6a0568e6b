"""A folder of arrays against the examples that were written, and what breaks it."""

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
    assert not measure_lengths(file).flags.writeable
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


@pytest.mark.parametrize("lengths", [[2, 5, 7, 4], [3, 3, 3, 3]])
def test_what_is_padded_is_known_also_where_examples_are_read_one_by_one(
    tmp_path, lengths
):
    examples = [
        {"tokens": np.arange(n), "meta": np.full(3, index)}
        for index, n in enumerate(lengths)
    ]
    file = write_token_file(tmp_path / "file", examples, sequences=["tokens"])
    plan = plan_buckets(lengths, max_tokens=16)
    schedule = BatchSchedule(plan, lengths, order="source")
    want = batch_dataset(file, schedule)[0]
    changed = batch_dataset(file, schedule, transform=lambda example, rng: example)
    assert_equal(changed[0], want)

    packing = pack(lengths, 16)
    plan = plan_buckets(packing.row_lengths, max_tokens=32, boundaries=[16])
    schedule = BatchSchedule(plan, lengths, packing=packing)
    want = batch_dataset(file, schedule)[0]
    for source in (
        concatenate([file]),
        split_source(file, 16),
        split_source(examples, 16, lengths=lengths, sequences=["tokens"]),
    ):
        assert_equal(batch_dataset(source, schedule)[0], want)

    for parts in (
        concat_then_split(file, 4, lengths=lengths),
        concat_then_split(examples, 4, lengths=lengths, sequences="tokens"),
    ):
        plan = plan_buckets(parts.packing.row_lengths, max_tokens=8, boundaries=[4])
        schedule = BatchSchedule(plan, parts.lengths, packing=parts.packing)
        batch = batch_dataset(parts, schedule)[0]
        assert batch.features["tokens"].shape == (2, 4)
        most = parts.packing.max_segments
        assert batch.features["meta"].shape == (2, most, 3)


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


def test_one_sequence_is_named_alone_and_none_twice(tmp_path):
    examples = tokens(3, 2, 4)
    file = write_token_file(tmp_path / "file", examples, sequences="tokens")
    assert file.sequences == ("tokens",)
    assert measure_lengths(file, sequences="tokens").tolist() == [3, 2, 4]
    assert len(split_source(file, 2, sequences="tokens")) == 5
    schedule = BatchSchedule(plan_buckets(file.lengths, max_tokens=12), file.lengths)
    assert len(batch_dataset(file, schedule, sequences="tokens")) == 1
    message = r"`sequences=\['tokens', 'tokens'\]` has a feature twice"
    for source in (file, examples):
        with pytest.raises(ValueError, match=message):
            measure_lengths(source, sequences=["tokens"] * 2, progress=False)
    with pytest.raises(ValueError, match=message):
        write_token_file(tmp_path / "twice", examples, sequences=["tokens"] * 2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_another_process_maps_it_anew(path, examples):
    text = pickle.dumps(TokenFile(path))
    assert len(text) < 500
    assert_equal(pickle.loads(text)[3]["tokens"], examples[3]["tokens"])


def test_another_process_does_not_map_another_file(path, examples, monkeypatch):
    monkeypatch.chdir(path.parent)
    text = pickle.dumps(TokenFile(path.name))
    monkeypatch.chdir("/")
    assert_equal(pickle.loads(text)[3]["tokens"], examples[3]["tokens"])
    shutil.rmtree(path)
    with pytest.raises(ValueError, match="is not a token file"):
        pickle.loads(text)
    write_token_file(path, examples[::-1], sequences=SEQUENCES)
    with pytest.raises(ValueError, match="was changed since it was opened"):
        pickle.loads(text)


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
    with pytest.raises(
        ValueError, match="tokens.npy is not an array of numpy: .*again"
    ):
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
        (None, "is not a token file"),
        ("{", "is not a token file"),
        (b"\xff\xfe{", "is not a token file"),
        (b'{"format": "\xe4"}', "is not a token file"),
        ("[" * 100_000, "is not a token file"),
        ("9" * 5_000, "is not a token file"),
        ("null", 'has no "format": "jaxbucket.TokenFile"'),
        ("[]", 'has no "format": "jaxbucket.TokenFile"'),
        ('{"format": "jaxbucket.TokenFile", "version": 2}', "has version 2; this jax"),
        ('{"format": "jaxbucket.TokenFile", "version": 1}', "index.json lacks 'files'"),
        (
            '{"format": "jaxbucket.TokenFile", "version": 1, "files": {}, '
            '"sequences": ["x"]}',
            "index.json lacks 'offsets' or a sequence",
        ),
    ],
)
def test_a_foreign_folder_is_refused(path, index, message):
    (path / "index.json").unlink()
    if index is not None:
        content = index.encode() if isinstance(index, str) else index
        (path / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TokenFile(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 1, 2], r"`rows` has 3 entries, but bucket \[2, 40\] has 2 rows. Give"),
        ([0, 60], "`rows` has 0 to 60: they must be from 0 to 59, or -1"),
        ([0, -2], "`rows` has -2 to 0: they must be from 0 to 59, or -1"),
        ([0.0, 1.0], "`rows` has dtype float64: give integers"),
        ([True, False], "`rows` has dtype bool: give integers"),
        (["0", "1"], "`rows` has dtype <U1: give integers"),
        (7, r"`rows` has 0 dimensions: give \[B\]"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "chunks", "concatenation"])
def test_rows_that_are_not_there_are_refused(path, kind, rows, message):
    source = {
        "file": TokenFile,
        "chunks": lambda path: split_source(TokenFile(path), 40),
        "concatenation": lambda path: concatenate([TokenFile(path)]),
    }[kind](path)
    with pytest.raises(ValueError, match=message):
        source.collate(rows, Bucket(2, 40))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.uint64])
def test_rows_may_have_any_dtype_of_integers(tmp_path, dtype):
    last = min(int(np.iinfo(dtype).max), 65_535)
    # Beyond it there are more, as the largest row of the dtype is not the last.
    examples = [{"tokens": np.full(3, index)} for index in range(last + 5)]
    file = write_token_file(tmp_path / "file", examples)
    for source in (file, split_source(file, 2), concatenate([file, file])):
        rows = np.array([last, 0, last - 1])
        assert_equal(
            source.collate(rows.astype(dtype), Bucket(3, 3)),
            source.collate(rows, Bucket(3, 3)),
        )
    begins, lengths = (np.array([x], dtype) for x in (2, last if last < 256 else 255))
    with pytest.raises(ValueError, match="are no part of example"):
        file.collate_spans(np.array([0], dtype), begins, lengths, Bucket(1, 300))


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
        ([{"x": np.ones(2, ml_dtypes.bfloat16)}], "'x' is bfloat16, .* would lose it"),
        ([{"x": np.ones(2, ml_dtypes.float8_e5m2)}], "'x' is float8_e5m2, .*lose it"),
        ([{"x": np.ones(2, ml_dtypes.int4)}], "'x' is int4, .*write its bits"),
        (
            [{"x": np.broadcast_to(np.uint8(0), 2**31)}],
            "Row 0 has length 2147483648, beyond 2147483647: split it",
        ),
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


# What is opened is what was written


def edit_index(path, change) -> None:
    """Changes the index, with a seal of its own or, from before there was any, none."""
    file = path / "index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def unseal(path) -> None:
    """Makes it one of those that were written before there was a seal."""

    def old(index):
        del index["seal"]
        for entry in index["files"].values():
            for name in ("dtype", "shape", "pages"):
                del entry[name]

    edit_index(path, old)


def put_header(file, **changes) -> None:
    """Writes another header into the same bytes."""
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


def test_another_dtype_of_the_same_size_is_refused(tmp_path):
    path = write_token_file(tmp_path / "file", numbers()).path
    put_header(path / "a.npy", descr="<f4")
    with pytest.raises(ValueError, match=r"a.npy is <f4\[.*, but <i4\[.* was written"):
        TokenFile(path)


@pytest.mark.parametrize("size", [3, 200])
def test_arrays_of_two_features_that_were_swapped_are_refused(tmp_path, size):
    path = write_token_file(tmp_path / "file", numbers()[:size]).path
    (path / "a.npy").rename(path / "c.npy")
    (path / "b.npy").rename(path / "a.npy")
    (path / "c.npy").rename(path / "b.npy")
    with pytest.raises(ValueError, match="a.npy is not what was written.*another feat"):
        TokenFile(path)


@pytest.mark.parametrize(
    "name", ["../file/a", "/etc/a", "a/b", "..", "", "a\n", "a\0b", ".", "x/../a"]
)
@pytest.mark.parametrize("sealed", [True, False])
def test_names_stay_in_the_folder(path, name, sealed):
    if not sealed:
        unseal(path)

    def lead_out(index):
        index["files"][name] = index["files"].pop("tokens")
        index["sequences"][0] = name
        if sealed:
            index["seal"] = token_index._seal(index)

    edit_index(path, lead_out)
    with pytest.raises(
        ValueError, match=r"index.json names .*, which is not a file in"
    ):
        TokenFile(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["sequences"].reverse(), "its seal is of another index"),
        (lambda x: x["files"].pop("label"), "its seal is of another index"),
        (lambda x: x.update(seal=[1]), "its seal is of another index"),
        (lambda x: x.pop("seal"), "its seal is missing"),
    ],
)
def test_an_index_that_was_changed_is_refused(path, change, message):
    edit_index(path, change)
    with pytest.raises(ValueError, match=rf"index.json .*{message}.*write it again"):
        TokenFile(path)


def test_a_file_from_before_there_was_a_seal_opens(path, examples):
    sealed = TokenFile(path)
    unseal(path)
    old = TokenFile(path)
    # Runs that began with it go on, whoever wrote it.
    assert old.fingerprint == sealed.fingerprint
    for index in (0, 17, 59):
        assert_equal(old[index], sealed[index])
    old.verify()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("frames", {"shape": (10, 3)}, "but its header is that of"),
        ("frames", {"fortran_order": True}, "is not an array of numpy: its order"),
        ("tokens", {"descr": "<i1"}, "but its header is that of int8"),
        ("tokens", {"descr": "|O"}, "is not an array of numpy: its dtype is object"),
        ("tokens", {"descr": "<M8[s]"}, "its dtype is datetime64"),
        ("offsets", {"descr": "<f8"}, "offsets.npy is float64.*, not int64"),
        ("offsets", {"descr": "<u8"}, "offsets.npy is uint64.*, not int64"),
        ("speaker", {"shape": (240,)}, "has shape .240., but .* counts 60 examples"),
    ],
)
def test_headers_of_an_old_file_have_to_fit(path, name, changes, message):
    unseal(path)
    put_header(path / f"{name}.npy", **changes)
    with pytest.raises(ValueError, match=rf"{message}.*Write the token file again"):
        TokenFile(path)


def test_offsets_that_do_not_rise_are_refused(path):
    unseal(path)
    with (path / "offsets.npy").open("r+b") as file:
        file.seek(-16, 2)
        file.write(np.int64(2**60).tobytes())
    file = TokenFile(path)
    with pytest.raises(
        ValueError, match="offsets.npy has examples of .* it was changed"
    ):
        _ = file.lengths


class Pickled:
    """Something that must not be made."""

    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def spoil(rng: np.random.Generator, path) -> None:
    """Changes a folder somehow."""
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
        # Of the same size, perhaps.
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
        begin = rng.integers(128)
        content[begin : begin + 9] = rng.bytes(9)
    else:
        file = path / "index.json"
        content = bytearray(file.read_bytes())
        for _ in range(rng.integers(1, 4)):
            begin = rng.integers(len(content))
            if kind == 6:
                content[begin] = rng.integers(256)
            elif kind == 7:
                del content[begin : begin + rng.integers(1, 40)]
            else:
                pieces = [b"[", b"{", b"-1", b"null", b'"', b"1e999", b"tokens", b"../"]
                content[begin:begin] = pieces[rng.integers(len(pieces))]
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("sealed", [True, False])
def test_whatever_is_opened_is_what_was_written_or_is_refused(tmp_path, sealed):
    examples = make_examples(1, 12, 9)
    written = write_token_file(tmp_path / "file", examples, sequences=SEQUENCES).path
    if not sealed:
        unseal(written)
    want = [dict(TokenFile(written)[index]) for index in range(len(examples))]
    path, refused = tmp_path / "spoilt", 0
    for seed in range(120):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(written, path)
        spoil(np.random.default_rng(seed), path)
        try:
            file = TokenFile(path)
            _ = file.lengths
        except ValueError as error:
            assert str(path) in str(error) and "again" in str(error), error
            assert "allow_pickle" not in str(error)
            refused += 1
            continue
        if sealed:
            # All pages of so small a file are looked at.
            for index, example in enumerate(want):
                assert_equal(file[index], example)
    assert refused > (90 if sealed else 60)


def test_opening_looks_at_some_pages_and_verifying_at_all(tmp_path):
    examples = [{"a": np.arange(1000)}] * 300
    path = write_token_file(tmp_path / "file", examples).path
    file = path / "a.npy"
    content = bytearray(file.read_bytes())
    for place, is_seen in ((len(content) // 30, False), (-3, True)):
        content[place] ^= 1
        file.write_bytes(bytes(content))
        with pytest.raises(ValueError, match="a.npy is not what was written"):
            TokenFile(path) if is_seen else TokenFile(path).verify()
