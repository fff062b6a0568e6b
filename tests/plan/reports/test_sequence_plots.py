import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.collections import QuadMesh

from jaxbucket import Bucket, BucketPlan, plan_buckets, report
from jaxbucket.plan.reports.sequence_plots import plot_sequence_padding, plot_shapes

matplotlib.use("agg")

SHAPES = [(4, {"source": 8, "target": 4}), (2, {"source": 100, "target": 300})]
PLAN = BucketPlan.from_shapes(SHAPES, overlong="drop")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def random_pairs(num_examples: int, *names: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(1, 200, num_examples) for name in names}


def test_every_shape_is_a_rectangle_from_the_origin():
    ax = plot_shapes(PLAN, {"source": [1, 100], "target": [2, 300]})
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
    pairs = random_pairs(500, "source", "target")
    kept = (pairs["source"] <= 100) & (pairs["target"] <= 300)
    ax = plot_shapes(PLAN, pairs)
    (cells,) = [x for x in ax.collections if isinstance(x, QuadMesh)]
    assert cells.get_array().sum() == kept.sum()


def test_the_bars_are_the_real_and_the_padded_tokens():
    pairs = random_pairs(300, "a", "b", "c")
    plan = plan_buckets(pairs, max_tokens=3000, num_buckets=4)
    epoch = report(plan, pairs)
    ax = plot_sequence_padding(epoch)
    real, padding = ([x.get_width() for x in bars] for bars in ax.containers)
    assert real == [pairs[name].sum() for name in "abc"]
    assert sum(real) + sum(padding) == pytest.approx(epoch.padded_tokens)
    labels = [text.get_text() for text in ax.texts]
    assert labels == [f"{epoch.sequence_padding[name]:.1%}" for name in "abc"]


def test_a_plan_without_two_sequences_is_refused():
    plan = BucketPlan((Bucket(1, 8),), max_tokens=8)
    with pytest.raises(ValueError, match=r"sequences \[\], but this plot has an axis"):
        plot_shapes(plan, {})
    with pytest.raises(ValueError, match="examples with one length. Use `plot_plan`"):
        plot_sequence_padding(report(plan, [8]))
