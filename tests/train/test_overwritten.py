"""Scales of layers in fp8, whose gradients are their new values."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState as FlaxTrainState

import jaxbucket as jb

pytestmark = pytest.mark.usefixtures("standard_promotion")

SCALES = "_overwrite_with_gradient"


class Float8(linen.Module):
    @linen.compact
    def __call__(self, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            x = linen.Dense(8, dot_general_cls=linen.Fp8DotGeneralOp)(x)
        x = linen.Dense(1, dot_general_cls=linen.Fp8DirectDotGeneralOp)(jnp.tanh(x))
        return x[..., 0]


def loss_fn(variables, batch, keys):
    y = Float8().apply(variables, batch.features["x"])
    return jnp.sum(jnp.square(y - 1), where=batch.mask), batch.num_tokens


def make_batch(mesh):
    rng = np.random.default_rng(0)
    rows = [{"x": 30 * rng.normal(size=(n, 16)).astype(np.float32)} for n in (4, 2, 3)]
    batch = jb.data.collate_rows(rows, jb.Bucket(4, 4))
    return next(iter(jb.sharding.prefetch_to_mesh([batch], mesh)))


def make_state(tx, mesh):
    sample = jax.ShapeDtypeStruct((4, 4, 16), np.float32)
    return jb.create_state(Float8(), tx, mesh, sample=sample)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.exhaustive
def test_scales_are_updated_as_by_flax(num_devices):
    mesh, tx = jb.data_mesh(jax.devices()[:num_devices]), optax.sgd(1e-2)
    state, batch = make_state(tx, mesh), make_batch(mesh)
    expected = FlaxTrainState.create(
        apply_fn=None, params=jax.tree.map(jnp.copy, state.model), tx=tx
    )

    @jax.jit
    def flax_step(state):
        def mean(params):
            loss_sum, weight = loss_fn(params, batch, None)
            return loss_sum / weight

        return state.apply_gradients(grads=jax.grad(mean)(state.params))

    step = jb.make_train_step(loss_fn, tx, mesh)
    for _ in range(3):
        state, _ = step(state, batch)
        expected = flax_step(expected)
    scales = jax.tree.leaves_with_path(state.variables[SCALES])
    assert len(scales) == 12
    for path, scale in scales:
        assert (scale != 1).any() and scale.any(), path
    # A sum in another order may be rounded to another number of 8 bits.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4),
        state.model,
        expected.params,
    )


@pytest.mark.exhaustive
def test_every_micro_batch_updates_the_scales():
    mesh, tx = jb.data_mesh(jax.devices()[:2]), optax.sgd(0.1)
    step = jb.make_train_step(loss_fn, tx, mesh, accumulate=True)
    batch = make_batch(mesh)
    state, _ = step(make_state(tx, mesh), (batch, batch))
    history = state.variables[SCALES]["Dense_0"]["Fp8DotGeneralOp_0"]
    largest = np.abs(batch.features["x"]).max()
    # The second micro-batch already uses the scale of the first.
    np.testing.assert_allclose(history["input_scale"], largest / 448, rtol=1e-6)


def test_scales_of_a_layer_that_is_not_called_stay():
    class Two(nnx.Module):
        def __init__(self):
            kind = nnx.variable_type_from_name(SCALES, allow_register=True)
            self.w, self.scale = nnx.Param(jnp.ones(())), kind(jnp.full(1, 3.0))

    def loss(model, batch, keys):
        return model.w[...] * jnp.sum(batch.features["x"]), batch.num_tokens

    mesh, tx = jb.data_mesh(jax.devices()[:1]), optax.sgd(0.1)
    state = jb.create_state(Two(), tx, mesh)
    state, _ = jb.make_train_step(loss, tx, mesh)(state, make_batch(mesh))
    assert state.model.scale[...] == 3


def test_scales_need_the_whole_batch():
    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(1e-2)
    step = jb.make_train_step(loss_fn, tx, mesh, mode="shard_map")
    with pytest.raises(ValueError, match="fp8.*`mode='jit'`"):
        step(make_state(tx, mesh), make_batch(mesh))
