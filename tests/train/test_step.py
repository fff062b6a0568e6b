"""Train and evaluation steps against gradients of simple losses without padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.lax import stop_gradient
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from step_cases import (
    MODES,
    SYMBOLS,
    WIDTH,
    assert_close,
    exhaustive,
    make_examples,
    make_mesh,
    make_params,
    on,
    only,
    recorder,
    token_losses,
)

import jaxbucket as jb
from jaxbucket.train.gradients import _cotangent_exponent, _power_of_two
from jaxbucket.train.loss import call_loss
from jaxbucket.train.modes import row_keys

# Pairwise; all but two are exhaustive tests. With "pmap", all axes shard the rows.
LAYOUTS_AND_MODES = [
    *(("2x2x2", "shard_map"), ("4x2", "pmap")),
    *exhaustive(("1", "jit"), ("8", "shard_map"), ("8", "pmap")),
    *exhaustive(("4x2-model", "jit"), ("2x2x2", "jit")),
]

# Rows 6 and 7 are empty, so that the last of four devices has only padding.
UNEQUAL = [7, 1, 4, 2, 8, 5]
EXAMPLES = make_examples(UNEQUAL)
BATCH = jb.data.collate_rows(EXAMPLES, jb.Bucket(8, 8))


def loss_fn(params, batch, keys):
    losses = token_losses(params, batch.features["tokens"])
    symbols = jnp.where(batch.mask, batch.features["tokens"], 0).sum()
    loss_sum = jnp.where(batch.mask, losses, 0).sum()
    return loss_sum, batch.num_tokens, {"symbols": symbols}


def dropout_loss_fn(params, batch, keys):
    tokens, labels = batch.features["tokens"], batch.features["label"]
    bits = draw(keys, tokens.shape[1])
    losses = token_losses(params, tokens, kept=bits % 2 == 0)
    sums = {"digest": digest(bits, labels)}
    return jnp.where(batch.mask, losses, 0).sum(), batch.num_tokens, sums


def draw(keys, seq_len):
    """`[B, T, width]` uint32."""
    shape = (seq_len, WIDTH)
    return jax.vmap(lambda key: jax.random.bits(key, shape))(keys)


def digest(bits, labels):
    """Identifies the bits of each row by its label; sums of uint32 are exact."""
    row_sums = bits.sum(axis=(1, 2), dtype=jnp.uint32)
    return (row_sums * (2 * labels + 1).astype(jnp.uint32)).sum(dtype=jnp.uint32)


@jax.jit
def unpadded_mean(params, tokens):
    """The reference: loss and gradient of the mean over all tokens, without batch."""
    return jax.value_and_grad(lambda x: token_losses(x, tokens).mean())(params)


def tokens_of(examples):
    return np.concatenate([example["tokens"] for example in examples])


def run_batch(batch, mesh, *, loss=loss_fn, params=None, tx=None, **options):
    """Runs one train step on one batch; returns the new state and the metrics."""
    tx = recorder() if tx is None else tx
    axes = options.get("batch_axes", "data")
    step = jb.make_train_step(loss, tx, mesh, **options)
    state = jb.create_state(make_params() if params is None else params, tx, mesh)
    return step(state, on(mesh, batch, batch_axes=axes))


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def setup_run():
    lengths = np.random.default_rng(1).integers(1, 9, 60)
    plan = jb.plan_buckets(lengths, max_tokens=64, num_buckets=1, batch_size_multiple=8)
    return make_examples(lengths), jb.BatchSchedule(plan, lengths, seed=3)


def four_devices():
    return jb.data_mesh(jax.devices()[:4])


# Gradients: padding never counts (invariant 8)


@pytest.mark.parametrize(("layout", "mode"), LAYOUTS_AND_MODES)
@pytest.mark.parametrize(("bucket", "pad_value"), [((8, 8), 5), ((32, 13), 11)])
def test_every_mesh_yields_the_gradient_of_the_unpadded_mean(
    layout, mode, bucket, pad_value
):
    mesh, axes = make_mesh(layout)
    batch = jb.data.collate_rows(EXAMPLES, jb.Bucket(*bucket), pad_value=pad_value)
    with jax.enable_x64(True):
        params = make_params(np.float64)
        options = {"params": params, "mode": mode, "batch_axes": axes}
        state, metrics = run_batch(batch, mesh, **options)
        loss, grads = unpadded_mean(params, tokens_of(EXAMPLES))
        assert_close(state.opt_state, grads, 1e-12)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
    sums = [int(metrics[x]) for x in ("num_examples", "weight", "symbols")]
    assert sums == [6, sum(UNEQUAL), tokens_of(EXAMPLES).sum()]


# Dropout keys are a function of seed, step, micro-batch and row


def test_row_keys_do_not_depend_on_the_default_implementation():
    """The bits that rbg draws for a row would depend on the other rows."""
    want = jax.random.key_data(row_keys(5, 7, 4))
    with jax.default_prng_impl("rbg"):
        keys = row_keys(5, 7, 4)
    np.testing.assert_array_equal(jax.random.key_data(keys), want)
    doubled = jnp.tile(jax.random.key_data(keys), 2)
    assert jax.random.wrap_key_data(doubled, impl="rbg").shape == (4,)


def test_row_keys_differ_by_seed_step_and_micro_batch():
    calls = [
        row_keys(0, 0, 4),
        row_keys(1, 0, 4),
        row_keys(2**40, 0, 4),
        row_keys(0, 1, 4),
        row_keys(0, 0, 4, micro_batch=1),
        row_keys(0, 0, 4, first_row=4),
    ]
    data = np.concatenate([jax.random.key_data(keys) for keys in calls])
    assert len(np.unique(data, axis=0)) == 24


# Keys depend on the step of the state, as after a resume.
FIRST_STEP, NUM_STEPS = 3, 5


@functools.cache
def dropout_run(layout, mode):
    """Returns parameters and digests after some steps with dropout."""
    source, schedule = setup_run()
    mesh, axes = make_mesh(layout)
    tx = optax.sgd(0.1, momentum=0.9)
    step = jb.make_train_step(dropout_loss_fn, tx, mesh, mode=mode, batch_axes=axes)
    state = jb.create_state(make_params(), tx, mesh)
    state = dataclasses.replace(state, step=state.step + FIRST_STEP)
    dataset = jb.batch_dataset(source, schedule, num_steps=NUM_STEPS)
    digests = []
    for batch in jb.sharding.prefetch_to_mesh(dataset, mesh, batch_axes=axes):
        state, metrics = step(state, batch)
        digests.append(int(metrics["digest"]))
    return jax.tree.map(np.asarray, state.params), digests


@pytest.mark.parametrize(("layout", "mode"), LAYOUTS_AND_MODES)
def test_dropout_is_the_same_on_every_mesh(layout, mode):
    params, digests = dropout_run(layout, mode)
    source, schedule = setup_run()
    dataset = jb.batch_dataset(source, schedule, num_steps=NUM_STEPS)
    for step, batch in enumerate(dataset):
        keys = row_keys(0, FIRST_STEP + step, batch.bucket.batch_size)
        bits = draw(keys, batch.bucket.seq_len)
        assert digests[step] == int(digest(bits, batch.features["label"]))
    # Floating point sums differ only because of their order.
    assert_close(params, dropout_run("1", "jit")[0], 1e-5)


@pytest.mark.parametrize(
    ("empty", "mode"),
    [(True, "shard_map"), (False, "jit"), *exhaustive((True, "jit"), (False, "pmap"))],
)
def test_a_batch_of_zero_weight_has_a_gradient_of_zero(empty, mode):
    """Without rows, or without weight."""
    tx, rows = optax.sgd(0.1, momentum=0.9), [] if empty else EXAMPLES
    batch = jb.data.collate_rows(rows, jb.Bucket(8, 8), like=EXAMPLES[0])

    def unweighted(params, batch, keys):
        loss_sum, weight, sums = loss_fn(params, batch, keys)
        return loss_sum * 0, weight * 0, sums

    state, metrics = run_batch(
        *(batch, four_devices()),
        loss=loss_fn if empty else unweighted,
        tx=tx,
        mode=mode,
    )
    assert_same_bits(state.params, make_params())
    trace = jax.tree.leaves(state.opt_state)
    assert len(trace) == 4
    assert not any(np.any(leaf) for leaf in trace)
    assert (state.step, metrics["loss"], metrics["weight"]) == (1, 0, 0)
    assert metrics["num_tokens"] == (0 if empty else sum(UNEQUAL))


# Metrics and evaluation


@pytest.mark.parametrize("mode", only("shard_map"))
def test_metrics_are_those_of_the_global_batch(mode):
    def weighted(params, batch, keys):
        # The weight is not the number of tokens, because only even symbols count.
        counts = batch.mask & (batch.features["tokens"] % 2 == 0)
        losses = token_losses(params, batch.features["tokens"])
        labels = jnp.where(batch.mask[:, 0], batch.features["label"], 0)
        sums = {"labels": labels.sum()}
        return jnp.where(counts, losses, 0).sum(), counts.sum(), sums

    _, metrics = run_batch(BATCH, four_devices(), loss=weighted, mode=mode)
    tokens = tokens_of(EXAMPLES)
    losses = np.asarray(token_losses(make_params(), tokens))
    loss_sum, weight = losses[tokens % 2 == 0].sum(), (tokens % 2 == 0).sum()
    assert 0 < weight < sum(UNEQUAL)
    np.testing.assert_allclose(metrics["loss_sum"], loss_sum, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], loss_sum / weight, rtol=1e-5)
    exact = {name: int(metrics[name]) for name in ("weight", "num_tokens", "labels")}
    assert exact == {"weight": weight, "num_tokens": sum(UNEQUAL), "labels": 15}
    assert (metrics["num_examples"], metrics["num_rows"]) == (6, 8)
    np.testing.assert_allclose(metrics["padding"], 1 - sum(UNEQUAL) / 64, rtol=1e-6)
    assert metrics["num_positions"] == 64
    counts = {"num_examples", "num_rows", "num_positions"}
    assert metrics.keys() == {"loss", "loss_sum", "padding", "grad_norm"} | counts | (
        exact.keys()
    )


def test_the_optimizer_receives_the_loss_the_step_and_all_sizes():
    received = []

    def update(updates, state, params=None, **extra):
        received.append(extra)
        return jax.tree.map(jnp.zeros_like, updates), {**extra}

    tx = optax.GradientTransformationExtraArgs(
        lambda params: (
            dict.fromkeys(
                ("num_examples", "num_tokens", "num_rows", "step"),
                jnp.zeros((), jnp.int32),
            )
            | dict.fromkeys(("value", "weight"), jnp.zeros((), jnp.float32))
        ),
        update,
    )
    # Four packed examples.
    ids = np.zeros((4, 8), np.int32)
    ids[0, :6], ids[1, :3] = [1, 1, 2, 2, 3, 3], 1
    batch = jb.Batch({"tokens": np.ones_like(ids)}, {"tokens": ids}, {"tokens": ids})
    state, metrics = run_batch(batch, four_devices(), tx=tx)
    sizes = {name: int(state.opt_state[name]) for name in state.opt_state}
    assert sizes.pop("value") == int(metrics["loss"])
    assert sizes.pop("weight") == metrics["weight"]
    assert sizes == {"num_examples": 4, "num_tokens": 9, "num_rows": 4, "step": 0}
    assert (metrics["num_examples"], metrics["num_tokens"]) == (4, 9)


# Skipped updates


@pytest.mark.parametrize(
    ("mode", "make"),
    [
        ("shard_map", lambda loss, weight: (loss, weight * jnp.inf * 0)),
        ("pmap", lambda loss, weight: (loss + jnp.inf * stop_gradient(loss), weight)),
        ("jit", lambda loss, weight: (loss * 1e25, weight)),
        *exhaustive(
            ("jit", lambda loss, weight: (loss * jnp.nan, weight)),
            ("shard_map", lambda loss, weight: (loss, weight * jnp.nan)),
        ),
    ],
    ids=["zero times inf", "loss", "norm", "gradient", "weight"],
)
def test_updates_of_nonfinite_losses_are_skipped(mode, make):
    def loss(params, batch, keys):
        loss_sum, weight, _ = loss_fn(params, batch, keys)
        return make(loss_sum, weight.astype(jnp.float32))

    # Not Adam, whose averages would overflow before the norm.
    tx, params = optax.sgd(0.1, momentum=0.9), make_params()
    state, metrics = run_batch(
        BATCH, four_devices(), loss=loss, tx=tx, mode=mode, skip_nonfinite=True
    )
    assert metrics["skipped"] == 1 and state.step == 1
    assert_same_bits(state.params, params)
    assert_same_bits(state.opt_state, tx.init(params))


def test_nonfinite_updates_are_skipped():
    endless = jb.scale_by_batch_size(base_examples=2, rule=lambda r: 1 / (r - r))
    tx = optax.chain(optax.sgd(0.1), endless)
    state, metrics = run_batch(BATCH, four_devices(), tx=tx, skip_nonfinite=True)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, make_params())


# float16: neither the sum over a batch nor a token's share of the mean is lost


def wide_batch(num_tokens=2**17):
    """A batch of ones, more than float16 can count, in rows for eight devices."""
    x = np.ones((16, num_tokens // 16), np.float32)
    ids = np.ones(x.shape, np.int32)
    return jb.Batch({"x": x}, {"x": ids}, {"x": np.zeros_like(ids)})


def weighted_sum(params, batch, keys):
    y = batch.features["x"] * params["w"].astype(jnp.float32)
    return jnp.sum(y), batch.num_tokens


@pytest.mark.parametrize(
    ("mode", "dtype", "accumulate"),
    [
        *(("shard_map", jnp.float16, False), ("jit", jnp.float16, True)),
        *exhaustive(("pmap", jnp.float16, True), ("pmap", jnp.bfloat16, False)),
        *exhaustive(("jit", jnp.float32, False), ("shard_map", jnp.bfloat16, True)),
    ],
)
def test_the_gradient_of_many_tokens_does_not_overflow(mode, dtype, accumulate):
    params, tx = {"w": jnp.asarray(1.0, dtype)}, optax.sgd(0.25)
    mesh, batch = four_devices(), wide_batch()
    step = jb.make_train_step(
        weighted_sum, tx, mesh, accumulate=accumulate, mode=mode, skip_nonfinite=True
    )
    state = jb.create_state(params, tx, mesh)
    batches = tuple(jb.sharding.prefetch_to_mesh([batch, batch], mesh))
    state, metrics = step(state, batches if accumulate else batches[0])
    assert metrics["skipped"] == 0
    assert metrics["grad_norm"] == 1
    assert state.params["w"] == 0.75 and state.params["w"].dtype == dtype


@pytest.mark.parametrize(
    ("mode", "dtype"), [("shard_map", jnp.bfloat16), ("pmap", jnp.float16)]
)
def test_half_precision_gradients_are_added_in_single_precision(mode, dtype):
    # In half precision, adding ones to 2,048 has no effect.
    weights = np.array([2048, 0, *[1] * 6], np.float32)

    def loss(params, batch, keys):
        local = batch.features["weights"]
        y = jnp.broadcast_to(params["w"], local.shape).astype(jnp.float32)
        return jnp.sum(y * local), batch.num_tokens

    mesh, axes = make_mesh("4x2")
    rows = [
        {**example, "weights": weight}
        for example, weight in zip(make_examples([1] * 8), weights, strict=True)
    ]
    batch = jb.data.collate_rows(rows, jb.Bucket(8, 1))
    params = {"w": jnp.asarray(1.0, dtype)}
    options = {"mode": mode, "batch_axes": axes}
    _, metrics = run_batch(batch, mesh, loss=loss, params=params, **options)
    want = jnp.asarray(2054 / 8, dtype).astype(jnp.float32)
    assert metrics["grad_norm"] == want


def test_a_tokens_share_of_the_mean_does_not_underflow():
    """1 / weight times the error of a nearly correct prediction would underflow.

    1e-3 / 131,072 is below 6e-8, the smallest float16.
    """

    def loss(params, batch, keys):
        errors = params.astype(jnp.float16) * jnp.asarray(batch.features["x"], "f2")
        return jnp.sum(errors.astype(jnp.float32) * 1e-3), batch.num_tokens

    state, _ = run_batch(wide_batch(), four_devices(), loss=loss, params=np.float32(1))
    np.testing.assert_allclose(state.opt_state, 1e-3, rtol=3e-2)


def test_the_cotangent_is_the_documented_power_of_two():
    rng = np.random.default_rng(0)
    random = np.exp2(rng.uniform(-120, 120, 500)) * rng.uniform(1, 2, 500)
    powers = np.exp2(np.arange(-126.0, 128))
    for dtype, most in ((jnp.float32, 126), (jnp.bfloat16, 126), (jnp.float16, 14)):
        exponents = jax.vmap(lambda w, d=dtype: _cotangent_exponent(w, d))
        weights = np.concatenate([random, powers]).astype(np.float32)
        floors = np.frexp(weights)[1] - 1
        want = np.clip(np.clip(floors, 0, 7) - floors, -most, most)
        np.testing.assert_array_equal(exponents(weights), want)
        np.testing.assert_array_equal(
            jax.vmap(_power_of_two)(exponents(weights)), np.exp2(want)
        )
        odd = np.array([0, -0.0, -3, np.inf, -np.inf, np.nan, -1e-30], np.float32)
        np.testing.assert_array_equal(exponents(odd), np.zeros(7))


@pytest.mark.parametrize("weight", [2.0**-100, 1e-3, 1.0, 2.0**100])
def test_gradients_are_means_for_any_weight(weight):
    def loss(params, batch, keys):
        loss_sum = weight * params["w"] * batch.num_tokens.astype(jnp.float32)
        return loss_sum, jnp.asarray(weight, jnp.float32)

    batch = jb.data.collate_rows(make_examples([3]), jb.Bucket(1, 4))
    mesh, params = jb.data_mesh(jax.devices()[:1]), {"w": np.float32(1)}
    state, _ = run_batch(batch, mesh, loss=loss, params=params)
    np.testing.assert_allclose(state.opt_state["w"], 3, rtol=1e-6)


def test_a_nan_loss_of_zero_weight_is_reported_as_nan():
    def loss(params, batch, keys):
        return jnp.sum(params["w"]) * jnp.nan, batch.num_tokens * 0

    params = {"w": np.ones(2, np.float32)}
    _, metrics = run_batch(
        BATCH, four_devices(), loss=loss, params=params, skip_nonfinite=True
    )
    assert np.isnan(metrics["loss"]) and metrics["skipped"] == 1


@pytest.mark.parametrize(
    ("of_loss", "of_weight", "names"),
    [
        (jnp.float16, jnp.float32, r"\['loss_sum'\]"),
        (jnp.float32, jnp.float16, r"\['weight'\]"),
        (jnp.bfloat16, jnp.bfloat16, r"\['weight'\]"),
        (jnp.float16, jnp.float16, r"\['loss_sum', 'weight'\]"),
    ],
)
def test_sums_in_half_precision_raise_a_warning(of_loss, of_weight, names):
    def loss(params, batch, keys):
        loss_sum, weight, _ = loss_fn(params, batch, keys)
        return loss_sum.astype(of_loss), weight.astype(of_weight)

    batch = jb.data.collate_rows(make_examples([3]), jb.Bucket(1, 4))
    keys = jax.random.split(jax.random.key(0), 1)
    with pytest.warns(UserWarning, match=f"{names} in half"):
        call_loss(loss, make_params(), jax.tree.map(jnp.asarray, batch), keys)


@pytest.mark.filterwarnings("ignore:.* in half precision")
def test_a_loss_in_half_precision_is_divided_by_the_exact_weight():
    # 4,099 is not a float16 number, and the total weight is beyond the largest.
    def half(params, batch, keys):
        loss_sum = params["a"] * batch.num_examples.astype(jnp.float16)
        return loss_sum, batch.num_examples * 4099

    batch = jb.data.collate_rows(make_examples([1] * 64), jb.Bucket(64, 1))
    params = {"a": np.ones((), np.float16)}
    state, metrics = run_batch(
        batch, four_devices(), loss=half, params=params, mode="shard_map"
    )
    assert metrics["weight"] == 64 * 4099
    np.testing.assert_allclose(metrics["loss"], 1 / 4099, rtol=1e-6)
    # The gradient itself is a subnormal float16.
    np.testing.assert_allclose(state.opt_state["a"], 1 / 4099, rtol=2e-2)


@pytest.mark.parametrize(
    ("layout", "mode"),
    [("4x2", "pmap"), *exhaustive(("2x2x2", "jit"), ("4x2", "shard_map"))],
)
def test_evaluation_over_an_epoch_adds_up_to_the_sum_over_examples(layout, mode):
    """The loss is called without keys, and the state is kept."""
    lengths = np.random.default_rng(2).integers(1, 17, 77)
    source = make_examples(lengths)
    plan = jb.plan_buckets(
        lengths, max_tokens=128, num_buckets=2, batch_size_multiple=8
    )
    schedule = jb.BatchSchedule(plan, lengths, order="source")
    mesh, axes = make_mesh(layout)
    received = []

    def loss(params, batch, keys):
        received.append(keys)
        return loss_fn(params, batch, keys)

    evaluate = jb.make_eval_step(loss, mesh, mode=mode, batch_axes=axes)
    state = jb.create_state(make_params(), optax.sgd(0.1), mesh)
    dataset = jb.batch_dataset(source, schedule)
    totals = dict.fromkeys(("loss_sum", "weight", "num_examples", "symbols"), 0.0)
    for batch in jb.sharding.prefetch_to_mesh(dataset, mesh, batch_axes=axes):
        metrics = evaluate(state, batch)
        mean = metrics["loss_sum"] / metrics["weight"]
        np.testing.assert_allclose(metrics["loss"], mean, rtol=1e-6)
        for name in totals:
            totals[name] += float(metrics[name])
    loss_sum = float(unpadded_mean(make_params(), tokens_of(source))[0]) * lengths.sum()
    assert totals.pop("loss_sum") == pytest.approx(loss_sum, rel=1e-5)
    assert totals == {
        "weight": lengths.sum(),
        "num_examples": 77,
        "symbols": tokens_of(source).sum(),
    }
    assert {*received} == {None}
    assert_same_bits(state.params, make_params())


# States


@pytest.mark.parametrize("mode", ["jit", "pmap"])
def test_a_step_donates_its_state_and_nothing_else(mode):
    mesh, tx = four_devices(), optax.sgd(0.1, momentum=0.9)
    state = jb.create_state(make_params(), tx, mesh)
    batch = on(mesh, BATCH)
    new, metrics = jb.make_train_step(loss_fn, tx, mesh, mode=mode)(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    kept = jax.tree.leaves((new, metrics, batch))
    assert not any(leaf.is_deleted() for leaf in kept)


def test_pmap_refuses_a_state_that_is_sharded_already():
    mesh = jb.data_mesh(jax.devices()[:2])
    params = make_params()
    rows = NamedSharding(mesh, PartitionSpec("data"))
    params["embedding"] = jax.device_put(params["embedding"], rows)
    state = jb.create_state(params, optax.sgd(0.1), mesh)
    step = jb.make_train_step(loss_fn, optax.sgd(0.1), mesh, mode="pmap")
    with pytest.raises(ValueError, match="sharding"):
        step(state, on(mesh, BATCH))


@pytest.mark.parametrize(
    ("mode", "ahead"), [("jit", True), *exhaustive(("shard_map", False))]
)
def test_a_sharded_state_keeps_its_sharding(ahead, mode):
    source, schedule = setup_run()
    mesh, _ = make_mesh("4x2-model")
    tx = optax.sgd(0.1, momentum=0.9)
    specs = {
        "embedding": PartitionSpec("model"),
        "kernel": PartitionSpec(None, "model"),
        "out": PartitionSpec("model"),
    }

    def sharding_of(path, leaf):
        name = getattr(path[-1], "key", None)
        return NamedSharding(mesh, specs.get(name, PartitionSpec()))

    first = jb.create_state(make_params(), tx)
    shardings = jax.tree_util.tree_map_with_path(sharding_of, first)
    state = jax.device_put(first, shardings)
    step = jb.make_train_step(loss_fn, tx, mesh, mode=mode, state_sharding=shardings)
    if ahead:
        batches = jb.sharding.batch_specs(schedule.plan, source[0], mesh)
        step = jb.compile_steps(step, state, batches, progress=False)
    plain = jb.make_train_step(loss_fn, tx, mesh)
    want = jb.sharding.replicate(first, mesh)
    dataset = jb.batch_dataset(source, schedule, num_steps=3)
    for batch in jb.sharding.prefetch_to_mesh(dataset, mesh):
        state, metrics = step(state, batch)
        want, _ = plain(want, batch)
    assert metrics["loss"].sharding.is_fully_replicated
    got = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert jax.tree.leaves(got) == jax.tree.leaves(shardings)
    halves = {
        name: leaf.addressable_data(0).shape for name, leaf in state.params.items()
    }
    assert halves == {
        "embedding": (SYMBOLS // 2, WIDTH),
        "kernel": (WIDTH, WIDTH // 2),
        "bias": (WIDTH,),
        "out": (WIDTH // 2, SYMBOLS),
    }
    assert_close(state.params, want.params, 1e-5)


# Refused arguments and losses


@pytest.mark.parametrize("mode", only("jit"))
def test_explicit_axes_are_named_if_the_loss_does_not_support_them(mode):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    tx = optax.sgd(0.1)
    state = jb.create_state(make_params(), tx, mesh)
    step = jb.make_train_step(loss_fn, tx, mesh, mode=mode)
    batch = on(mesh, BATCH)
    if mode != "jit":
        step(state, batch)
        return
    with pytest.raises(Exception) as caught:
        step(state, batch)
    assert "`mesh` has axis types" in caught.value.__notes__[0]


def test_dropout_from_the_rngs_of_a_model_needs_the_whole_batch():
    class Dropped(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def loss(model, batch, keys):
        ones = jnp.ones(batch.mask.shape)
        kept = jnp.where(batch.mask, model.dropout(ones), 0)
        return model.scale.get_value() * kept.sum(), batch.num_tokens

    tx, mesh = optax.sgd(0.0), four_devices()
    batch = on(mesh, BATCH)
    state = jb.create_state(Dropped(nnx.Rngs(0)), tx, mesh)
    with pytest.raises(ValueError, match=r"\['count'\].*`nnx.RngCount`"):
        jb.make_train_step(loss, tx, mesh, mode="shard_map")(state, batch)
    step = jb.make_train_step(loss, tx, mesh)
    sums = []
    for _ in range(2):
        state, metrics = step(state, batch)
        sums.append(float(metrics["loss_sum"]))
    # Every step draws anew.
    assert sums[0] != sums[1]


SHARDED = NamedSharding(Mesh(jax.devices()[:2], "data"), PartitionSpec("data"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("loss_fn", {"loss_fn": 3}),
        ("mode", {"mode": "pjit"}),
        *(("batch_axes", {"batch_axes": "rows", "mode": mode}) for mode in MODES),
        ("mesh", {"mesh": "mesh"}),
        ("tx", {"tx": None}),
        *(("seed", {"seed": seed}) for seed in (-1, 2**63, 1.5, None)),
        *(("accumulate", {"accumulate": x}) for x in (4, "no", None)),
        ("state_sharding", {"mode": "pmap", "state_sharding": SHARDED}),
        *(
            ("batch_axes", {"mode": "pmap", "mesh": make_mesh(x)[0], "batch_axes": y})
            for x, y in (("4x2", "data"), ("4x2", ("fsdp", "data")))
        ),
    ],
)
def test_wrong_options_are_refused(name, options):
    good = {"loss_fn": loss_fn, "tx": optax.sgd(0.1), "mesh": jb.data_mesh()}
    with pytest.raises(ValueError, match=f"`{name}[=`]"):
        jb.make_train_step(**{**good, **options})
    if options.keys() <= {"loss_fn", "mesh", "mode", "batch_axes"}:
        good.pop("tx")
        with pytest.raises(ValueError, match=f"`{name}[=`]"):
            jb.make_eval_step(**{**good, **options})


# What a loss must not return, given its loss sum and its weight.
BROKEN = {
    "no-tuple": lambda total, weight: total,
    "list": lambda total, weight: [total, weight],
    "nothing": lambda total, weight: None,
    "too-short": lambda total, weight: (total,),
    "too-long": lambda total, weight: (total, weight, {}, {}, 1),
    "integer-loss": lambda total, weight: (weight, weight),
    "loss-by-row": lambda total, weight: (total * jnp.ones(3), weight),
    "weight-by-row": lambda total, weight: (total, jnp.ones((2, 1))),
    "bool": lambda total, weight: (total, weight, {"any": weight > 0}),
    "constant-loss": lambda total, weight: (1.5, weight),
    "constant-weight": lambda total, weight: (total, 8),
    "constant-sum": lambda total, weight: (total, weight, {"rows": np.float32(2)}),
    "nested-sum": lambda total, weight: (total, weight, {"tasks": {"a": weight}}),
    "sums-list": lambda total, weight: (total, weight, [weight]),
    "mean-twice": lambda total, weight: (total, weight, {"loss": total}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_loss_that_breaks_the_contract_is_refused(case):
    def broken(params, batch, keys):
        return BROKEN[case](*loss_fn(params, batch, keys)[:2])

    mesh, tx = jb.data_mesh(jax.devices()[:2]), optax.sgd(0.1)
    batch = on(mesh, BATCH)
    state = jb.create_state(make_params(), tx, mesh)
    for step in (
        jb.make_train_step(broken, tx, mesh, mode="shard_map"),
        jb.make_eval_step(broken, mesh),
    ):
        with pytest.raises(ValueError, match="`loss_fn`"):
            step(state, batch)


def test_an_optimizer_that_drops_extra_arguments_is_named():
    tx = optax.chain(optax.sgd(0.1), jb.scale_by_batch_size(base_examples=4))
    tx = optax.MultiSteps(tx, 2).gradient_transformation()
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(ValueError, match="`num_examples` is needed"),
    ):
        run_batch(BATCH, four_devices(), tx=tx)


def test_an_average_that_overflows_is_skipped():
    """Later updates would be zero, and therefore finite."""

    def loss(params, batch, keys):
        return 400 * jnp.sum(params.astype(jnp.float32)) * 8, jnp.asarray(8)

    tx = optax.scale_by_adam()
    mesh = jb.data_mesh(jax.devices()[:2])
    step = jb.make_train_step(loss, tx, mesh, skip_nonfinite=True)
    state = jb.create_state(jnp.ones(3, jnp.float16), tx, mesh)
    with jax.numpy_dtype_promotion("standard"):
        state, metrics = step(state, on(mesh, BATCH))
    assert metrics["skipped"] == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("mode", only("jit"))
def test_micro_batches_need_accumulate(mode):
    tx, mesh = optax.sgd(0.1), four_devices()
    step = jb.make_train_step(loss_fn, tx, mesh, mode=mode)
    state = jb.create_state(make_params(), tx, mesh)
    micro_batches = on(mesh, (BATCH, BATCH))
    for kind in (tuple, list):
        with pytest.raises(ValueError, match="`batch`.*`accumulate=True`"):
            step(state, kind(micro_batches))
    state, _ = step(state, micro_batches[0])
    assert state.step == 1
