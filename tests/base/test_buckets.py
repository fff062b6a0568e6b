import dataclasses
import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from jaxbucket import BatchSchedule, Bucket, BucketPlan, plan_buckets, report
from jaxbucket.base.checks import check_float

PLAN = BucketPlan((Bucket(8, 128), Bucket(2, 512)), max_tokens=1024)
PAIRS = BucketPlan((Bucket(8, {"a": 4, "b": 8}),), max_tokens=128)

BAD_LENGTHS = {
    "empty": [],
    "zero": [3, 0],
    "negative": [3, 4, -7],
    "nan": [3.0, np.nan],
    "float": np.ones(2),
    "text": ["u0"],
    "bool": [True, False],
    "object": [None, 3],
    "scalar": 5,
    "mapping": {"a": [1], "b": [2]},
    "table": [[1, 2]],
    "huge": [2**31],
    "uint64": np.array([2**63], np.uint64),
}
FUNCTIONS = {
    "plan_buckets": lambda lengths: plan_buckets(lengths, max_tokens=4096),
    "assign": PLAN.assign,
    "BatchSchedule": lambda lengths: BatchSchedule(PLAN, lengths),
    "report": lambda lengths: report(PLAN, lengths),
}


@pytest.mark.parametrize(
    ("function", "bad"),
    [
        *(("assign", bad) for bad in BAD_LENGTHS),
        *((function, bad) for function in FUNCTIONS for bad in ("zero", "float")),
    ],
)
def test_bad_lengths_are_refused(function, bad):
    with pytest.raises(ValueError, match="`lengths"):
        FUNCTIONS[function](BAD_LENGTHS[bad])


@pytest.mark.parametrize(
    ("value", "options"),
    [
        *((x, {}) for x in (0, -1.0, math.nan, math.inf, True, np.True_, "3", None)),
        *((x, {"least": 0, "most": 1}) for x in (-0.1, 1.1, math.nan)),
        *((x, {"least": 0, "most": math.inf}) for x in (-1, math.nan)),
        (10**400, {}),
    ],
)
def test_bad_floats_are_refused(value, options):
    with pytest.raises(ValueError, match=f"`rate={re.escape(repr(value))}"):
        check_float("rate", value, **options)


def test_any_number_is_a_float():
    for value in (2, 2.0, np.float32(2), np.int64(2), np.asarray(2), Fraction(2)):
        number = check_float("rate", value)
        assert number == 2 and type(number) is float
    assert check_float("rate", math.inf, least=0, most=math.inf) == math.inf
    assert check_float("rate", 0, least=0) == 0


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_every_integer_dtype_is_accepted(dtype):
    lengths = np.array([1, 127, 100], dtype)
    assert PLAN.assign(lengths).tolist() == [0, 0, 0]
    plan = BucketPlan((Bucket(1, 120), Bucket(1, 40_000)), max_tokens=40_000)
    assert plan.assign(lengths).tolist() == [0, 1, 0]


# Bucket


def test_buckets_compare_and_sort_by_value():
    assert Bucket(8, 128) == Bucket(batch_size=np.int64(8), seq_len=128)
    assert hash(Bucket(8, 128)) == hash(Bucket(8, 128))
    assert sorted([Bucket(8, 2), Bucket(2, 9)]) == [Bucket(2, 9), Bucket(8, 2)]
    assert (str(Bucket(8, 128)), Bucket(8, 128).num_tokens) == ("[8, 128]", 1024)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Bucket(8, 128).seq_len = 3


@pytest.mark.parametrize("value", [0, -3, True, 2.0, "8", None, 2**62])
def test_an_invalid_bucket_is_refused(value):
    with pytest.raises(ValueError, match="`seq_len"):
        Bucket(8, value)


# BucketPlan


def test_assign_returns_the_shortest_bucket_that_holds_an_example(problem):
    plan, lengths = problem
    for length, index in zip(lengths, plan.assign(lengths), strict=True):
        holds = [k for k, bucket in enumerate(plan.buckets) if length <= bucket.seq_len]
        too_long = {"drop": -1, "truncate": len(plan) - 1}.get(plan.overlong)
        assert index == (holds[0] if holds else too_long)


def test_assign_returns_int16_for_long_arrays():
    lengths = np.random.default_rng(0).integers(1, 513, 600_000).astype(np.int32)
    index = PLAN.assign(lengths)
    assert index.dtype == np.int16
    np.testing.assert_array_equal(index, lengths > 128)


PAIR = {"a": 9, "b": 9}


@pytest.mark.parametrize(
    ("plan", "changes", "name"),
    [
        (PLAN, {"buckets": ()}, "buckets"),
        (PLAN, {"buckets": ((8, 4),)}, "buckets"),
        (PLAN, {"buckets": PLAN.buckets[::-1]}, "buckets"),
        (PLAN, {"buckets": (Bucket(1, 8), Bucket(2, 8))}, "buckets"),
        (PLAN, {"max_tokens": 1023}, "max_tokens"),
        (PLAN, {"max_tokens": 0}, "max_tokens"),
        (PLAN, {"max_tokens": 1e6}, "max_tokens"),
        (PLAN, {"max_tokens": PAIR}, "max_tokens"),
        (PLAN, {"batch_size_multiple": 4}, "batch_size_multiple"),
        (PLAN, {"seq_len_multiple": 256}, "seq_len_multiple"),
        (PLAN, {"overlong": "cut"}, "overlong"),
        (PLAN, {"overlong": dict.fromkeys(PAIR, "drop")}, "overlong"),
        (PLAN, {"packed": "no"}, "packed"),
        (PAIRS, {"max_tokens": {"a": 99}}, "max_tokens"),
        (PAIRS, {"max_tokens": {"a": 99, "b": 1}}, "max_tokens"),
        (PAIRS, {"seq_len_multiple": {"b": 1}}, "seq_len_multiple"),
        (PAIRS, {"seq_len_multiple": {"a": 1, "b": 3}}, "seq_len_multiple"),
        (PAIRS, {"overlong": {"a": "drop"}}, "overlong"),
        (PAIRS, {"overlong": "cut"}, r"overlong"),
        (PAIRS, {"overlong": {"a": "cut", "b": "drop"}}, r"overlong\['a'\]"),
        (PAIRS, {"overlong": "split"}, "overlong"),
    ],
)
def test_an_invalid_plan_is_refused(plan, changes, name):
    with pytest.raises(ValueError, match=f"`{name}"):
        dataclasses.replace(plan, **changes)


@pytest.mark.parametrize("lengths", [{"a": [1]}, {}, [1], {"a": [1], "b": [1, 2]}])
def test_lengths_of_other_sequences_are_refused(lengths):
    with pytest.raises(ValueError, match="`lengths`"):
        PAIRS.assign(lengths)


@pytest.mark.parametrize(
    ("plan", "lengths", "name"),
    [
        (PLAN, [512, 513], r"lengths\[1\]=513"),
        (dataclasses.replace(PLAN, overlong="split"), [512, 513], r"lengths\[1\]=513"),
        (PAIRS, {"a": [4, 4], "b": [8, 9]}, r"lengths\['b'\]\[1\]=9"),
    ],
)
def test_lengths_beyond_the_last_bucket_are_refused(plan, lengths, name):
    with pytest.raises(ValueError, match=f"`{name}"):
        plan.assign(lengths)


def test_a_plan_with_too_many_shapes_for_int16_is_refused():
    buckets = [Bucket(1, length) for length in range(1, 2**15 + 1)]
    plan = BucketPlan(buckets[:-1], max_tokens=2**15)
    assert plan.assign([2**15 - 1]).tolist() == [2**15 - 2]
    with pytest.raises(ValueError, match="`buckets=.*: pass 1 to 32767"):
        BucketPlan(buckets, max_tokens=2**15)


def test_from_json_inverts_to_json(problem):
    plan, _ = problem
    again = BucketPlan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.fingerprint == plan.fingerprint
    # The JSON uses the names of the attributes.
    assert json.loads(plan.to_json())["max_tokens"] == plan.max_tokens


def test_numpy_integers_do_not_change_the_fingerprint():
    plan = BucketPlan([Bucket(np.int32(8), np.int64(128))], max_tokens=np.int64(1024))
    assert plan.fingerprint == BucketPlan((Bucket(8, 128),), 1024).fingerprint


def test_the_fingerprint_changes_with_every_field():
    changed = [
        {"max_tokens": 1025},
        {"batch_size_multiple": 2},
        {"seq_len_multiple": 2},
        {"overlong": "drop"},
        {"overlong": "truncate"},
        {"overlong": "truncate_left"},
        {"overlong": "split"},
        {"buckets": (Bucket(7, 128), Bucket(2, 512))},
        {"buckets": (Bucket(8, 127), Bucket(2, 512))},
    ]
    plans = [PLAN, *(dataclasses.replace(PLAN, **change) for change in changed)]
    assert len({plan.fingerprint for plan in plans}) == len(plans)


def test_equal_policies_of_all_sequences_are_one_policy():
    plans = [
        BucketPlan((Bucket(8, {"a": 4, "b": 8}),), 1024, overlong=overlong)
        for overlong in ("drop", {"a": "drop", "b": "drop"})
    ]
    assert plans[0] == plans[1] and plans[0].fingerprint == plans[1].fingerprint
    assert BucketPlan.from_json(plans[1].to_json()) == plans[0]


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"format": "other"}'])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ValueError):
        BucketPlan.from_json(text)


def edited(**changes) -> str:
    fields = {**json.loads(PLAN.to_json()), **changes}
    return json.dumps({k: v for k, v in fields.items() if v is not ...})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 4}, "version"),
        ({"max_ratios": 2}, "max_ratios"),
        ({"max_tokens": ...}, "max_tokens"),
        ({"buckets": ...}, "buckets"),
        ({"buckets": [[8]]}, "buckets"),
        ({"buckets": 5}, "buckets"),
        ({"buckets": [[8, "128"]]}, "`seq_len='128'`"),
        ({"buckets": [[9, 128]]}, "`max_tokens=1024`"),
        ({"overlong": []}, "`overlong"),
    ],
)
def test_json_of_an_invalid_plan_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BucketPlan.from_json(edited(**changes))


def test_json_may_have_notes():
    noted = BucketPlan.from_json(edited(notes={"by": "seconds"}))
    assert noted == BucketPlan.from_json(edited())
