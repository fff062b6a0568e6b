"""Batch normalization against Flax's own on unpadded data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxbucket as jb

F = 5


def make_features(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    lengths = [7, 1, 0, 4]
    x = rng.normal(3, 2, (4, 9, F)).astype(dtype)
    mask = np.arange(9) < np.array(lengths)[:, None]
    return x, mask


def nnx_results(layer, x, **options):
    y = layer(jnp.asarray(x), **options)
    return y, layer.mean[...], layer.var[...]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_nnx_statistics_are_those_of_real_positions(dtype):
    x, mask = make_features(dtype=dtype)
    ours = jb.layers.NnxBatchNorm(F, momentum=0.5, rngs=nnx.Rngs(0))
    flax = nnx.BatchNorm(
        F, momentum=0.5, use_fast_variance=False, dtype=np.float32, rngs=nnx.Rngs(0)
    )
    y, *statistics = nnx_results(ours, x, mask=jnp.asarray(mask))
    want, *expected = nnx_results(flax, x[mask].astype(np.float32))
    np.testing.assert_allclose(y[mask], want, atol=1e-5)
    np.testing.assert_allclose(statistics, expected, rtol=1e-5)
    # In evaluation, the running averages are used, and nothing is updated.
    ours.eval(), flax.eval()
    y, *unchanged = nnx_results(ours, x, mask=jnp.asarray(mask))
    want, *_ = nnx_results(flax, x[mask].astype(np.float32))
    np.testing.assert_allclose(y[mask], want, atol=1e-5)
    np.testing.assert_array_equal(unchanged, statistics)


@pytest.mark.parametrize("options", [{}, {"use_scale": False, "use_bias": False}])
def test_linen_statistics_are_those_of_real_positions(options):
    x, mask = make_features()
    options = {"momentum": 0.5, "use_running_average": False, **options}
    ours = jb.layers.LinenBatchNorm(**options)
    flax = linen.BatchNorm(**options, use_fast_variance=False)
    variables = ours.init(jax.random.key(0), jnp.asarray(x))
    expected = flax.init(jax.random.key(0), jnp.asarray(x))
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    y, new = ours.apply(
        variables, jnp.asarray(x), mask=jnp.asarray(mask), mutable=["batch_stats"]
    )
    want, expected = flax.apply(expected, jnp.asarray(x[mask]), mutable=["batch_stats"])
    np.testing.assert_allclose(y[mask], want, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), new, expected
    )


def test_a_batch_without_real_positions_keeps_the_running_averages():
    layer = jb.layers.NnxBatchNorm(F, rngs=nnx.Rngs(0))
    x, mask = make_features()
    y, mean, var = nnx_results(layer, x, mask=jnp.zeros_like(mask))
    assert np.isfinite(y).all()
    assert (mean == 0).all() and (var == 1).all()


def test_features_may_be_on_another_axis():
    x, mask = make_features()
    last = jb.layers.NnxBatchNorm(F, rngs=nnx.Rngs(0))
    middle = jb.layers.NnxBatchNorm(F, axis=1, rngs=nnx.Rngs(0))
    expected = nnx_results(last, x, mask=jnp.asarray(mask))
    y, *statistics = nnx_results(middle, np.moveaxis(x, 2, 1), mask=jnp.asarray(mask))
    np.testing.assert_allclose(np.moveaxis(y, 1, 2), expected[0], rtol=1e-6)
    np.testing.assert_allclose(statistics, expected[1:], rtol=1e-6)


def test_a_mask_covers_further_axes():
    x, mask = make_features()
    images = np.stack([x, 2 * x], axis=2)  # [B, T, 2, F]
    mean, var, num_real = jb.layers.masked_statistics(images, jnp.asarray(mask))
    real = images[mask].reshape(-1, F)
    np.testing.assert_allclose(mean, real.mean(0), rtol=1e-5)
    np.testing.assert_allclose(var, real.var(0), rtol=1e-5)
    assert num_real == len(real)


@pytest.mark.parametrize("shape", [(4, 8), (9,), (4, 9, F), (4, 9, 1)])
def test_a_mask_of_another_shape_is_refused(shape):
    x, _ = make_features()
    with pytest.raises(ValueError, match=r"`mask` has shape .* has \[4, 9\] positions"):
        jb.layers.masked_statistics(jnp.asarray(x), jnp.ones(shape, bool))


def test_devices_cannot_be_selected():
    with pytest.raises(ValueError, match="`axis_name='data'` is not supported"):
        jb.layers.NnxBatchNorm(F, axis_name="data", rngs=nnx.Rngs(0))
    layer = jb.layers.LinenBatchNorm(axis_name="data", use_running_average=False)
    with pytest.raises(ValueError, match="`axis_name='data'` is not supported"):
        layer.init(jax.random.key(0), jnp.ones((2, F)))


def test_features_must_have_one_axis():
    layer = jb.layers.LinenBatchNorm(axis=(-2, -1), use_running_average=False)
    with pytest.raises(ValueError, match=r"`axis=\(-2, -1\)` is not supported"):
        layer.init(jax.random.key(0), jnp.ones((2, 3, 4)))
