"""The learning rate follows the batch: factors, and equality with a scaled rate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbucket as jb

RULES = {
    "linear": lambda ratio: ratio,
    "sqrt": np.sqrt,
    "own": lambda ratio: 1 / (1 + ratio),
}
SIZES = [8, 3, 64, 1, 16]


@pytest.fixture
def standard_promotion():
    """Parts of optax mix int32 counts with floats, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def scaling(rule: str, **base: float) -> optax.GradientTransformationExtraArgs:
    own = rule if rule in ("linear", "sqrt") else RULES[rule]
    return jb.scale_by_batch_size(**base, rule=own)


def random_params(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    values = {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=2)}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)


# Factors


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", RULES)
def test_updates_are_multiplied_by_the_rule_of_the_ratio(rule, size):
    tx = scaling(rule, base_examples=4)
    grads = random_params(0)
    updates, _ = tx.update(grads, tx.init(grads), num_examples=size)
    for name in grads:
        want = np.asarray(grads[name]) * RULES[rule](size / 4)
        np.testing.assert_allclose(updates[name], want, rtol=1e-6)


def test_sqrt_is_the_rule_where_none_is_given():
    tx = jb.scale_by_batch_size(base_examples=4)
    update, _ = tx.update(jnp.ones(()), tx.init(jnp.ones(())), num_examples=36)
    assert update == 3


@pytest.mark.parametrize(
    ("base", "factor"), [({"base_examples": 2}, 3), ({"base_tokens": 200}, 0.5)]
)
def test_only_the_size_the_base_names_counts(base, factor):
    tx = jb.scale_by_batch_size(**base, rule="linear")
    grads = jnp.ones(())
    sizes = {"num_examples": 6, "num_tokens": 100}
    update, _ = tx.update(grads, tx.init(grads), **sizes)
    assert update == factor


@pytest.mark.parametrize(
    "size", [8, 8.0, np.int64(8), np.float32(8), jnp.int32(8), jnp.float32(8)]
)
def test_a_size_may_be_any_number(size):
    tx = jb.scale_by_batch_size(base_examples=2, rule="linear")
    grads = jnp.ones(3)
    updates, state = tx.update(grads, tx.init(grads), num_examples=size)
    np.testing.assert_array_equal(updates, [4, 4, 4])
    assert state.factor == 4


@pytest.mark.parametrize("rule", RULES)
def test_a_traced_size_gives_the_factor_of_a_static_one(rule):
    tx = scaling(rule, base_tokens=100)
    grads = random_params(1)
    traces = []

    @jax.jit
    def update(grads, state, size):
        traces.append(size)
        return tx.update(grads, state, num_tokens=size)

    for size in SIZES:
        got, got_state = update(grads, tx.init(grads), size)
        want, want_state = tx.update(grads, tx.init(grads), num_tokens=size)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), got, want)
        np.testing.assert_allclose(got_state.factor, want_state.factor, 1e-6)
    assert len(traces) == 1


def test_an_empty_batch_is_an_update_of_zero():
    tx = jb.scale_by_batch_size(base_examples=4)
    update, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), num_examples=0)
    np.testing.assert_array_equal(update, [0, 0])
    assert state.factor == 0


def test_the_state_is_the_last_factor():
    tx = jb.scale_by_batch_size(base_examples=4, rule="linear")
    grads = jnp.ones(2)
    state = tx.init(grads)
    assert (state.factor, state.factor.dtype) == (1, jnp.float32)
    for size in SIZES:
        _, state = tx.update(grads, state, num_examples=size)
        assert state.factor == size / 4
        assert (state.factor.shape, state.factor.dtype) == ((), jnp.float32)


def test_the_factor_does_not_depend_on_what_came_before():
    tx = jb.scale_by_batch_size(base_examples=4)
    grads = jnp.ones(2)
    _, late = tx.update(grads, tx.init(grads), num_examples=99)
    after, _ = tx.update(grads, late, num_examples=7)
    fresh, _ = tx.update(grads, tx.init(grads), num_examples=7)
    np.testing.assert_array_equal(after, fresh)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_updates_keep_their_dtype(dtype):
    tx = jb.scale_by_batch_size(base_examples=1, rule="linear")
    grads = {"w": jnp.ones(2, dtype), "b": jnp.ones((), jnp.float32)}
    updates, state = tx.update(grads, tx.init(grads), num_examples=jnp.int32(3))
    assert (updates["w"].dtype, updates["b"].dtype) == (dtype, jnp.float32)
    np.testing.assert_array_equal(updates["w"].astype(jnp.float32), [3, 3])
    assert state.factor.dtype == jnp.float32


def test_double_precision_updates_keep_their_dtype():
    with jax.enable_x64(True):
        tx = jb.scale_by_batch_size(base_examples=4)
        grads = jnp.ones(2, jnp.float64)
        updates, state = tx.update(grads, tx.init(grads), num_examples=jnp.asarray(3))
        assert (updates.dtype, state.factor.dtype) == (jnp.float64, jnp.float32)
        np.testing.assert_allclose(updates, np.sqrt([0.75, 0.75]), rtol=1e-15)


# Equal to scaling the learning rate


OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": lambda lr: optax.adamw(lr, weight_decay=0.1),
    "lion": lambda lr: optax.lion(lr, weight_decay=0.1),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_equals_scaling_the_learning_rate(name, rule):
    make, lr = OPTIMIZERS[name], 0.01
    tx = optax.chain(make(lr), scaling(rule, base_examples=4))
    params = expected = random_params(0)
    state, expected_state = tx.init(params), make(lr).init(params)
    for step, size in enumerate(SIZES):
        grads = random_params(step + 1)
        updates, state = tx.update(grads, state, params, num_examples=size)
        params = optax.apply_updates(params, updates)
        # The state of these optimizers has no learning rate in it.
        scaled = make(lr * RULES[rule](size / 4))
        updates, expected_state = scaled.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    for name in params:
        np.testing.assert_allclose(params[name], expected[name], rtol=2e-6)


@pytest.mark.usefixtures("standard_promotion")
def test_it_works_behind_a_learning_rate_schedule():
    rates = optax.piecewise_constant_schedule(1.0, {2: 0.5})
    tx = optax.chain(optax.sgd(rates), jb.scale_by_batch_size(base_examples=4))
    grads = jnp.ones(())
    state, given = tx.init(grads), []
    for size in (4, 16, 4, 16):
        update, state = tx.update(grads, state, num_examples=size)
        given.append(float(update))
    assert given == [-1, -2, -0.5, -1]


# Among other transformations


def test_it_works_with_injected_hyperparameters():
    tx = optax.chain(
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.5),
        jb.scale_by_batch_size(base_examples=4),
    )
    grads = jnp.ones(())
    state = tx.init(grads)
    update, state = tx.update(grads, state, num_examples=16)
    assert update == -1
    state[0].hyperparams["learning_rate"] = jnp.float32(3)
    update, _ = tx.update(grads, state, num_examples=16)
    assert update == -6


@pytest.mark.usefixtures("standard_promotion")
def test_it_works_under_multi_steps():
    inner = optax.chain(optax.sgd(1.0), jb.scale_by_batch_size(base_examples=4))
    multi = optax.MultiSteps(inner, every_k_schedule=2)
    grads = jnp.ones(())
    state, given = multi.init(grads), []
    for size in (16, 16, 64, 64):
        update, state = multi.update(grads, state, grads, num_examples=size)
        given.append(float(update))
    assert given == [0, -2, 0, -4]


def test_it_may_scale_some_of_the_parameters():
    tx = optax.masked(
        jb.scale_by_batch_size(base_examples=1, rule="linear"), {"a": True, "b": False}
    )
    grads = {"a": jnp.ones(()), "b": jnp.ones(())}
    updates, _ = tx.update(grads, tx.init(grads), num_examples=5)
    assert updates == {"a": 5, "b": 1}


def test_nnx_optimizer_passes_the_size_on():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    before = np.asarray(model.bias.get_value())
    tx = optax.chain(optax.sgd(1.0), jb.scale_by_batch_size(base_examples=4))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads, num_examples=16)
    np.testing.assert_array_equal(model.bias.get_value(), before - 2)


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
@pytest.mark.parametrize(
    ("base", "factor"), [({"base_examples": 12}, 0.5), ({"base_tokens": 2}, 5)]
)
def test_data_parallel_gives_the_sizes_of_the_global_batch(base, factor, mode):
    mesh = jb.data_mesh(jax.devices()[:4])
    tx = optax.chain(optax.sgd(1.0), jb.scale_by_batch_size(**base, rule="linear"))
    rows = [{"x": np.zeros(n, np.int32)} for n in (1, 2, 1, 3, 1, 2)]
    batch = jb.collate_rows(rows, jb.Bucket(8, 4))
    step = jb.data_parallel(
        lambda w, batch, keys: (w * batch.num_tokens.astype(w.dtype), batch.num_tokens),
        *(tx, mesh),
        mode=mode,
    )
    state = jb.replicate(jb.create_state(np.float32(0), tx), mesh)
    state, _ = step(state, next(jb.prefetch_to_mesh([batch], mesh)))
    # 6 examples, 10 tokens, a mean gradient of 1.
    assert state.params == -factor
    assert state.opt_state[1].factor == factor


# What is refused


@pytest.mark.parametrize("bases", [{}, {"base_examples": 4, "base_tokens": 9}])
def test_not_exactly_one_base_is_refused(bases):
    examples, tokens = bases.get("base_examples"), bases.get("base_tokens")
    message = f"`base_examples={examples}`, `base_tokens={tokens}`: give one of the two"
    with pytest.raises(ValueError, match=message):
        jb.scale_by_batch_size(**bases)


@pytest.mark.parametrize("name", ["base_examples", "base_tokens"])
@pytest.mark.parametrize("value", [0, -2, float("nan"), float("inf"), "3"])
def test_a_base_that_is_not_positive_is_refused(name, value):
    message = f"`{name}={value!r}` must be a positive number"
    with pytest.raises(ValueError, match=message):
        jb.scale_by_batch_size(**{name: value})


def test_an_unknown_rule_is_refused():
    message = r"`rule='cubic'`: choose one of \['linear', 'sqrt'\], or pass a function"
    with pytest.raises(ValueError, match=message):
        jb.scale_by_batch_size(base_examples=4, rule="cubic")


@pytest.mark.parametrize(
    ("base", "size", "given"),
    [
        ("base_examples", "num_examples", {}),
        ("base_tokens", "num_tokens", {}),
        ("base_examples", "num_examples", {"num_tokens": 9}),
        ("base_tokens", "num_tokens", {"num_examples": 9}),
        ("base_tokens", "num_tokens", {"num_tokens": None}),
    ],
)
def test_an_update_without_its_size_says_what_to_pass(base, size, given):
    tx = optax.chain(optax.sgd(1.0), jb.scale_by_batch_size(**{base: 4}))
    grads = jnp.ones(())
    message = rf"needs the batch size: call `tx.update\(.*, {size}=batch\.{size}\)`"
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(grads), grads, **given)


@pytest.mark.parametrize("rule", [lambda r: 0.5, lambda r: 2, lambda r: np.float32(3)])
def test_a_rule_may_give_a_plain_number(rule):
    tx = jb.scale_by_batch_size(base_examples=4, rule=rule)
    u, s = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), num_examples=8)
    assert s.factor == rule(2)


def test_a_rule_that_gives_several_factors_is_refused():
    tx = jb.scale_by_batch_size(base_examples=4, rule=lambda r: jnp.ones(3) * r)
    with pytest.raises(ValueError, match=r"`rule` returned a factor of shape \[3\]"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)), num_examples=8)
