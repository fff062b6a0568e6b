"""The bias and the noise of the gradients of buckets, against known distributions."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxbucket as jb
from jaxbucket import Bucket
from jaxbucket.train.bias_report import BucketBias
from jaxbucket.train.gradient_sketch import SKETCH_SIZE, sketch

BUCKETS = (Bucket(16, 8), Bucket(4, 32), Bucket(1, 128))
COUNTS = dict(zip(BUCKETS, (30, 50, 20), strict=True))
DIM = 64


def random_gradients(seed, num_batches, noise=1.0, bias=1.0):
    """Returns gradients of buckets, and the true mean gradient of each bucket."""
    rng = np.random.default_rng(0)
    means = 1.0 + bias * rng.normal(size=(3, DIM)) / np.sqrt(DIM)
    rng = np.random.default_rng(seed)
    scale = noise * np.array([0.5, 1.0, 2.0]) / np.sqrt(DIM)
    samples = {
        bucket: mean + s * rng.normal(size=(num_batches, DIM))
        for bucket, mean, s in zip(BUCKETS, means, scale, strict=True)
    }
    return samples, means, (scale**2 * DIM)


def report_of(samples, accumulate=1):
    weights = {bucket: [100.0] * len(x) for bucket, x in samples.items()}
    return BucketBias.of(COUNTS, samples, weights, accumulate)


def test_estimates_are_unbiased():
    reports = [report_of(random_gradients(seed, 4)[0]) for seed in range(400)]
    _, means, noise = random_gradients(0, 1)
    shares = np.array([0.3, 0.5, 0.2])
    mean = shares @ means
    bias = np.square(means - mean).sum(axis=1) / (mean @ mean)
    for k in range(3):
        estimates = np.array([report.buckets[k].bias for report in reports])
        standard_error = estimates.std() / np.sqrt(len(estimates))
        assert abs(estimates.mean() - bias[k]) < 5 * standard_error
        # The jackknife is right on average, to a factor of two.
        errors = np.array([report.buckets[k].bias_error for report in reports])
        assert 0.5 < np.sqrt(np.mean(errors**2)) / estimates.std() < 2
        noises = np.array([report.buckets[k].noise for report in reports])
        np.testing.assert_allclose(noises.mean(), noise[k] / (mean @ mean), rtol=0.05)
    between = np.mean([report.between for report in reports])
    np.testing.assert_allclose(between, shares @ bias, rtol=0.1)


def test_equal_buckets_have_no_bias():
    biases = [
        [x.bias for x in report_of(random_gradients(seed, 8, bias=0)[0]).buckets]
        for seed in range(200)
    ]
    assert np.abs(np.mean(biases, axis=0)).max() < 3 * np.std(biases) / np.sqrt(200)


def test_ways_are_those_of_sampled_updates():
    samples, means, noise = random_gradients(0, 2, noise=1e-6)
    report = report_of(samples)
    ways = {way.name: way for way in report.ways}
    rng = np.random.default_rng(0)
    shares = np.array([0.3, 0.5, 0.2])
    mean = shares @ means
    for name, size in (("one bucket, shuffled", 1), ("2 micro-batches, shuffled", 2)):
        drawn = rng.choice(3, p=shares, size=(200_000, size))
        distance = means[drawn].mean(axis=1) - mean
        expected = np.square(distance).sum(axis=1).mean() / (mean @ mean)
        np.testing.assert_allclose(ways[name].one, expected, rtol=0.02)
        np.testing.assert_allclose(ways[name].several, expected, rtol=0.02)
        # Without noise, the updates are 1 + the variance.
        np.testing.assert_allclose(ways[name].more_tokens, expected, rtol=0.02)
    packed = ways["all lengths, as in packed rows"]
    assert packed.one < 1e-9 and packed.more_tokens == 0
    spread = ways["one bucket, spread"]
    assert spread.one == pytest.approx(ways["one bucket, shuffled"].one)
    assert spread.several < 0.3 * ways["one bucket, shuffled"].several
    assert ways["2 micro-batches, spread"].one < ways["2 micro-batches, shuffled"].one
    # An update of two such batches has half the noise.
    noisy = report_of(random_gradients(0, 8)[0])
    half = report_of(random_gradients(0, 8)[0], accumulate=2)
    (one,), (two,) = (
        [way.one for way in x.ways if way.name == packed.name] for x in (noisy, half)
    )
    assert one == pytest.approx(2 * two)
    shuffled = noisy.ways[0]
    updates = [1 + way.several for way in (shuffled, noisy.ways[-1])]
    assert 1 + shuffled.more_tokens == pytest.approx(updates[0] / updates[1])


def test_the_tables_and_the_json_have_all_numbers():
    report = report_of(random_gradients(0, 8)[0])
    text = str(report)
    for bucket in report.buckets:
        assert f"{bucket.bias:.3g} ± {bucket.bias_error:.2g}" in text
    for way in report.ways:
        assert way.name in text and f"{way.several:.3g}" in text
        assert f"{way.more_tokens:.1%}" in text
    loaded = json.loads(report.to_json())
    assert loaded == report.to_dict()
    assert loaded["buckets"][1]["bucket"] == [4, 32]
    assert max(map(len, text.splitlines())) <= 80


def test_a_gradient_of_zero_is_refused():
    samples = {bucket: np.array([[1.0], [-1.0]]) for bucket in BUCKETS}
    with pytest.raises(ValueError, match="The mean gradient is smaller than the noise"):
        report_of(samples)


def test_a_sketch_keeps_inner_products():
    rng = np.random.default_rng(0)
    size = 3 * SKETCH_SIZE
    x = rng.normal(size=size).astype(np.float32)
    y = (0.5 * x + rng.normal(size=size)).astype(np.float32)

    def tree(a):
        return {"b": a[: size // 3].reshape(-1, 128), "a": [a[size // 3 :]]}

    xs, ys = sketch(tree(x)), sketch(tree(y))
    assert xs.shape == (SKETCH_SIZE,) and xs.dtype == jnp.float32
    bound = 5 * np.sqrt(2 / SKETCH_SIZE) * np.linalg.norm(x) * np.linalg.norm(y)
    assert abs(float(xs @ ys) - float(x @ y)) < bound
    np.testing.assert_allclose(sketch(tree(x + y)), xs + ys, atol=1e-3)
    different = sketch(tree(x), seed=1)
    assert abs(float(xs @ different)) < 0.1 * float(xs @ xs)


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
    np.testing.assert_allclose(one.between, report.between, rtol=1e-5)


def test_too_few_batches_are_refused():
    mesh = jb.data_mesh(jax.devices()[:1])
    state = jb.create_state({"w": jnp.zeros(())}, optax.sgd(0.1), mesh)
    with pytest.raises(ValueError, match="`batches_per_bucket=1` is too small"):
        jb.train.bucket_bias(loss_fn, state, make_batches(mesh), batches_per_bucket=1)
    plan = jb.BucketPlan.from_shapes([(8, 4)])
    schedule = jb.BatchSchedule(plan, [4] * 8)
    batches = jb.MeshLoader([{"x": np.ones(4, np.float32)}] * 8, schedule, mesh)
    with pytest.raises(ValueError, match="No bucket has two batches in an epoch"):
        jb.train.bucket_bias(loss_fn, state, batches)


def test_the_plot_shows_every_number():
    report = report_of(random_gradients(0, 8)[0])
    left, right = jb.train.plot_bias(report).axes
    noise, bias = ([bar.get_height() for bar in part] for part in left.containers[:2])
    np.testing.assert_allclose(noise, [x.noise for x in report.buckets])
    np.testing.assert_allclose(bias, [max(x.bias, 0) for x in report.buckets])
    one, several = ([bar.get_width() for bar in part] for part in right.containers)
    np.testing.assert_allclose(one, [way.one for way in report.ways])
    np.testing.assert_allclose(several, [way.several for way in report.ways])
    names = [label.get_text() for label in right.get_yticklabels()]
    assert names == [way.name for way in report.ways]
    assert 0 < report.between_share < 1
    assert report.to_dict()["between_share"] == report.between_share
