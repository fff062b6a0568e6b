"""The bias and the noise of the gradients of buckets, against known distributions."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxbucket as jb
from jaxbucket import Bucket
from jaxbucket.schedule.spread import spread_evenly
from jaxbucket.train import bucket_gradients
from jaxbucket.train.bias_report import BucketBias
from jaxbucket.train.gradient_estimates import GradientSamples
from jaxbucket.train.gradient_sketch import SKETCH_SIZE, sketch

BUCKETS = (Bucket(16, 8), Bucket(4, 32), Bucket(1, 128))
COUNTS = dict(zip(BUCKETS, (30, 50, 20), strict=True))
DIM = 64
SHARES = np.array([0.3, 0.5, 0.2])


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


def report_of(samples, accumulate=1, weights=(100, 100, 100)):
    measured = {
        bucket: GradientSamples(
            samples[bucket],
            np.full(len(samples[bucket]), weight),
            np.full(len(samples[bucket]), bucket.batch_size),
        )
        for bucket, weight in zip(BUCKETS, weights, strict=True)
    }
    return BucketBias.of(COUNTS, measured, accumulate)


def test_estimates_are_unbiased():
    reports = [report_of(random_gradients(seed, 4)[0]) for seed in range(400)]
    _, means, noise = random_gradients(0, 1)
    mean = SHARES @ means
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
    more = np.array([report.ways[0].more_tokens for report in reports])
    errors = np.array([report.ways[0].more_tokens_error for report in reports])
    assert 0.5 < np.sqrt(np.mean(errors**2)) / more.std() < 2


def test_equal_buckets_have_no_bias():
    reports = [report_of(random_gradients(seed, 8, bias=0)[0]) for seed in range(200)]
    biases = [[x.bias for x in report.buckets] for report in reports]
    assert np.abs(np.mean(biases, axis=0)).max() < 3 * np.std(biases) / np.sqrt(200)
    more = [[way.more_tokens for way in report.ways] for report in reports]
    assert np.abs(np.mean(more, axis=0)).max() < 0.005


def test_batches_count_by_their_weight():
    samples, means, _ = random_gradients(0, 40, noise=0.1, bias=2)
    weights = (400, 100, 25)
    report = report_of(samples, weights=weights)
    shares = SHARES * weights / (SHARES @ weights)
    mean = shares @ means
    for k, x in enumerate(report.buckets):
        expected = np.square(means[k] - mean).sum() / (mean @ mean)
        assert x.bias == pytest.approx(expected, rel=0.1, abs=0.01)
    offset = np.square(SHARES @ means - mean).sum() / (mean @ mean)
    assert report.offset == pytest.approx(offset, rel=0.1)
    assert "The mean of updates differs from the mean gradient by" in report.summary
    assert "differs" not in report_of(samples).summary
    # A batch with next to no weight changes nothing, whatever its gradient.
    first = samples[BUCKETS[0]]
    measured = {
        bucket: GradientSamples(samples[bucket], np.ones(40), np.ones(40))
        for bucket in BUCKETS
    }
    plain = BucketBias.of(COUNTS, measured)
    odd = GradientSamples(
        np.vstack([first, 100 * np.ones(DIM)]),
        np.append(np.ones(40), 1e-9),
        np.ones(41),
    )
    other = BucketBias.of(COUNTS, measured | {BUCKETS[0]: odd})
    for x, y in zip(plain.buckets, other.buckets, strict=True):
        assert (x.bias, x.noise) == pytest.approx((y.bias, y.noise), rel=0.05)


@pytest.mark.parametrize("weights", [(100, 100, 100), (400, 100, 25)], ids=str)
def test_ways_are_those_of_sampled_updates(weights):
    samples, means, _ = random_gradients(0, 2, noise=1e-6)
    report = report_of(samples, weights=weights)
    rng = np.random.default_rng(0)
    ways = {way.name: way for way in report.ways}
    total = SHARES * weights @ means / (SHARES @ weights)
    steps = np.repeat(np.arange(3), list(COUNTS.values()))
    for name, size in (
        ("one bucket", 1),
        ("2 micro-batches", 2),
        ("4 micro-batches", 4),
    ):
        spread, _ = spread_evenly(np.arange(100), np.array(list(COUNTS.values())))
        runs = {"spread": np.tile(spread, 4000)}
        if size < 4:
            runs["shuffled"] = rng.choice(steps, 400_000)
        for order, buckets in runs.items():
            # The micro-batches of updates, from any step on.
            x = np.lib.stride_tricks.sliding_window_view(buckets, 10 * size)[::7]
            x = x[:20_000].reshape(-1, 10, size)
            w = np.array(weights)[x][..., None]
            updates = (w * means[x]).sum(axis=2) / w.sum(axis=2)
            centre = updates.mean(axis=(0, 1))
            one = np.square(updates - centre).sum(axis=-1).mean() / (total @ total)
            several = updates.mean(axis=1) - centre
            several = 10 * np.square(several).sum(axis=-1).mean() / (total @ total)
            way = ways[f"{name}, {order}"]
            assert way.one == pytest.approx(one, rel=0.05, abs=1e-6)
            assert way.several == pytest.approx(several, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("weights", [(16, 4, 1), (128, 128, 128)], ids=str)
def test_mixed_updates_have_the_variance_of_random_examples(weights, accumulate):
    # Examples of bucket k have length `weights[k] / B`, and their own noise.
    samples, means, noise = random_gradients(0, 4000)
    report = report_of(samples, accumulate, weights)
    rng = np.random.default_rng(0)
    sizes = np.array([bucket.batch_size for bucket in BUCKETS])
    total = SHARES * weights @ means / (SHARES @ weights)
    number = round(accumulate * SHARES @ sizes)
    drawn = rng.choice(3, p=SHARES * sizes / (SHARES @ sizes), size=(20_000, number))
    length = (np.array(weights) / sizes)[drawn]
    share = length / (number * (SHARES @ weights) / (SHARES @ sizes))
    biased = np.einsum("nd,ndk->nk", share, (means - total)[drawn])
    variance = np.square(biased).sum(axis=1).mean()
    variance += (share**2 * (noise * sizes)[drawn]).sum(axis=1).mean()
    mixed = report.ways[-1]
    assert mixed.one == pytest.approx(variance / (total @ total), rel=0.05)
    assert mixed.more_tokens == 0
    for way in report.ways:
        expected = (1 + way.several) / (1 + mixed.several) - 1
        assert way.more_tokens == pytest.approx(expected)


def test_the_tables_and_the_json_have_all_numbers():
    report = report_of(random_gradients(0, 8)[0])
    text = str(report)
    for bucket in report.buckets:
        assert f"{bucket.bias:.3g} ± {bucket.bias_error:.2g}" in text
    for way in report.ways:
        assert way.name in text and f"{way.several:.3g}" in text
    for way in report.ways[:-1]:
        assert f"{way.more_tokens:.1%} ± {way.more_tokens_error:.1%}" in text
    loaded = json.loads(report.to_json())
    assert loaded == report.to_dict()
    assert loaded["buckets"][1]["bucket"] == [4, 32]
    assert max(map(len, text.splitlines())) <= 80
    shuffled, spread, *_ = report.ways
    assert shuffled.more_tokens > 0 > spread.more_tokens
    sentence = (
        f"needs about {shuffled.more_tokens:.1%} more tokens because of this variance "
        f"if the order is shuffled, and {-spread.more_tokens:.1%} fewer if buckets are"
    )
    assert sentence in report.summary and sentence in " ".join(text.split())


def test_equal_numbers_of_tokens_are_called_equal():
    samples = {bucket: 1.0 + 1e-6 * np.eye(4, DIM) for bucket in BUCKETS}
    assert "needs about as many tokens because of" in report_of(samples).summary


def test_two_batches_have_no_standard_errors():
    report = report_of(random_gradients(0, 2, noise=0.1)[0])
    assert all(np.isnan(bucket.bias_error) for bucket in report.buckets)
    loaded = json.loads(report.to_json())
    assert loaded["buckets"][0]["bias_error"] is None
    assert loaded["ways"][0]["more_tokens_error"] is None
    assert "±" not in str(report) and "nan" not in str(report)


def test_a_bucket_with_one_batch_is_left_out_and_named():
    samples, _, _ = random_gradients(0, 8)
    samples[BUCKETS[2]] = samples[BUCKETS[2]][:1]
    report = report_of(samples)
    assert [x.bucket for x in report.buckets] == list(BUCKETS[:2])
    assert report.left_out == BUCKETS[2:] and report.left_out_share == 0.2
    assert (
        "fewer than two batches have weight: [1, 128], 20.0% of the steps."
        in " ".join(str(report).split())
    )
    assert report.to_dict()["left_out"] == [[1, 128]]


def test_gradients_of_zero_or_nan_are_refused():
    samples = {bucket: np.array([[1.0], [-1.0]]) for bucket in BUCKETS}
    with pytest.raises(
        ValueError, match="The mean gradient is zero, or smaller than the"
    ):
        report_of(samples)
    samples[BUCKETS[1]][1] = np.nan
    with pytest.raises(ValueError, match=r"a batch of shape \[4, 32\] is not finite"):
        report_of(samples)


@pytest.mark.parametrize("weight", [-1.0, np.inf])
def test_weights_that_are_no_weights_are_refused(weight):
    samples, _, _ = random_gradients(0, 8)
    with pytest.raises(ValueError, match=r"shape \[4, 32\] is negative or not finite"):
        report_of(samples, weights=(1, weight, 1))


def test_every_bucket_of_a_long_epoch_is_seen(monkeypatch):
    monkeypatch.setattr(bucket_gradients, "_MAX_STEPS_SEARCHED", 40)
    batches = make_batches(jb.data_mesh(jax.devices()[:1]), order="ascending")
    counts, chosen = bucket_gradients._choose(batches, 4)
    assert list(counts) == list(batches.schedule.plan.buckets)
    assert len(chosen) == 12 and sum(counts.values()) == 40 < len(batches)


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
    for x, y in zip(one.ways, report.ways, strict=True):
        np.testing.assert_allclose(x.several, y.several, rtol=1e-5)


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
        assert 1 < x.num_batches < 12
        assert x.weight < 0.9 * x.bucket.num_tokens


def test_too_few_batches_are_refused():
    mesh = jb.data_mesh(jax.devices()[:1])
    state = jb.create_state({"w": jnp.zeros(())}, optax.sgd(0.1), mesh)
    with pytest.raises(ValueError, match="`batches_per_bucket=1` is too small"):
        jb.train.bucket_bias(loss_fn, state, make_batches(mesh), batches_per_bucket=1)
    plan = jb.BucketPlan.from_shapes([(8, 4)])
    schedule = jb.BatchSchedule(plan, [4] * 8)
    batches = jb.MeshLoader([{"x": np.ones(4, np.float32)}] * 8, schedule, mesh)
    with pytest.raises(ValueError, match="No bucket has two batches with weight"):
        jb.train.bucket_bias(loss_fn, state, batches)
    with pytest.raises(ValueError, match="`batches` is a list. Pass the loader itself"):
        jb.train.bucket_bias(loss_fn, state, list(make_batches(mesh)))


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
