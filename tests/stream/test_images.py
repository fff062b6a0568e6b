"""Streams of images: features with axes of two sequences."""

import grain
import numpy as np
import pytest
from stream_cases import batches_of, through_json

import jaxbucket as jb
from jaxbucket.data import collate_rows, unbatch

# Images have their width first, because the mapping does.
SEQUENCES = {"width": ["image", "columns"], "height": ["image"]}


def make_images(seed: int, size: int):
    rng = np.random.default_rng(seed)
    return [
        {
            "image": rng.integers(1, 99, (width, height, 3)).astype(np.uint8),
            "columns": rng.random(width),
            "index": index,
        }
        for index, (height, width) in enumerate(rng.integers(1, 9, (size, 2)).tolist())
    ]


def stream(images):
    options = grain.ReadOptions(num_threads=0)
    return grain.MapDataset.source(images).to_iter_dataset(options)


def make_plan(t: int = 8, **options):
    shapes = [(4, {"height": 5, "width": t}), (4, {"height": 8, "width": t})]
    return jb.BucketPlan.from_shapes(shapes, **options)


@pytest.mark.parametrize("policy", ["truncate", "truncate_left", "drop"])
def test_a_stream_has_the_rows_of_a_schedule(policy):
    """Every row, including its padding, is that of the map path for the same image."""
    images = make_images(1, 60)
    plan = make_plan(6, overlong={"height": "error", "width": policy})
    batches = batches_of(
        stream(images), plan, pool_size=16, sequences=SEQUENCES, pad_value={"image": 7}
    )
    rows = []
    for batch in batches:
        for example in unbatch(batch, sequences=SEQUENCES):
            index = int(example["index"])
            kept = collate_rows(
                [images[index]],
                jb.Bucket(1, batch.bucket.seq_len),
                sequences=SEQUENCES,
                pad_value={"image": 7},
                **{} if policy == "drop" else {policy: ["width"]},
            )
            row = np.flatnonzero(batch.features["index"] == index)[-1]
            for name, value in kept.features.items():
                np.testing.assert_array_equal(batch.features[name][row], value[0])
            rows.append(index)
    kept = [i for i, x in enumerate(images) if policy != "drop" or len(x["image"]) < 7]
    assert sorted(rows) == kept


def test_a_state_keeps_the_order_of_the_axes():
    # Transposed images would fit into the same buckets.
    make = {"plan": make_plan(), "pool_size": 8}
    batches = batches_of(stream(make_images(2, 40)), sequences=SEQUENCES, **make)
    iterator = iter(batches)
    next(iterator)
    state = through_json(iterator.get_state())
    want = next(iterator)
    again = iter(batches)
    again.set_state(state)
    np.testing.assert_array_equal(next(again).features["image"], want.features["image"])
    swapped = {"height": ["image"], "width": ["columns", "image"]}
    other = batches_of(stream(make_images(2, 40)), sequences=swapped, **make)
    assert other.fingerprint != batches.fingerprint
    with pytest.raises(ValueError, match=r"sequences .*\['image', 1\]"):
        iter(other).set_state(state)
