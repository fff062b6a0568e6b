"""Plans for examples with several sequences."""

import ast
import re

import numpy as np
import pytest

import jaxbucket as jb

SEEDS = [
    *range(4),
    *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 12)),
]


def make_pairs(seed, size=300, longest=60):
    rng = np.random.default_rng(seed)
    source = rng.integers(1, longest, size)
    target = np.clip((source * rng.uniform(0.5, 1.5, size)).astype(int), 1, longest)
    if rng.random() < 0.5:  # Examples may lack one of the sequences.
        target *= rng.random(size) < 0.6
        source *= (target == 0) | (rng.random(size) < 0.8)
    return {"source": source, "target": target}


def check_filled(plan, pairs):
    """Checks that no bucket has a B that its rows cannot fill."""
    for bucket in jb.report(plan, pairs).buckets:
        empty = bucket.empty_rows // max(bucket.batches, 1)
        assert empty < plan.batch_size_multiple


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_within_its_limits_and_holds_every_pair(seed):
    pairs = make_pairs(seed)
    options = {
        "batch_size_multiple": int(np.random.default_rng(seed).choice([1, 4])),
        "seq_len_multiple": [1, {"source": 4, "target": 2}][seed % 2],
        "max_batch_size": [None, 16][seed // 2 % 2],
    }
    limits = jb.plan.Limits(max_tokens=1000, **options)
    plan = jb.plan.plan_within(pairs, limits, num_buckets=5)
    assert len(plan) <= 5
    assert (plan.assign(pairs) >= 0).all()
    for bucket in plan.buckets:
        assert bucket.num_tokens <= 1000
        assert bucket.batch_size <= (options["max_batch_size"] or 1000)
    check_filled(plan, pairs)
    assert jb.BucketPlan.from_json(plan.to_json()) == plan


def pair_cost(batch_size, seq_lens):
    """The operations of an encoder and a decoder of one layer of width 8."""
    s, t = seq_lens["source"], seq_lens["target"]
    return batch_size * 8 * (8 * 84 * (s + t) + 12 * (s * s + t * t + s * t))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cost_of_a_plan_is_that_of_its_schedule(seed):
    pairs = make_pairs(seed)
    cost_fn = [None, pair_cost][seed % 2]
    plan = jb.plan_buckets(pairs, max_tokens=900, cost_fn=cost_fn, num_buckets=4)
    report = jb.BatchSchedule(plan, pairs).report()
    assert report.epoch_cost == pytest.approx(jb.report(plan, pairs).epoch_cost)
    assert report.cost_unit == ("tokens" if cost_fn is None else "cost")


@pytest.mark.parametrize(
    "budget",
    [{"source": 500, "target": 300}, lambda sizes: 400 + 10 * sizes["target"]],
)
def test_budgets_for_each_sequence_and_by_a_function(budget):
    pairs = make_pairs(1)
    plan = jb.plan_buckets(pairs, max_tokens=budget, num_buckets=4)
    assert (plan.assign(pairs) >= 0).all()
    for bucket in plan.buckets:
        if callable(budget):
            assert bucket.num_tokens <= budget(bucket.seq_len)
        else:
            for name, limit in budget.items():
                assert bucket.batch_size * bucket.seq_len[name] <= limit


def test_too_long_pairs_are_dropped_or_truncated():
    pairs = make_pairs(2)
    options = {"max_tokens": 1000, "max_seq_len": 32, "num_buckets": 3}
    dropped = jb.plan_buckets(pairs, **options, overlong="drop")
    is_kept = (pairs["source"] <= 32) & (pairs["target"] <= 32)
    np.testing.assert_array_equal(dropped.assign(pairs) >= 0, is_kept)
    mixed = {"source": "truncate", "target": "drop"}
    cut = jb.plan_buckets(pairs, **options, overlong=mixed)
    np.testing.assert_array_equal(cut.assign(pairs) >= 0, pairs["target"] <= 32)
    assert cut.buckets[-1].seq_len == {"source": 32, "target": 32}


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate", "truncate_left"])
def test_the_last_bucket_has_the_maximum_t(overlong):
    pairs = {name: np.minimum(x, 20) for name, x in make_pairs(2).items()}
    longest = {"source": 32, "target": 40}
    options = {"max_seq_len": longest, "overlong": overlong}
    plan = jb.plan_buckets(pairs, max_tokens=1000, num_buckets=3, **options)
    assert plan.buckets[-1].seq_len == longest
    examples = {"source": [32, 30, 1], "target": [40, 2, 39]}
    assert (plan.assign(examples) >= 0).all()
    for max_tokens in ({"source": 8, "target": 512}, 71):
        with pytest.raises(ValueError, match="`max_tokens=.*source.*32.*target.*40"):
            jb.plan_buckets(pairs, max_tokens=max_tokens, **options)


@pytest.mark.parametrize("seed", range(6))
def test_the_remedy_for_a_budget_is_sufficient(seed):
    rng = np.random.default_rng(seed)
    lengths = {name: rng.integers(1, 20, 5) for name in ("source", "target")}
    options = {
        "num_buckets": 1 + seed // 3,
        "seq_len_multiple": {"source": int(rng.choice([1, 16])), "target": 3},
        "batch_size_multiple": int(rng.choice([1, 4])),
        "overlong": str(rng.choice(["error", "truncate"])),
    }
    budget = 5 if seed % 2 else {"source": 20, "target": 1}
    with pytest.raises(ValueError, match="does not hold") as error:
        jb.plan_buckets(lengths, max_tokens=budget, **options)
    remedy = re.search(r"to (.*), for all", str(error.value))
    assert remedy is not None
    jb.plan_buckets(lengths, max_tokens=ast.literal_eval(remedy[1]), **options)


def test_boundaries_may_be_given():
    pairs = make_pairs(3)
    boundaries = [{"source": 60, "target": 60}, {"source": 30, "target": 30}]
    plan = jb.plan_buckets(pairs, max_tokens=600, boundaries=boundaries)
    assert [str(x) for x in plan.buckets] == [
        "[10, source 30, target 30]",
        "[5, source 60, target 60]",
    ]


def test_a_cost_function_receives_a_mapping():
    pairs = make_pairs(4)
    plan = jb.plan_buckets(
        pairs,
        max_tokens=600,
        num_buckets=3,
        cost_fn=lambda size, seq_lens: size * seq_lens["source"] ** 2,
    )
    for bucket, cost in zip(plan.buckets, plan.costs, strict=True):
        assert cost == bucket.batch_size * bucket.seq_len["source"] ** 2
    assert plan.cost_unit == "cost"


@pytest.mark.parametrize("seed", range(20))
def test_as_few_shapes_as_possible_hold_all_pairs_of_a_tight_budget(seed):
    rng = np.random.default_rng(seed)
    source = rng.integers(1, 4000, 8)
    pairs = {"source": source, "target": 4001 - source + rng.integers(0, 900, 8)}
    totals = sum(pairs.values())
    budget = int(1.15 * totals.max())

    def is_allowed(examples):
        return sum(max(x[list(examples)]) for x in pairs.values()) <= budget

    # By source, because a bucket may then hold any run of pairs.
    order = np.argsort(source)
    fewest = [0]
    for end in range(1, 9):
        starts = [i for i in range(end) if is_allowed(order[i:end])]
        fewest.append(1 + min(fewest[i] for i in starts))
    plan = jb.plan_buckets(pairs, max_tokens=budget, num_buckets=fewest[-1])
    assert (plan.assign(pairs) >= 0).all()


def test_few_long_examples_are_planned_well():
    lengths = {
        "source": [604, 841, 1602, 135, 2129] * 40,
        "target": [480, 277, 1073, 2908, 495] * 40,
    }
    plan = jb.plan_buckets(lengths, max_tokens=15_968, num_buckets=2)
    assert jb.report(plan, lengths).epoch_cost == 634_040


def test_the_number_of_shapes_weighs_compiling_against_padding():
    lengths = make_pairs(np.random.default_rng(1), 60)
    cost_fn = jb.plan.TokenCost(tokens_per_second=2000)
    options = {"max_tokens": 2048, "cost_fn": cost_fn}
    limits = jb.plan.Limits(**options)
    curve = jb.plan.plan_curve(
        lengths, limits, compile_seconds=1, num_epochs=2, max_buckets=6
    )
    # No number of shapes takes less time, whether it was tried or not.
    for size in range(1, 7):
        plan = jb.plan_buckets(lengths, num_buckets=size, **options)
        total = len(plan) + 2 * jb.report(plan, lengths).epoch_cost
        assert curve.chosen.total_seconds <= total * 1.001


# Invalid input


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("boundaries", {"boundaries": "quantile"}),
        ("boundaries", {"boundaries": []}),
        ("boundaries", {"boundaries": [8]}),
        ("lengths", {"boundaries": [{"source": 9, "target": 9}]}),
        ("max_tokens", {"max_tokens": 50}),
        ("max_tokens", {"max_tokens": 300, "batch_size_multiple": 4}),
        ("max_tokens", {"max_tokens": {"source": 999, "target": 9}}),
        ("max_tokens", {"max_tokens": {"source": 9, "goal": 9}}),
        ("max_seq_len", {"max_seq_len": {"target": 9}}),
        ("overlong", {"overlong": {"source": "drop"}}),
        ("max_tokens", {"max_tokens": {"source": 9, "target": 0}}),
        ("max_tokens", {"max_tokens": lambda sizes: 0}),
        ("cost_fn", {"cost_fn": lambda size, seq_lens: -1}),
        ("overlong", {"overlong": "split"}),
        ("overlong", {"overlong": {"source": "drop", "target": "cut"}}),
        ("lengths", {"max_seq_len": 30}),
        (
            "max_seq_len",
            {"max_seq_len": {"source": 63, "target": 64}, "seq_len_multiple": 8},
        ),
        ("max_seq_len", {"max_seq_len": 1, "overlong": "drop"}),
        # No bucket holds 60 of both.
        (
            "max_seq_len",
            {
                "max_seq_len": 60,
                "boundaries": [
                    {"source": 30, "target": 60},
                    {"source": 60, "target": 30},
                ],
            },
        ),
    ],
)
def test_invalid_options_are_refused(name, options):
    pairs = {name: x + 1 for name, x in make_pairs(5).items()}
    with pytest.raises(ValueError, match=f"`{name}"):
        jb.plan_buckets(pairs, **{"max_tokens": 1000, "num_buckets": 3} | options)


@pytest.mark.parametrize(
    "lengths",
    [
        *({}, {"a": [1]}, {"a": [1], "b": [1, 2]}, {"a": [0], "b": [0]}),
        {"a": [], "b": []},
    ],
)
def test_invalid_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="`(lengths|sequences)"):
        jb.plan_buckets(lengths, max_tokens=100)


def test_functions_of_one_length_refuse_limits_of_several():
    limits = jb.plan.Limits(sequences=("a", "b"), max_tokens=9)
    with pytest.raises(ValueError, match="`lengths`"):
        jb.plan.plan_within([1], limits)


def test_costs_of_transformers_say_how_many_sequences_they_require():
    pairs = make_pairs(0)
    with pytest.raises(ValueError, match="`TransformerCost` requires examples"):
        jb.plan_buckets(pairs, max_tokens=999, cost_fn=jb.plan.TransformerCost(2, 1))
    with pytest.raises(ValueError, match="`StepTime` requires examples with one leng"):
        jb.plan_buckets(pairs, max_tokens=999, cost_fn=jb.plan.StepTime(0.1, 1e-6, 0))
    plans = [
        jb.plan_buckets(pairs, max_tokens=999, num_buckets=3, cost_fn=cost_fn)
        for cost_fn in (None, jb.plan.TokenCost())
    ]
    assert plans[0].buckets == plans[1].buckets
