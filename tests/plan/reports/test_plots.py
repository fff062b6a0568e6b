import dataclasses

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot

from jaxbucket import Bucket, BucketPlan, plan_buckets, report
from jaxbucket.plan.reports.plots import plot_histogram, plot_lengths, plot_plan

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def area(ax, label: str) -> float:
    """Returns a filled area, in percent of examples times positions."""
    (filled,) = [c for c in ax.collections if c.get_label().startswith(label)]
    x, y = filled.get_paths()[0].vertices.T
    return abs(np.sum(x * np.roll(y, 1) - y * np.roll(x, 1))) / 2


def test_areas_are_proportional_to_tokens():
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    plan = plan_buckets(lengths, max_tokens=2**16, num_buckets=5)
    ax = plot_plan(plan, lengths)
    real = area(ax, "real")
    whole = 100 * plan.max_seq_len
    assert real / whole == pytest.approx(lengths.sum() / 3000 / plan.max_seq_len, 1e-2)
    padding = np.mean(plan.boundaries[plan.assign(lengths)] - lengths)
    assert area(ax, "padding") / 100 == pytest.approx(padding, 1e-2)
    rest = area(ax, "padding") + area(ax, "with a single T=")
    assert real + rest == pytest.approx(whole)


@pytest.mark.parametrize("plot", [plot_plan, plot_lengths])
def test_a_plan_that_drops_every_example_cannot_be_drawn(plot):
    plan = BucketPlan((Bucket(1, 8),), max_tokens=8, overlong="drop")
    with pytest.raises(ValueError, match="leaves out every example, so there is"):
        plot(plan, [9, 10])


def bar_area(ax, label: str) -> float:
    (bars,) = [c for c in ax.containers if c.get_label().startswith(label)]
    return sum(bar.get_height() for bar in bars)


@pytest.mark.parametrize(
    "bins", [1, 7, 64, pytest.param(1000, marks=pytest.mark.exhaustive)]
)
def test_a_histogram_holds_every_token(bins):
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    plan = plan_buckets(lengths, max_tokens=2**16, num_buckets=5)
    ax = plot_lengths(plan, lengths, bins=bins)
    assert bar_area(ax, "real") == pytest.approx(lengths.sum())
    padding = plan.boundaries[plan.assign(lengths)] - lengths
    assert bar_area(ax, "padding") == pytest.approx(padding.sum())
    ends = sorted(line.get_xdata()[0] for line in ax.lines)
    assert ends == plan.boundaries.tolist()


@pytest.mark.parametrize("bins", [1, 7, 48, 1000])
@pytest.mark.parametrize("spread", [1, 2, 500, 100_000])
def test_a_histogram_of_lengths_holds_every_example_and_token(spread, bins):
    rng = np.random.default_rng(spread)
    lengths = np.ceil(spread ** rng.random(3000) * rng.integers(1, 3, 3000)).astype(int)
    above, below = plot_histogram(lengths, unit="bytes", bins=bins).axes
    examples, tokens = (stairs.get_data() for stairs in above.patches)
    for drawn, weights in ((examples, np.ones(3000)), (tokens, lengths)):
        expected, _ = np.histogram(lengths, drawn.edges, weights=weights)
        assert drawn.values == pytest.approx(100 * expected / weights.sum())
        assert drawn.values.sum() == pytest.approx(100)
        assert len(drawn.values) <= bins
        assert np.all(drawn.edges == drawn.edges.astype(int))
    sums = [line for line in below.lines if len(line.get_xdata()) > 2]
    for line, weights in zip(sums, (np.ones(3000), lengths), strict=True):
        for length, share in zip(*line.get_data(), strict=True):
            if share > 0:
                up_to = weights[lengths <= length].sum() / weights.sum()
                assert share == pytest.approx(100 * up_to)
    assert below.get_xlabel() == "length (bytes)"
    assert (below.get_xscale() == "log") == (spread > 100)


@pytest.mark.parametrize("plot", [plot_plan, plot_lengths])
@pytest.mark.parametrize("remainder", ["pad", "cheapest", "promote"])
def test_the_legend_has_the_figures_of_the_report(plot, remainder):
    lengths = np.random.default_rng(0).integers(1, 500, 300)
    plan = plan_buckets(lengths, max_tokens=4096, num_buckets=5)
    epoch = report(plan, lengths, remainder=remainder)
    epoch = dataclasses.replace(epoch, unit="bytes")
    ax = plot(plan, lengths, epoch=epoch)
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    padding, rest = epoch.summary.splitlines()[1].split(" padding: ")
    in_rows, empty = rest.rstrip(".").split(", ")
    empty = empty.replace(" in ", " ")
    assert f"padding: {padding} ({in_rows}, {empty})" in legend
    assert "real bytes" in legend
    assert "bytes" in ax.get_ylabel()
