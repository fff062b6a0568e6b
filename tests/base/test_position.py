import dataclasses
import json
import math
import re

import pytest

from jaxbucket import BatchSchedule, batch_dataset, plan_buckets
from jaxbucket.data import DataPosition

SOURCE = [{"x": [index] * length} for index, length in enumerate([3, 1, 4, 2, 5, 6])]
LENGTHS = [len(example["x"]) for example in SOURCE]


def dataset(
    source=SOURCE,
    *,
    max_tokens=12,
    seed=0,
    order="shuffled",
    **options,
):
    lengths = [len(example["x"]) for example in source]
    plan = plan_buckets(
        lengths, sample=True, max_tokens=max_tokens, num_buckets=2, **options
    )
    schedule = BatchSchedule(plan, lengths, seed=seed, order=order)
    return batch_dataset(source, schedule, num_steps=100)


def cost_per_step(cost):
    return lambda batch_size, seq_len: batch_size * seq_len + cost


CHANGES = {
    "seed": ({"seed": 3}, "schedule seed 0 -> 3"),
    "order": ({"order": "source"}, "schedule order shuffled -> source"),
    "budget": ({"max_tokens": 24}, "plan max tokens 12 -> 24"),
    "policy": ({"overlong": "drop"}, "plan overlong error -> drop"),
    "grown": ({"source": [*SOURCE, {"x": [9]}]}, "data examples 6 -> 7"),
    "different lengths": (
        {"source": [*SOURCE[:-2], {"x": [4] * 6}, {"x": [5] * 5}]},
        "data fingerprint",
    ),
    "different contents": (
        {"source": [*SOURCE[:-1], {"x": [0] * 6}]},
        "data fingerprint",
    ),
    "different dtype": (
        {"source": [{"x": [float(x) for x in e["x"]]} for e in SOURCE]},
        "data fingerprint",
    ),
    "different name": (
        {"source": [{**example, "y": 0} for example in SOURCE]},
        "data fingerprint",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_error_names_the_change(case):
    options, message = CHANGES[case]
    position = dataset().position(7)
    with pytest.raises(ValueError, match=f"at step 7, .*{message}"):
        dataset(**options).resume(position)


def test_the_error_names_every_change_with_the_buckets_last():
    position = dataset(cost_fn=cost_per_step(1)).position(7)
    with pytest.raises(ValueError) as refusal:
        dataset(seed=1, max_tokens=24, cost_fn=cost_per_step(9)).resume(position)
    _, _, changes = str(refusal.value).partition("(saved -> now): ")
    buckets = re.escape("plan buckets [[2, 5], [2, 6]] -> [[4, 5], [4, 6]]. ")
    options = "plan max tokens 12 -> 24; schedule seed 0 -> 1; "
    assert re.match(options + buckets, changes)


def test_the_error_names_changed_step_costs_of_the_same_buckets():
    position = dataset(cost_fn=cost_per_step(1)).position(7)
    other = dataset(cost_fn=cost_per_step(2))
    with pytest.raises(ValueError, match=r"now\): plan step costs \[.*\] -> \[.*\]\. "):
        other.resume(position)


def test_the_fingerprint_of_a_source_is_compared():
    class Versioned(list):
        fingerprint = "v1"

    position = dataset(Versioned(SOURCE)).position(7)
    dataset(Versioned(SOURCE)).resume(position)
    later = Versioned(SOURCE)
    later.fingerprint = "v2"
    with pytest.raises(ValueError, match="data fingerprint"):
        dataset(later).resume(position)


def test_a_position_reads_only_a_few_examples():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    source = Counted([{"x": [1] * (1 + index % 9)} for index in range(5000)])
    batches = dataset(source, max_tokens=1000)
    source.reads = 0
    batches.position(3)
    assert 2 <= source.reads <= 16


def test_a_run_resumes_only_with_the_same_padding():
    source = [{"x": [float(x) for x in example["x"]]} for example in SOURCE]
    schedule = BatchSchedule(plan_buckets(LENGTHS, max_tokens=12), LENGTHS)
    options = ({}, {"sequences": "x"}, {"pad_value": -100}, {"pad_value": math.nan})
    for old in options:
        position = batch_dataset(source, schedule, **old).position(1)
        position = DataPosition.from_dict(json.loads(json.dumps(position.to_dict())))
        for new in options:
            batches = batch_dataset(source, schedule, **new)
            if str(old) == str(new):
                batches.resume(position)
            else:
                with pytest.raises(ValueError, match="sequences .* -> |pad value"):
                    batches.resume(position)


FIELDS = dataset().position(3).to_dict()


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        {},
        {name: value for name, value in FIELDS.items() if name != "data"},
        {**FIELDS, "more": 1},
        {**FIELDS, "plan": "8"},
        {**FIELDS, "plan": {}},
    ],
)
def test_an_invalid_position_is_refused(fields):
    with pytest.raises(ValueError, match="`DataPosition`"):
        DataPosition.from_dict(fields)


def test_a_step_that_is_not_an_integer_is_refused():
    with pytest.raises(ValueError, match="`step='3'` is not an integer"):
        DataPosition.from_dict({**FIELDS, "step": "3"})
    with pytest.raises(ValueError, match="`step=2.5` is not an integer"):
        dataset().position(2.5)


def test_positions_of_one_run_may_differ_in_the_step():
    position = dataset().position(7)
    position.check_same(dataclasses.replace(position, step=9))
