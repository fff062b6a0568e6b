"""The same lengths under every rule, and under plans of the user's own."""

import dataclasses
import json

import numpy as np
import pytest

from jaxbucket import BucketPlan, Limits, plan_buckets, report
from jaxbucket.plan import Comparison, TransformerCost, compare_plans
from jaxbucket.plan.planner import RULES

LENGTHS = np.random.default_rng(0).lognormal(5, 1, 3000).clip(1, 1500).astype(int)
LIMITS = Limits(max_tokens=16_384, batch_size_multiple=2, seq_len_multiple=8)
OPTIONS = {"max_tokens": 16_384, "batch_size_multiple": 2, "seq_len_multiple": 8}


@pytest.fixture(name="comparison", scope="module")
def comparison_of_all_tests() -> Comparison:
    return compare_plans(LENGTHS, LIMITS)


def test_every_rule_has_its_plan_in_the_comparison():
    comparison = compare_plans(LENGTHS, LIMITS, num_buckets=6)
    for rule in RULES:
        plan = plan_buckets(LENGTHS, num_buckets=6, boundaries=rule, **OPTIONS)
        compared = comparison[rule.replace("_", " ")]
        assert compared.plan == plan
        assert compared.report == report(plan, LENGTHS)
    assert len(comparison["one shape"].plan) == 1
    assert len(comparison.plans) == len(RULES) + 1
    with pytest.raises(KeyError):
        comparison["of all"]


def test_the_cheapest_plan_comes_first_and_none_is_below_the_bound():
    for cost in (None, TransformerCost(64, 2)):
        limits = Limits(**OPTIONS, cost_fn=cost)
        comparison = compare_plans(LENGTHS, limits, num_buckets=6)
        costs = [compared.report.epoch_cost for compared in comparison.plans]
        assert costs == sorted(costs)
        assert comparison.plans[0].name == "optimal"
        assert comparison.least_cost <= costs[0] <= 1.05 * comparison.least_cost
        above = costs[0] / comparison.least_cost - 1
        assert comparison.exact
        sentence = (
            f"The optimal plan costs {above:.2%} more and is proven to be the cheapest "
            "plan with up to 6 shapes and one example per row."
        )
        assert sentence in comparison.summary


def test_with_a_cost_function_the_plan_by_tokens_is_compared_too():
    limits = Limits(**OPTIONS, cost_fn=TransformerCost(8, 2))
    comparison = compare_plans(LENGTHS, limits, num_buckets=4)
    by_tokens = plan_buckets(LENGTHS, num_buckets=4, **OPTIONS)
    assert comparison["optimal by tokens"].plan.buckets == by_tokens.buckets
    assert {c.report.cost_unit for c in comparison.plans} == {"FLOP"}
    ours, theirs = comparison["optimal"], comparison["optimal by tokens"]
    assert ours.report.epoch_cost <= theirs.report.epoch_cost
    assert ours.report.padded_tokens >= theirs.report.padded_tokens


def test_the_json_has_every_number(comparison):
    found = json.loads(comparison.to_json())
    assert found["least_cost"] == comparison.least_cost
    for compared, numbers in zip(comparison.plans, found["plans"], strict=True):
        assert numbers["report"]["padding"] == compared.report.padding
        assert BucketPlan.from_json(json.dumps(numbers["plan"])) == compared.plan


def test_dropped_remainders_and_names_of_rules_are_refused():
    with pytest.raises(ValueError, match="`remainder"):
        compare_plans(LENGTHS, LIMITS, remainder="drop")
    mine = BucketPlan.from_shapes([(4, 1504)])
    for name in ("optimal", "equal tokens", "one shape"):
        with pytest.raises(ValueError, match="`others"):
            compare_plans(LENGTHS, LIMITS, others={name: mine})


def test_additional_plans_are_sorted_by_cost(comparison):
    (second, third) = comparison.plans[1:3]
    between = dataclasses.replace(
        second,
        name="mine",
        report=dataclasses.replace(
            second.report,
            epoch_cost=(second.report.epoch_cost + third.report.epoch_cost) / 2,
        ),
    )
    extended = comparison.extended([between], "A note.")
    assert [one.name for one in extended.plans[1:4]] == [
        second.name,
        "mine",
        third.name,
    ]
    assert extended.summary.endswith("\nA note.")
    assert json.loads(extended.to_json())["note"] == "A note."
    with pytest.raises(ValueError, match="`others`"):
        comparison.extended([second])


def test_a_comparison_is_printed_as_a_table(comparison):
    lines = str(comparison).splitlines()
    assert lines[0].split()[:3] == ["empty", "largest", "epoch"]
    for compared in comparison.plans:
        cost = f"{compared.report.epoch_cost:,.0f}"
        assert any(x.startswith(compared.name) and cost in x for x in lines)
    assert " ".join(comparison.summary.split()) in " ".join(str(comparison).split())
    assert max(map(len, lines)) <= 80
