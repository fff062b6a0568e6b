"""Scaling by the batch size: factors, and equality with a scaled learning rate."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxbucket as jb
from jaxbucket.optim.states import learning_rate_metrics, skip_where

RULES = {
    "linear": lambda ratio: ratio,
    "sqrt": np.sqrt,
    "custom": lambda ratio: 1 / (1 + ratio),
}
SIZES = [8, 3, 64, 1, 16]


def mostly_exhaustive(names, quick) -> list:
    """Returns parameters, all exhaustive except those in `quick`."""
    slow = pytest.mark.exhaustive
    return [x if x in quick else pytest.param(x, marks=slow) for x in names]


@pytest.fixture
def standard_promotion():
    """Allows mixed dtypes, because parts of optax mix int32 counts with floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def scaling(rule: str, **base: float) -> optax.GradientTransformationExtraArgs:
    function = rule if rule in ("linear", "sqrt") else RULES[rule]
    return jb.scale_by_batch_size(**base, rule=function)


def random_params(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    values = {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=2)}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)


# Factors


@pytest.mark.parametrize("rule", RULES)
def test_updates_are_scaled_by_the_rule(rule):
    tx = scaling(rule, base_tokens=100)
    grads = random_params(1)
    traces = []

    @jax.jit
    def update(grads, state, size):
        traces.append(size)
        return tx.update(grads, state, num_tokens=size)

    for size in SIZES:
        for run in (update, lambda *x: tx.update(*x[:2], num_tokens=x[2])):
            updates, _ = run(grads, tx.init(grads), size)
            for name in grads:
                want = np.asarray(grads[name]) * RULES[rule](size / 100)
                np.testing.assert_allclose(updates[name], want, rtol=1e-6)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("dtype", "is_wide"),
    [(jnp.float16, False), (jnp.bfloat16, False), (jnp.float32, True)]
    + [(jnp.float64, True)],
)
def test_updates_keep_their_dtype(dtype, is_wide):
    """The rule is "sqrt" by default."""
    with jax.enable_x64(is_wide):
        # The factor itself would overflow float16.
        tx = jb.scale_by_batch_size(base_examples=4 * 2**-34)
        grads = {"w": jnp.full(2, 2**-17, dtype), "b": jnp.ones((), jnp.float32)}
        updates, state = tx.update(grads, tx.init(grads), num_examples=jnp.int32(3))
        assert (updates["w"].dtype, updates["b"].dtype) == (dtype, jnp.float32)
        assert state.factor.dtype == jnp.float32
        rtol = max(jnp.finfo(dtype).eps, 1e-15)
        np.testing.assert_allclose(np.float64(updates["w"]), 0.75**0.5, rtol=rtol)


@pytest.mark.parametrize(
    ("base", "sizes", "factor"),
    [
        ({"base_examples": 2}, {"num_examples": 6, "num_tokens": 1}, 3),
        ({"base_tokens": 2.0}, {"num_examples": 6, "num_tokens": np.int64(1)}, 0.5),
        ({"base_rows": np.asarray(2)}, {"num_rows": np.float32(8)}, 4),
        ({"base_weight": np.int64(2)}, {"weight": jnp.float32(0)}, 0),
        ({"base_rows": 2, "rule": "none"}, {"num_rows": 77}, 1),
        ({"base_rows": 2, "rule": lambda ratio: 0.5}, {"num_rows": 77}, 0.5),
        ({"base_rows": 4, "rule": lambda x: jnp.clip(x, 0, 2)}, {"num_rows": 400}, 2),
    ],
)
def test_the_factor_follows_the_named_size_and_its_bounds(base, sizes, factor):
    tx = jb.scale_by_batch_size(**{"rule": "linear", **base})
    grads = jnp.ones(3)
    assert tx.init(grads).factor == 1
    updates, state = tx.update(grads, tx.init(grads), **sizes)
    np.testing.assert_array_equal(updates, [factor] * 3)
    assert state.factor == factor and state.factor.dtype == jnp.float32


# Equal to scaling the learning rate


# The rows of buckets with the same token budget; a step fills some of them.
BATCH_SIZES = [64, 16, 8, 2]
EQUAL = {
    "sgd": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": lambda lr: optax.adamw(lr, weight_decay=0.1),
    "lion": lambda lr: optax.lion(lr, weight_decay=0.1),
    "rmsprop": optax.rmsprop,
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "rule", "tolerance"),
    [
        *((name, "sqrt", 1e-12) for name in EQUAL),
        # In single precision.
        pytest.param("adamw", "linear", 5e-7, marks=pytest.mark.exhaustive),
        pytest.param("momentum", "custom", 5e-7, marks=pytest.mark.exhaustive),
    ],
)
def test_it_equals_a_scaled_rate_for_50_steps_of_changing_buckets(
    name, rule, tolerance
):
    make, lr, base, wide = EQUAL[name], 1e-3, 16, tolerance < 1e-7
    dtype = jnp.float64 if wide else jnp.float32
    with jax.enable_x64(wide):
        tx = optax.chain(make(lr), scaling(rule, base_examples=base))
        traces = []

        @jax.jit
        def step(size, grads, params, state):
            traces.append(size)
            updates, state = tx.update(grads, state, params, num_examples=size)
            return optax.apply_updates(params, updates), state

        @jax.jit
        def expected_step(rate, grads, params, state):
            updates, state = make(rate).update(grads, state, params)
            return optax.apply_updates(params, updates), state

        rng = np.random.default_rng(0)
        grads = jax.tree.map(lambda x: x.astype(dtype), random_params(0))
        params = expected = grads
        state, expected_state = tx.init(params), make(lr).init(params)
        for _ in range(50):
            size = int(rng.integers(1, rng.choice(BATCH_SIZES) + 1))
            grads = jax.tree.map(
                lambda x: jnp.asarray(rng.normal(size=x.shape), dtype), grads
            )
            rate = jnp.asarray(lr * RULES[rule](size / base), dtype)
            params, state = step(jnp.int32(size), grads, params, state)
            expected, expected_state = expected_step(
                rate, grads, expected, expected_state
            )
        assert len(traces) == 1
        for key in params:
            np.testing.assert_allclose(
                params[key], expected[key], rtol=0, atol=tolerance
            )


ROUTED = {
    name: make
    for name, make in vars(optax).items()
    if (inspect.isfunction(make) or isinstance(make, functools.partial))
    and "learning_rate" in inspect.signature(make).parameters
    # Excludes optimizers whose rate is an initial value or a bound, and parts.
    and not name.startswith(("_", "scale_by", "rprop", "lbfgs"))
}
ROUTED |= {
    "adafactor with momentum": functools.partial(optax.adafactor, momentum=0.9),
    "adafactor with decay": functools.partial(optax.adafactor, weight_decay_rate=0.1),
    "rmsprop with momentum": functools.partial(optax.rmsprop, momentum=0.9),
    "lars with momentum": functools.partial(optax.lars, momentum=0.9),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "name",
    mostly_exhaustive(
        ROUTED,
        {"sgd", "adamw", "fromage", "lars with momentum", "rmsprop with momentum"}
        | {"adafactor with momentum", "adafactor with decay"},
    ),
)
def test_a_scaled_schedule_equals_a_scaled_learning_rate(name):
    make, lr = ROUTED[name], 0.01
    rate = jb.scale_schedule(lr, base_rows=16, rule="linear")
    # A dtype is callable, so optax would use it as a schedule.
    static = {"dtype_momentum"} & inspect.signature(make).parameters.keys()
    tx = optax.inject_hyperparams(make, static_args=static)(learning_rate=rate)
    params = expected = random_params(0)
    state, expected_state = tx.init(params), make(learning_rate=lr).init(params)
    for step, size in enumerate(SIZES):
        grads = random_params(step + 1)
        updates, state = tx.update(grads, state, params, num_rows=size)
        params = optax.apply_updates(params, updates)
        scaled = make(learning_rate=lr * size / 16)
        updates, expected_state = scaled.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        assert float(learning_rate_metrics(state)["learning_rate"]) == pytest.approx(
            lr * size / 16
        )
        assert float(learning_rate_metrics(state)["lr_factor"]) == pytest.approx(
            size / 16
        )
    for key in params:
        np.testing.assert_allclose(params[key], expected[key], rtol=2e-5)


# Schedules of steps, and of work


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("steps", "rates"),
    [
        # The first step is not 0 after changing the optimizer, and some are skipped.
        ([2, 3, 7], [2, 1, 1]),
        # Without steps, updates are counted.
        ([None] * 5, [2, 2, 2, 1, 1]),
    ],
)
def test_a_schedule_is_evaluated_at_the_step_of_the_data(steps, rates):
    schedule = optax.piecewise_constant_schedule(1.0, {3: 0.5})
    rate = jb.scale_schedule(schedule, base_examples=2, rule="linear")
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    grads = jnp.ones(())
    state, applied = tx.init(grads), []
    for step in steps:
        extra = {} if step is None else {"step": jnp.int32(step)}
        update, state = tx.update(grads, state, num_examples=4, **extra)
        applied.append(-float(update))
    assert applied == rates


@pytest.mark.parametrize("work", ["tokens", "examples"])
def test_a_schedule_by_work_does_not_depend_on_batch_sizes(work):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 300, 1000)
    tx = optax.inject_hyperparams(optax.sgd)(jb.optim.schedule_by_work(schedule, work))
    rng = np.random.default_rng(0)
    for _ in range(3):
        done, state = 0, tx.init(jnp.zeros(()))
        while done < 1000:
            size = int(rng.integers(1, 90))
            other = "examples" if work == "tokens" else "tokens"
            sizes = {f"num_{work}": size, f"num_{other}": 7}
            _, state = tx.update(jnp.ones(()), state, **sizes)
            # The rate depends on the work before this batch.
            rate = state.hyperparams["learning_rate"]
            np.testing.assert_allclose(rate, schedule(done), rtol=1e-6)
            done += size


@pytest.mark.parametrize(
    "sizes",
    [
        [jnp.int32(x) for x in (2**31 - 1, 2**30, 5, 2**31 - 9, 2**31 - 1)],
        [2**33 + 5, np.int64(2**40), 2**20],
    ],
)
def test_work_is_counted_exactly_beyond_int32(sizes):
    counts = []
    by_tokens = jb.optim.schedule_by_work(lambda done: counts.append(float(done)) or 1)
    state, done = by_tokens.init(), 0
    for size in sizes:
        state = by_tokens.update(state, num_tokens=size)
        done += int(size)
        assert int(state.high) * 2**30 + int(state.low) == done
        by_tokens(state)
        assert counts[-1] == pytest.approx(done)


def test_a_schedule_by_work_is_scaled_by_the_batch():
    work = jb.optim.schedule_by_work(optax.linear_schedule(0.0, 1.0, 100))
    rate = jb.scale_schedule(work, base_tokens=10, rule="linear")
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    state, applied = tx.init(jnp.zeros(())), []
    for size in (50, 20, 40):
        update, state = tx.update(jnp.ones(()), state, num_tokens=size)
        applied.append(-float(update))
    np.testing.assert_allclose(applied, [0, 0.5 * 2, 0.7 * 4], rtol=1e-6)


def test_inverse_sqrt_equals_the_formula_of_the_paper():
    schedule = jb.optim.warmup_inverse_sqrt_schedule(0.5, 4000)
    for step in (0, 1, 3999, 4000, 4001, 10**9):
        want = 0.5 * min(step / 4000, (4000 / max(step, 1)) ** 0.5)
        np.testing.assert_allclose(schedule(step), want, rtol=1e-6)
        np.testing.assert_allclose(schedule(jnp.int32(step)), want, rtol=1e-6)


# The current learning rate, and skipped updates


def metrics_after(tx, params=None, **sizes):
    params = jnp.ones(()) if params is None else params
    _, state = tx.update(params, tx.init(params), params, **sizes)
    return {name: float(value) for name, value in learning_rate_metrics(state).items()}


def in_chain(*factors, rate=None):
    """Returns the metrics after batches with these factors, in one chain."""
    rate = {} if rate is None else {"learning_rate": rate}
    return {"lr_factor": math.prod(factors), **rate}


@pytest.mark.usefixtures("standard_promotion")
def test_learning_rate_metrics_include_all_factors():
    by_size, inject = {"base_examples": 2, "rule": "linear"}, optax.inject_hyperparams
    scale = functools.partial(jb.scale_by_batch_size, **by_size)
    injected = inject(optax.sgd)(learning_rate=1.0)
    scheduled = inject(optax.sgd)(jb.scale_schedule(1.0, **by_size))
    decay = inject(optax.adamw)(
        learning_rate=0.5, weight_decay=jb.scale_schedule(0.1, **by_size)
    )
    half = {"learning_rate": 0.5}
    for chain, want in (
        ((scheduled, scale()), in_chain(4, 4, rate=16)),
        ((injected, scale()), in_chain(4, rate=4)),
        # Before the optimizer, gradients are scaled.
        ((scale(), injected), in_chain(4, rate=1)),
        ((injected, scale(), scale()), in_chain(4, 4, rate=16)),
        ((decay,), half),
        ((optax.adam(1e-3),), {}),
        ((optax.adam(1e-3), scale()), in_chain(4)),
    ):
        assert metrics_after(optax.chain(*chain), num_examples=8) == want
    branches = optax.partition({"a": injected, "b": scale()}, {"x": "a", "y": "b"})
    params = {"x": jnp.ones(()), "y": jnp.ones(())}
    assert metrics_after(branches, params, num_examples=8) == {}
    first = jb.scale_by_batch_size(base_examples=8).init(0)
    assert learning_rate_metrics(first) == in_chain(1)


def plateau(count):
    return optax.piecewise_constant_schedule(1e-3, {3: 0.5})(count)


@pytest.mark.parametrize(
    ("make", "schedule", "dtype", "is_wide"),
    [
        (optax.sgd, 1e-3, jnp.bfloat16, False),
        (optax.sgd, plateau, jnp.float32, True),
        (optax.lars, jb.optim.schedule_by_work(plateau), jnp.float32, False),
        (optax.rmsprop, optax.constant_schedule(1e-3), jnp.float16, False),
        (optax.rmsprop, jb.optim.schedule_by_work(plateau), jnp.bfloat16, True),
    ],
)
def test_the_first_state_has_the_dtypes_of_later_states(make, schedule, dtype, is_wide):
    # Standard promotion, because optax relies on weakly typed numbers.
    with jax.enable_x64(is_wide), jax.numpy_dtype_promotion("standard"):
        rate = jb.scale_schedule(schedule, base_tokens=2)
        tx = optax.inject_hyperparams(make)(learning_rate=rate, momentum=0.9)
        params = jnp.ones(2, dtype)
        state = tx.init(params)
        avals = jax.tree.map(jax.typeof, state)
        for _ in range(2):
            _, state = tx.update(params, state, params, num_tokens=jnp.int32(8))
            assert jax.tree.map(jax.typeof, state) == avals


def test_a_schedule_too_long_for_an_integer_suggests_a_float():
    with pytest.raises(OverflowError) as raised:
        work = jb.optim.schedule_by_work(optax.linear_schedule(0.0, 1e-3, 10**10))
        work(work.init())
    assert "as a float, such as 1e10" in raised.value.__notes__[-1]
    work = jb.optim.schedule_by_work(optax.linear_schedule(0.0, 1e-3, 1e10))
    state = work.init()
    for _ in range(5):
        state = work.update(state, num_tokens=10**9)
    np.testing.assert_allclose(work(state), 0.5e-3, rtol=1e-6)


def adams():
    """Returns Adam with a rate of 1 / (1 + step), passed in every possible way."""

    def schedule(count):
        return 1 / (1 + jnp.asarray(count, jnp.float32))

    base = {"base_examples": 1, "rule": "none"}
    return {
        "optax": optax.adam(schedule),
        "reported": optax.chain(
            optax.inject_hyperparams(optax.adam)(schedule),
            jb.scale_by_batch_size(**base),
        ),
        "inside": optax.inject_hyperparams(optax.adam)(
            learning_rate=jb.scale_schedule(schedule, **base)
        ),
        "by work": optax.inject_hyperparams(optax.adam)(
            learning_rate=jb.scale_schedule(
                jb.optim.schedule_by_work(schedule, "examples"), **base
            )
        ),
    }


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", adams())
def test_a_skipped_update_keeps_averages_and_advances_schedules(name):
    tx = optax.with_extra_args_support(adams()[name])
    params = random_params(0)
    state, adam = tx.init(params), optax.scale_by_adam()
    expected_state = adam.init(params)
    for step, is_bad in enumerate([False, True, True, False, True, False]):
        grads = random_params(step + 1)
        if is_bad:
            grads = jax.tree.map(lambda g: g * jnp.nan, grads)
        updates, new = tx.update(grads, state, params, num_examples=1)
        state = skip_where(jnp.asarray(is_bad), new, state)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
        if not is_bad:
            want, expected_state = adam.update(grads, expected_state)
            for key in params:
                np.testing.assert_allclose(
                    updates[key], -want[key] / (1 + step), rtol=2e-5
                )
    if name != "optax":
        rate = learning_rate_metrics(state)["learning_rate"]
        np.testing.assert_allclose(rate, 1 / 6, rtol=1e-6)


# Refusals


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "base_weight=None"),
        ({"base_examples": 4, "base_tokens": 9}, "base_tokens=9"),
        *(({"base_rows": x}, "base_rows") for x in (0, math.nan, math.inf, "3", True)),
        ({"base_rows": 2, "rule": "cubic"}, "rule"),
    ],
)
def test_invalid_scalings_are_refused(options, name):
    for make in (jb.scale_by_batch_size, functools.partial(jb.scale_schedule, 1e-3)):
        with pytest.raises(ValueError, match=f"`{name}"):
            make(**options)


BY_WORK = jb.optim.schedule_by_work(optax.constant_schedule(1e-3))
SCALED = jb.scale_schedule(1e-3, base_examples=2)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *(
            (lambda x=x: jb.scale_schedule(x, base_rows=2), "schedule")
            for x in (0, "fast", SCALED)
        ),
        *(
            (lambda x=x: jb.optim.schedule_by_work(x), "schedule")
            for x in (1e-3, SCALED, BY_WORK)
        ),
        (lambda: jb.optim.schedule_by_work(lambda n: n, "steps"), "work"),
        (lambda: jb.optim.warmup_inverse_sqrt_schedule(1e-3, 0), "warmup_steps"),
        (lambda: jb.optim.warmup_inverse_sqrt_schedule(-1, 9), "peak_value"),
        *(
            (
                lambda x=x: optax.sgd(x).update(jnp.ones(2), optax.sgd(x).init(0)),
                "optax.inject_hyperparams",
            )
            for x in (SCALED, BY_WORK)
        ),
    ],
)
def test_invalid_arguments_are_refused(make, name):
    with pytest.raises(ValueError, match=f"`{name}"):
        make()


def updates(name, **sizes):
    """Yields the ways to pass a batch size that is named by its base."""
    yield lambda: jb.scale_by_batch_size(**{name: 4}).update(
        jnp.ones(2), jb.scale_by_batch_size(**{name: 4}).init(0), **sizes
    )
    rate = jb.scale_schedule(1e-3, **{name: 4})
    yield lambda: optax.inject_hyperparams(optax.sgd)(rate).update(
        jnp.ones(2),
        optax.inject_hyperparams(optax.sgd)(rate).init(jnp.ones(2)),
        **sizes,
    )


BAD_SIZES = [
    *(-4, math.nan, math.inf, "8", None, np.float32("nan"), True, np.True_),
    *(jnp.asarray(True), jnp.ones(2)),
]


@pytest.mark.parametrize(
    ("base", "name", "size"),
    [
        *(("base_tokens", "num_tokens", size) for size in BAD_SIZES),
        ("base_examples", "num_examples", -4),
        ("base_rows", "num_rows", -4),
        ("base_weight", "weight", -4),
    ],
    ids=str,
)
def test_an_invalid_size_is_refused(base, name, size):
    for update in updates(base, **{name: size}):
        with pytest.raises(ValueError, match=f"`{name}"):
            update()
    if name == "num_tokens":
        with pytest.raises(ValueError, match=f"`{name}"):
            BY_WORK.update(BY_WORK.init(), num_tokens=size)


def test_an_update_without_its_size_is_refused():
    for update in updates("base_tokens", num_examples=9):
        with pytest.raises(ValueError, match="`num_tokens"):
            update()
    with pytest.raises(ValueError, match="`num_tokens"):
        BY_WORK.update(BY_WORK.init(), num_examples=3)


@pytest.mark.parametrize("result", [None, jnp.ones(3)])
def test_a_rule_must_return_one_number(result):
    tx = jb.scale_by_batch_size(base_rows=2, rule=lambda ratio: result)
    with pytest.raises(ValueError, match="`rule`"):
        tx.update(jnp.ones(2), tx.init(0), num_rows=2)


# Precision, and steps that are skipped


@pytest.mark.skipif(
    tuple(map(int, optax.__version__.split(".")[:3])) < (0, 2, 7),
    reason="optax does not advance the schedule",
)
@pytest.mark.usefixtures("standard_promotion")
def test_a_skipped_update_advances_the_schedule_of_weight_decay():
    def schedule(count):
        return 1 / (1 + jnp.asarray(count, jnp.float32))

    tx = optax.adamw(schedule, weight_decay=schedule)
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    for is_bad in (False, True, True, False):
        _, new = tx.update(params, state, params)
        state = skip_where(jnp.asarray(is_bad), new, state)
    counts = {
        jax.tree_util.keystr(path): int(leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
        if jax.tree_util.keystr(path).endswith("count")
    }
    assert sorted(counts.values()) == [2, 4, 4], counts


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.contrib.schedule_free(tx, learning_rate=1.0),
    ],
)
def test_wrappers_that_count_are_restored_completely_if_skipped(wrap):
    tx = wrap(optax.sgd(optax.linear_schedule(1.0, 0.0, 10)))
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    _, new = tx.update(params, state, params)
    restored = skip_where(jnp.asarray(True), new, state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
