"""The measurement of the gradients of buckets: which batches, losses and states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxbucket as jb
from jaxbucket.train import bucket_gradients
from jaxbucket.train.gradient_sketch import SKETCH_SIZE, make_sketch


@pytest.mark.parametrize("order", ["ascending", "spread", "shuffled"])
def test_every_bucket_of_a_long_epoch_is_measured(order):
    # In the order "spread", every second batch is of the first bucket.
    plan = jb.BucketPlan.from_shapes([(4, 4), (2, 8), (1, 16)])
    lengths = np.repeat([4, 8, 16], [4 * 5000, 2 * 4997, 3])
    source = [{"x": np.zeros(n, np.float32)} for n in lengths]
    schedule = jb.BatchSchedule(plan, lengths, order=order)
    mesh = jb.data_mesh(jax.devices()[:1])
    batches = jb.MeshLoader(source, schedule, mesh, start_step=7)
    counts, chosen = bucket_gradients._choose(batches, 8, seed=0)
    assert counts == dict(zip(plan.buckets, [5000, 4997, 3], strict=True))
    seen = [schedule.micro_batches(step)[index].bucket for step, index in chosen]
    assert [seen.count(bucket) for bucket in plan.buckets] == [8, 8, 3]
    assert min(chosen)[0] >= len(schedule) and max(chosen)[0] < 2 * len(schedule)
    assert chosen == bucket_gradients._choose(batches, 8, seed=0)[1]
    assert chosen != bucket_gradients._choose(batches, 8, seed=1)[1]


@pytest.mark.exhaustive
def test_a_sketch_keeps_inner_products():
    rng = np.random.default_rng(0)
    size = 3 * SKETCH_SIZE
    x = rng.normal(size=size).astype(np.float32)
    y = (0.5 * x + rng.normal(size=size)).astype(np.float32)

    def tree(a):
        return {"b": a[: size // 3].reshape(-1, 128), "a": [a[size // 3 :]]}

    mesh = jb.data_mesh(jax.devices()[:1])
    sketch = make_sketch(mesh)
    xs, ys = sketch(tree(x)), sketch(tree(y))
    assert xs.shape == (SKETCH_SIZE,) and xs.dtype == np.float32
    bound = 5 * np.sqrt(2 / SKETCH_SIZE) * np.linalg.norm(x) * np.linalg.norm(y)
    assert abs(float(xs @ ys) - float(x @ y)) < bound
    np.testing.assert_allclose(sketch(tree(x + y)), xs + ys, atol=1e-3)
    different = make_sketch(mesh, seed=1)(tree(x))
    assert abs(float(xs @ different)) < 0.1 * float(xs @ xs)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_arrays_of_the_same_shape_share_a_program(axis_type):
    mesh = jax.make_mesh((4,), ("data",), (axis_type,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    tree = jax.device_put([np.full((8, 4), k, np.float32) for k in range(6)], sharding)
    sketch = make_sketch(mesh)
    with jb.compile.count_compiles() as compiles:
        several = sketch(tree)
    assert compiles["add_array"] == 1
    one = make_sketch(jb.data_mesh(jax.devices()[:1]))(jax.device_get(tree))
    np.testing.assert_array_equal(several, one)


def test_every_array_has_a_projection_of_its_own():
    sketch = make_sketch(jb.data_mesh(jax.devices()[:1]))
    x = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    first, second = sketch([x, 0 * x]), sketch([0 * x, x])
    assert abs(first @ second) < 0.1 * (x @ x)


def test_gradients_are_sharded_as_parameters_and_freed(monkeypatch):
    mesh = jb.data_mesh(jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    state = jb.create_state({"w": jnp.ones((31, 64))}, optax.sgd(0.1), mesh)
    params = jax.device_put(state.params, sharding)
    state = dataclasses.replace(state, params=params)

    def loss_fn(params, batch, keys):
        x = jnp.sum(batch.features["x"], where=batch.mask)
        return x * jnp.sum(params["w"]), batch.num_tokens

    def num_alive():
        return sum(x.shape == (31, 64) for x in jax.live_arrays())

    def compile_observed(*args, **options):
        steps = compile_steps(*args, **options)

        def observed(state, batch):
            alive.append(num_alive())
            result = steps(state, batch)
            shardings.append(result[0]["w"].sharding)
            return result

        return observed

    alive, shardings = [num_alive()], []
    compile_steps = bucket_gradients.compile_steps
    monkeypatch.setattr(bucket_gradients, "compile_steps", compile_observed)
    jb.train.bucket_bias(loss_fn, state, make_batches(mesh), batches_per_bucket=3)
    assert len(shardings) == 9 and max(alive[1:]) <= alive[0]
    assert all(x.is_equivalent_to(sharding, 2) for x in shardings)


def make_batches(mesh, **options):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 17, 600)
    source = [{"x": np.full(n, n, np.float32)} for n in lengths]
    plan = jb.plan_buckets(
        lengths, max_tokens=128, num_buckets=3, batch_size_multiple=4
    )
    schedule = jb.BatchSchedule(plan, lengths, **options)
    return jb.MeshLoader(source, schedule, mesh)


def loss_fn(params, batch, keys):
    losses = (params["w"] - batch.features["x"]) ** 2
    return jnp.sum(losses, where=batch.mask), batch.num_tokens


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "group": "mixed"}], ids=str)
def test_the_bias_of_a_loss_is_that_of_its_gradients(options):
    mesh = jb.data_mesh(jax.devices()[:4])
    batches = make_batches(mesh, **options)
    state = jb.create_state({"w": jnp.zeros(())}, optax.sgd(0.1), mesh)
    report = jb.train.bucket_bias(loss_fn, state, batches, batches_per_bucket=64)
    assert report.accumulate == batches.schedule.accumulate
    plan, lengths = batches.schedule.plan, batches.schedule.lengths
    # The gradient of a token in an example of length n is -2 * n.
    by_bucket = plan.assign(lengths)
    gradients = [
        np.repeat(lengths, lengths)[np.repeat(by_bucket, lengths) == k]
        for k in range(3)
    ]
    means = np.array([g.mean() for g in gradients])
    mean = np.repeat(lengths, lengths).mean()
    for k, bucket in enumerate(report.buckets):
        assert bucket.bucket == plan.buckets[k]
        expected = (means[k] - mean) ** 2 / mean**2
        assert bucket.bias == pytest.approx(expected, abs=0.02)
    assert sum(bucket.share for bucket in report.buckets) == pytest.approx(1)
    one = jb.train.bucket_bias(
        loss_fn,
        jb.create_state(
            {"w": jnp.zeros(())},
            optax.sgd(0.1),
            alone := jb.data_mesh(jax.devices()[:1]),
        ),
        make_batches(alone, **options),
        batches_per_bucket=64,
    )
    for x, y in zip(one.ways, report.ways, strict=True):
        np.testing.assert_allclose(x.several, y.several, rtol=1e-5)


@pytest.mark.exhaustive
def test_every_batch_has_its_own_random_keys():
    mesh = jb.data_mesh(jax.devices()[:1])
    batches = make_batches(mesh)
    state = jb.create_state({"w": jnp.ones(256)}, optax.sgd(0.1), mesh)

    def noisy(params, batch, keys):
        # The gradient of a row is 1 plus noise that depends on its key alone.
        noise = jax.vmap(lambda key: jax.random.normal(key, (256,)))(keys)
        is_real = batch.mask.any(axis=1)
        return jnp.sum((1 + noise) @ params["w"], where=is_real), jnp.sum(is_real)

    report = jb.train.bucket_bias(noisy, state, batches)
    for x in report.buckets:
        assert abs(x.bias) < 5 * x.bias_error < 0.2
        assert x.noise_scale == pytest.approx(1, rel=0.3)


def test_batches_without_weight_are_left_out():
    mesh = jb.data_mesh(jax.devices()[:1])
    batches = make_batches(mesh)
    state = jb.create_state({"w": jnp.ones(4)}, optax.sgd(0.1), mesh)

    def sometimes(params, batch, keys):
        weight = batch.num_tokens * (batch.num_tokens % 2)
        return weight.astype(jnp.float32) * jnp.sum(params["w"]), weight

    report = jb.train.bucket_bias(sometimes, state, batches, batches_per_bucket=12)
    for x in report.buckets:
        assert (x.bias, x.noise) == pytest.approx((0, 0), abs=1e-5)
        assert 2 < x.num_batches < 12
        assert x.weight < 0.9 * x.bucket.num_tokens


class Calls(nnx.Variable):
    """Counts the calls of a model."""


def test_a_loss_may_change_any_variable():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(()))
            self.calls = Calls(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return self.w - x

    def loss_fn(model, batch, keys):
        losses = model(batch.features["x"]) ** 2
        return jnp.sum(losses, where=batch.mask), batch.num_tokens

    mesh = jb.data_mesh(jax.devices()[:1])
    state = jb.create_state(Model(), optax.sgd(0.1), mesh)
    report = jb.train.bucket_bias(loss_fn, state, make_batches(mesh))
    assert len(report.buckets) == 3
    assert state.model.calls[...] == 0


def test_a_state_of_ones_own_is_refused():
    batches = make_batches(jb.data_mesh(jax.devices()[:1]))
    with pytest.raises(ValueError, match="`state` is a builtins.dict. The steps of"):
        jb.train.bucket_bias(loss_fn, {"w": 0.0}, batches)


def test_too_few_batches_are_refused():
    mesh = jb.data_mesh(jax.devices()[:1])
    state = jb.create_state({"w": jnp.zeros(())}, optax.sgd(0.1), mesh)
    with pytest.raises(ValueError, match="`batches_per_bucket=2` is too small"):
        jb.train.bucket_bias(loss_fn, state, make_batches(mesh), batches_per_bucket=2)
    message = "`loss_fn=None` is not a function. Pass a function of .model, batch, keys"
    with pytest.raises(ValueError, match=message):
        jb.train.bucket_bias(None, state, make_batches(mesh))  # pyright: ignore
    plan = jb.BucketPlan.from_shapes([(8, 4)])
    schedule = jb.BatchSchedule(plan, [4] * 8)
    batches = jb.MeshLoader([{"x": np.ones(4, np.float32)}] * 8, schedule, mesh)
    with pytest.raises(ValueError, match="No bucket has three batches with weight"):
        jb.train.bucket_bias(loss_fn, state, batches)
    with pytest.raises(ValueError, match="`batches` is a list. Pass the loader itself"):
        jb.train.bucket_bias(loss_fn, state, list(make_batches(mesh)))
    dataset = jb.batch_dataset([{"x": np.ones(4, np.float32)}] * 8, schedule)
    with pytest.raises(ValueError, match="is a BatchDataset. Pass the loader itself"):
        jb.train.bucket_bias(loss_fn, state, dataset)
