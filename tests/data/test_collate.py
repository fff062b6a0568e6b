import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxbucket import Bucket
from jaxbucket.data import collate_rows, unbatch


def random_rows(seed: int, bucket: Bucket) -> list[dict | None]:
    """Examples of every length up to T, with empty rows between and after them."""
    rng = np.random.default_rng(seed)
    rows: list[dict | None] = []
    for _ in range(int(rng.integers(1, bucket.batch_size + 1))):
        length = int(rng.integers(1, bucket.seq_len + 1))
        example = {
            "tokens": rng.integers(0, 250, length).astype(np.uint8),
            "frames": rng.normal(size=(length, 3)).astype(np.float32),
            "label": np.int16(rng.integers(10)),
            "speaker": rng.normal(size=()).astype(np.float64),
        }
        rows.append(None if rng.random() < 0.2 else example)
    rows[0] = example
    return rows


def padded(rows, name: str, bucket: Bucket, pad_value: float) -> np.ndarray:
    """The reference implementation, one row at a time."""
    like = next(row[name] for row in rows if row is not None)
    shape = (bucket.batch_size, bucket.seq_len, *like.shape[1:])
    out = np.full(shape, pad_value, like.dtype)
    for number, row in enumerate(rows):
        if row is not None:
            out[number, : len(row[name])] = row[name]
    return out


@pytest.mark.parametrize("seed", range(20))
def test_sequences_are_padded_and_the_rest_is_stacked(seed):
    bucket = Bucket(6, 9)
    rows = random_rows(seed, bucket)
    pads = [{"tokens": 5}, {"frames": -0.5}, {"tokens": 9, "frames": 1.5}, {}][seed % 4]
    sequences = ["tokens", "frames"]
    batch = collate_rows(rows, bucket, sequences=sequences, pad_value=pads)
    assert batch.bucket == bucket
    for name in sequences:
        expected = padded(rows, name, bucket, pads.get(name, 0))
        np.testing.assert_array_equal(batch.features[name], expected)
        assert batch.features[name].dtype == expected.dtype
    for name in ("label", "speaker"):
        stacked = batch.features[name]
        assert (stacked.shape, stacked.dtype) == ((6,), rows[0][name].dtype)
        for number, row in enumerate(rows):
            assert stacked[number] == (0 if row is None else row[name])
    lengths = [0 if row is None else len(row["tokens"]) for row in rows]
    lengths += [0] * (6 - len(rows))
    # The derived properties follow from the lengths.
    real = np.arange(9) < np.array(lengths)[:, None]
    (ids,), (positions,) = batch.segment_ids.values(), batch.positions.values()
    np.testing.assert_array_equal(ids, real)
    np.testing.assert_array_equal(positions, np.where(real, np.arange(9), 0))
    assert ids.dtype == positions.dtype == np.int32
    assert batch.num_tokens == sum(lengths)
    assert batch.num_examples == np.count_nonzero(lengths)


@pytest.mark.parametrize("seed", range(20))
def test_unbatch_is_the_inverse(seed):
    bucket = Bucket(5, 7)
    rows = random_rows(seed, bucket)
    examples = [row for row in rows if row is not None]
    back = unbatch(collate_rows(rows, bucket))
    assert len(back) == len(examples)
    for result, expected in zip(back, examples, strict=True):
        assert result.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(result[name], expected[name])
            assert result[name].dtype == expected[name].dtype


def test_unbatch_needs_names_if_a_vector_has_the_length_of_the_bucket():
    # Each example has a feature of shape [3], and the bucket has T = 3.
    rows = [{"x": np.arange(2), "v": np.arange(3.0)}]
    batch = collate_rows(rows, Bucket(1, 3), sequences=["x"])
    (back,) = unbatch(batch, sequences=["x"])
    assert back["v"].tolist() == [0, 1, 2]


def test_long_examples_are_truncated_on_request():
    rows = [{"x": np.arange(5)}, {"x": np.arange(2)}]
    for options, kept in (
        ({"truncate": True}, [0, 1, 2]),
        ({"truncate_left": True}, [2, 3, 4]),
        ({"truncate_left": "x"}, [2, 3, 4]),
    ):
        batch = collate_rows(rows, Bucket(2, 3), **options)
        assert batch.features["x"].tolist() == [kept, [0, 1, 0]]
        assert batch.positions["x"].tolist() == [[0, 1, 2], [0, 1, 0]]
        assert batch.num_tokens == 5


X = {"x": np.arange(3)}
ROW_1 = r"[^$]*row 1"


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([X] * 3, {}, "`rows`"),
        ([None], {}, "`like="),
        ([X, {"x": np.arange(5)}], {}, "`seq_len=4`" + ROW_1),
        ([X, {"x": np.arange(0)}], {}, "`sequences`" + ROW_1),
        ([X, {"y": np.arange(3)}], {}, "'y'.*'x'" + ROW_1),
        ([X, {"x": np.ones(3)}], {}, "float64.*int64" + ROW_1),
        ([X, {"x": np.ones((3, 2), int)}], {}, "`sequences`" + ROW_1),
        ([X, {"x": 5}], {}, "`sequences`" + ROW_1),
        ([X, {"x": [[1], [1, 2]]}], {}, "inhomogeneous[^$]*'x'" + ROW_1),
        ([X, {"x": np.ma.array([1, 2], mask=[0, 1])}], {}, "masked" + ROW_1),
        ([X, [1, 2]], {}, "list, not a `Mapping`" + ROW_1),
        ([{"x": [1], "y": [1, 2]}], {}, "`sequences`"),
        ([{"label": 5}], {}, "`sequences`"),
        ([X], {"sequences": []}, "`sequences`"),
        ([X], {"sequences": ["z"]}, "`sequences`"),
        ([{"x": [1], "n": 3}], {"sequences": ["n"]}, "`sequences`"),
        ([X], {"truncate": "y"}, "`truncate`"),
        ([X], {"truncate": True, "truncate_left": True}, "`truncate`"),
        ([X], {"like": {"y": [1]}}, "'x'.*'y'"),
        ([[X] * 3], {"max_segments": 2}, "`max_segments=2`"),
        ([[X] * 2], {"max_segments": 2}, "`seq_len=4`"),
        ([X], {"max_segments": 2}, "`max_segments=2`"),
        ([[X, X]], {}, "`max_segments="),
        ([{"x": [1], "name": "ab"}], {}, "'name'"),
        ([{"x": [1], "name": np.datetime64("2000-01-01")}], {}, "'name'"),
    ],
)
def test_invalid_rows_are_refused(rows, options, message):
    with pytest.raises(ValueError, match=message):
        collate_rows(rows, Bucket(2, 4), **options)


@pytest.mark.parametrize(
    ("dtype", "pad_value"),
    [
        *(("u1", 300), ("u1", -1), ("?", 2), ("i8", 2.0**63), ("u8", 2**64)),
        *(("i4", 0.5), ("i4", float("nan")), ("i4", float("inf")), ("i4", 2**40)),
        *(("f2", 1e300), ("f2", -70_000), ("f4", 1e39), ("f8", 10**400)),
        *(("c8", 1e39), (jnp.bfloat16, 1e39), (jnp.int4, 8)),
        *((jnp.float8_e4m3fn, float("inf")), (jnp.float8_e4m3fn, 2**64)),
        *((jnp.bfloat16, 10**400), (jnp.int4, 2**64), (jnp.int4, 10**400)),
        *(("f2", 65520), (ml_dtypes.float6_e2m3fn, float("inf"))),
    ],
)
def test_a_pad_value_that_its_dtype_cannot_hold_is_refused(dtype, pad_value):
    rows = [{"x": np.ones(2, dtype)}]
    with pytest.raises(ValueError, match="`pad_value="):
        collate_rows(rows, Bucket(2, 4), pad_value=pad_value)


def test_a_pad_value_that_its_dtype_can_hold_is_used():
    nan, inf = float("nan"), float("inf")
    held = [
        *(("u1", 255), ("i4", -100), ("?", True), ("i8", 2**63 - 1), ("u8", 2**63)),
        *(("f2", 0.1), ("f4", nan), ("f2", -inf), ("f8", 1e300), ("f4", 2**40)),
        *((jnp.bfloat16, 1e38), (jnp.bfloat16, nan), (jnp.int4, -8)),
        *((jnp.float4_e2m1fn, -6), (ml_dtypes.float6_e2m3fn, 7.5), ("f2", 65519)),
        *((jnp.bfloat16, -inf), (jnp.bfloat16, 2.0**64)),
    ]
    for dtype, pad_value in held:
        batch = collate_rows(
            [{"x": np.ones(2, dtype)}], Bucket(1, 3), pad_value=pad_value
        )
        expected = np.array([1, 1, 0], dtype)
        expected[2] = pad_value
        assert batch.features["x"].dtype == expected.dtype
        assert batch.features["x"].tobytes() == expected.tobytes()


def test_one_number_for_several_features_is_that_of_none():
    rows = [{"tokens": np.ones(2, "i4"), "labels": np.ones(2, "i4"), "index": 1}]
    for pad_value in ({"labels": -100}, {"labels": np.int64(-100), "tokens": 0}):
        batch = collate_rows(rows, Bucket(1, 3), pad_value=pad_value)
        assert batch.features["tokens"].tolist() == [[1, 1, 0]]
        assert batch.features["labels"].tolist() == [[1, 1, -100]]


@pytest.mark.parametrize(
    "pad_value",
    [-100, np.nan, {"label": 1}, {"index": 1}, {"labels": "x"}, None, [1, 2]],
)
def test_a_pad_value_for_other_features_is_refused(pad_value):
    rows = [{"tokens": [1], "labels": [1], "index": 1}]
    with pytest.raises(ValueError, match="`pad_value"):
        collate_rows(rows, Bucket(1, 3), pad_value=pad_value)


def test_features_of_bytes_are_padded_with_zeros():
    for dtype in ("V2", "i4,f4"):
        batch = collate_rows([{"x": np.zeros(2, dtype)}], Bucket(1, 3))
        assert batch.features["x"].tobytes() == bytes(3 * np.dtype(dtype).itemsize)


@pytest.mark.parametrize("sequences", [["token"], "frames", ["tokens", "label"]])
def test_unbatch_refuses_sequences_that_were_not_padded(sequences):
    example = {"tokens": [1, 2], "frames": np.ones(9), "label": 1}
    batch = collate_rows([example], Bucket(2, 3), sequences=["tokens"])
    with pytest.raises(ValueError, match="`sequences="):
        unbatch(batch, sequences=sequences)
    (example,) = unbatch(batch, sequences="tokens")
    assert example["tokens"].tolist() == [1, 2] and len(example["frames"]) == 9
