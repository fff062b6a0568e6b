"""The report on gradients by bucket, against known distributions."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket import Bucket
from jaxbucket.schedule.spread_updates import SpreadUpdates
from jaxbucket.train import ways_to_batch
from jaxbucket.train.bias_report import BucketBias
from jaxbucket.train.gradient_estimates import GradientSamples

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


@pytest.mark.exhaustive
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
    assert "With one bucket in each update, the mean of updates differs from" in (
        report.summary
    )
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "weights",
    [(100, 100, 100), (400, 100, 25)],
    ids=str,
)
def test_ways_are_those_of_sampled_updates(weights):
    samples, means, _ = random_gradients(0, 3, noise=1e-6)
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
        updates = SpreadUpdates(np.array(list(COUNTS.values())), size)
        spread, _ = updates.at(np.arange(100))
        runs = {"spread": np.tile(spread, 4000)}
        if size < 4:
            runs["shuffled"] = rng.choice(steps, 400_000)
        for order, buckets in runs.items():
            # The micro-batches of updates, from any step on.
            x = np.lib.stride_tricks.sliding_window_view(buckets, 10 * size)
            x = x[:: 7 * size][:20_000].reshape(-1, 10, size)
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


def test_long_epochs_are_sampled_at_random(monkeypatch):
    # Every second batch is of the first bucket, so no fixed stride would do.
    samples, _, _ = random_gradients(0, 4)
    measured = {
        bucket: GradientSamples(x, np.full(4, 100.0), np.full(4, 4.0))
        for bucket, x in samples.items()
    }
    counts = dict(zip(BUCKETS, (40_000, 20_000, 20_000), strict=True))
    ways = BucketBias.of(counts, measured).ways
    monkeypatch.setattr(ways_to_batch, "_MAX_SIZE", 40 * 2000)
    windows = ways_to_batch.spread_windows(np.array([*counts.values()]), 4)
    assert windows.shape == (2000, 10, 4)
    shares = np.bincount(windows[:, 0].ravel()) / 8000
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.25], atol=0.03)
    for few, all_of_them in zip(
        BucketBias.of(counts, measured).ways, ways, strict=True
    ):
        assert few.one == pytest.approx(all_of_them.one, rel=0.05)
        assert few.several == pytest.approx(all_of_them.several, rel=0.05)


def test_many_buckets_take_little_memory():
    rng = np.random.default_rng(0)
    buckets = [Bucket(1, n) for n in range(1, 161)]
    measured = {
        x: GradientSamples(1 + rng.normal(size=(3, 8)) / 8, np.ones(3), np.ones(3))
        for x in buckets
    }
    tracemalloc.start()
    BucketBias.of(dict.fromkeys(buckets, 50), measured)
    assert tracemalloc.get_traced_memory()[1] < 5e7
    tracemalloc.stop()


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
    assert loaded["offset_error"] == report.offset_error > 0
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "if all updates have the same learning rate" in flat
    assert report.summary in flat
    assert loaded["accumulate"] == 1 and "micro-batches;" not in flat


def test_micro_batches_are_named_because_an_update_has_several():
    report = report_of(random_gradients(0, 8)[0], accumulate=4)
    flat = " ".join(str(report).split())
    assert "An update has 4 micro-batches; these are the numbers of one" in flat
    assert report.to_dict()["accumulate"] == 4


def test_no_difference_is_shown_as_minus_zero():
    report = with_tokens(report_of(random_gradients(0, 8)[0]), (-1e-5, 1e-5), (0, 0))
    assert "0.0% ± 0.0%" in str(report) and "-0.0%" not in str(report)


def with_tokens(report, shuffled, spread):
    """Returns the report with other numbers and errors of tokens, for the summary."""
    numbers = (shuffled, spread)
    ways = [
        dataclasses.replace(way, more_tokens=more, more_tokens_error=error)
        for way, (more, error) in zip(report.ways, numbers, strict=False)
    ]
    return dataclasses.replace(report, ways=(*ways, *report.ways[2:]))


def test_the_summary_claims_only_what_exceeds_two_errors():
    report = report_of(random_gradients(0, 8)[0])
    summary = with_tokens(report, (0.03, 0.01), (-0.02, 0.005)).summary
    assert "needs about 3.0% ± 1.0% more tokens because of this variance" in summary
    assert "and 2.0% ± 0.5% fewer tokens if buckets are spread evenly" in summary
    summary = with_tokens(report, (0.03, 0.02), (-0.02, 0.011)).summary
    assert "about 3.0% ± 2.0% more tokens (not significant) because of" in summary
    assert "and 2.0% ± 1.1% fewer tokens (not significant) if buckets" in summary
    offset = dataclasses.replace(report, offset=0.04, offset_error=0.01).summary
    assert "the mean of updates differs from the mean gradient by 20% of" in offset
    for values in ({"offset": 0.04, "offset_error": 0.03}, {"offset": 0.005}):
        assert "mean of updates" not in dataclasses.replace(report, **values).summary


def test_equal_buckets_have_no_offset():
    reports = [
        report_of(random_gradients(seed, 4, noise=8, bias=0)[0], weights=(400, 100, 25))
        for seed in range(60)
    ]
    assert any(report.offset > 0.01 for report in reports)
    assert sum("mean of updates" in report.summary for report in reports) <= 3


def test_the_order_of_the_measurements_does_not_matter():
    samples, _, _ = random_gradients(0, 8)
    measured = {
        bucket: GradientSamples(x, np.full(8, 100.0), np.full(8, 4.0))
        for bucket, x in samples.items()
    }
    backward = dict(reversed(measured.items()))
    assert BucketBias.of(COUNTS, backward) == BucketBias.of(COUNTS, measured)


def test_equal_numbers_of_tokens_are_called_equal():
    samples = {bucket: 1.0 + 1e-6 * np.eye(4, DIM) for bucket in BUCKETS}
    assert "needs about as many tokens because of" in report_of(samples).summary


@pytest.mark.parametrize("size", [1, 2])
def test_a_bucket_with_too_few_batches_is_left_out_and_named(size):
    samples, _, _ = random_gradients(0, 8)
    samples[BUCKETS[2]] = samples[BUCKETS[2]][:size]
    report = report_of(samples)
    assert [x.bucket for x in report.buckets] == list(BUCKETS[:2])
    assert [x.share for x in report.buckets] == [0.3, 0.5]
    assert report.left_out == BUCKETS[2:] and report.left_out_share == 0.2
    assert (
        "fewer than three batches have weight: [1, 128], 20.0% of the steps."
        in " ".join(str(report).split())
    )
    assert report.summary.startswith("Without 20.0% of the steps, compared with ran")
    assert report.to_dict()["left_out"] == [[1, 128]]
    left, _ = jb.train.plot_bias(report).axes
    assert left.get_xlabel() == "bucket [B, T], without 20.0% of the steps"


def test_nothing_is_said_about_orders_if_one_bucket_is_measured():
    samples, _, _ = random_gradients(0, 8)
    for bucket in BUCKETS[1:]:
        samples[bucket] = samples[bucket][:2]
    report = report_of(samples)
    assert report.left_out == BUCKETS[1:] and report.buckets[0].bias == 0
    assert report.summary.startswith("With a single bucket, the order")


def test_gradients_of_zero_or_nan_are_refused():
    samples = {bucket: np.array([[1.0], [-1.0], [0.0]]) for bucket in BUCKETS}
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


def test_batches_without_weight_do_not_change_the_noise_scale():
    samples, _, _ = random_gradients(0, 40)
    full = {
        bucket: GradientSamples(x, np.full(40, 100.0), np.full(40, 4.0))
        for bucket, x in samples.items()
    }
    half = {
        bucket: GradientSamples(
            *(np.concatenate([a, np.zeros_like(a)]) for a in (x.gradients, x.weights)),
            np.full(80, 4.0),
        )
        for bucket, x in full.items()
    }
    pairs = zip(
        BucketBias.of(COUNTS, full).buckets,
        BucketBias.of(COUNTS, half).buckets,
        strict=True,
    )
    for x, y in pairs:
        assert y.noise_scale == pytest.approx(x.noise_scale)
        assert (y.weight, y.noise) == pytest.approx((x.weight / 2, 2 * x.noise))


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
