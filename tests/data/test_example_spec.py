"""Features with axes of several sequences, such as images, against plain numpy."""

import json

import jax
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket import Bucket
from jaxbucket.data import collate_rows, unbatch

DTYPES = [np.uint8, np.int32, np.float32, np.float64, np.bool_]


def make_images(seed: int, size: int, longest: int = 7):
    """Returns random examples, and the sequences of their features in random order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(["height", "width", "boxes"]).tolist()
    axes = [name for name in order if name != "boxes"]
    trailing = [(), (3,), (2, 1)][seed % 3]
    dtype = DTYPES[seed % len(DTYPES)]
    examples = []
    for index in range(size):
        n = dict(zip(order, rng.integers(1, longest + 1, 3).tolist(), strict=True))
        shape = [n[name] for name in axes]
        examples.append(
            {
                "image": rng.integers(0, 99, (*shape, *trailing)).astype(dtype),
                "mask": rng.random(shape) < 0.5,
                "columns": rng.integers(1, 9, n["width"]),
                "boxes": rng.random((n["boxes"], 4)),
                "index": index,
            }
        )
    features = {
        "height": ["image", "mask"],
        "width": ["columns", "image", "mask"],
        "boxes": [],
    }
    return examples, {name: features[name] for name in order}


def axes_of(sequences):
    """Returns the sequences of the axes of each feature."""
    both = tuple(name for name in sequences if name != "boxes")
    return {"image": both, "mask": both, "columns": ("width",), "boxes": ("boxes",)}


def lengths_of(example, sequences) -> dict[str, int]:
    axes = axes_of(sequences)["image"]
    lengths = dict(zip(axes, example["image"].shape, strict=False))
    return {**lengths, "boxes": len(example["boxes"])}


def expected_batch(examples, bucket, sequences, pads, left=()):
    """Returns the features of a batch, and its segment ids."""
    features, ids = {}, {}
    for name, axes in axes_of(sequences).items():
        seq_lens = [bucket.seq_len[axis] for axis in axes]
        first = examples[0][name]
        shape = (bucket.batch_size, *seq_lens, *first.shape[len(axes) :])
        features[name] = np.full(shape, pads.get(name, 0), first.dtype)
        for row, example in enumerate(examples):
            value = example[name]
            for axis, (sequence, t) in enumerate(zip(axes, seq_lens, strict=True)):
                start = max(0, value.shape[axis] - t) if sequence in left else 0
                value = np.take(
                    value, range(start, min(start + t, value.shape[axis])), axis
                )
            place = tuple(slice(size) for size in value.shape)
            features[name][row][place] = value
    for name, t in bucket.seq_len.items():
        ids[name] = np.zeros((bucket.batch_size, t), np.int32)
        for row, example in enumerate(examples):
            ids[name][row, : lengths_of(example, sequences)[name]] = 1
    return features, ids


def assert_equal(example, other):
    assert example.keys() == other.keys()
    for name, value in example.items():
        np.testing.assert_array_equal(value, other[name])
        assert np.asarray(value).dtype == np.asarray(other[name]).dtype


@pytest.mark.parametrize("seed", range(12))
def test_unbatch_is_the_inverse_of_collate_rows(seed):
    examples, sequences = make_images(seed, size=5)
    pads = {"image": 1, "columns": -1, "boxes": 0.5} if seed % 2 else {}
    bucket = Bucket(6, {"height": 7, "width": 9, "boxes": 8})
    batch = collate_rows(examples, bucket, sequences=sequences, pad_value=pads)
    features, ids = expected_batch(examples, bucket, sequences, pads)
    assert_equal({x: batch.features[x] for x in features}, features)
    assert_equal(batch.segment_ids, ids)
    for example, other in zip(
        unbatch(batch, sequences=sequences), examples, strict=True
    ):
        assert_equal(example, other)
    like = collate_rows([], bucket, like=examples[0], sequences=sequences)
    assert jax.tree.map(np.shape, like) == jax.tree.map(np.shape, batch)


@pytest.mark.parametrize("seed", range(8))
def test_each_axis_is_truncated_on_its_own_side(seed):
    examples, sequences = make_images(seed, size=4)
    rng = np.random.default_rng(seed)
    left = [name for name in sequences if rng.random() < 0.5]
    right = [name for name in sequences if name not in left]
    bucket = Bucket(4, dict(zip(sequences, rng.integers(1, 6, 3), strict=True)))
    batch = collate_rows(
        examples, bucket, sequences=sequences, truncate=right, truncate_left=left
    )
    features, ids = expected_batch(examples, bucket, sequences, {}, left)
    assert_equal({x: batch.features[x] for x in features}, features)
    assert_equal(batch.segment_ids, ids)


@pytest.mark.parametrize("seed", range(2))
def test_a_schedule_has_each_image_once(seed):
    examples, sequences = make_images(seed, size=40)
    measured = jb.measure_lengths(examples, sequences=sequences, progress=False)
    assert list(measured) == sorted(sequences)
    expected = [lengths_of(example, sequences) for example in examples]
    for name, lengths in measured.items():
        assert lengths.tolist() == [x[name] for x in expected]
    shapes = [(4, dict.fromkeys(sequences, t)) for t in (4, 6, 7)]
    plan = jb.BucketPlan.from_shapes(shapes)
    schedule = jb.BatchSchedule(plan, measured, seed=seed)
    batches = jb.batch_dataset(examples, schedule, sequences=sequences)
    seen = [x for batch in batches for x in unbatch(batch, sequences=sequences)]
    assert sorted(int(x["index"]) for x in seen) == list(range(len(examples)))
    for example in seen:
        assert_equal(example, examples[int(example["index"])])


def test_the_order_of_axes_is_part_of_keys_and_positions(tmp_path):
    images = [{"image": np.zeros((2 + i, 9 - i))} for i in range(4)]
    sequences = {"width": ["image"], "height": ["image"]}
    swapped = dict(reversed(sequences.items()))
    options = {"cache": tmp_path, "progress": False}
    a = jb.measure_lengths(images, sequences=sequences, **options)
    b = jb.measure_lengths(images, sequences=swapped, **options)
    assert a["width"].tolist() == b["height"].tolist() == [2, 3, 4, 5]
    assert a["height"].tolist() == b["width"].tolist() == [9, 8, 7, 6]
    assert len(list(tmp_path.glob("*.npy"))) == 2
    plan = jb.plan_buckets(a, max_tokens=60, num_buckets=1)
    schedule = jb.BatchSchedule(plan, a)
    position = jb.batch_dataset(images, schedule, sequences=sequences).position(0)
    saved = json.loads(json.dumps(position.to_dict(), sort_keys=True))
    position = type(position).from_dict(saved)
    same = jb.batch_dataset(images, schedule, sequences=sequences)
    assert same.resume(position).start_step == 0
    other = jb.batch_dataset(images, schedule, sequences=swapped)
    with pytest.raises(ValueError, match="sequences"):
        other.resume(position)


IMAGE = {"image": np.ones((3, 4, 2))}
SEQUENCES = {"height": ["image"], "width": ["image"]}
BUCKET = Bucket(1, {"height": 4, "width": 4})


@pytest.mark.parametrize(
    ("example", "sequences"),
    [
        ({"image": np.ones(3)}, SEQUENCES),
        (IMAGE, None),
        (IMAGE | {"height": 3}, SEQUENCES),
        (IMAGE, {"height": ["height", "image"], "width": ["image"]}),
        (IMAGE, {"height": ["image", "image"], "width": []}),
        (
            IMAGE | {"columns": np.ones(3)},
            {"height": ["image"], "width": ["image", "columns"]},
        ),
    ],
)
def test_wrong_axes_are_refused(example, sequences):
    with pytest.raises(ValueError, match="`sequences"):
        collate_rows([example], BUCKET, sequences=sequences)
    if sequences is not None:
        with pytest.raises(ValueError, match="`sequences"):
            jb.measure_lengths([example], sequences=sequences, progress=False)


def test_images_do_not_fit_into_rows_of_other_kinds():
    batch = collate_rows([IMAGE], BUCKET, sequences=SEQUENCES)
    with pytest.raises(ValueError, match="5 of 'width', beyond `seq_len=4`"):
        collate_rows([{"image": np.ones((2, 5))}], BUCKET, sequences=SEQUENCES)
    with pytest.raises(ValueError, match="`sequences`"):
        collate_rows([{"image": np.ones((3, 0))}], BUCKET, sequences=SEQUENCES)
    with pytest.raises(ValueError, match=r"two sequences, if two axes differ"):
        collate_rows([{"x": np.ones((n, n))} for n in (2, 3)], Bucket(2, 4))
    wrong = batch._replace(features={"image": np.ones((1, 4, 5))})
    with pytest.raises(ValueError, match="`sequences="):
        unbatch(wrong, sequences=SEQUENCES)


def test_packed_images_are_blocks_on_a_diagonal():
    examples, sequences = make_images(1, size=9)
    lengths = {x: [lengths_of(e, sequences)[x] for e in examples] for x in sequences}
    shape = dict.fromkeys(sequences, 16)
    packing = jb.packing.pack(lengths, [shape])
    plan = jb.BucketPlan.from_shapes([(2, shape)], packed=True)
    schedule = jb.BatchSchedule(plan, lengths, packing=packing)
    seen = []
    for batch in jb.batch_dataset(examples, schedule, sequences=sequences):
        segments = {"sequences": sequences, "max_segments": packing.max_segments}
        seen += unbatch(batch, **segments)
        first, second = axes_of(sequences)["mask"]
        rows, columns = batch.segment_ids[first], batch.segment_ids[second]
        same = (rows[:, :, None] == columns[:, None]) & (rows > 0)[:, :, None]
        assert not batch.features["mask"][~same].any()
    assert sorted(int(x["index"]) for x in seen) == list(range(9))
    for example in seen:
        assert_equal(example, examples[int(example["index"])])


def test_images_are_not_split_or_in_token_files(tmp_path):
    lengths = {"height": [3], "width": [4]}
    with pytest.raises(ValueError, match="`overlong='split'`"):
        jb.plan_buckets(lengths, max_tokens=9, overlong="split")
    with pytest.raises(ValueError, match="names several sequences"):
        jb.data.write_token_file(tmp_path / "a", [IMAGE], sequences=SEQUENCES)
    files = [
        jb.data.write_token_file(tmp_path / name, [{name: np.ones((3, 4))}])
        for name in ("height", "width")
    ]
    zipped = jb.data.zip_sources(files)
    plan = jb.plan_buckets(zipped.lengths, max_tokens=9)
    schedule = jb.BatchSchedule(plan, zipped.lengths)
    sequences = {"height": [], "width": ["height"]}
    with pytest.raises(ValueError, match="`sequences="):
        jb.batch_dataset(zipped, schedule, sequences=sequences)
