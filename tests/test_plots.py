import matplotlib
import numpy as np
import pytest

from jaxbucket import Bucket, BucketPlan, plan_buckets
from jaxbucket.plots import plot_plan

matplotlib.use("agg")


def area(ax, label: str) -> float:
    """What a filled area covers, in examples times positions per 100."""
    (filled,) = [c for c in ax.collections if c.get_label().startswith(label)]
    x, y = filled.get_paths()[0].vertices.T
    return abs(np.sum(x * np.roll(y, 1) - y * np.roll(x, 1))) / 2


def test_areas_are_tokens():
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    plan = plan_buckets(lengths, max_tokens=2**16, num_buckets=5)
    ax = plot_plan(plan, lengths)
    real = area(ax, "real")
    whole = 100 * plan.max_seq_len
    assert real / whole == pytest.approx(lengths.sum() / 3000 / plan.max_seq_len, 1e-2)
    padding = np.mean(plan.boundaries[plan.assign(lengths)] - lengths)
    assert area(ax, "padding of") / 100 == pytest.approx(padding, 1e-2)
    assert real + area(ax, "padding of") + area(ax, "padded to") == pytest.approx(whole)


def test_examples_left_out_are_not_drawn():
    plan = BucketPlan((Bucket(1, 8),), max_tokens=8, overlong="drop")
    ax = plot_plan(plan, [8, 8, 100])
    assert area(ax, "real") == pytest.approx(800)


def test_lengths_the_plan_refuses_are_refused():
    plan = BucketPlan((Bucket(1, 8),), max_tokens=8)
    with pytest.raises(ValueError, match=r"`lengths\[0\]=9`"):
        plot_plan(plan, [9])
