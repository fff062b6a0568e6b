"""A step of several micro-batches against one padded batch of the same examples."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbucket as jb

MODES = ["jit", "shard_map", "pmap"]
EXHAUSTIVE = pytest.mark.exhaustive
SYMBOLS, WIDTH = 12, 6


def only(mode):
    """Parameters for all modes; those other than `mode` are exhaustive tests."""
    return [
        pytest.param(m, marks=() if m == mode else pytest.mark.exhaustive)
        for m in MODES
    ]


def make_params(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"embedding": (SYMBOLS, WIDTH), "out": (WIDTH, SYMBOLS)}
    return {name: rng.normal(size=s).astype(dtype) for name, s in shapes.items()}


def token_losses(params, tokens, kept=None):
    hidden = params["embedding"][tokens]
    if kept is not None:
        hidden = hidden * kept.astype(hidden.dtype)
    logits = jnp.tanh(hidden) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, (tokens + 1) % SYMBOLS
    )


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
    weight = jnp.where(batch.mask, weights[batch.features["task"]][:, None], 0)
    losses = token_losses(params, batch.features["tokens"])
    return (losses * weight).sum(), weight.sum()


def with_dropout(params, batch, keys):
    tokens = batch.features["tokens"]
    bits = jax.vmap(lambda key: jax.random.bits(key, (tokens.shape[1], WIDTH)))(keys)
    losses = token_losses(params, tokens, bits % 2 == 0)
    return jnp.where(batch.mask, losses, 0).sum(), batch.num_tokens


LOSSES = {"tokens": by_tokens, "examples": by_examples, "task": by_task}


def make_examples(size, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"tokens": rng.integers(0, SYMBOLS, n, np.int32), "task": np.int32(n % 3)}
        for n in rng.integers(1, 24, size)
    ]


def split(examples, seed):
    """Splits examples into micro-batches of random buckets with some empty rows."""
    rng = np.random.default_rng(seed)
    order, batches = rng.permutation(len(examples)), []
    while order.size:
        size = int(rng.integers(1, 12))
        rows = [examples[i] for i in order[:size]]
        order = order[size:]
        bucket = jb.Bucket(-(-len(rows) // 8) * 8, int(rng.choice([24, 32])))
        batches.append(jb.data.collate_rows(rows, bucket))
    return batches


def recorder():
    """An optimizer that changes nothing and keeps the last gradient as its state."""

    def update(updates, state, params=None):
        return jax.tree.map(jnp.zeros_like, updates), updates

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )


def make_step(loss, tx, mesh, params=None, **options):
    step = jb.make_train_step(loss, tx, mesh, accumulate=True, **options)
    params = make_params() if params is None else params
    return step, jb.create_state(params, tx, mesh)


def on(mesh, batches):
    (group,) = jb.sharding.prefetch_to_mesh([tuple(batches)], mesh)
    return group


def distance(got, want):
    """Returns the largest relative distance between tensors of two trees."""
    norms = jax.tree.map(
        lambda a, b: np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b), got, want
    )
    return max(jax.tree.leaves(norms))


@pytest.mark.parametrize(
    ("loss", "mode", "num_devices"),
    [
        ("tokens", "pmap", 8),
        pytest.param("tokens", "jit", 1, marks=EXHAUSTIVE),
        pytest.param("tokens", "shard_map", 1, marks=EXHAUSTIVE),
        pytest.param("examples", "jit", 8, marks=EXHAUSTIVE),
        pytest.param("task", "shard_map", 8, marks=EXHAUSTIVE),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [pytest.param(np.float32, 1e-5, marks=EXHAUSTIVE), (np.float64, 1e-12)],
    ids=["f32", "f64"],
)
def test_any_split_has_the_gradient_of_one_padded_batch(
    loss, mode, num_devices, dtype, limit
):
    examples = make_examples(40)
    whole = jb.data.collate_rows(examples, jb.Bucket(40, 32))
    with jax.enable_x64(dtype == np.float64):
        params = make_params(dtype)

        def mean(params):
            loss_sum, weight, *_ = LOSSES[loss](params, whole, None)
            return loss_sum / weight.astype(loss_sum.dtype)

        want_loss, want = jax.value_and_grad(mean)(params)
        mesh = jb.data_mesh(jax.devices()[:num_devices])
        step, state = make_step(LOSSES[loss], recorder(), mesh, params, mode=mode)
        for seed in range(2):
            batches = split(examples, seed)
            state, metrics = step(state, on(mesh, batches))
            assert distance(state.opt_state, want) < limit
            np.testing.assert_allclose(metrics["loss"], want_loss, rtol=10 * limit)
            assert metrics["num_examples"] == 40
            assert metrics["num_tokens"] == sum(len(x["tokens"]) for x in examples)
            assert metrics["num_rows"] == sum(b.bucket.batch_size for b in batches)
            positions = sum(b.bucket.num_tokens for b in batches)
            assert metrics["num_positions"] == positions
            padding = 1 - int(metrics["num_tokens"]) / positions
            np.testing.assert_allclose(metrics["padding"], padding, rtol=1e-5)
            norm = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(want)))
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=10 * limit)
            if loss == "tokens":
                assert metrics["rows"] == 40
        assert state.step == 2


def scheduled(order="shuffled", size=90, **options):
    examples = make_examples(size, seed=1)
    lengths = jb.measure_lengths(examples, progress=False)
    plan = jb.plan_buckets(
        lengths, max_tokens=256, num_buckets=3, batch_size_multiple=8
    )
    return examples, jb.BatchSchedule(
        plan, lengths, order=order, accumulate=3, **options
    )


@pytest.mark.parametrize("mode", only("pmap"))
@pytest.mark.parametrize("group", [pytest.param("same", marks=EXHAUSTIVE), "mixed"])
def test_each_bucket_and_each_phase_is_compiled_once(mode, group):
    examples, schedule = scheduled(group=group)
    mesh = jb.data_mesh(jax.devices()[:4])
    traces = []

    def loss(params, batch, keys):
        traces.append(batch.bucket)
        return with_dropout(params, batch, keys)

    tx = optax.adam(1e-3)
    step, state = make_step(loss, tx, mesh, mode=mode)
    specs = jb.sharding.batch_specs(schedule.plan, examples[0], mesh)
    with jax.numpy_dtype_promotion("standard"), jb.compile.count_compiles() as compiles:
        steps = jb.compile_steps(step, state, specs)
        dataset = jb.batch_dataset(examples, schedule, num_epochs=2)
        for micro_batches in jb.sharding.prefetch_to_mesh(dataset, mesh):
            state, _ = steps(state, micro_batches)
    assert int(state.step) == len(dataset) == 2 * len(schedule)
    # jax's own names for pmapped functions: jax 0.10, jax 0.9.
    names = ["_fun", "call_wrapped"] if mode == "pmap" else ["add_micro_batch"]
    assert sum(compiles[name] for name in names) == len(schedule.plan)
    assert compiles["begin"] == compiles["update_state"] == 1
    assert list(steps) == list(schedule.plan.buckets)
    # Once for each bucket, and once more to find the names of the sums.
    devices_once = len(schedule.plan) + 1
    assert len(traces) == devices_once


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", only("jit"))
def test_compiled_and_jitted_steps_agree_and_donate_their_state(mode):
    examples, schedule = scheduled(group="mixed")
    mesh = jb.data_mesh(jax.devices()[:2])
    tx = optax.sgd(0.1, momentum=0.9)
    step, state = make_step(with_dropout, tx, mesh, mode=mode, seed=3)
    twin = jb.create_state(make_params(), tx, mesh)
    specs = jb.sharding.batch_specs(schedule.plan, examples[0], mesh)
    steps = jb.compile_steps(step, state, specs)
    groups = jb.batch_dataset(examples, schedule, num_steps=3)
    for group in jb.sharding.prefetch_to_mesh(groups, mesh):
        before = state
        state, metrics = steps(state, group)
        assert all(x.is_deleted() for x in jax.tree.leaves(before.params))
        twin, same = step(twin, group)
        for a, b in zip(
            jax.tree.leaves((state.params, metrics)),
            jax.tree.leaves((twin.params, same)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


def test_clipping_and_learning_rate_depend_on_the_whole_step():
    examples = make_examples(40)
    whole = jb.data.collate_rows(examples, jb.Bucket(40, 32))
    tx = optax.chain(
        optax.clip_by_global_norm(0.05),
        optax.inject_hyperparams(optax.sgd)(1.0),
        jb.scale_by_batch_size(base_examples=10, rule="linear"),
    )

    def mean(params):
        loss_sum, weight, _ = by_tokens(params, whole, None)
        return loss_sum / weight.astype(loss_sum.dtype)

    params = make_params()
    grads = jax.grad(mean)(params)
    norm = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(grads)))
    assert norm > 0.1
    mesh = jb.data_mesh(jax.devices()[:2])
    step, state = make_step(by_tokens, tx, mesh)
    state, metrics = step(state, on(mesh, split(examples, 0)))
    want = jax.tree.map(lambda p, g: p - 4 * 0.05 / norm * g, params, grads)
    assert distance(state.params, want) < 1e-5
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert metrics["lr_factor"] == metrics["learning_rate"] == 4


@pytest.mark.parametrize("mode", only("shard_map"))
def test_a_nonfinite_micro_batch_skips_the_whole_step(mode):
    batches = split(make_examples(40), 0)
    mesh = jb.data_mesh(jax.devices()[:2])

    def loss(params, batch, keys):
        loss_sum, weight, _ = by_tokens(params, batch, keys)
        # Only one of the micro-batches has this task.
        bad = jnp.any(batch.features["task"] == 9)
        return jnp.where(bad, jnp.nan, 1) * loss_sum, weight

    step, state = make_step(loss, optax.sgd(0.1), mesh, mode=mode, skip_nonfinite=True)
    batches[1].features["task"][0] = 9
    before = jax.tree.map(np.array, state.params)
    state, metrics = step(state, on(mesh, batches))
    assert metrics["skipped"] == 1 and state.step == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    batches[1].features["task"][0] = 1
    state, metrics = step(state, on(mesh, batches))
    assert metrics["skipped"] == 0 and distance(state.params, before) > 0


MESH = jb.data_mesh(jax.devices()[:2])


BATCH = jb.data.collate_rows(make_examples(4), jb.Bucket(8, 24))
OTHER = jb.data.collate_rows(make_examples(4), jb.Bucket(8, 25))


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
            lambda: on(MESH, [BATCH._replace(features={"tokens": BATCH.mask + 0})])[0],
            "`batch.features['task']`",
        ),
        (lambda: on(MESH, [OTHER])[0], "shape [8, 25] is outside the plan"),
        (lambda: on(jb.data_mesh(jax.devices()[2:4]), [BATCH])[0], "device"),
    ],
)
def test_a_refused_micro_batch_leaves_the_state_unchanged(other, message, compiled):
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    if compiled:
        specs = jb.sharding.batch_specs(
            jb.BucketPlan.from_shapes([(8, 24)]), make_examples(1)[0], MESH
        )
        step = jb.compile_steps(step, state, specs, progress=False)
    elif "task" in message or "plan" in message:
        pytest.skip("without a plan, batches may have any features")
    (first,) = on(MESH, [BATCH])
    with pytest.raises(ValueError, match=re.escape(message)):
        step(state, (first, other()))
    state, _ = step(state, (first,))
    assert state.step == 1


def test_a_step_accepts_models_of_different_shapes():
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    batches = on(MESH, [BATCH])
    step(state, batches)
    wide = {
        "embedding": np.ones((SYMBOLS, 9), "f4"),
        "out": np.ones((9, SYMBOLS), "f4"),
    }
    state = jb.create_state(wide, optax.sgd(0.1), MESH)
    state, _ = step(state, batches)
    assert state.params["out"].shape == (9, SYMBOLS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=EXHAUSTIVE)])
def test_a_sharded_state_keeps_its_sharding_and_sums_are_donated(ahead):
    mesh = jb.data_mesh(jax.devices()[:2])
    tx = optax.sgd(0.1, momentum=0.9)
    whole = jb.create_state(make_params(), tx)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda x: rows if x.ndim == 2 else replicated, whole)
    step = jb.make_train_step(
        with_dropout, tx, mesh, accumulate=True, state_sharding=shardings
    )
    plain = jb.make_train_step(with_dropout, tx, mesh, accumulate=True)
    state, want = jax.device_put(whole, shardings), jb.sharding.replicate(whole, mesh)
    received, add = [], step.add

    class Recorded:
        def __getattr__(self, name):
            return getattr(add, name)

        def __call__(self, state, accumulated, batch):
            received.append(accumulated.grads)
            return add(state, accumulated, batch)

    if ahead:
        specs = jb.sharding.batch_specs(
            jb.BucketPlan.from_shapes([(8, 24)]), make_examples(1)[0], mesh
        )
        step = jb.compile_steps(step, state, specs, progress=False)
    else:
        step.add = Recorded()
    for _ in range(2):
        batches = on(mesh, [BATCH, BATCH])
        state, _ = step(state, batches)
        want, _ = plain(want, batches)
        for name, value in state.params.items():
            assert value.sharding.is_equivalent_to(rows, 2)
            np.testing.assert_allclose(value, want.params[name], rtol=2e-5, atol=1e-6)
    for grads in received:
        assert all(
            x.is_deleted() and x.sharding.is_equivalent_to(rows, 2)
            for x in jax.tree.leaves(grads)
        )


def fails_for_long_rows(params, batch, keys):
    if batch.bucket.seq_len == 25:
        raise RuntimeError("too long for this loss")
    return by_tokens(params, batch, keys)


def counts_long_rows(params, batch, keys):
    loss_sum, weight, sums = by_tokens(params, batch, keys)
    return (
        loss_sum,
        weight,
        sums | ({"long": weight} if batch.mask.shape[1] == 25 else {}),
    )


@pytest.mark.parametrize("mode", only("jit"))
@pytest.mark.parametrize("loss", [fails_for_long_rows, counts_long_rows])
def test_a_loss_that_fails_for_a_micro_batch_leaves_the_state_unchanged(loss, mode):
    step, state = make_step(loss, optax.sgd(0.1), MESH, mode=mode)
    with pytest.raises((RuntimeError, ValueError)):
        step(state, on(MESH, [BATCH, OTHER]))
    state, _ = step(state, on(MESH, [BATCH]))
    assert state.step == 1


@pytest.mark.exhaustive
def test_the_sums_of_a_loss_may_depend_on_the_features():
    def loss(params, batch, keys):
        loss_sum, weight, sums = by_tokens(params, batch, keys)
        more = (
            {"tasks": batch.features["task"].sum()} if "task" in batch.features else {}
        )
        return loss_sum, weight, sums | more

    step, state = make_step(loss, optax.sgd(0.1), MESH)
    state, metrics = step(state, on(MESH, [BATCH]))
    assert "tasks" in metrics
    tokens = BATCH._replace(features={"tokens": BATCH.features["tokens"]})
    state, metrics = step(state, on(MESH, [tokens]))
    assert "tasks" not in metrics and state.step == 2


def test_numpy_batches_are_accepted():
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    _, want = step(jax.tree.map(jnp.copy, state), on(MESH, [BATCH, BATCH]))
    _, metrics = step(state, (BATCH, BATCH))
    assert metrics["loss"] == want["loss"]
