"""The average of the parameters against the weighted mean of all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxbucket as jb


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999, 1 - 1e-8])
def test_the_average_is_the_weighted_mean_of_all_parameters(decay, dtype):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=3), dtype)}
    tx = optax.chain(optax.sgd(1.0), jb.optim.average_params(decay))
    state = tx.init(params)
    after = []
    for _ in range(20):
        grads = {"w": jnp.asarray(rng.normal(size=3), dtype)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        after.append(np.asarray(params["w"], np.float64))
    weights = np.float64(decay) ** np.arange(20)[::-1]
    average = jb.optim.average_of(state)["w"]
    assert average.dtype == jnp.float32
    np.testing.assert_allclose(
        average, np.average(after, axis=0, weights=weights), rtol=2e-4
    )


def test_before_the_first_update_it_is_the_parameters():
    params = {"w": jnp.ones(2), "v": {"x": jnp.zeros(())}}
    state = optax.chain(optax.adam(1.0), jb.optim.average_params()).init(params)
    assert jax.tree.all(
        jax.tree.map(jnp.array_equal, jb.optim.average_of(state), params)
    )


def test_updates_are_unchanged():
    params, grads = jnp.ones(3), jnp.arange(3.0)
    tx = optax.sgd(0.1, momentum=0.9)
    want, _ = tx.update(grads, tx.init(params), params)
    tx = optax.chain(tx, jb.optim.average_params())
    got, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2, np.nan])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match="`decay=.* must be at least 0 and below 1"):
        jb.optim.average_params(decay)


def test_parameters_are_required():
    tx = jb.optim.average_params()
    with pytest.raises(ValueError, match="`average_params` needs the parameters"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


def test_an_optimizer_without_an_average_is_named():
    state = jb.create_state({"w": np.ones(2)}, optax.adam(1.0))
    with pytest.raises(ValueError, match=r"no average.* `optax.chain\(optax.adam"):
        print(state.average)


@pytest.mark.parametrize("decay", ["a", None, jnp.float32(0.5)])
def test_a_decay_that_is_not_a_number_is_refused(decay):
    with pytest.raises(ValueError, match="`decay` is a .*static_args"):
        jb.optim.average_params(decay)


AVERAGE = jb.optim.average_params(0.5)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(AVERAGE, optax.sgd(1.0)),
        optax.chain(optax.sgd(1.0), AVERAGE, optax.identity()),
        optax.chain(optax.chain(optax.sgd(1.0), AVERAGE), optax.scale(2.0)),
        optax.MultiSteps(optax.chain(AVERAGE, optax.sgd(1.0)), 2),
        optax.named_chain(("z", AVERAGE), ("a", optax.sgd(1.0))),
        optax.partition({"a": optax.chain(AVERAGE, optax.sgd(1.0))}, {"x": "a"}),
    ],
)
def test_an_average_that_is_not_last_is_refused(tx):
    params = {"x": jnp.ones(1)}
    with pytest.raises(ValueError, match="`average_params` is number . of . .* last"):
        jb.create_state(params, tx)
    with pytest.raises(ValueError, match="Put it last"):
        jb.optim.average_of(tx.init(params))


def counting(tx):
    """Returns a wrapper whose state is a plain tuple, though not that of a chain."""

    def update(grads, state, params=None):
        updates, inner = tx.update(grads, state[0], params)
        return updates, (inner, state[1] + 1)

    return optax.GradientTransformation(
        lambda params: (tx.init(params), jnp.zeros((), jnp.int32)), update
    )


@pytest.mark.parametrize(
    "tx",
    [
        AVERAGE,
        counting(optax.chain(optax.sgd(1.0), AVERAGE)),
        optax.named_chain(("z", optax.sgd(1.0)), ("a", AVERAGE)),
        optax.chain(optax.sgd(1.0), optax.chain(optax.identity(), AVERAGE)),
        optax.MultiSteps(optax.chain(optax.sgd(1.0), AVERAGE), 2),
        optax.inject_hyperparams(
            lambda learning_rate: optax.chain(optax.sgd(learning_rate), AVERAGE)
        )(0.5),
        optax.partition({"a": optax.chain(optax.sgd(1.0), AVERAGE)}, {"x": "a"}),
    ],
)
def test_an_average_inside_of_wrappers_is_found(tx):
    state = jb.create_state({"x": jnp.ones(1)}, tx)
    assert state.average.params["x"] == 1
