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


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_rows_end_with_their_last_token(transform):
    left = transform(jb.attention.left_padded)(make_batch())
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
    left = jb.attention.left_padded(batch)
    assert left.features["x"].tolist() == [[0, 0, 7, 3, 5]]
    assert left.segment_ids["x"].tolist() == [[0, 0, 1, 1, 2]]
    assert left.positions["x"].tolist() == [[0, 0, 0, 1, 0]]


def test_features_may_be_named():
    left = jb.attention.left_padded(make_batch(), sequences=["x"])
    np.testing.assert_array_equal(left.features["y"], make_batch().features["y"])


def test_a_single_feature_may_be_named_without_a_list():
    batch = make_batch()
    batch = batch._replace(features={**batch.features, "xy": batch.features["x"]})
    left = jb.attention.left_padded(batch, sequences="xy")
    np.testing.assert_array_equal(left.features["x"], batch.features["x"])
    moved = jb.attention.left_padded(batch).features["x"]
    np.testing.assert_array_equal(left.features["xy"], moved)


@pytest.mark.parametrize("names", [[], [""], ["z"], ["x", "label"], ["pooled"], [3]])
def test_names_must_be_those_of_sequences(names):
    batch = make_batch()
    batch = batch._replace(features={**batch.features, "pooled": jnp.ones((4, 3))})
    with pytest.raises(ValueError, match=r"must name features .*from \['x', 'y'\]"):
        jb.attention.left_padded(batch, sequences=names)


def test_rows_that_are_left_padded_are_unchanged():
    left = jb.attention.left_padded(make_batch())
    for again in (jb.attention.left_padded, jax.jit(jb.attention.left_padded)):
        jax.tree.map(np.testing.assert_array_equal, again(left), left)


def test_several_sequences_are_refused():
    ids = jnp.ones((1, 2), jnp.int32)
    batch = jb.Batch({}, {"a": ids, "b": ids}, {"a": ids, "b": ids})
    with pytest.raises(ValueError, match=r"`batch` has the sequences \['a', 'b'\]"):
        jb.attention.left_padded(batch)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_padding_is_moved_back(transform):
    batch = make_batch()
    back = transform(jb.attention.right_padded)(jb.attention.left_padded(batch))
    jax.tree.map(np.testing.assert_array_equal, back, batch)
    left = jb.attention.left_padded(batch)
    back = jb.attention.right_padded(left, sequences="y")
    np.testing.assert_array_equal(back.features["x"], left.features["x"])
    np.testing.assert_array_equal(back.features["y"], batch.features["y"])


def test_outputs_that_are_moved_back_are_predicted():
    source = [{"x": np.array(row, np.int32)} for row in ROWS if row]
    lengths = jb.measure_lengths(source, progress=False)
    plan = jb.plan_buckets(lengths, max_tokens=8, num_buckets=2)
    mesh = jb.data_mesh(jax.devices()[:1])

    def predict_fn(params, batch):
        left = jb.attention.left_padded(batch)
        outputs = {"y": 2 * left.features["x"]}
        return jb.attention.right_padded(left._replace(features=outputs)).features

    outputs = jb.predict(
        jb.make_predict_step(predict_fn, mesh),
        jb.create_state({"w": np.float32(1)}, mesh=mesh),
        jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh),
    )
    assert [x["y"].tolist() for x in outputs] == [
        [2 * i for i in row] for row in ROWS if row
    ]
