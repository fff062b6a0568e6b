"""Sums over examples, against numpy, in padded and packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb

VALUES = [np.array(x, np.float32) for x in ([1, 2, 4], [8], [16, 32], [64])]
example_sums = jb.attention.example_sums


def examples():
    return [{"x": x, "y": np.stack([x, -x], axis=1)} for x in VALUES]


def test_rows_of_one_example_have_one_sum():
    batch = jb.data.collate_rows([*examples(), None], jb.Bucket(5, 4), pad_value={})
    sums = jax.jit(lambda x: example_sums(x.features["x"], x, None))(batch)
    assert sums.tolist() == [7, 8, 48, 64, 0]
    assert example_sums(batch.mask, batch, None).tolist() == [3, 1, 2, 1, 0]
    wide = example_sums(batch.features["y"], batch, None)
    assert wide.tolist() == [[x, -x] for x in sums]


def test_packed_rows_have_a_sum_for_each_example():
    first, second, third, fourth = examples()
    rows = [[first, second], None, [third, fourth]]
    batch = jb.data.collate_rows(
        rows, jb.Bucket(3, 5), max_segments=3, pad_value={"x": 9}
    )
    sums = jax.jit(lambda x: example_sums(x.features["x"], x, 3))(batch)
    assert sums.tolist() == [[7, 8, 0], [0, 0, 0], [48, 64, 0]]
    counts = example_sums(batch.mask, batch, 3)
    assert counts.tolist() == [[3, 1, 0], [0, 0, 0], [2, 1, 0]]
    assert example_sums(batch.features["y"], batch, 3).shape == (3, 3, 2)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *((np.uint8, 255), (np.int8, -128), (np.int16, 30_000), (bool, 1)),
        *((jnp.bfloat16, 1), (np.float16, 3), (np.float32, 0.1), (np.int32, 2**16)),
    ],
)
@pytest.mark.parametrize("shape", [(1, 4096), (1, 4096, 2)])
def test_packed_rows_have_the_sums_and_dtypes_of_padded_rows(dtype, number, shape):
    """Sums do not overflow, nor are they rounded after each token."""
    x = jnp.full(shape, number, dtype)
    ids = jnp.repeat(jnp.arange(1, 3), 2048)[None]
    batch = jb.Batch({}, {"x": ids}, {"x": ids})
    sums = example_sums(x, batch, 3)
    padded = example_sums(x[:, :2048], jb.Batch({}, {"x": ids[:, :2048]}, {}), None)
    assert sums.dtype == padded.dtype
    exact = np.asarray(x[:, :2048], np.float64).sum(axis=1)
    for total in (padded, sums[:, 0], sums[:, 1]):
        np.testing.assert_allclose(np.asarray(total, np.float64), exact, 1e-4)
    assert not sums[:, 2].any()


def test_every_token_needs_a_number():
    batch = jb.data.collate_rows(examples(), jb.Bucket(4, 4))
    with pytest.raises(ValueError, match="`x`"):
        example_sums(np.ones(4), batch, None)
