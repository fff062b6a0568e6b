import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot

from jaxbucket import Bucket
from jaxbucket.plan.reports.run import StepRecord
from jaxbucket.plan.reports.run_plots import plot_buckets, plot_run

matplotlib.use("agg")

BUCKETS = [Bucket(8, 4), Bucket(4, 8), Bucket(2, 16)]
RECORDS = [
    StepRecord(step, BUCKETS[step % 3], 0.1 + step, 3.0 - step, 8, 1e-3 * step)
    for step in range(9)
]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def test_every_step_is_a_point_in_the_color_of_its_bucket():
    figure = plot_run(RECORDS)
    loss, rate, speed = figure.axes
    for ax, values in (
        (loss, [r.loss for r in RECORDS]),
        (rate, [r.learning_rate for r in RECORDS]),
        (speed, [r.real_tokens / r.seconds for r in RECORDS]),
    ):
        drawn = {}
        for number, points in enumerate(ax.collections):
            for x, y in points.get_offsets():
                drawn[x] = (y, number)
        assert len(drawn) == len(RECORDS)
        for record, value in zip(RECORDS, values, strict=True):
            y, number = drawn[record.step]
            assert y == pytest.approx(value)
            assert BUCKETS[number] == record.bucket
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(map(str, BUCKETS))


def test_buckets_are_distinguishable_in_grayscale():
    figure = plot_run(RECORDS)
    colors = [points.get_facecolor()[0] for points in figure.axes[0].collections]
    gray = [0.3 * red + 0.59 * green + 0.11 * blue for red, green, blue, _ in colors]
    assert np.all(np.diff(gray) > 0.15)


def test_bars_show_each_buckets_part_of_the_run():
    figure = plot_buckets(RECORDS)
    padding, time, cost = (
        [bar.get_width() for bar in ax.patches] for ax in figure.axes
    )
    assert padding == pytest.approx([75, 75, 75])
    seconds = [sum(r.seconds for r in RECORDS if r.bucket == b) for b in BUCKETS]
    assert time == pytest.approx([100 * s / sum(seconds) for s in seconds])
    assert cost == pytest.approx([1e6 * (s / 3) / 32 for s in seconds])
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert names == list(map(str, BUCKETS))


def test_many_shapes_stay_legible():
    many = [StepRecord(n, Bucket(4, n + 1), 1.0, 2.0, 1, 1e-3) for n in range(60)]
    (legend,) = plot_run(many).legends
    assert len(legend.get_texts()) <= 16
    assert len(plot_buckets(many).axes[0].get_yticks()) <= 16


@pytest.mark.parametrize("plot", [plot_run, plot_buckets])
def test_a_run_without_steps_cannot_be_drawn(plot):
    with pytest.raises(ValueError, match="`records` is empty, so there is no step"):
        plot([])
