"""The number of buckets: compile time against the epoch time that it saves."""

import itertools
import json
import re

import numpy as np
import pytest

from jaxbucket import Limits, plan_buckets, report
from jaxbucket.plan import StepTime, TokenCost, TransformerCost, plan_curve
from jaxbucket.plan.optimal import Optimum

LENGTHS = np.random.default_rng(0).lognormal(5, 1, 3000).clip(1, 1500).astype(int)
LIMITS = Limits(max_tokens=16_384, cost_fn=StepTime(0.01, 1e-5, 1e-9))


EXHAUSTIVE = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 8)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [*range(3), *EXHAUSTIVE])
def test_the_chosen_number_of_buckets_takes_the_least_time(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(4, 1, int(rng.integers(20, 2000))).clip(1, 400).astype(int)
    limits = Limits(max_tokens=4096, seq_len_multiple=8, cost_fn=LIMITS.cost_fn)
    compile_seconds, num_epochs = (
        float(rng.choice([0.02, 0.5, 5])),
        int(rng.integers(1, 50)),
    )
    curve = plan_curve(
        lengths,
        limits,
        compile_seconds=compile_seconds,
        num_epochs=num_epochs,
        max_buckets=24,
    )
    totals = []
    for size in range(1, 25):
        plan = plan_buckets(
            lengths,
            max_tokens=4096,
            seq_len_multiple=8,
            num_buckets=size,
            cost_fn=limits.cost_fn,
        )
        epoch = report(plan, lengths).epoch_cost
        totals.append(len(plan) * compile_seconds + num_epochs * epoch)
    assert curve.chosen.total_seconds == pytest.approx(min(totals), rel=1e-4)


def test_points_agree_with_the_reports_of_their_plans():
    curve = plan_curve(LENGTHS, LIMITS, compile_seconds=0.5, num_epochs=4)
    for point in curve.points:
        epoch = report(point.plan, LENGTHS)
        assert point.num_buckets == len(point.plan)
        assert point.padding == pytest.approx(epoch.padding)
        assert point.steps_per_epoch == epoch.steps_per_epoch
        assert point.epoch_seconds == pytest.approx(epoch.epoch_cost)
        assert point.compile_seconds == 0.5 * len(point.plan)
        total = point.compile_seconds + 4 * point.epoch_seconds
        assert point.total_seconds == pytest.approx(total)
    seconds = [point.epoch_seconds for point in curve.points]
    assert seconds == sorted(seconds, reverse=True)
    assert len(curve) > curve.chosen.num_buckets


def test_expensive_compilation_leads_to_fewer_shapes():
    def size(compile_seconds: float, num_epochs: int = 3) -> int:
        curve = plan_curve(
            *(LENGTHS[:200], LIMITS),
            compile_seconds=compile_seconds,
            num_epochs=num_epochs,
        )
        return curve.chosen.num_buckets

    sizes = [size(seconds) for seconds in (0.01, 0.3, 3, 1e4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 1
    assert size(3, num_epochs=300) > sizes[2]


@pytest.mark.exhaustive
def test_the_reason_names_the_times_of_neighboring_points():
    curve = plan_curve(LENGTHS, LIMITS, compile_seconds=0.3, num_epochs=2)
    k = curve.chosen.num_buckets
    begin = f"With {k} shapes, compiling takes {0.3 * k:,.1f} s and 2 epochs take "
    assert curve.reason.startswith(begin)
    assert curve.turned
    end = f"The curve stops at {curve.points[-1].num_buckets} shapes, because more "
    assert end in curve.reason
    limit = 1.02 * curve.chosen.total_seconds
    near = [x.num_buckets for x in curve.points if x.total_seconds <= limit]
    assert near == list(range(near[0], near[-1] + 1))
    assert f"{near[0]} to {near[-1]} shapes are within 2% of this time." in curve.reason
    for point in curve.points:
        if point.num_buckets in (k - 1, k + 1):
            text = f"{point.num_buckets} shapes would take {point.total_seconds:,.1f} s"
            assert text in curve.reason


def test_equal_lengths_have_one_point():
    curve = plan_curve([7] * 30, LIMITS, compile_seconds=1.0)
    assert [point.num_buckets for point in curve.points] == [1]
    assert curve.reason.startswith("With 1 shape, compiling takes 1 s and 1 epoch")


def test_a_curve_is_printed_as_a_table():
    curve = plan_curve(LENGTHS, LIMITS, compile_seconds=0.5, num_epochs=4)
    text = str(curve)
    assert " ".join(curve.reason.split()) in " ".join(text.split())
    (line,) = [line for line in text.splitlines() if line.startswith("->")]
    assert line.split()[1] == str(curve.chosen.num_buckets)


def test_the_json_holds_every_number():
    curve = plan_curve(LENGTHS, LIMITS, compile_seconds=0.5, num_epochs=4)
    fields = json.loads(curve.to_json())
    assert fields["points"][fields["chosen"]]["num_buckets"] == curve.chosen.num_buckets
    assert fields["chosen_num_buckets"] == curve.chosen.num_buckets
    assert fields["reason"] == curve.reason
    assert len(fields["points"]) == len(curve)


@pytest.mark.parametrize(
    ("cost_fn", "unit"),
    [(None, "tokens"), (TokenCost(), "tokens"), (TransformerCost(8, 2), "FLOP")],
)
def test_costs_in_other_units_than_seconds_are_refused(cost_fn, unit):
    limits = Limits(max_tokens=16_384, cost_fn=cost_fn)
    with pytest.raises(ValueError, match=f"counts {unit}, but compile time is"):
        plan_curve(LENGTHS, limits, compile_seconds=1.0)


def test_a_function_without_a_unit_is_taken_as_seconds():
    limits = Limits(max_tokens=16_384, cost_fn=lambda b, t: b * t / 1e6)
    of_function = plan_curve(LENGTHS, limits, compile_seconds=0.1).chosen
    limits = Limits(max_tokens=16_384, cost_fn=TokenCost(1e6))
    of_tokens = plan_curve(LENGTHS, limits, compile_seconds=0.1).chosen
    assert of_function.plan.buckets == of_tokens.plan.buckets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile_seconds": None}, "`compile_seconds` is missing. Pass the time"),
        ({"compile_seconds": 0}, "`compile_seconds=0` must be a positive, finite"),
        ({"compile_seconds": "3"}, "`compile_seconds='3'` must be a positive, finite"),
        ({"num_epochs": -1}, "`num_epochs=-1` must be a positive, finite"),
        ({"num_epochs": np.nan}, "`num_epochs=nan` must be a positive, finite"),
        ({"max_buckets": 0}, "`max_buckets=0` must be a positive integer"),
    ],
)
def test_invalid_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_curve(LENGTHS, LIMITS, **{"compile_seconds": 1.0, **options})


@pytest.mark.exhaustive
def test_some_large_numbers_of_buckets_are_skipped(monkeypatch):
    sizes = []
    original = Optimum.choice

    def counted(self, num_buckets, known=None):
        sizes.append(num_buckets)
        return original(self, num_buckets, known)

    monkeypatch.setattr(Optimum, "choice", counted)
    limits = Limits(max_tokens=16_384, cost_fn=TokenCost(tokens_per_second=1e5))
    plan_curve(LENGTHS[:500], limits, compile_seconds=1e-9, max_buckets=300)
    assert sizes[:64] == list(range(1, 65))
    assert len(sizes) < 130 and sizes[-1] > 200
    assert max(b / a for a, b in itertools.pairwise(sizes[32:])) < 1.04
