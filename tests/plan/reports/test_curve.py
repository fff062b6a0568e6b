"""The number of buckets: compile time against the epoch time that it saves."""

import json

import numpy as np
import pytest

from jaxbucket import Limits, plan_buckets, report
from jaxbucket.plan import (
    PlanCurve,
    StepTime,
    TokenCost,
    TransformerCost,
    plan_curve,
)

LENGTHS = np.random.default_rng(0).lognormal(5, 1, 600).clip(1, 1500).astype(int)
LIMITS = Limits(max_tokens=16_384, cost_fn=StepTime(0.01, 1e-5, 1e-9))


@pytest.fixture(name="curve", scope="module")
def curve_of_all_tests() -> PlanCurve:
    return plan_curve(LENGTHS, LIMITS, compile_seconds=0.5, num_epochs=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(8))
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
    assert curve.chosen.total_seconds == pytest.approx(min(totals), rel=1e-3)


def test_points_agree_with_the_reports_of_their_plans(curve):
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
    assert curve.points[-1].num_buckets > curve.chosen.num_buckets


def test_a_curve_is_printed_as_a_table(curve):
    text = str(curve)
    assert " ".join(curve.reason.split()) in " ".join(text.split())
    (line,) = [line for line in text.splitlines() if line.startswith("->")]
    assert line.split()[1] == str(curve.chosen.num_buckets)


def test_the_json_holds_every_number(curve):
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
    with pytest.raises(ValueError, match=f"`cost_fn.* counts {unit}"):
        plan_curve(LENGTHS, limits, compile_seconds=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compile_seconds", None),
        ("compile_seconds", 0),
        ("num_epochs", np.nan),
        ("max_buckets", 0),
    ],
)
def test_invalid_numbers_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}"):
        plan_curve(LENGTHS, LIMITS, **{"compile_seconds": 1.0, name: value})
