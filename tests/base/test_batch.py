import jax
import numpy as np
import pytest

from jaxbucket import Batch, Bucket
from jaxbucket.data import RowShard


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *(({"parts": x}, "parts") for x in ((), (1, 0), (0, 0), (-1,), (0, 3), (0.5,))),
        ({"num_parts": 0}, "num_parts"),
    ],
)
def test_an_invalid_shard_is_refused(options, name):
    with pytest.raises(ValueError, match=f"`{name}"):
        RowShard(**{"num_parts": 3, **options})


def packed() -> Batch:
    return Batch(
        {"x": np.array([[7, 3, 9, 5, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6])},
        {"x": np.array([[1, 1, 1, 2, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6])},
        {"x": np.array([[0, 1, 2, 0, 0, 0], [0] * 6, [0] * 6])},
    )


def test_validity_is_derived_from_segment_ids():
    batch = packed()
    assert batch.bucket == Bucket(3, 6)
    assert batch.mask.sum(axis=1).tolist() == [4, 1, 0]
    assert batch.num_tokens == 5
    # Two examples in the first row, one in the second, none in the third.
    assert batch.num_examples == 3


def test_the_mask_of_shapes_is_a_shape():
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), packed())
    assert spec.mask == jax.ShapeDtypeStruct((3, 6), bool)


def test_as_dict_uses_the_names_of_grain():
    batch = packed()
    assert set(batch.as_dict()) == {"x", "x_segment_ids", "x_positions"}
    assert batch.as_dict()["x_segment_ids"] is batch.segment_ids["x"]


def test_a_feature_with_the_name_of_a_derived_array_is_refused():
    batch = packed()
    batch.features["x_positions"] = batch.features["x"]
    with pytest.raises(ValueError, match=r"`features` already has \['x_positions'\]"):
        batch.as_dict()


def test_empty_rows_and_examples_without_a_sequence_are_counted():
    ids = {
        "x": np.array([[1, 1, 3, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
        "y": np.array([[1, 2], [1, 0], [0, 0]]),
    }
    for cast in (np.asarray, jax.numpy.asarray):
        batch = jax.tree.map(cast, Batch({}, ids, {}))
        assert batch.segments_per_row.tolist() == [3, 1, 0]
        assert batch.row_mask.tolist() == [True, True, False]
        assert batch.num_examples == 4
        assert jax.jit(lambda batch: batch.row_mask)(batch).tolist() == [1, 1, 0]


def test_the_mask_of_two_sequences_is_ambiguous():
    batch = packed()
    ids = {"x": batch.segment_ids["x"], "y": batch.segment_ids["x"][:, :2]}
    two = batch._replace(segment_ids=ids)
    with pytest.raises(ValueError, match=r"`mask` is ambiguous: .* \['x', 'y'\]"):
        _ = two.mask
    assert two.num_tokens == 5 + 3
