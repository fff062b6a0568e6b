"""A step of several micro-batches against one padded batch of the same examples."""

import re
import textwrap

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
    # jax names every pmapped function `_fun`.
    step_name = "_fun" if mode == "pmap" else "add_micro_batch"
    assert compiles[step_name] == len(schedule.plan)
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


@EXHAUSTIVE
def test_dropout_differs_between_micro_batches_but_not_between_meshes():
    batch = jb.data.collate_rows(make_examples(8), jb.Bucket(8, 24))
    losses_by_count = {}
    for num_devices, mode in ((1, "jit"), (8, "shard_map"), (4, "pmap")):
        mesh = jb.data_mesh(jax.devices()[:num_devices])
        step, state = make_step(with_dropout, recorder(), mesh, mode=mode, seed=5)
        for count in (1, 2):
            _, metrics = step(
                jb.sharding.replicate(state, mesh), on(mesh, [batch] * count)
            )
            losses_by_count.setdefault(count, []).append(float(metrics["loss"]))
    for losses in losses_by_count.values():
        np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    # The same rows in a second micro-batch have different dropout.
    assert abs(losses_by_count[1][0] / losses_by_count[2][0] - 1) > 1e-3


@pytest.mark.exhaustive
def test_a_single_micro_batch_equals_a_step_without_accumulation():
    batch = jb.data.collate_rows(make_examples(8), jb.Bucket(8, 24))
    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    step, state = make_step(with_dropout, tx, mesh, seed=5)
    plain = jb.make_train_step(with_dropout, tx, mesh, seed=5)
    want, want_metrics = plain(jb.sharding.replicate(state, mesh), on(mesh, [batch])[0])
    got, metrics = step(state, on(mesh, [batch]))
    assert distance(got.params, want.params) < 1e-6
    assert metrics.keys() == want_metrics.keys()
    for name in metrics:
        np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-5)


def test_clipping_and_learning_rate_depend_on_the_whole_step():
    examples = make_examples(40)
    whole = jb.data.collate_rows(examples, jb.Bucket(40, 32))
    tx = optax.chain(
        optax.clip_by_global_norm(0.05),
        optax.sgd(1.0),
        jb.scale_by_batch_size(base_examples=10, rule="linear", learning_rate=1.0),
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


TWO = """
import json
import jax, numpy as np
import jaxbucket as jb
{model}

jax.config.update("jax_enable_x64", {is_wide})
params = make_params({dtype!r})
with jb.Processes() as processes:
    mesh = jb.data_mesh()
    step, state = make_step(
        with_dropout, recorder(), mesh, params, mode={mode!r}, seed=5
    )
    shard = jb.sharding.local_rows(mesh)
    groups = [
        tuple(
            jax.tree.map(lambda x: x[shard.rows(len(x))], batch)
            for batch in split(make_examples(40), seed)
        )
        for seed in range(3)
    ]
    for group in jb.sharding.prefetch_to_mesh(groups, mesh):
        state, metrics = step(state, group)
        grads = [x.tolist() for x in jax.tree.leaves(state.opt_state)]
        record(json.dumps([grads, float(metrics["loss"]), int(metrics["num_rows"])]))
"""


# "shard_map" in several processes is tested with steps without accumulation.
@EXHAUSTIVE
@pytest.mark.parametrize(
    ("mode", "dtype", "limit"),
    [
        ("pmap", "float64", 1e-12),
    ],
)
def test_two_processes_compute_the_gradient_of_one(launch, mode, dtype, limit):
    import inspect
    import json

    helpers = (
        make_params,
        token_losses,
        with_dropout,
        make_examples,
        split,
        recorder,
        make_step,
    )
    model = "\n".join(map(inspect.getsource, helpers))
    names = f"import jax.numpy as jnp, optax\nSYMBOLS, WIDTH = {SYMBOLS}, {WIDTH}\n"
    is_wide = dtype == "float64"
    code = textwrap.dedent(TWO).format(
        model=names + model, mode=mode, dtype=dtype, is_wide=is_wide
    )
    done = launch(code, devices=2)
    assert done.status == 0, done.output
    with jax.enable_x64(is_wide):
        mesh = jb.data_mesh(jax.devices()[:1])
        step, state = make_step(
            with_dropout, recorder(), mesh, make_params(dtype), seed=5
        )
        for seed in range(3):
            state, metrics = step(state, on(mesh, split(make_examples(40), seed)))
            for process in range(2):
                grads, loss, rows = json.loads(done.recorded(process)[seed])
                leaves = [np.array(x, dtype) for x in grads]
                assert distance(leaves, jax.tree.leaves(state.opt_state)) < limit
                assert loss == pytest.approx(float(metrics["loss"]), rel=10 * limit)
                assert rows == metrics["num_rows"]


MESH = jb.data_mesh(jax.devices()[:2])


def refuse(micro_batches, compiled=False):
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    if compiled:
        plan = jb.BucketPlan.from_shapes([(8, 24)])
        specs = jb.sharding.batch_specs(plan, make_examples(1)[0], MESH)
        step = jb.compile_steps(step, state, specs, progress=False)
    step(state, micro_batches)


BATCH = jb.data.collate_rows(make_examples(4), jb.Bucket(8, 24))
OTHER = jb.data.collate_rows(make_examples(4), jb.Bucket(8, 25))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("micro_batches", "message"),
    [
        ((), "`micro_batches` is empty. Pass a tuple of `jaxbucket.Batch`"),
        (BATCH, "`micro_batches` is a Batch. Pass a tuple"),
        (None, "`micro_batches` is a NoneType. Pass a tuple"),
    ],
)
def test_micro_batches_must_be_a_tuple_of_batches(micro_batches, message, compiled):
    with pytest.raises(ValueError, match=re.escape(message)):
        refuse(micro_batches, compiled)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: None, "`micro_batches[1]` is a NoneType, not a `jaxbucket.Batch`"),
        (
            lambda: on(MESH, [BATCH._replace(features={"tokens": BATCH.mask + 0})])[0],
            "`batch.features['task']` is missing, but [8, 24] was compiled for",
        ),
        (
            lambda: on(jb.data_mesh(jax.devices()[2:4]), [BATCH])[0],
            "`micro_batches[1]` is on 2 devices, which differ from the 2 devices",
        ),
    ],
)
def test_a_refused_micro_batch_leaves_the_state_unchanged(other, message, compiled):
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    if compiled:
        specs = jb.sharding.batch_specs(
            jb.BucketPlan.from_shapes([(8, 24)]), make_examples(1)[0], MESH
        )
        step = jb.compile_steps(step, state, specs, progress=False)
    elif "was compiled" in message:
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
@pytest.mark.parametrize(
    ("mode", "ahead"),
    [
        ("shard_map", False),
        *(
            pytest.param(*case, marks=EXHAUSTIVE)
            for case in (("jit", False), ("jit", True), ("shard_map", True))
        ),
    ],
)
def test_a_sharded_state_keeps_its_sharding_and_sums_are_donated(mode, ahead):
    mesh = jb.data_mesh(jax.devices()[:2])
    tx = optax.sgd(0.1, momentum=0.9)
    whole = jb.create_state(make_params(), tx)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda x: rows if x.ndim == 2 else replicated, whole)
    step = jb.make_train_step(
        with_dropout, tx, mesh, accumulate=True, mode=mode, state_sharding=shardings
    )
    plain = jb.make_train_step(with_dropout, tx, mesh, accumulate=True, mode=mode)
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


def test_a_micro_batch_outside_the_plan_leaves_the_state_unchanged():
    plan = jb.BucketPlan.from_shapes([(8, 24)])
    specs = jb.sharding.batch_specs(plan, make_examples(1)[0], MESH)
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    steps = jb.compile_steps(step, state, specs, progress=False)
    with pytest.raises(ValueError, match=r"shape \[8, 25\] is outside the plan"):
        steps(state, on(MESH, [BATCH, OTHER]))
    state, _ = steps(state, on(MESH, [BATCH]))
    assert state.step == 1


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_sharded_state_under_pmap_is_refused(accumulate):
    with pytest.raises(ValueError, match="is not supported by `mode='pmap'`"):
        jb.make_train_step(
            by_tokens,
            optax.sgd(1),
            MESH,
            accumulate=accumulate,
            mode="pmap",
            state_sharding="any",
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_gradient_sums_are_donated(mode):
    received = []
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH, mode=mode)
    add = step.add

    def recorded(state, accumulated, batch):
        received.append(accumulated)
        return add(state, accumulated, batch)

    step.add = recorded
    state, _ = step(state, on(MESH, [BATCH, BATCH, BATCH]))
    # The first sums are copied, because they lack the sharding of pmap's results.
    for accumulated in received[1:]:
        assert all(x.is_deleted() for x in jax.tree.leaves(accumulated))


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


def test_a_different_device_order_leaves_the_state_unchanged():
    other = jb.data_mesh(jax.devices()[1::-1])
    plan = jb.BucketPlan.from_shapes([(8, 24)])
    specs = jb.sharding.batch_specs(plan, make_examples(1)[0], MESH)
    step, state = make_step(by_tokens, optax.sgd(0.1), MESH)
    steps = jb.compile_steps(step, state, specs, progress=False)
    with pytest.raises(ValueError, match="sharding"):
        steps(state, (*on(MESH, [BATCH]), *on(other, [BATCH])))
    state, _ = steps(state, on(MESH, [BATCH]))
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


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=EXHAUSTIVE)]
)
def test_many_half_precision_gradients_do_not_lose_precision(dtype):
    """Their sum is far larger than a sum computed in half precision."""

    def loss(params, batch, keys):
        count = batch.num_tokens.astype(jnp.float32)
        return 1.1 * params.astype(jnp.float32) * count, batch.num_tokens

    tx = optax.sgd(1.0)
    step = jb.make_train_step(loss, tx, MESH, accumulate=True)
    state = jb.create_state(jnp.zeros((), dtype), tx, MESH)
    state, metrics = step(state, on(MESH, [BATCH] * 1500))
    np.testing.assert_allclose(state.params, -1.1, rtol=1e-2)
    np.testing.assert_allclose(metrics["grad_norm"], 1.1, rtol=1e-2)
