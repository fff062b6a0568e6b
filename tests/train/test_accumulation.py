"""A step of several micro-batches against one padded batch of the same examples."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from step_cases import (
    SYMBOLS,
    WIDTH,
    assert_close,
    exhaustive,
    make_examples,
    make_params,
    on,
    recorder,
    token_losses,
)

import jaxbucket as jb


def by_tokens(params, batch, keys):
    losses = jnp.where(batch.mask, token_losses(params, batch.features["tokens"]), 0)
    return losses.sum(), batch.num_tokens, {"rows": jnp.any(batch.mask, 1).sum()}


def by_examples(params, batch, keys):
    """A loss in which every example counts the same, independent of its length."""
    mask = batch.mask
    losses = jnp.where(mask, token_losses(params, batch.features["tokens"]), 0)
    lengths = mask.sum(axis=1).astype(losses.dtype)
    return (losses.sum(axis=1) / jnp.maximum(lengths, 1)).sum(), batch.num_examples


def by_task(params, batch, keys):
    """A loss in which tokens count according to the weight of their task."""
    weights = jnp.asarray([1.0, 0.0, 2.5], params["out"].dtype)
    weights = weights[batch.features["label"] % 3]
    weight = jnp.where(batch.mask, weights[:, None], 0)
    losses = token_losses(params, batch.features["tokens"])
    return (losses * weight).sum(), weight.sum()


def with_dropout(params, batch, keys):
    tokens = batch.features["tokens"]
    bits = jax.vmap(lambda key: jax.random.bits(key, (tokens.shape[1], WIDTH)))(keys)
    losses = token_losses(params, tokens, bits % 2 == 0)
    return jnp.where(batch.mask, losses, 0).sum(), batch.num_tokens


LOSSES = {"tokens": by_tokens, "examples": by_examples, "task": by_task}


def examples_of(size, seed=0):
    return make_examples(np.random.default_rng(seed).integers(1, 24, size), seed)


EXAMPLES = examples_of(40)
WHOLE = jb.data.collate_rows(EXAMPLES, jb.Bucket(40, 32))
MESH = jb.data_mesh(jax.devices()[:2])
BATCH = jb.data.collate_rows(EXAMPLES[:4], jb.Bucket(8, 24))
OTHER = jb.data.collate_rows(EXAMPLES[:4], jb.Bucket(8, 25))
PLAN = jb.BucketPlan.from_shapes([(8, 24)])
SPECS = jb.sharding.batch_specs(PLAN, EXAMPLES[0], MESH)


def split(seed):
    """Splits examples into micro-batches of random buckets with some empty rows."""
    rng = np.random.default_rng(seed)
    order, batches = rng.permutation(len(EXAMPLES)), []
    while order.size:
        size = int(rng.integers(1, 12))
        rows = [EXAMPLES[i] for i in order[:size]]
        order = order[size:]
        bucket = jb.Bucket(-(-len(rows) // 8) * 8, int(rng.choice([24, 32])))
        batches.append(jb.data.collate_rows(rows, bucket))
    return tuple(batches)


def make_step(loss, tx, mesh, params=None, **options):
    step = jb.make_train_step(loss, tx, mesh, accumulate=True, **options)
    params = make_params() if params is None else params
    return step, jb.create_state(params, tx, mesh)


def mean_of_whole(loss):
    """Returns a function from parameters to the mean loss and its gradient."""

    def mean(params):
        loss_sum, weight, *_ = loss(params, WHOLE, None)
        return loss_sum / weight.astype(loss_sum.dtype)

    return jax.value_and_grad(mean)


def norm_of(tree):
    return np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize(
    ("loss", "mode", "num_devices", "dtype", "limit"),
    [
        ("tokens", "pmap", 8, np.float64, 1e-12),
        *exhaustive(
            ("tokens", "jit", 1, np.float32, 1e-5),
            ("tokens", "shard_map", 1, np.float64, 1e-12),
            ("examples", "jit", 8, np.float64, 1e-12),
            ("task", "shard_map", 8, np.float32, 1e-5),
        ),
    ],
)
def test_any_split_has_the_gradient_of_one_padded_batch(
    loss, mode, num_devices, dtype, limit
):
    with jax.enable_x64(dtype == np.float64):
        params = make_params(dtype)
        want_loss, want = mean_of_whole(LOSSES[loss])(params)
        mesh = jb.data_mesh(jax.devices()[:num_devices])
        step, state = make_step(LOSSES[loss], recorder(), mesh, params, mode=mode)
        for seed in range(2):
            batches = split(seed)
            state, metrics = step(state, on(mesh, batches))
            assert_close(state.opt_state, want, limit)
            np.testing.assert_allclose(metrics["loss"], want_loss, rtol=10 * limit)
            assert metrics["num_examples"] == 40
            assert metrics["num_tokens"] == sum(len(x["tokens"]) for x in EXAMPLES)
            assert metrics["num_rows"] == sum(b.bucket.batch_size for b in batches)
            positions = sum(b.bucket.num_tokens for b in batches)
            assert metrics["num_positions"] == positions
            padding = 1 - int(metrics["num_tokens"]) / positions
            np.testing.assert_allclose(metrics["padding"], padding, rtol=1e-5)
            norm = norm_of(want)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=10 * limit)
            if loss == "tokens":
                assert metrics["rows"] == 40
        assert state.step == 2


@pytest.mark.parametrize(
    ("mode", "group"),
    [("pmap", "mixed"), *exhaustive(("jit", "same"), ("shard_map", "mixed"))],
)
def test_each_bucket_and_each_phase_is_compiled_once(mode, group):
    """Ahead of time, with the results of a step that is compiled when called."""
    examples = examples_of(90, seed=1)
    lengths = jb.measure_lengths(examples, progress=False)
    plan = jb.plan_buckets(
        lengths, max_tokens=256, num_buckets=3, batch_size_multiple=8
    )
    schedule = jb.BatchSchedule(plan, lengths, accumulate=3, group=group)
    mesh, traces = jb.data_mesh(jax.devices()[:4]), []

    def loss(params, batch, keys):
        traces.append(batch.bucket)
        return with_dropout(params, batch, keys)

    tx = optax.sgd(0.1, momentum=0.9)
    step, state = make_step(loss, tx, mesh, mode=mode, seed=3)
    specs = jb.sharding.batch_specs(schedule.plan, examples[0], mesh)
    results = []
    with jb.compile.count_compiles() as compiles:
        steps = jb.compile_steps(step, state, specs)
        dataset = jb.batch_dataset(examples, schedule, num_epochs=2)
        groups = list(jb.sharding.prefetch_to_mesh(dataset, mesh))
        for micro_batches in groups:
            before = state
            state, metrics = steps(state, micro_batches)
            assert all(x.is_deleted() for x in jax.tree.leaves(before.params))
            results.append(jax.tree.map(jnp.copy, (state.params, metrics)))
    assert int(state.step) == len(groups) == 2 * len(schedule)
    # jax's own names for pmapped functions: jax 0.10, jax 0.9.
    names = ["_fun", "call_wrapped"] if mode == "pmap" else ["add_micro_batch"]
    assert sum(compiles[name] for name in names) == len(schedule.plan)
    assert compiles["begin"] == compiles["update_state"] == 1
    assert list(steps) == list(schedule.plan.buckets)
    # Once for each bucket, and once more to find the names of the sums.
    assert len(traces) == len(schedule.plan) + 1
    twin = jb.create_state(make_params(), tx, mesh)
    for micro_batches, want in zip(groups[:3], results, strict=False):
        twin, metrics = step(twin, micro_batches)
        jax.tree.map(np.testing.assert_array_equal, (twin.params, metrics), want)


def test_clipping_and_learning_rate_depend_on_the_whole_step():
    tx = optax.chain(
        optax.clip_by_global_norm(0.05),
        optax.inject_hyperparams(optax.sgd)(1.0),
        jb.scale_by_batch_size(base_examples=10, rule="linear"),
    )
    params = make_params()
    _, grads = mean_of_whole(by_tokens)(params)
    norm = norm_of(grads)
    assert norm > 0.1
    step, state = make_step(by_tokens, tx, MESH)
    state, metrics = step(state, on(MESH, split(0)))
    want = jax.tree.map(lambda p, g: p - 4 * 0.05 / norm * g, params, grads)
    assert_close(state.params, want, 1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert metrics["lr_factor"] == metrics["learning_rate"] == 4


def test_a_nonfinite_micro_batch_skips_the_whole_step():
    def loss(params, batch, keys):
        loss_sum, weight, _ = by_tokens(params, batch, keys)
        # Only one of the micro-batches has this label.
        bad = jnp.any(batch.features["label"] == 99)
        return jnp.where(bad, jnp.nan, 1) * loss_sum, weight

    options = {"mode": "shard_map", "skip_nonfinite": True}
    step, state = make_step(loss, optax.sgd(0.1), MESH, **options)
    batches, before = split(0), jax.tree.map(np.array, state.params)
    batches[1].features["label"][0] = 99
    state, metrics = step(state, on(MESH, batches))
    assert metrics["skipped"] == 1 and state.step == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    batches[1].features["label"][0] = 1
    state, metrics = step(state, on(MESH, batches))
    assert metrics["skipped"] == 0
    assert not np.array_equal(state.params["out"], before["out"])


@pytest.mark.parametrize(
    "micro_batches", [(), BATCH, None], ids=["empty", "batch", "none"]
)
def test_micro_batches_must_be_a_tuple_of_batches(micro_batches):
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    with pytest.raises(ValueError, match="`micro_batches`"):
        step(state, micro_batches)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: None, "`micro_batches[1]`"),
        (
            lambda: on(MESH, BATCH._replace(features={"tokens": BATCH.mask + 0})),
            "`batch.features['label']`",
        ),
        (lambda: on(MESH, OTHER), "shape [8, 25] is outside the plan"),
        (lambda: on(jb.data_mesh(jax.devices()[2:4]), BATCH), "device"),
    ],
)
def test_a_refused_micro_batch_leaves_the_state_unchanged(other, message, compiled):
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    if compiled:
        step = jb.compile_steps(step, state, SPECS, progress=False)
    elif "label" in message or "plan" in message:
        pytest.skip("without a plan, batches may have any features")
    first = on(MESH, BATCH)
    with pytest.raises(ValueError, match=re.escape(message)):
        step(state, (first, other()))
    state, _ = step(state, (first,))
    assert state.step == 1


def test_a_step_accepts_models_of_different_shapes():
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    batches = on(MESH, (BATCH,))
    step(state, batches)
    wide = make_params() | {"out": np.ones((WIDTH, 2 * SYMBOLS), "f4")}
    state = jb.create_state(wide, optax.sgd(0.1), MESH)
    state, _ = step(state, batches)
    assert state.params["out"].shape == (WIDTH, 2 * SYMBOLS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ahead", [False, True])
def test_a_sharded_state_keeps_its_sharding_and_sums_are_donated(ahead):
    tx = optax.sgd(0.1, momentum=0.9)
    whole = jb.create_state(make_params(), tx)
    rows = NamedSharding(MESH, PartitionSpec("data"))
    replicated = NamedSharding(MESH, PartitionSpec())
    shardings = jax.tree.map(lambda x: rows if x.ndim else replicated, whole)
    step = jb.make_train_step(
        with_dropout, tx, MESH, accumulate=True, state_sharding=shardings
    )
    plain = jb.make_train_step(with_dropout, tx, MESH, accumulate=True)
    state, want = jax.device_put(whole, shardings), jb.sharding.replicate(whole, MESH)
    batch = on(MESH, BATCH)
    sums = step.begin(state, batch)
    step.add(state, sums, batch)
    for x in jax.tree.leaves(sums.grads):
        assert x.is_deleted() and x.sharding.is_equivalent_to(rows, x.ndim)
    if ahead:
        step = jb.compile_steps(step, state, SPECS, progress=False)
    for _ in range(2):
        state, _ = step(state, (batch, batch))
        want, _ = plain(want, (batch, batch))
        for name, value in state.params.items():
            assert value.sharding.is_equivalent_to(rows, value.ndim)
            np.testing.assert_allclose(value, want.params[name], rtol=2e-5, atol=1e-6)


def fails_for_long_rows(params, batch, keys):
    if batch.bucket.seq_len == 25:
        raise RuntimeError("too long for this loss")
    return by_tokens(params, batch, keys)


def counts_long_rows(params, batch, keys):
    loss_sum, weight, sums = by_tokens(params, batch, keys)
    more = {"long": weight} if batch.bucket.seq_len == 25 else {}
    return loss_sum, weight, sums | more


@pytest.mark.parametrize("loss", [fails_for_long_rows, counts_long_rows])
def test_a_loss_that_fails_for_a_micro_batch_leaves_the_state_unchanged(loss):
    step, state = make_step(loss, optax.sgd(0.1), MESH)
    with pytest.raises((RuntimeError, ValueError)):
        step(state, on(MESH, (BATCH, OTHER)))
    state, _ = step(state, on(MESH, (BATCH,)))
    assert state.step == 1


@pytest.mark.exhaustive
def test_the_sums_of_a_loss_may_depend_on_the_features():
    def loss(params, batch, keys):
        loss_sum, weight, sums = by_tokens(params, batch, keys)
        others = batch.features.keys() - {"tokens"}
        return loss_sum, weight, sums | {x: batch.features[x].sum() for x in others}

    step, state = make_step(loss, optax.sgd(0.1), MESH)
    state, metrics = step(state, on(MESH, (BATCH,)))
    assert "label" in metrics
    tokens = BATCH._replace(features={"tokens": BATCH.features["tokens"]})
    state, metrics = step(state, on(MESH, (tokens,)))
    assert "label" not in metrics and state.step == 2


def test_numpy_batches_are_accepted():
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    _, want = step(jax.tree.map(jnp.copy, state), on(MESH, (BATCH, BATCH)))
    _, metrics = step(state, (BATCH, BATCH))
    assert metrics["loss"] == want["loss"]
