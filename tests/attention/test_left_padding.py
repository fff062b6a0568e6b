"""Left padding against rows that are padded by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb

ROWS = [[7, 3, 9], [5], None, [1, 2, 3, 4, 5]]


def make_batch():
    rows = [
        None if x is None else {"x": x, "y": np.outer(x, [1.0, 2.0]), "label": len(x)}
        for x in ROWS
    ]
    return jb.data.collate_rows(rows, jb.Bucket(4, 5), sequences=["x", "y"])


def moved_left(batch, sequences=("x", "y")):
    return jb.attention.left_padded(batch, sequences=sequences)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_rows_end_with_their_last_token(transform):
    left = transform(moved_left)(make_batch())
    want = [[0] * (5 - len(row or [])) + (row or []) for row in ROWS]
    np.testing.assert_array_equal(left.features["x"], want)
    np.testing.assert_array_equal(left.mask, np.array(want) > 0)
    np.testing.assert_array_equal(left.features["y"], np.multiply.outer(want, [1, 2]))
    np.testing.assert_array_equal(
        left.features["label"], make_batch().features["label"]
    )
    positions = [[0] * (5 - len(x or [])) + list(range(len(x or []))) for x in ROWS]
    np.testing.assert_array_equal(left.positions["x"], positions)


def test_packed_rows_are_moved_as_a_whole():
    batch = jb.data.collate_rows(
        [[{"x": [7, 3]}, {"x": [5]}]], jb.Bucket(1, 5), max_segments=2
    )
    left = moved_left(batch, "x")
    assert left.features["x"].tolist() == [[0, 0, 7, 3, 5]]
    assert left.segment_ids["x"].tolist() == [[0, 0, 1, 1, 2]]
    assert left.positions["x"].tolist() == [[0, 0, 0, 1, 0]]


@pytest.mark.parametrize("names", ["x", ["x"], ("y", "x")])
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 2)])
def test_only_the_named_features_are_moved(names, shape):
    """T class scores have the shape of a sequence."""
    scores = np.arange(np.prod(shape)).reshape(shape)
    batch = make_batch()._replace(features=make_batch().features | {"scores": scores})
    left = moved_left(batch, names)
    back = jb.attention.right_padded(left, sequences=names)
    for name, x in batch.features.items():
        np.testing.assert_array_equal(back.features[name], x)
        is_moved = not np.array_equal(left.features[name], x)
        assert is_moved == (name in names)


def test_rows_that_are_left_padded_are_unchanged():
    left = moved_left(make_batch())
    for again in (moved_left, jax.jit(moved_left)):
        jax.tree.map(np.testing.assert_array_equal, again(left), left)


@pytest.mark.parametrize("names", [[], [""], ["z"], ["x", "label"], ["pooled"], [3]])
def test_names_must_be_those_of_sequences(names):
    batch = make_batch()
    batch = batch._replace(features={**batch.features, "pooled": jnp.ones((4, 3))})
    with pytest.raises(ValueError, match="`sequences"):
        jb.attention.left_padded(batch, sequences=names)


def test_several_sequences_are_refused():
    ids = jnp.ones((1, 2), jnp.int32)
    batch = jb.Batch({}, {"a": ids, "b": ids}, {"a": ids, "b": ids})
    with pytest.raises(ValueError, match="`sequences"):
        moved_left(batch)
