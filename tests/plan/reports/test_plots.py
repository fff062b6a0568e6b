import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.collections import QuadMesh

from jaxbucket import BucketPlan, Limits, plan_buckets
from jaxbucket.plan import (
    TokenCost,
    chunk_lengths,
    compare_plans,
    plan_curve,
)
from jaxbucket.plan.reports.plots import (
    plot_comparison,
    plot_curve,
    plot_histogram,
    plot_plan,
    plot_shapes,
)

matplotlib.use("agg")

LENGTHS = np.random.default_rng(0).lognormal(5, 1, 3000).clip(1, 1500).astype(int)
OPTIONS = {"max_tokens": 16_384, "batch_size_multiple": 2, "seq_len_multiple": 8}


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


def test_plots_show_chunks():
    plan = BucketPlan.from_shapes([(4, 4), (2, 8)], overlong="split")
    ax = plot_plan(plan, [5, 50])
    chunks = chunk_lengths([5, 50], 8)
    _, y = ax.collections[0].get_paths()[0].vertices.T
    assert set(y.tolist()) == {0, *chunks.tolist()}


@pytest.mark.parametrize(("spread", "bins"), [(1, 48), (2, 1), (100_000, 1000)])
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
    assert below.get_xlabel().startswith("length (bytes)")
    assert (below.get_xscale() == "log") == (spread > 100)


# Several sequences


SHAPES = [(4, {"source": 8, "target": 4}), (2, {"source": 100, "target": 300})]
PAIRS_PLAN = BucketPlan.from_shapes(SHAPES, overlong="drop")


def test_every_shape_is_a_rectangle_from_the_origin():
    ax = plot_shapes(PAIRS_PLAN, {"source": [1, 100], "target": [2, 300]})
    corners = [line.get_xydata().tolist() for line in ax.lines]
    assert corners == [
        [[0, 4], [8, 4], [8, 0]],
        [[0, 300], [100, 300], [100, 0]],
    ]
    assert ax.get_xlabel() == "source (tokens)" and ax.get_ylabel() == "target (tokens)"
    texts = [text.get_text() for text in ax.texts]
    assert texts[:2] == ["1", "2"]
    assert "[B, source × target]" in texts[2]
    assert "1  [4, 8 × 4]" in texts[2] and "2  [2, 100 × 300]" in texts[2]


def test_every_example_that_is_kept_is_in_the_histogram():
    rng = np.random.default_rng(0)
    pairs = {name: rng.integers(1, 200, 500) for name in ("source", "target")}
    kept = (pairs["source"] <= 100) & (pairs["target"] <= 300)
    ax = plot_shapes(PAIRS_PLAN, pairs)
    (cells,) = [x for x in ax.collections if isinstance(x, QuadMesh)]
    assert cells.get_array().sum() == kept.sum()


def test_the_first_two_of_three_sequences_are_drawn():
    rng = np.random.default_rng(0)
    triples = {name: rng.integers(1, 200, 300) for name in "abc"}
    ax = plot_shapes(plan_buckets(triples, max_tokens=3000, num_buckets=4), triples)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("a (tokens)", "b (tokens)")
    assert "c" in ax.get_title()


# Comparisons


@pytest.mark.parametrize("cost", [None, TokenCost(1e4)])
def test_bars_show_the_padding_and_the_cost_of_every_plan(cost):
    limits = Limits(**OPTIONS, cost_fn=cost)
    comparison = compare_plans(LENGTHS, limits)
    figure = plot_comparison(comparison)
    ends, padding, costs = figure.axes
    number = len(comparison.plans)
    for place, compared in enumerate(comparison.plans):
        drawn = ends.lines[place].get_xdata()
        assert list(drawn) == compared.plan.boundaries.tolist()
        bars = [padding.patches[place], padding.patches[number + place]]
        total = sum(bar.get_width() for bar in bars)
        assert total == pytest.approx(100 * compared.report.padding)
        over = compared.report.epoch_cost / comparison.plans[0].report.epoch_cost
        assert costs.patches[place].get_width() == pytest.approx(min(over, 2.5))
    assert ends.get_ylim()[0] > ends.get_ylim()[1]
    figure.canvas.draw()


def test_a_curve_marks_the_chosen_number_of_shapes():
    limits = Limits(**OPTIONS, cost_fn=TokenCost(1e5))
    curve = plan_curve(LENGTHS, limits, compile_seconds=0.4, num_epochs=3)
    figure = plot_curve(curve)
    left, right = figure.axes
    assert list(left.lines[0].get_xdata()) == [p.num_buckets for p in curve.points]
    mark = right.lines[0]
    assert mark.get_xdata()[0] == curve.chosen.num_buckets
    assert mark.get_ydata()[0] == curve.chosen.total_seconds
    tops = [bar.get_y() + bar.get_height() for bar in right.patches[len(curve) :]]
    assert tops == pytest.approx([p.total_seconds for p in curve.points])
    figure.canvas.draw()
