"""Costs and budgets of images."""

import pickle

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.plan import AreaBudget, AreaCost


@pytest.mark.parametrize("seed", range(20))
def test_a_budget_holds_as_many_pixels_as_the_area(seed):
    rng = np.random.default_rng(seed)
    shapes = rng.integers(1, 2000, (50, 2))
    area = int(rng.integers(1, 10**7))
    limits = jb.plan.SequenceLimits(
        sequences=("height", "width"),
        max_tokens=AreaBudget(area, "height", "width"),
        cost_fn=AreaCost("height", "width"),
    )
    expected = area // shapes.prod(axis=1)
    assert limits.batch_sizes(shapes).tolist() == expected.tolist()
    fitting = expected > 0
    costs = limits.costs(expected[fitting], shapes[fitting])
    assert costs.tolist() == (expected * shapes.prod(axis=1))[fitting].tolist()


COST = AreaCost("height", "width")


def test_a_plan_costs_its_pixels():
    lengths = {"height": [3, 8, 8], "width": [16, 5, 16]}
    plan = jb.plan_buckets(
        lengths,
        max_tokens=AreaBudget(4096, "height", "width"),
        cost_fn=COST,
        boundaries=[{"height": 8, "width": 8}, {"height": 8, "width": 16}],
    )
    assert plan.batch_sizes.tolist() == [1, 2]
    assert (plan.step_costs, plan.cost_unit) == ((64, 256), "pixels")
    assert jb.report(plan, lengths).cost_unit == "pixels"


@pytest.mark.exhaustive
def test_a_plan_by_area_has_the_fewest_pixels():
    rng = np.random.default_rng(0)
    lengths = {name: rng.integers(1, 9, 300) * 4 for name in ("height", "width")}
    options = {"max_tokens": AreaBudget(4096, "height", "width"), "num_buckets": 4}
    plan = jb.plan_buckets(lengths, cost_fn=COST, **options)

    def pixels(plan):
        schedule = jb.BatchSchedule(plan, lengths)
        buckets = (schedule[step].bucket for step in range(schedule.steps_per_epoch))
        return sum(COST(b.batch_size, b.seq_len) for b in buckets)

    assert pixels(plan) < pixels(jb.plan_buckets(lengths, **options))
    assert pixels(plan) == pytest.approx(jb.report(plan, lengths).epoch_cost)


def test_areas_refuse_other_sequences():
    pairs = {"source": [3], "target": [4]}
    message = (
        r"`AreaBudget` requires the sequences \['height', 'width'\], but examples have "
        r"\['source', 'target'\]\. Pass the names of two sequences\."
    )
    budget, cost = AreaBudget(99, "height", "width"), AreaCost("height", "height")
    with pytest.raises(ValueError, match=message):
        jb.plan_buckets(pairs, max_tokens=budget)
    with pytest.raises(ValueError, match=r"examples have \[\]\. Pass the names of two"):
        jb.plan_buckets([3, 4], max_tokens=9, cost_fn=cost)
    images = {"height": [30], "width": [40]}
    with pytest.raises(ValueError, match=r"requires the sequences \['height', 'hei"):
        jb.plan_buckets(images, max_tokens=99, cost_fn=cost)
    message = r"`max_tokens=AreaBudget\(max_area=99.* does not hold 1 row of `seq_len="
    with pytest.raises(ValueError, match=message):
        jb.plan_buckets(images, max_tokens=budget)
    with pytest.raises(ValueError, match="`max_area=0`"):
        AreaBudget(0, "height", "width")
    assert pickle.loads(pickle.dumps((budget, cost))) == (budget, cost)
